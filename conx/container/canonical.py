"""Canonical msgpack: the one way to write a value, and a parser that refuses all others.

msgpack allows many encodings of one value, and a map may have a key twice, so that two readers see two files. Only the
shortest encoding with ascending keys is accepted, which is checked by packing again what was parsed.

Hostile bytes are bounded in three steps. A pass that builds nothing makes sure that all that is announced is there (an
array of 5 bytes announces 2^32 elements, which msgpack would allocate at once). Containers are counted while they are
built. Depth is measured level by level before anything recursive sees the value.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import msgpack

from conx.container.limits import MAX_INDEX_CONTAINERS, MAX_INDEX_DEPTH
from conx.errors import FormatError

__all__ = ["pack", "parse_canonical"]


def parse_canonical(data: bytes) -> Any:
    """The value that canonical msgpack `data` stands for; maps become dicts, arrays lists.

    Raises:
        FormatError: the bytes are not msgpack, not canonical, too deep or have too many containers.
    """
    _check_complete(data)
    counter = _Counter()
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            unicode_errors="strict",
            list_hook=counter.on_array,
            object_pairs_hook=counter.on_map,
            ext_hook=_refuse_extension,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FormatError(f"index: invalid msgpack: {_reason(error)}") from None
    _check_depth(value)
    if msgpack.packb(value, use_bin_type=True) != data:
        raise FormatError("index: not in canonical form: a number, string, array or map is not written shortest")
    return value


def pack(value: Any) -> bytes:
    """`value` in canonical form; keys of maps are sorted, tuples are arrays.

    Raises:
        ValueError: it has what canonical form has not: other types, keys that are not strings, too much nesting.
    """
    return bytes(msgpack.packb(_sorted(value, 1), use_bin_type=True))


class _Counter:
    """Counts containers as they are built, and makes dicts of maps whose keys ascend."""

    def __init__(self) -> None:
        self.count = 0

    def on_array(self, items: list[Any]) -> list[Any]:
        self._add()
        return items

    def on_map(self, pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        self._add()
        result: dict[str, Any] = {}
        last = None
        for key, item in pairs:
            if type(key) is not str:
                raise FormatError(f"index: map key {str(key)[:60]!r}: must be a string")
            # The order of code points is the order of UTF-8 bytes.
            if last is not None and key <= last:
                raise FormatError(f"index: map key {key[:60]!r} after {last[:60]!r}: keys must ascend and differ")
            result[key] = item
            last = key
        return result

    def _add(self) -> None:
        self.count += 1
        if self.count > MAX_INDEX_CONTAINERS:
            raise FormatError(f"index: more than {MAX_INDEX_CONTAINERS} arrays and maps")


def _check_complete(data: bytes) -> None:
    """Refuses bytes that are not exactly one value, without building anything."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"index: invalid msgpack: {_reason(error)}") from None
    if unpacker.tell() != len(data):
        raise FormatError(f"index: {len(data) - unpacker.tell()} bytes after the end of the msgpack value")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while True:
        level = [item for item in level if type(item) is dict or type(item) is list]
        if not level:
            return
        depth += 1
        if depth > MAX_INDEX_DEPTH:
            raise FormatError(f"index: nested deeper than {MAX_INDEX_DEPTH} arrays and maps")
        level = [item for box in level for item in (box.values() if type(box) is dict else box)]


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise FormatError(f"index: extension type {code} with {len(data)} bytes: there are none in canonical form")


def _reason(error: Exception) -> str:
    """Why parsing failed: the exceptions of msgpack often have no text."""
    if isinstance(error, msgpack.OutOfData):
        return "it is cut short"
    if isinstance(error, msgpack.StackError):
        return f"nested deeper than {MAX_INDEX_DEPTH} arrays and maps"
    if isinstance(error, UnicodeDecodeError):
        return f"a string is not UTF-8 ({error.reason})"
    return str(error) or type(error).__name__


def _sorted(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping | list | tuple):
        if depth > MAX_INDEX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_INDEX_DEPTH} arrays and maps")
        if isinstance(value, Mapping):
            for key in value:
                if type(key) is not str:
                    raise ValueError(f"map key {key!r}: must be a string")
            return {key: _sorted(value[key], depth + 1) for key in sorted(value)}
        return [_sorted(item, depth + 1) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{value} is not an integer of 64 bits")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise ValueError(f"{value!r} of type {type(value).__name__} has no canonical form")
