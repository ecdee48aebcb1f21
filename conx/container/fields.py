"""Reading one field of the parsed index: right type, right range, or an error that names it.

A path is like `tensors[3].shape`. An error is one line: the path, the value, the rule.
"""

from collections.abc import Mapping
from typing import Any

from conx.container.limits import MAX_NAME
from conx.errors import FormatError

__all__ = [
    "SHA256_SIZE",
    "as_array",
    "as_bytes",
    "as_int",
    "as_ints",
    "as_map",
    "as_name",
    "as_str",
    "refuse",
    "required",
]

SHA256_SIZE = 32


def refuse(path: str, value: object, rule: str) -> FormatError:
    """The error for a field whose value breaks a rule."""
    return FormatError(f"index: {path} is {_short(value)}: {rule}")


def required(fields: Mapping[str, Any], key: str, path: str) -> Any:
    """`fields[key]`; `path` is that of the map, empty for the index itself."""
    try:
        return fields[key]
    except KeyError:
        raise FormatError(f"index: {path + '.' if path else ''}{key} is missing") from None


def as_map(value: Any, path: str) -> dict[str, Any]:
    """`value` as a map."""
    if type(value) is not dict:
        raise refuse(path, value, "must be a map")
    return value


def as_array(value: Any, path: str, length: int | None = None, most: int | None = None) -> list[Any]:
    """`value` as an array, of exactly `length` or at most `most` items."""
    if type(value) is not list:
        raise refuse(path, value, "must be an array")
    if length is not None and len(value) != length:
        raise refuse(path, value, f"must have {length} items, not {len(value)}")
    if most is not None and len(value) > most:
        raise refuse(path, value, f"must have at most {most} items, not {len(value)}")
    return value


def as_int(value: Any, path: str, low: int, high: int) -> int:
    """`value` as an integer of `low` to `high`."""
    if type(value) is not int:  # a bool is not an integer
        raise refuse(path, value, "must be an integer")
    if not low <= value <= high:
        raise refuse(path, value, f"must be {low} to {high}")
    return value


def as_ints(value: Any, path: str, low: int, high: int, most: int) -> tuple[int, ...]:
    """`value` as an array of at most `most` integers of `low` to `high`."""
    items = as_array(value, path, most=most)
    return tuple([as_int(item, f"{path}[{i}]", low, high) for i, item in enumerate(items)])


def as_str(value: Any, path: str) -> str:
    """`value` as a string."""
    if type(value) is not str:
        raise refuse(path, value, "must be a string")
    return value


def as_name(value: Any, path: str) -> str:
    """`value` as a string of at most MAX_NAME bytes."""
    name = as_str(value, path)
    if len(name) > MAX_NAME // 4 and len(name.encode()) > MAX_NAME:
        raise refuse(path, name, f"must have at most {MAX_NAME} bytes, not {len(name.encode())}")
    return name


def as_bytes(value: Any, path: str, length: int = SHA256_SIZE) -> bytes:
    """`value` as a byte string of exactly `length` bytes."""
    if type(value) is not bytes:
        raise refuse(path, value, "must be a byte string")
    if len(value) != length:
        raise refuse(path, value, f"must have {length} bytes, not {len(value)}")
    return value


def _short(value: object) -> str:
    """`value` for people, in one line, never long; nested values are only named, as printing them may take long."""
    if type(value) is bytes:
        return f"{len(value)} bytes {value[:8].hex()}" + ("…" if len(value) > 8 else "")
    if type(value) is str:
        return repr(value if len(value) <= 60 else value[:59] + "…")
    if type(value) is dict:
        return f"a map of {len(value)}"
    if isinstance(value, list | tuple):
        if len(value) <= 8 and all(type(item) is int for item in value):
            return str(list(value))
        return f"an array of {len(value)}"
    if value is None or type(value) is bool:
        return {True: "true", False: "false", None: "nil"}[value]
    return str(value)
