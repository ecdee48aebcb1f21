"""The container: bytes <-> records. Knows nothing of ONNX or of codecs."""

from conx.container.header import Header
from conx.container.index import FEATURES, content_id
from conx.container.reader import Reader, Verify
from conx.container.records import Binding, External, Graph, Hole, Index, Page, Stream, Tensor
from conx.container.source import ByteSource, Readable, open_source
from conx.container.writer import Writer

__all__ = [
    "FEATURES",
    "Binding",
    "ByteSource",
    "External",
    "Graph",
    "Header",
    "Hole",
    "Index",
    "Page",
    "Readable",
    "Reader",
    "Stream",
    "Tensor",
    "Verify",
    "Writer",
    "content_id",
    "open_source",
]
