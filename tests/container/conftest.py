"""The small file that many tests look at."""

import pytest

from tests.container.parts import Parts, take_apart, write


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the small file."""
    path = tmp_path_factory.mktemp("small") / "small.conx"
    write(path)
    return path.read_bytes()


@pytest.fixture
def parts(small: bytes) -> Parts:
    """The small file in pieces, to be broken."""
    return take_apart(small)
