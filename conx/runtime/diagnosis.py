"""What is installed to run models with, and which way a file's weights would take, and why."""

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime

from conx.container.reader import Reader
from conx.container.records import External, Graph
from conx.errors import UnsupportedError
from conx.runtime.cuda.pipeline import Wanted, recipe_of
from conx.runtime.decode import fill_holes
from conx.runtime.injection import candidates
from conx.runtime.installed import WHEELS, check_onnxruntime
from conx.runtime.providers import CUDA, usable_providers
from conx.runtime.ways import REFUSE_MEMORY, find_device

__all__ = ["FileWay", "device_facts", "file_ways", "runtime_facts"]


@dataclass(frozen=True)
class FileWay:
    """How the weights of one precision would come in.

    Attributes:
        precision: of the graph.
        way: "device", "memory" or "files".
        why: the reason, for people.
        device_bytes: what would be decoded on the GPU.
        host_bytes: what would be decoded on the host.
    """

    precision: str
    way: str
    why: str
    device_bytes: int
    host_bytes: int


def runtime_facts() -> list[tuple[str, str]]:
    """Version, providers and faults of the onnxruntime that is installed."""
    packages = {d.metadata["Name"].lower() for d in importlib.metadata.distributions() if d.metadata["Name"]}
    wheels = [name for name in WHEELS if name in packages]
    facts = [
        ("onnxruntime", f"{onnxruntime.__version__} ({', '.join(wheels) or 'of an unknown package'})"),
        ("providers", ", ".join(onnxruntime.get_available_providers())),
        ("usable here", ", ".join(name for name, _ in usable_providers(None, None, None))),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_onnxruntime()
        except UnsupportedError as e:
            facts.append(("problem", str(e)))
    return facts + [("problem", str(warning.message)) for warning in caught]


def device_facts() -> list[tuple[str, str]]:
    """CuPy's version, the GPUs, and whether weights can be decoded there."""
    try:
        from conx.runtime.cuda.cupy_device import versions
    except ImportError as e:
        return [("cupy", f'cannot be imported ({e}); for decoding on the GPU: pip install "conx-onnx[cuda13]"')]
    facts = [*versions().items()]
    try:
        device = find_device(CUDA, {})
        facts.append(("kernels", f"compiled for GPU {device.number}"))
    except UnsupportedError as e:
        facts.append(("kernels", str(e)))
    return facts


def file_ways(
    source: Any, providers: Sequence[Any] | None = None, provider_options: Sequence[Mapping[Any, Any]] | None = None
) -> list[FileWay]:
    """The way that each precision of a .conx file would take with these providers (None: all that there are).

    Raises:
        FormatError, IntegrityError: the file is damaged.
    """
    name, options = usable_providers(None, providers, provider_options)[0]
    try:
        find_device(name, options)
        obstacle = ""
    except UnsupportedError as e:
        obstacle = str(e)
    with Reader(source) as reader:
        graphs = [(precision, graph) for graph in reader.index.graphs for precision in graph.precisions]
        return [_way(reader, precision, graph, name, obstacle) for precision, graph in sorted(graphs, key=_precision)]


def _precision(pair: tuple[str, Graph]) -> str:
    return pair[0]


def _way(reader: Reader, precision: str, graph: Graph, provider: str, obstacle: str) -> FileWay:
    tensors = reader.index.tensors
    total = sum(external.nbytes_of(tensors[external.tensor]) for external in graph.externals)
    if provider in REFUSE_MEMORY:
        return FileWay(precision, "files", f"{provider} takes no weights in memory", 0, total)
    if obstacle:
        return FileWay(precision, "memory", obstacle, 0, total)
    large = candidates(fill_holes(reader, graph), graph.externals, tensors)
    fit = sum(e.nbytes_of(tensors[e.tensor]) for e in large if recipe_of(reader, _wanted(reader, e)) is not None)
    if not fit:
        return FileWay(precision, "memory", "no large matrix that only MatMul, Gemm or Gather use", 0, total)
    return FileWay(precision, "device", f"{provider} and CuPy are there", fit, total - fit)


def _wanted(reader: Reader, external: External) -> Wanted:
    return Wanted(external.tensor, external.dtype_of(reader.index.tensors[external.tensor]), external.perm)
