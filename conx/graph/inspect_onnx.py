"""Facts about an .onnx file, in the form that `conx.inspect` gives."""

import os
from collections import Counter
from typing import Any

from conx.graph.facts import graph_facts
from conx.graph.parameters import parameter_facts, undone
from conx.graph.read import read_model
from conx.graph.ties import find_ties, shared_names

__all__ = ["onnx_facts"]


def onnx_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of `conx.ModelInfo`; tensors as maps.

    Raises:
        ModelError: the file is no ONNX model, or damaged.
    """
    with read_model(path) as source:
        ties = find_ties(source.weights)
        uses = Counter(tie.stored for tie in ties)
        shared = shared_names(source.weights, ties)
        stored = [w for w in source.weights if ties[w.number].stored == w.number]
        by_dtype: Counter[str] = Counter()
        for weight in source.weights:
            by_dtype[weight.dtype.label] += weight.nbytes
        counts = parameter_facts(source, ties, undone(source))
        return {
            "path": os.fspath(path),
            "format": "onnx",
            "file_bytes": source.size,
            "source_bytes": source.size,
            **counts,
            "lossless": True,
            "precisions": ("original",),
            "memory": {"original": sum(w.nbytes for w in source.weights)},
            "by_dtype": dict(sorted(by_dtype.items())),
            "by_codec": {},
            "graph": graph_facts(source),
            "tensors": [
                {
                    "name": w.name,
                    "dtype": w.dtype.label,
                    "shape": w.shape,
                    "codec": "",
                    "bytes": w.nbytes,
                    "stored": w.nbytes,
                    "uses": uses[w.number],
                    "error": 0.0,
                    "shared": tuple(shared.get(w.number, ())),
                }
                for w in stored
            ],
        }
