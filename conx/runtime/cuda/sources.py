"""The kernels' source and their parameters.

All .cu files are compiled as one, without headers, so that NVRTC needs nothing but itself.
"""

import re
from pathlib import Path

__all__ = ["GROUP", "OPTIONS", "SQUARE", "THREADS", "TILE", "TILE_BYTES", "kernel_names", "kernel_source"]

FILES = ("begin", "floats", "places", "linear", "fields", "palette", "planes", "moves")

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


def kernel_source() -> str:
    """The whole source, each file marked for the compiler's messages."""
    folder = Path(__file__).parent
    parts = [f'#line 1 "{name}.cu"\n' + (folder / f"{name}.cu").read_text(encoding="utf-8") for name in FILES]
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
