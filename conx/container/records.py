"""What the index says, as values: graphs with their bindings, tensors with their streams, pages of the chunk table.

Records hold what was read or will be written and derive nothing that needs more than themselves. A field that is at
its default is None or empty, never the default spelled out, so that equal things are equal records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from conx.container.limits import SEGMENT
from conx.dtypes import DType

__all__ = [
    "CODES",
    "EMPTY_STREAM",
    "RUN",
    "SCALES",
    "SOURCE",
    "VALUES",
    "ZERO_POINTS",
    "Binding",
    "External",
    "Graph",
    "Grid",
    "Hole",
    "Index",
    "Original",
    "Page",
    "Stream",
    "Tensor",
]

SOURCE = "source"
RUN = "run"

VALUES = "values"
CODES = "codes"
SCALES = "scales"
ZERO_POINTS = "zero_points"


@dataclass(frozen=True, slots=True)
class Stream:
    """`size` raw bytes that begin at `offset` in the raw content of `chunk` and run on through the chunks after it."""

    chunk: int
    offset: int
    size: int


EMPTY_STREAM = Stream(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor.

    Attributes:
        name: Where it came from, for people; not unique.
        shape: Dims.
        dtype: Element type.
        codec: The codec's id.
        params: The codec's parameters, as stored.
        side: Streams that every segment needs.
        streams: Main streams.
        sha256: Of the decoded bytes in `dtype`, in the row-major order of `shape`.
        order: Axes of `shape` in stored order; None is the identity.
        segment: Elements in a segment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    codec: str
    params: Mapping[str, Any]
    side: tuple[Stream, ...]
    streams: tuple[Stream, ...]
    sha256: bytes
    order: tuple[int, ...] | None = None
    segment: int = SEGMENT

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor decodes to in its own type."""
        return self.dtype.nbytes(self.count)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Dims in stored order."""
        return self.shape if self.order is None else tuple(self.shape[axis] for axis in self.order)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return -(-self.count // self.segment)

    def segment_range(self, i: int) -> tuple[int, int]:
        """First element of segment `i` and the first after it, in stored order."""
        if not 0 <= i < self.segments:
            raise ValueError(f"segment {i}: the tensor has {self.segments}")
        return i * self.segment, min((i + 1) * self.segment, self.count)


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid on which codes are made of a tensor's values.

    Attributes:
        scales: Index of the tensor of float32 scales, one for each position of `axis`.
        axis: Axis of the tensor's shape.
    """

    scales: int
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How a tensor becomes the bytes that a graph wants.

    Attributes:
        tensor: Index of the tensor.
        dtype: Element type of the result; None is the tensor's.
        perm: Axes of what is viewed in the order wanted; None is the identity.
        shape: Dims of the result; None is the (permuted) shape, which only values without `repeat` have.
        view: VALUES, or what the codec makes them of: CODES, SCALES or ZERO_POINTS.
        grid: Of codes: they are made of the values, on this grid; None: they are the codec's.
        pad: Of codes: positions of the last axis (permuted), those beyond the tensor's filled up with the code 0.
        repeat: Every element comes so many times in a row.
    """

    tensor: int
    dtype: DType | None = None
    perm: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    view: str = VALUES
    grid: Grid | None = None
    pad: int | None = None
    repeat: int = 1

    def dtype_of(self, tensor: Tensor) -> DType:
        """Element type of the result, `tensor` being the one bound."""
        return self.dtype or tensor.dtype

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Dims of the result, `tensor` being the one bound."""
        if self.shape is not None:
            return self.shape
        return tensor.shape if self.perm is None else tuple(tensor.shape[axis] for axis in self.perm)

    def nbytes_of(self, tensor: Tensor) -> int:
        """Bytes of the result, `tensor` being the one bound."""
        count = tensor.count if self.shape is None else prod(self.shape)
        return self.dtype_of(tensor).nbytes(count)


@dataclass(frozen=True, slots=True)
class Hole(Binding):
    """Bytes to be inserted before byte `at` of the graph's stream."""

    at: int


@dataclass(frozen=True, slots=True)
class External(Binding):
    """Bytes that the runtime is handed by `location`, for the initializer `name`.

    `repacked` says that a runtime is expected to make its own copy in another layout.
    """

    location: str
    name: str
    repacked: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's message without its weights, and where they go.

    Attributes:
        role: `source` (the model as it was built) or `run`.
        precisions: What a run graph serves, ascending; empty for the source.
        stream: The message with the bytes of its holes left out.
        sha256: Of the stream's bytes.
        holes: Weights to be spliced into the message, by position.
        externals: Weights that the runtime is handed.
        accuracy_levels: Positions in the stream of bytes that are the attribute accuracy_level of a MatMulNBits, and
            that a loader may replace.
    """

    role: str
    precisions: tuple[str, ...]
    stream: Stream
    sha256: bytes
    holes: tuple[Hole, ...] = ()
    externals: tuple[External, ...] = ()
    accuracy_levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Original:
    """A file of the model as it was.

    Attributes:
        name: Relative, its parts joined by `/`.
        size: Bytes.
        sha256: Of the file.
        stream: Its bytes without those of its holes.
        holes: Weights to be spliced in, by position.
    """

    name: str
    size: int
    sha256: bytes
    stream: Stream
    holes: tuple[Hole, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the chunk table.

    Attributes:
        rows: Chunks that it describes.
        stored: Bytes of the page's frame.
        raw: Bytes of the page once decompressed.
        data: Sum of its chunks' stored sizes.
        sha256: Of the page's frame as stored.
    """

    rows: int
    stored: int
    raw: int
    data: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """Everything that a file says about itself."""

    features: tuple[str, ...]
    graphs: tuple[Graph, ...]
    tensors: tuple[Tensor, ...]
    pages: tuple[Page, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    originals: tuple[Original, ...] = ()

    @property
    def chunks(self) -> int:
        """Rows of the chunk table."""
        return sum(page.rows for page in self.pages)

    @property
    def source(self) -> Graph:
        """The graph of the model as it was built."""
        return next(graph for graph in self.graphs if graph.role == SOURCE)

    def serving(self, precision: str) -> Graph | None:
        """The run graph that serves `precision`, or None."""
        return next((graph for graph in self.graphs if precision in graph.precisions), None)
