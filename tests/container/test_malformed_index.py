"""One index for each rule that it can break, with the error that it must give."""

import re
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from conx.container import Reader
from conx.container.index import parse_index
from conx.container.limits import MAX_GRAPH_RAW, MAX_INDEX_CONTAINERS, MAX_INDEX_DEPTH, MAX_INDEX_RAW, PAGE_ROWS
from conx.errors import ConxError, FormatError, UnsupportedError
from tests.container.parts import Parts, compress

Index = dict[str, Any]
MAX_STORED = 2**24 + 2**17


def refused(data: bytes, kind: type[ConxError], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        Reader(data)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("<bytes>: index: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


GOOD = {"features": ["draft-2"], "graphs": [], "metadata": {}, "pages": [], "tensors": []}
HEAD = msgpack.packb(GOOD)[:-1]  # all but the empty array of tensors

ENCODINGS: dict[str, tuple[bytes, str]] = {
    "no bytes of a value": (HEAD, "invalid msgpack: it is cut short"),
    "bytes after the value": (HEAD + b"\x90\xc0", "1 bytes after the end of the msgpack value"),
    "unused first byte": (b"\xc1", "invalid msgpack: "),
    "not a map": (b"\x90", "the value is not a map"),
    "integer not shortest": (HEAD + b"\x91\xcc\x01", "not in canonical form"),
    "positive integer as signed": (HEAD + b"\x91\xd1\x01\x00", "not in canonical form"),
    "string not shortest": (HEAD + b"\x91\xd9\x01a", "not in canonical form"),
    "array not shortest": (HEAD + b"\xdc\x00\x00", "not in canonical form"),
    "map not shortest": (HEAD + b"\x91\xde\x00\x00", "not in canonical form"),
    "bytes not shortest": (HEAD + b"\x91\xc5\x00\x01a", "not in canonical form"),
    "float 32": (HEAD + b"\x91\xca\x00\x00\x00\x00", "not in canonical form"),
    "keys not ascending": (HEAD + b"\x91\x82\xa1b\x01\xa1a\x01", "map key 'a' after 'b': keys must ascend and differ"),
    "key twice": (HEAD + b"\x91\x82\xa1a\x01\xa1a\x01", "map key 'a' after 'a': keys must ascend and differ"),
    "key an integer": (HEAD + b"\x91\x81\x01\x01", "map key '1': must be a string"),
    "key bytes": (HEAD + b"\x91\x81\xc4\x01a\x01", "must be a string"),
    "key an array": (HEAD + b"\x91\x81\x90\x01", "must be a string"),
    "key an array, longer": (HEAD + b"\x91\x81\x91\xc0\x01", "must be a string"),
    "key nil": (HEAD + b"\x91\x81\xc0\x01", "map key 'None': must be a string"),
    "extension type": (HEAD + b"\x91\xd4\x05a", "invalid msgpack: "),
    "extension type without bytes": (HEAD + b"\x91\xc7\x00\x05", "extension type 5 with 0 bytes"),
    "time stamp": (HEAD + b"\x91\xd6\xff\x00\x00\x00\x00", "invalid msgpack: "),
    "string not UTF-8": (HEAD + b"\x91\xa1\xff", "invalid msgpack: a string is not UTF-8"),
    "surrogate": (HEAD + b"\x91\xa3\xed\xa0\x80", "invalid msgpack: a string is not UTF-8"),
    "too deep by one": (HEAD + b"\x91" * (MAX_INDEX_DEPTH - 1) + b"\x90", f"nested deeper than {MAX_INDEX_DEPTH}"),
    "very deep": (HEAD + b"\x91" * 100_000 + b"\x90", f"nested deeper than {MAX_INDEX_DEPTH}"),
    "maps too deep": (
        HEAD + b"\x91" + b"\x81\xa1a" * MAX_INDEX_DEPTH + b"\xc0",
        f"nested deeper than {MAX_INDEX_DEPTH}",
    ),
    "containers": (
        HEAD + b"\xdd" + (MAX_INDEX_CONTAINERS + 1).to_bytes(4) + b"\x90" * (MAX_INDEX_CONTAINERS + 1),
        f"more than {MAX_INDEX_CONTAINERS} arrays and maps",
    ),
    # 500 arrays that announce 2^27 elements each: 500 GB, if they were believed.
    "arrays that announce much": (HEAD + b"\xdd\x08\x00\x00\x00" * 500, "invalid msgpack: it is cut short"),
    "maps that announce much": (HEAD + b"\xdf\xff\xff\xff\xff\xa1a" * 500, "invalid msgpack: it is cut short"),
    "string that announces much": (HEAD + b"\x91\xdb\xff\xff\xff\xff", "invalid msgpack: it is cut short"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_malformed_encoding(parts: Parts, name: str) -> None:
    parts.raw_index, text = ENCODINGS[name]
    refused(parts.seal(), FormatError, text)


def test_the_deepest_index_is_read(parts: Parts) -> None:
    box: Any = []
    for _ in range(MAX_INDEX_DEPTH - 3):
        box = [box]
    parts.index["metadata"] = {"deep": box}
    Reader(parts.seal())
    parts.index["metadata"] = {"deep": [box]}
    refused(parts.seal(), FormatError, f"nested deeper than {MAX_INDEX_DEPTH}")


@pytest.mark.parametrize("key", ["features", "graphs", "metadata", "tensors"])
def test_a_key_of_the_index_is_missing(parts: Parts, key: str) -> None:
    del parts.index[key]
    refused(parts.seal(), FormatError, f"index: {key} is missing")


@pytest.mark.parametrize("key", ["codec", "dtype", "name", "params", "sha256", "shape", "streams"])
def test_a_key_of_a_tensor_is_missing(parts: Parts, key: str) -> None:
    del parts.index["tensors"][2][key]
    refused(parts.seal(), FormatError, f"index: tensors[2].{key} is missing")


@pytest.mark.parametrize("key", ["precisions", "role", "sha256", "stream"])
def test_a_key_of_a_graph_is_missing(parts: Parts, key: str) -> None:
    del parts.index["graphs"][1][key]
    refused(parts.seal(), FormatError, f"index: graphs[1].{key} is missing")


@pytest.mark.parametrize("key", ["at", "tensor"])
def test_a_key_of_a_hole_is_missing(parts: Parts, key: str) -> None:
    del parts.index["graphs"][0]["holes"][1][key]
    refused(parts.seal(), FormatError, f"index: graphs[0].holes[1].{key} is missing")


@pytest.mark.parametrize("key", ["location", "name", "tensor"])
def test_a_key_of_an_external_is_missing(parts: Parts, key: str) -> None:
    del parts.index["graphs"][1]["externals"][1][key]
    refused(parts.seal(), FormatError, f"index: graphs[1].externals[1].{key} is missing")


def test_pages_are_missing(parts: Parts) -> None:
    parts.raw_index = msgpack.packb({key: value for key, value in GOOD.items() if key != "pages"})
    refused(parts.seal(), FormatError, "index: pages is missing")


def at(*path: str | int, to: object) -> Callable[[Index], None]:
    """Sets the field at `path`; the keys of its map are sorted again."""

    def mutate(index: Index) -> None:
        box: Any = index
        for step in path[:-1]:
            box = box[step]
        box[path[-1]] = to
        if isinstance(box, dict):
            items = sorted(box.items())
            box.clear()
            box.update(items)

    return mutate


def tensor(i: int, key: str, to: object) -> Callable[[Index], None]:
    return at("tensors", i, key, to=to)


def graph(i: int, key: str, to: object) -> Callable[[Index], None]:
    return at("graphs", i, key, to=to)


def hole(i: int, key: str, to: object) -> Callable[[Index], None]:
    return at("graphs", 0, "holes", i, key, to=to)


def external(i: int, key: str, to: object) -> Callable[[Index], None]:
    return at("graphs", 1, "externals", i, key, to=to)


def view(**fields: object) -> Callable[[Index], None]:
    """A run graph that wants the codes of the first tensor."""
    wanted: dict[str, object] = {"location": "w0", "name": "w", "tensor": 0, "view": "codes"}
    return graph(1, "externals", [dict(sorted((wanted | fields).items()))])


def original_map(**fields: object) -> Index:
    found: Index = {
        "holes": [{"at": 0, "tensor": 1}],
        "name": "m",
        "sha256": bytes(32),
        "size": 25,
        "stream": [0, 0, 1],
    }
    return dict(sorted((found | fields).items()))


def original(**fields: object) -> Callable[[Index], None]:
    """A file of the stream's first byte and the second tensor's 24."""
    return at("originals", to=[original_map(**fields)])


def originals(*names: str) -> Callable[[Index], None]:
    return at("originals", to=[original_map(name=name) for name in names])


RULES: dict[str, tuple[Callable[[Index], None], str]] = {
    # the index
    "features no array": (at("features", to="draft-2"), "features is 'draft-2': must be an array"),
    "feature no string": (at("features", to=[1]), "features[0] is 1: must be a string"),
    "features not ascending": (at("features", to=["draft-2", "codec:raw"]), "features[1] is 'codec:raw': must ascend"),
    "feature twice": (at("features", to=["draft-2", "draft-2"]), "features[1] is 'draft-2': must ascend, and none"),
    "no draft": (at("features", to=["codec:raw"]), "features is an array of 1: must have 'draft-2'"),
    "metadata no map": (at("metadata", to=[]), "metadata is []: must be a map"),
    "metadata nil": (at("metadata", to=None), "metadata is nil: must be a map"),
    "tensors no array": (at("tensors", to={}), "tensors is a map of 0: must be an array"),
    "too many tensors": (at("tensors", to=[0] * (2**18 + 1)), "must have at most 262144 items, not 262145"),
    "graphs no array": (at("graphs", to=5), "graphs is 5: must be an array"),
    "too many graphs": (at("graphs", to=[0] * 65), "graphs is an array of 65: must have at most 64 items, not 65"),
    "no graph": (at("graphs", to=[]), "graphs is []: exactly one must have the role 'source', not 0"),
    # tensors
    "tensor no map": (at("tensors", 0, to=[]), "tensors[0] is []: must be a map"),
    "codec no string": (tensor(0, "codec", 1), "tensors[0].codec is 1: must be a string"),
    "codec without its feature": (
        tensor(0, "codec", "planes"),
        "tensors[0].codec is 'planes': is not among the features",
    ),
    "dtype unknown": (tensor(0, "dtype", "float"), "tensors[0].dtype is 'float': is not an element type of the format"),
    "dtype string": (tensor(0, "dtype", "string"), "tensors[0].dtype is 'string': is not an element type"),
    "dtype no string": (tensor(0, "dtype", 1), "tensors[0].dtype is 1: must be a string"),
    "name no string": (tensor(0, "name", b"a"), "tensors[0].name is 1 bytes 61: must be a string"),
    "name too long": (
        tensor(0, "name", "n" * 65537),
        "tensors[0].name is 'nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
    ),
    "name too long in UTF-8": (tensor(0, "name", "é" * 32769), "must have at most 65536 bytes, not 65538"),
    "params no map": (tensor(0, "params", []), "tensors[0].params is []: must be a map"),
    "sha256 no bytes": (
        tensor(0, "sha256", "a" * 32),
        "tensors[0].sha256 is 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': must be a byte",
    ),
    "sha256 too short": (tensor(0, "sha256", bytes(31)), "0000000000000000…: must have 32 bytes, not 31"),
    "shape no array": (tensor(0, "shape", 5), "tensors[0].shape is 5: must be an array"),
    "dim no integer": (tensor(0, "shape", [2.0]), "tensors[0].shape[0] is 2.0: must be an integer"),
    "dim a bool": (tensor(0, "shape", [True]), "tensors[0].shape[0] is true: must be an integer"),
    "dim negative": (tensor(0, "shape", [3, -1]), "tensors[0].shape[1] is -1: must be 0 to 1099511627776"),
    "dim too big": (
        tensor(0, "shape", [2**40 + 1]),
        "tensors[0].shape[0] is 1099511627777: must be 0 to 1099511627776",
    ),
    "dim of 64 bits": (tensor(0, "shape", [2**64 - 1]), "tensors[0].shape[0] is 18446744073709551615: must be 0 to"),
    "rank too big": (tensor(0, "shape", [1] * 65), "tensors[0].shape is an array of 65: must have at most 64 items"),
    "too many elements": (
        tensor(0, "shape", [2**21, 2**20]),
        "tensors[0].shape is [2097152, 1048576]: dims multiply to",
    ),
    "too many but for a 0": (tensor(3, "shape", [2**39, 0, 4]), "dims multiply to more than 1099511627776 elements"),
    "order no permutation": (
        tensor(0, "order", [0, 0]),
        "tensors[0].order is [0, 0]: must be a permutation of the 2 axes",
    ),
    "order too short": (tensor(0, "order", [0]), "tensors[0].order is [0]: must be a permutation of the 2 axes"),
    "order negative": (tensor(0, "order", [-1, 0]), "tensors[0].order[0] is -1: must be 0 to 64"),
    "order nil": (tensor(0, "order", None), "tensors[0].order is nil: must be an array"),
    "segment too small": (tensor(0, "segment", 1023), "tensors[0].segment is 1023: must be 1024 to 2097152"),
    "segment too big": (tensor(0, "segment", 2**21 + 1), "tensors[0].segment is 2097153: must be 1024 to 2097152"),
    "segment of int4": (tensor(3, "segment", 1028), "tensors[3].segment is 1028: must be a multiple of 8 for int4"),
    "side no array": (tensor(0, "side", 0), "tensors[0].side is 0: must be an array"),
    # streams
    "stream no array": (tensor(1, "streams", [5]), "tensors[1].streams[0] is 5: must be an array"),
    "stream of 2": (tensor(1, "streams", [[0, 0]]), "tensors[1].streams[0] is [0, 0]: must have 3 items, not 2"),
    "chunk negative": (tensor(1, "streams", [[-1, 0, 4]]), "tensors[1].streams[0][0] is -1: must be 0 to 16777215"),
    "chunk too big": (tensor(1, "streams", [[2**24, 0, 4]]), "tensors[1].streams[0][0] is 16777216: must be 0 to"),
    "offset too big": (tensor(1, "streams", [[0, 2**24, 4]]), "tensors[1].streams[0][1] is 16777216: must be 0 to"),
    "size too big": (
        tensor(1, "streams", [[0, 0, 2**48 + 1]]),
        "tensors[1].streams[0][2] is 281474976710657: must be 0",
    ),
    "no such chunk": (tensor(1, "streams", [[99, 0, 24]]), "tensors[1].streams[0] is [99, 0, 24]: there are 10 chunks"),
    "no such chunk, side": (tensor(0, "side", [[10, 0, 4]]), "tensors[0].side[0] is [10, 0, 4]: there are 10 chunks"),
    "beyond all chunks": (
        tensor(1, "streams", [[9, 1, 2**24]]),
        "tensors[1].streams[0] is [9, 1, 16777216]: runs beyond the last of 10 chunks",
    ),
    "empty stream with a place": (
        tensor(1, "streams", [[1, 0, 0]]),
        "tensors[1].streams[0] is [1, 0, 0]: a stream of size 0",
    ),
    "empty stream with an offset": (tensor(1, "streams", [[0, 1, 0]]), "a stream of size 0 must be [0, 0, 0]"),
    "bytes of no elements": (
        tensor(3, "streams", [[0, 0, 1]]),
        "tensors[3].streams[0] is [0, 0, 1]: a tensor without elem",
    ),
    "segments with an offset": (
        tensor(0, "streams", [[1, 0, 3072], [2, 1, 15]]),
        "tensors[0].streams[1] is [2, 1, 15]: with several segments, main stream 1 must begin at [2, 0]",
    ),
    "segments not side by side": (
        tensor(0, "streams", [[1, 0, 3072], [3, 0, 15]]),
        "tensors[0].streams[1] is [3, 0, 15]: with several segments, main stream 1 must begin at [2, 0]",
    ),
    "segments bigger than chunks": (
        tensor(0, "streams", [[1, 0, 3 * 2**24 + 1], [2, 0, 15]]),
        "tensors[0].streams[0] is [1, 0, 50331649]: 3 chunks cannot hold it",
    ),
    "segments beyond all chunks": (
        tensor(0, "streams", [[5, 0, 3072], [6, 0, 15]]),
        "tensors[0].streams[0] is [5, 0, 3072]: 3 segments of 2 streams run beyond the last of 10 chunks",
    ),
    # graphs
    "graph no map": (at("graphs", 0, to="source"), "graphs[0] is 'source': must be a map"),
    "role unknown": (graph(1, "role", "train"), "graphs[1].role is 'train': must be 'source' or 'run'"),
    "two sources": (
        at("graphs", 1, to={"precisions": [], "role": "source", "sha256": bytes(32), "stream": [0, 0, 0]}),
        "graphs is an array of 2: exactly one must have the role 'source', not 2",
    ),
    "precisions of the source": (graph(0, "precisions", ["fp32"]), "a graph of role 'source' has none"),
    "no precision of a run graph": (graph(1, "precisions", []), "graphs[1].precisions is []: a graph of role"),
    "precisions not ascending": (graph(1, "precisions", ["b", "a"]), "graphs[1].precisions[1] is 'a': must ascend"),
    "precision no string": (graph(1, "precisions", [b"fp32"]), "graphs[1].precisions[0] is 4 bytes 66703332: must be"),
    "precision served twice": (
        lambda index: index["graphs"].append(index["graphs"][1] | {"precisions": ["fp16", "original"]}),
        "graphs[2].precisions is 'original': graphs[1] serves it already",
    ),
    "graph too big": (graph(0, "stream", [0, 0, 2**31]), "graphs[0].stream[2] is 2147483648: must be 0 to 2147483647"),
    "graph's stream": (graph(0, "stream", [10, 0, 1]), "graphs[0].holes[0].at is 4: must be 0 to 1"),
    "graph's chunk": (graph(1, "stream", [10, 0, 1]), "graphs[1].stream is [10, 0, 1]: there are 10 chunks"),
    "graph's hash": (graph(0, "sha256", b""), "graphs[0].sha256 is 0 bytes : must have 32 bytes, not 0"),
    "holes no array": (graph(0, "holes", {}), "graphs[0].holes is a map of 0: must be an array"),
    "hole no map": (at("graphs", 0, "holes", 0, to=1), "graphs[0].holes[0] is 1: must be a map"),
    "hole negative": (hole(0, "at", -1), "graphs[0].holes[0].at is -1: must be 0 to 54"),
    "hole beyond the message": (hole(2, "at", 55), "graphs[0].holes[2].at is 55: must be 0 to 54"),
    "holes not ascending": (
        hole(0, "at", 10),
        "graphs[0].holes[1].at is 9: positions must ascend, the one before is 10",
    ),
    "hole's tensor": (hole(0, "tensor", 4), "graphs[0].holes[0].tensor is 4: there are 4 tensors"),
    "hole's tensor a bool": (hole(0, "tensor", True), "graphs[0].holes[0].tensor is true: must be an integer"),
    "holes too big": (
        graph(0, "holes", [{"at": 0, "tensor": 2}] * 1096),
        f"bytes of the graph up to this hole, at most {MAX_GRAPH_RAW}",
    ),
    "externals no array": (graph(1, "externals", 1), "graphs[1].externals is 1: must be an array"),
    "external no map": (at("graphs", 1, "externals", 1, to=[]), "graphs[1].externals[1] is []: must be a map"),
    "external's tensor": (external(0, "tensor", -1), "graphs[1].externals[0].tensor is -1: must be 0 to 262144"),
    "external's name": (external(0, "name", 1), "graphs[1].externals[0].name is 1: must be a string"),
    "repacked no bool": (external(0, "repacked", 1), "graphs[1].externals[0].repacked is 1: must be true or false"),
    "location no string": (external(0, "location", 1), "graphs[1].externals[0].location is 1: must be a string"),
    "location twice": (external(1, "location", "w0"), "graphs[1].externals[1].location is 'w0': must differ from all"),
    "location twice but for case": (
        external(1, "location", "W0"),
        "externals[1].location is 'W0': must differ from all",
    ),
    # bindings
    "perm no permutation": (
        external(1, "perm", [1, 1]),
        "externals[1].perm is [1, 1]: must be a permutation of the 2 axes",
    ),
    "perm too long": (hole(1, "perm", [0, 1, 2]), "holes[1].perm is [0, 1, 2]: must be a permutation of the 2 axes"),
    "binding's shape": (external(1, "shape", [7]), "externals[1].shape is [7]: must have 6 elements"),
    "binding's rank": (
        external(1, "shape", [1] * 64 + [6]),
        "externals[1].shape is an array of 65: must have at most 64",
    ),
    "binding's dtype unknown": (external(1, "dtype", "f4"), "externals[1].dtype is 'f4': is not an element type"),
    "binding's dtype": (
        external(1, "dtype", "int8"),
        "externals[1].dtype is 'int8': a tensor of float32 is not converted",
    ),
    "binding's dtype, from int4": (
        hole(2, "dtype", "float32"),
        "is 'float32': a tensor of int4 is not converted to it",
    ),
    "binding's dtype float64": (
        external(1, "dtype", "float64"),
        "is 'float64': a tensor of float32 is not converted to it",
    ),
    "binding's view": (external(1, "view", "bytes"), "externals[1].view is 'bytes': must be one of values, codes"),
    "binding's view no string": (external(1, "view", 1), "externals[1].view is 1: must be a string"),
    "repeat of nothing": (external(1, "repeat", 0), "externals[1].repeat is 0: must be 1 to"),
    "repeated, but for its shape": (external(1, "repeat", 2), "externals[1].shape is [6]: must have 12 elements"),
    "repeated without a shape": (external(0, "repeat", 2), "index: graphs[1].externals[0].shape is missing"),
    "repeat of int4": (
        graph(0, "holes", [{"at": 4, "repeat": 2, "shape": [0], "tensor": 3}]),
        "holes[0].repeat is 2: elements smaller than a byte are not repeated",
    ),
    "codes without a type": (view(), "graphs[1].externals[0].dtype is missing"),
    "codes without a shape": (view(dtype="int8"), "graphs[1].externals[0].shape is missing"),
    "codes as floats": (
        view(dtype="float32", shape=[3000]),
        "externals[0].dtype is 'float32': codes are one of int8, uint8, int4, uint4",
    ),
    "scales as integers": (
        view(view="scales", dtype="int8", shape=[1]),
        "externals[0].dtype is 'int8': scales are one of float32, float16, bfloat16",
    ),
    "codes of another shape": (view(dtype="int8", shape=[2999]), "shape is [2999]: has not the elements of [3, 1000]"),
    "codes repeated": (view(dtype="int8", shape=[3000], repeat=2), "repeat is 2: codes are not repeated"),
    "padded to less": (view(dtype="int8", shape=[3000], pad=999), "externals[0].pad is 999: must be 1000 to"),
    "padded, but for its shape": (
        view(dtype="int8", shape=[3000], pad=1024),
        "shape is [3000]: has not the elements of [3, 1000], padded",
    ),
    "grid no pair": (view(dtype="int8", shape=[3000], grid=[1]), "grid is [1]: must have 2 items, not 1"),
    "grid's axis": (view(dtype="int8", shape=[3000], grid=[1, 2]), "grid[1] is 2: must be 0 to 1"),
    "grid's scales": (view(dtype="int8", shape=[3000], grid=[4, 0]), "grid[0] is 4: there are 4 tensors"),
    "grid's scales of another shape": (
        view(dtype="int8", shape=[3000], grid=[1, 0]),
        "grid[0] is 1: must be a tensor of 3 float32 scales",
    ),
    "grid of integers": (
        view(tensor=3, dtype="int8", shape=[0, 4], grid=[1, 0]),
        "grid is [1, 0]: a tensor of int4 has no codes",
    ),
    "accuracy level outside": (graph(1, "accuracy_levels", [51]), "accuracy_levels[0] is 51: must be 0 to 50"),
    "accuracy levels not ascending": (
        graph(1, "accuracy_levels", [4, 4]),
        "accuracy_levels is [4, 4]: must ascend, and none may be there twice",
    ),
    # originals
    "originals no array": (at("originals", to=1), "originals is 1: must be an array"),
    "too many originals": (at("originals", to=[0] * 4097), "must have at most 4096 items, not 4097"),
    "original's size": (original(size=26), "originals[0].size is 26: stream and holes have 25 bytes"),
    "original's hole beyond it": (
        original(stream=[0, 0, 1], size=1),
        "originals[0].holes[0] is 25: bytes of the graph up to this hole",
    ),
    "original's name is empty": (original(name=""), "originals[0].name is '': must be relative, without empty parts"),
    "original's name is absolute": (original(name="/etc/a"), "name is '/etc/a': must be relative"),
    "original's name leaves the folder": (original(name="a/../../b"), "name is 'a/../../b': must be relative"),
    "original's name with a drive": (original(name="c:/a"), "name is 'c:/a': has a character that not every system"),
    "original's name with a backslash": (original(name="a\\b"), "has a character that not every system takes"),
    "original's name with NUL": (original(name="a\0b"), "has a character that not every system takes"),
    "original's name a device": (original(name="a/NUL.onnx"), "is a device's name on Windows"),
    "original's name ends in a dot": (original(name="a./b"), "has a part that ends in a dot or a space"),
    "original's name too long": (original(name="a" * 256), "has a part of more than 255 bytes"),
    "originals of one name but for case": (
        originals("Ä.onnx", "a\u0308.ONNX"),
        "originals[1].name is 'a\u0308.ONNX': is the same file as 'Ä.onnx' where case does not count",
    ),
    "original a folder": (originals("a", "A/b"), "originals[1].name is 'A/b': is a folder in one name and a file in"),
    "original a folder before": (originals("a/b", "a"), "originals[1].name is 'a': is a folder in one name"),
    "originals too big": (
        at("originals", to=[original_map(size=1 + 490000 * 4 * 600, holes=[{"at": 0, "tensor": 2}] * 600)]),
        "originals come to 1176000001 bytes: at most 1073741824",
    ),
    # totals
    "tensors too big": (
        tensor(2, "shape", [2**31]),
        "tensors decode to 8589946616 bytes: at most 1073741824, unless the limit",
    ),
    "externals too big": (
        graph(1, "externals", [{"location": f"w{i}", "name": "w", "tensor": 2} for i in range(600)]),
        "graphs[1] comes to 1176000051 bytes: at most 1073741824, unless the limit is raised",
    ),
    "streams too big": (
        tensor(2, "side", [[0, 0, 160 * 2**20]] * 7),
        "tensors have streams of 1174408247 bytes: at most 1073741824",
    ),
}
LOCATIONS = ["", ".", "..", "a/b", "a\\b", "/a", "c:a", ".hidden", "end.", "a b", "é", "a\n", "a\0", "w" * 129]
DEVICES = ["con", "NUL", "aux.bin", "Com1", "lpt9.tar.gz", "com0"]


@pytest.mark.parametrize("name", RULES)
def test_malformed_index(parts: Parts, name: str) -> None:
    mutate, text = RULES[name]
    mutate(parts.index)
    refused(parts.seal(), FormatError, text)


@pytest.mark.parametrize("location", LOCATIONS)
def test_locations_that_are_no_file_names(parts: Parts, location: str) -> None:
    external(0, "location", location)(parts.index)
    refused(parts.seal(), FormatError, "graphs[1].externals[0].location is ")


@pytest.mark.parametrize("location", DEVICES)
def test_locations_that_are_devices(parts: Parts, location: str) -> None:
    external(0, "location", location)(parts.index)
    refused(parts.seal(), FormatError, f"location is {location!r}: is a device's name on Windows")


@pytest.mark.parametrize("location", ["w" * 128, "a", "_", "com", "con1", "a..b", "Layer-3.weight"])
def test_locations_that_are_file_names(parts: Parts, location: str) -> None:
    external(0, "location", location)(parts.index)
    Reader(parts.seal())


def test_unknown_features_are_named(parts: Parts) -> None:
    parts.index["features"] = ["codec:linear", "codec:trellis", "draft-2", "zebra"]
    text = "index: features has 'codec:trellis', 'zebra': this conx does not know it, a newer one is needed"
    refused(parts.seal(), UnsupportedError, text)


def test_the_limit_may_be_raised(parts: Parts) -> None:
    tensor(2, "shape", [2**31])(parts.index)
    Reader(parts.seal(), max_decoded=2**34)
    with pytest.raises(FormatError, match="at most 1000, unless the limit is raised"):
        Reader(parts.seal(), max_decoded=1000)


PAGE = [10, 300, 400, 1000, bytes(32)]

PAGES: dict[str, tuple[Any, str]] = {
    "pages no array": (0, "pages is 0: must be an array"),
    "page no array": ([{}], "pages[0] is a map of 0: must be an array"),
    "page of 4": ([PAGE[:4]], "pages[0] is [10, 300, 400, 1000]: must have 5 items, not 4"),
    "no rows": ([[0, 300, 0, 0, bytes(32)]], "pages[0][0] is 0: must be 1 to 4096"),
    "too many rows": ([[4097, 300, 400, 1000, bytes(32)]], "pages[0][0] is 4097: must be 1 to 4096"),
    "not full": ([PAGE, PAGE], "pages[0][0] is 10: must be 4096 to 4096"),
    "stored too small": ([[10, 12, 400, 1000, bytes(32)]], f"pages[0][1] is 12: must be 13 to {MAX_STORED}"),
    "stored too big": (
        [[10, MAX_STORED + 1, 400, 1000, bytes(32)]],
        f"is {MAX_STORED + 1}: must be 13 to {MAX_STORED}",
    ),
    "raw": ([[10, 300, 401, 1000, bytes(32)]], "pages[0][2] is 401: must be 400 to 400"),
    "data too small": ([[10, 300, 400, 129, bytes(32)]], f"pages[0][3] is 129: must be 130 to {10 * MAX_STORED}"),
    "data too big": ([[1, 300, 40, MAX_STORED + 1, bytes(32)]], f"pages[0][3] is {MAX_STORED + 1}: must be 13 to"),
    "hash": (
        [[10, 300, 400, 1000, bytes(33)]],
        "pages[0][4] is 33 bytes 0000000000000000…: must have 32 bytes, not 33",
    ),
    "too many": ([PAGE] * (2**24 // PAGE_ROWS + 1), "pages is an array of 4097: must have at most 4096 items"),
    "end elsewhere": ([PAGE], "pages and chunks end at byte "),
}


@pytest.mark.parametrize("name", PAGES)
def test_malformed_pages(parts: Parts, name: str) -> None:
    parts.pages, text = PAGES[name]
    refused(parts.seal(), FormatError, text)


def test_an_index_that_is_too_big() -> None:
    with pytest.raises(FormatError, match="index: 33554433 bytes: at most 33554432"):
        parse_index(bytes(MAX_INDEX_RAW + 1))


def test_the_frame_of_the_index(parts: Parts) -> None:
    parts.raw_index = bytes(2**20)
    parts.index_frame = compress(bytes(2**20 + 1))
    refused(parts.seal(), FormatError, "index: the frame states 1048577 bytes of content: must be 1048576")
