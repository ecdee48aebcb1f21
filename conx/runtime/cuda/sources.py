"""The kernels' sources and their parameters.

The .cu files are compiled in groups, without headers, so that NVRTC needs nothing but itself. A group is compiled when
a kernel of it is first wanted, which takes a second or two on a new machine; CuPy keeps the result on disk.
"""

import re
from pathlib import Path

__all__ = [
    "GROUP",
    "GROUPS",
    "OPTIONS",
    "SQUARE",
    "THREADS",
    "TILE",
    "TILE_BYTES",
    "group_of",
    "kernel_names",
    "kernel_source",
]

# What each group is compiled from, and the beginnings of its kernels' names.
GROUPS = {
    "linear": (("begin", "floats", "places", "linear"), ("linear", "log8")),
    "fields": (("begin", "fields"), ("count", "unpack")),
    "palette": (("begin", "places", "palette"), ("palette",)),
    "planes": (("begin", "floats", "planes"), ("planes", "cast")),
    "moves": (("begin", "moves"), ("fill", "transpose")),
}

# IEEE arithmetic: every product rounded by itself, subnormal numbers kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

# As in begin.cu, fields.cu and moves.cu.
THREADS = 256
GROUP = 4
TILE = 4096
TILE_BYTES = 4096
SQUARE = 32

_FLOATS = ("float32", "float16", "bfloat16")
_PAIRS = [f"{source}_{target}" for source in ("float64", *_FLOATS) for target in _FLOATS]


def group_of(kernel: str) -> str:
    """The group that a kernel is in."""
    return next(group for group, (_, names) in GROUPS.items() if kernel.partition("_")[0] in names)


def kernel_source(group: str | None = None) -> str:
    """The source of a group, or of all; each file is marked for the compiler's messages."""
    chosen = GROUPS.values() if group is None else [GROUPS[group]]
    names = dict.fromkeys(name for files, _ in chosen for name in files)
    folder = Path(__file__).parent
    parts = [f'#line 1 "{name}.cu"\n' + (folder / f"{name}.cu").read_text(encoding="utf-8") for name in names]
    return "".join(parts)


def kernel_names() -> dict[str, int]:
    """Every kernel, and how many parameters it takes; each is 8 bytes wide."""
    source = kernel_source()
    plain = re.findall(r"^KERNEL (\w+)\(([^)]*)\)", source, re.MULTILINE)
    found = {name: parameters.count(",") + 1 for name, parameters in plain if "#" not in name}
    made = {name: len(re.findall(r",", parameters)) + 1 for name, parameters in _templates(source).items()}
    return found | {
        **{f"linear_{target}": made["linear"] for target in _FLOATS},
        **{f"palette_{size}": made["palette"] for size in (2, 4)},
        **{f"planes_{pair}": made["planes"] for pair in _PAIRS},
        **{f"cast_{pair}": made["cast"] for pair in _PAIRS},
    }


def _templates(source: str) -> dict[str, str]:
    """The parameters of the kernels that macros make."""
    return dict(re.findall(r"KERNEL (\w+)_##\w+\(([^)]*)\)", source))
