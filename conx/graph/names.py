"""Names for new values of a graph."""

import onnx

from conx.graph.fp16_graph import all_names

__all__ = ["Names"]


class Names:
    """Gives names that neither a graph nor one within it has."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.taken = set(all_names(graph))

    def fresh(self, name: str, part: str) -> str:
        """A new name for a part of the value `name`."""
        new, number = f"{name}/{part}", 0
        while new in self.taken:
            number += 1
            new = f"{name}/{part}_{number}"
        self.taken.add(new)
        return new
