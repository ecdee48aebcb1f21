"""What packing did: the answer of `conx.pack`."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conx.inspection import TensorInfo, inspect
from conx.packing.pairs import PairReport
from conx.verification import VerifyReport

__all__ = ["KindRow", "PackReport", "make_report"]


@dataclass(frozen=True)
class KindRow:
    """The tensors stored by one codec: how many, their bytes before and in the file, and their errors.

    `mean_error` and `worst_error` are root mean square errors over those of the weights; `worst_name` has the worst.
    """

    kind: str
    tensors: int
    before: int
    after: int
    mean_error: float
    worst_error: float
    worst_name: str


@dataclass(frozen=True)
class PackReport:
    """What packing did.

    Attributes:
        source, path: the model and the .conx file.
        source_bytes: bytes of the model's files, external data included.
        bytes: bytes of the .conx file.
        seconds: how long it took.
        lossless: whether every weight is bit for bit the original.
        tensors: what was stored; `error` is the root mean square error over that of the weight.
        by_kind: the same summed up by codec, with the graphs and the index.
        outputs: errors of the outputs at each precision; None where they were not measured.
        unmeasured: why not.
        pairs: which weights have the codes of a quantized twin.
    """

    source: Path
    path: Path
    source_bytes: int
    bytes: int
    seconds: float
    lossless: bool
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    by_kind: tuple[KindRow, ...] = field(repr=False)
    outputs: VerifyReport | None = field(repr=False, default=None)
    unmeasured: str = ""
    pairs: PairReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"source": str(self.source), "path": str(self.path), "ratio": self.ratio}

    @property
    def ratio(self) -> float:
        """Size of the file over that of the model."""
        return self.bytes / self.source_bytes if self.source_bytes else 1.0


def make_report(
    source: Path,
    path: Path,
    seconds: float,
    outputs: VerifyReport | None,
    unmeasured: str,
    pairs: PairReport | None,
) -> PackReport:
    """The report of a file that was just written."""
    info = inspect(path)
    kinds = sorted({t.codec for t in info.tensors})
    rows = [_row(kind, [t for t in info.tensors if t.codec == kind]) for kind in kinds]
    rows += [KindRow(kind, 0, 0, info.by_codec[kind], 0.0, 0.0, "") for kind in ("graphs", "index")]
    return PackReport(
        source=source,
        path=path,
        source_bytes=info.source_bytes,
        bytes=info.file_bytes,
        seconds=seconds,
        lossless=info.lossless,
        tensors=info.tensors,
        by_kind=tuple(rows),
        outputs=outputs,
        unmeasured=unmeasured,
        pairs=pairs,
    )


def _row(kind: str, tensors: list[TensorInfo]) -> KindRow:
    worst = max(tensors, key=lambda t: t.error)
    mean = sum(t.error for t in tensors) / len(tensors)
    before, after = sum(t.bytes * t.uses for t in tensors), sum(t.stored for t in tensors)
    return KindRow(kind, len(tensors), before, after, mean, worst.error, worst.name if worst.error else "")
