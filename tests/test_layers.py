"""Imports of conx point down only, heavy packages are imported in one place each, and `import conx` loads none."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Who may import whom: each layer (a module of conx, or a package with all that is in it) and the layers below it that
# it may use. What is not listed is forbidden, and a new module fails the tests until it has a row.
BOTTOM = {"_version", "errors", "dtypes"}
STORE = BOTTOM | {"container", "codecs"}
LAYERS: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "dtypes": {"errors"},
    "container": BOTTOM,  # knows nothing of codecs
    "codecs": BOTTOM,  # know nothing of files
    "quantize": BOTTOM | {"codecs"},
    "graph": STORE | {"quantize"},  # the ONNX side, pack time only
    "runtime": STORE,  # load time: never graph or quantize
    "arrays": BOTTOM | {"codecs", "runtime"},
    "checking": STORE | {"runtime"},
    "inspection": STORE | {"graph"},
    "unpacking": STORE | {"graph", "runtime"},
    "dequantizing": {"graph"},
    "packing": STORE | {"quantize", "graph", "runtime", "checking", "inspection", "feeds", "verification"},
    "report": set(),
    "feeds": {"errors"},
    "verification": {"errors", "feeds", "inspection", "runtime"},
    # What follows uses conx as anybody does, by its public names.
    "demo": {"__init__", "errors", "report"},
    "doctor": {"__init__", "errors", "report", "runtime"},
    "cli": {"__init__", "errors", "dequantizing", "report", "inspection", "packing", "verification", "demo", "doctor"},
    "__main__": {"cli"},
    # The public names. Only _version and errors are really imported, the others when they are first asked for: see
    # test_import_conx_loads_nothing_heavy.
    "__init__": {
        "_version",
        "errors",
        "arrays",
        "runtime",
        "checking",
        "dequantizing",
        "inspection",
        "unpacking",
        "packing",
        "verification",
    },
}

# The one place of each heavy package.
HOMES = {
    "onnx": "conx.graph",
    "google": "conx.graph",  # protobuf
    "onnxruntime": "conx.runtime",
    "cupy": "conx.runtime.cuda",
    "rich": "conx.cli",
}

# Imports inside functions: (in, of) and why. Nothing else may, least of all to dodge a cycle.
LATE_IMPORTS = {
    ("conx.arrays", "conx.runtime.cuda"): "optional",
    ("conx.cli", "conx.demo"): "a command imports its own part only",
    ("conx.cli", "conx.dequantizing"): "a command imports its own part only",
    ("conx.cli", "conx.doctor"): "a command imports its own part only",
    ("conx.cli", "rich"): "optional",
    ("conx.doctor", "conx.runtime"): "it tells what is missing where onnxruntime is",
    ("conx.inspection", "conx.graph"): "a .conx file is inspected without onnx",
    ("conx.runtime.diagnosis", "conx.runtime.cuda.cupy_device"): "optional",
    ("conx.runtime.ways", "conx.runtime.cuda.cupy_device"): "optional",
}

# Who may import by a name made at run time: only the table of public names. Data in a file never triggers an import.
BY_NAME = {"conx"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "conx").rglob("*.py"))
}

CODECS = {f"conx.codecs.{page.stem}" for page in (ROOT / "spec" / "codecs").glob("*.md")}


@dataclass(frozen=True)
class Import:
    """One imported module, as it stands in a source file."""

    module: str
    line: int
    target: str
    late: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def imports_in(module: str, source: str) -> Iterator[Import]:
    """Each import statement's modules, wherever it stands; `from package import module` counts as the module."""

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name, late)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: relative import"
            package = node.module or ""
            targets = {full if (full := f"{package}.{alias.name}") in MODULES else package for alias in node.names}
            for target in sorted(targets):
                yield Import(module, node.lineno, target, late)
        inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), late=False)


IMPORTS = [each for name, path in MODULES.items() for each in imports_in(name, path.read_text(encoding="utf-8"))]


def under(module: str, place: str) -> bool:
    """Whether `module` is `place` or lies in it."""
    return module == place or module.startswith(place + ".")


def layer(module: str) -> str:
    """The row of LAYERS that a module of conx belongs to."""
    return "__init__" if module == "conx" else module.split(".")[1]


def run(code: str) -> str:
    """What Python prints for `code`, run in a process of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_finder_sees_every_kind_of_import() -> None:
    source = (
        "import a.b\nfrom conx import errors\nfrom conx.errors import ConxError\n"
        "try:\n    import c\nexcept ImportError:\n    pass\n"
        "def f():\n    if True:\n        from d import e\n"
        "class C:\n    import g\n    async def m(self):\n        import h\n"
    )
    assert [(each.target, each.late) for each in imports_in("conx.planted", source)] == [
        ("a.b", False),
        ("conx.errors", False),
        ("conx.errors", False),
        ("c", False),
        ("d", True),
        ("g", False),
        ("h", True),
    ]


def test_every_module_has_a_layer() -> None:
    assert sorted(name for name in MODULES if layer(name) not in LAYERS) == [], "put them into LAYERS"


def test_the_table_points_down() -> None:
    assert set().union(*LAYERS.values()) <= LAYERS.keys()
    TopologicalSorter(LAYERS).prepare()  # raises CycleError


def test_imports_point_down() -> None:
    wrong = [
        str(each)
        for each in IMPORTS
        if under(each.target, "conx") and layer(each.target) not in {layer(each.module), *LAYERS[layer(each.module)]}
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for each in IMPORTS:
        if not each.late and each.target in MODULES:
            edges.setdefault(each.module, set()).add(each.target)
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_codecs_do_not_import_codecs() -> None:
    def codec(module: str) -> str | None:
        return next((name for name in CODECS if under(module, name)), None)

    assert {name for name in CODECS if name not in MODULES} == set(), "a page in spec/codecs without its codec"
    wrong = [
        str(each) for each in IMPORTS if codec(each.module) and codec(each.target) not in {None, codec(each.module)}
    ]
    assert wrong == []


@pytest.mark.parametrize("package", HOMES)
def test_a_heavy_package_is_imported_in_its_one_place(package: str) -> None:
    wrong = [str(each) for each in IMPORTS if under(each.target, package) and not under(each.module, HOMES[package])]
    assert wrong == []


def test_imports_inside_functions_are_the_listed_ones() -> None:
    def listed(each: Import) -> set[tuple[str, str]]:
        return {row for row in LATE_IMPORTS if under(each.module, row[0]) and under(each.target, row[1])}

    late = [each for each in IMPORTS if each.late]
    assert [str(each) for each in late if not listed(each)] == []
    assert LATE_IMPORTS.keys() - set().union(*map(listed, late)) == set(), "allowed, but not there any more"


def test_only_the_public_names_are_imported_by_name() -> None:
    wrong = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            word = node.name if isinstance(node, ast.alias) else word
            if word in {"import_module", "__import__"} and name not in BY_NAME:
                wrong.append(f"{name} uses {word}")
    assert wrong == []


def test_import_conx_loads_nothing_heavy() -> None:
    loaded = run(
        "import sys; before = set(sys.modules); import conx; print(*sorted(set(sys.modules) - before))"
    ).split()
    heavy = {*HOMES, "numpy", "zstandard", "msgpack"}
    assert "conx" in loaded
    assert sorted(name for name in loaded if name.split(".")[0] in heavy) == []


def test_a_session_does_not_load_onnx() -> None:
    loaded = run("import sys, conx; conx.InferenceSession; print(*sorted(sys.modules))").split()
    assert "onnxruntime" in loaded
    assert {"onnx", "google.protobuf"} & set(loaded) == set()
