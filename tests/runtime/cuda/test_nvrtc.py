"""The kernels compile for every GPU that conx is meant for, and fit into its registers."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from conx.runtime.cuda import sources
from conx.runtime.cuda.sources import GROUPS, group_of, kernel_names, kernel_source
from tools.gpu_kernels import ARCHITECTURES, NvrtcError, compiled, figures_of, find_nvrtc, known_architectures

pytestmark = pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def rolled(source: str) -> str:
    """The same kernels with their loops left as they are: they compile likewise, and several times as fast."""
    return "#define UNROLL\n" + re.sub(r"#pragma unroll.*", "#pragma unroll 1", source)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: int) -> None:
    if architecture not in known_architectures():
        pytest.skip(f"this NVRTC knows no sm_{architecture}")
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda group: compiled(rolled(kernel_source(group)), architecture), GROUPS)
        found = {name for code, log in results for name in figures_of(log) if code.startswith(b"\x7fELF")}
    assert found == kernel_names().keys()


def test_nothing_is_spilled() -> None:
    with ThreadPoolExecutor(2) as pool:
        logs = [*pool.map(lambda group: compiled(kernel_source(group), 90)[1], GROUPS)]
    figures = {name: each for log in logs for name, each in figures_of(log).items()}
    assert figures.keys() == kernel_names().keys()
    assert [name for name, each in figures.items() if each.spilled] == []
    assert all(each.registers <= 64 for each in figures.values()), "fewer than 1024 threads fit on a multiprocessor"


def test_the_log_of_an_error_is_told() -> None:
    with pytest.raises(NvrtcError, match=r"linear\.cu.*undefined"):
        compiled(kernel_source("linear").replace("narrowed<T>(", "no_such_thing("), 90)


def test_groups_hold_all_kernels() -> None:
    assert {group_of(name) for name in kernel_names()} == GROUPS.keys()


def test_numbers_are_those_of_the_source() -> None:
    source = kernel_source()
    for name in ("THREADS", "GROUP", "SQUARE", "TILE_BYTES"):
        assert re.search(rf"#define {name} {getattr(sources, name)}\b", source), name
    rounds = int(re.findall(r"#define ROUNDS (\d+)", source)[0])
    assert sources.THREADS * sources.GROUP * rounds == sources.TILE
