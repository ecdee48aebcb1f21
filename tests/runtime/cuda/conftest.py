"""Kernels compiled once for all tests."""

from pathlib import Path

import pytest

from tests.runtime.cuda.host import COMPILER, Kernels, compile_kernels


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if COMPILER is None:
        pytest.skip("no C++ compiler here")
    folder: Path = tmp_path_factory.mktemp("kernels")
    return compile_kernels(folder)
