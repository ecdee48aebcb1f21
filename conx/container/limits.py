"""The limits of the format: the table of `spec/conx.md`, by name. A test holds the two together.

A reader checks them before it allocates, a writer stays within them.
"""

__all__ = [
    "INDEX_EXPANSION",
    "INDEX_FREE_RAW",
    "MAX_CHUNKS",
    "MAX_CHUNK_RAW",
    "MAX_CHUNK_STORED",
    "MAX_ELEMENTS",
    "MAX_EXPANSION",
    "MAX_GRAPHS",
    "MAX_GRAPH_RAW",
    "MAX_INDEX_CONTAINERS",
    "MAX_INDEX_DEPTH",
    "MAX_INDEX_RAW",
    "MAX_INDEX_STORED",
    "MAX_LEVELS",
    "MAX_LOCATION",
    "MAX_NAME",
    "MAX_ORIGINALS",
    "MAX_RANK",
    "MAX_SEGMENT",
    "MAX_SHARED_RAW",
    "MAX_TENSORS",
    "MIN_DECODED",
    "MIN_RUN_RAW",
    "MIN_SEGMENT",
    "PAGE_ROWS",
    "SEGMENT",
    "decoded_limit",
]

MAX_INDEX_RAW = 2**25
"""Bytes of the raw index."""

MAX_INDEX_STORED = 2**25 + 2**17
"""Bytes of the index's frame."""

INDEX_FREE_RAW = 2**20
INDEX_EXPANSION = 64
"""The raw index has at most INDEX_FREE_RAW + INDEX_EXPANSION · stored bytes."""

MAX_INDEX_DEPTH = 12
"""Nesting of arrays and maps in the index; the index itself is the first."""

MAX_INDEX_CONTAINERS = 2**20
"""Arrays and maps in the index: 1 byte of msgpack becomes 64 of memory."""

PAGE_ROWS = 4096
"""Rows of a page of the chunk table."""

MAX_CHUNKS = 2**24
"""Rows of the chunk table."""

MAX_CHUNK_RAW = 2**24
"""Raw bytes of a chunk."""

MAX_CHUNK_STORED = 2**24 + 2**17
"""Stored bytes of a chunk."""

MAX_SHARED_RAW = 2**20
"""Raw bytes of a chunk of which a stream uses only a part: the work that a stream of 1 byte can ask for."""

MIN_RUN_RAW = 2**16
"""Raw bytes of a chunk from which a stream runs on into the next: the same, for streams through many small chunks."""

MAX_GRAPHS = 64
"""Graphs."""

MAX_TENSORS = 2**18
"""Tensors."""

MAX_ORIGINALS = 2**12
"""Files of the model as it was."""

MAX_RANK = 64
"""Dims of a tensor."""

MAX_ELEMENTS = 2**40
"""Elements of a tensor; dims that are 0 do not count, so that no product of dims overflows anywhere."""

SEGMENT = 2**18
"""Elements of a segment where a tensor does not say otherwise."""

MIN_SEGMENT = 2**10
MAX_SEGMENT = 2**21
"""Elements of a segment."""

MAX_GRAPH_RAW = 2**31 - 1
"""Raw bytes of a graph, holes filled: protobuf's own limit."""

MAX_LEVELS = 2**18
"""Accuracy levels that a graph has places for."""

MAX_NAME = 2**16
"""UTF-8 bytes of a name."""

MAX_LOCATION = 128
"""Characters of a location."""

MIN_DECODED = 2**30
MAX_EXPANSION = 1000
"""Bytes that a file may decode to: at most the larger of MIN_DECODED and MAX_EXPANSION · file size."""


def decoded_limit(file_size: int) -> int:
    """Bytes that a file of `file_size` bytes may decode to, unless the caller raises it."""
    return max(MIN_DECODED, MAX_EXPANSION * file_size)
