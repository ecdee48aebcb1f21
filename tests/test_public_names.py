"""The public names of conx are these, and stay what they are whatever else has been imported."""

import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import conx

FUNCTIONS = ["pack", "unpack", "inspect", "check", "verify", "dequantize_array", "dequantize"]
CLASSES = [
    "InferenceSession",
    "PackReport",
    "VerifyReport",
    "ConxError",
    "FormatError",
    "IntegrityError",
    "UnsupportedError",
    "ModelError",
]
PUBLIC = [*FUNCTIONS, *CLASSES, "__version__"]


def test_all_names_exactly_these() -> None:
    assert sorted(conx.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(conx))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function = getattr(conx, name)
    assert inspect.isfunction(function)
    assert function.__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    assert inspect.isclass(getattr(conx, name))
    assert getattr(conx, name).__doc__


def test_errors_form_the_documented_tree() -> None:
    assert [error.__base__ for error in (conx.FormatError, conx.UnsupportedError, conx.ModelError)] == [
        conx.ConxError
    ] * 3
    assert conx.IntegrityError.__base__ is conx.FormatError
    assert conx.ConxError.__base__ is Exception


def test_the_version_is_that_of_the_distribution() -> None:
    source = (Path(conx.__file__).parent / "_version.py").read_text(encoding="utf-8")
    assert f'__version__ = "{conx.__version__}"' in source


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match=name):
        getattr(conx, name)


def test_submodules_do_not_hide_public_names() -> None:
    # Importing a submodule sets it as an attribute of its package: with a module conx/pack.py, whoever imports that
    # would turn the function conx.pack into a module. In a process of its own: here the names are known already.
    modules = [
        module.name
        for module in pkgutil.walk_packages(conx.__path__, "conx.")
        if module.name != "conx.__main__" and not module.name.startswith("conx.runtime.cuda.cupy_")
    ]
    assert modules
    code = (
        f"import importlib, inspect, conx\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"for name in {FUNCTIONS!r}: assert inspect.isfunction(getattr(conx, name)), name\n"
    )
    root = Path(conx.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
