"""Equal initializers become one, so that a runtime holds and converts a shared weight once."""

from collections.abc import Callable, Hashable, Mapping

import onnx

from conx.graph.fp16_graph import constants_to_initializers
from conx.graph.lift import subgraphs

__all__ = ["merge_equal", "merged", "merged_externals"]


def merge_equal(model: onnx.ModelProto, content: Callable[[onnx.TensorProto], Hashable | None]) -> int:
    """Make one of those initializers of the main graph that have equal content, one type and one shape.

    What a graph takes or returns stays.

    Args:
        model: with stubs; is changed.
        content: of an initializer, what is equal for equal ones; None: it stays.

    Returns:
        How many initializers are gone.
    """
    main = model.graph
    fixed = {v.name for v in (*main.input, *main.output)}
    first: dict[Hashable, str] = {}
    new: dict[str, str] = {}
    for tensor in main.initializer:
        key = content(tensor)
        if key is not None and tensor.name not in fixed:
            name = first.setdefault((key, tensor.data_type, tuple(tensor.dims)), tensor.name)
            if name != tensor.name:
                new[tensor.name] = name
    if new:
        kept = [tensor for tensor in main.initializer if tensor.name not in new]
        del main.initializer[:]
        main.initializer.extend(kept)
        _rename(main, new)
    return len(new)


def merged(model: onnx.ModelProto, content: Callable[[onnx.TensorProto], Hashable | None]) -> onnx.ModelProto:
    """As `merge_equal`, Constant nodes of the main graph included, but the model is not changed.

    Returns:
        The model itself where nothing in it is equal.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    constants_to_initializers(made.graph, {v.name for v in (*made.graph.input, *made.graph.output)})
    return made if merge_equal(made, content) else model


def merged_externals(message: bytes, content: Mapping[str, Hashable]) -> tuple[bytes, set[str]]:
    """Merge the external initializers of a run graph.

    Args:
        message: the graph, its holes filled.
        content: by location, what is equal for equal bytes.

    Returns:
        The message, and the locations that it still has.
    """
    model = onnx.ModelProto.FromString(message)

    def location(tensor: onnx.TensorProto) -> str:
        return next((e.value for e in tensor.external_data if e.key == "location"), "")

    merge_equal(model, lambda tensor: content.get(location(tensor)))
    kept = {location(tensor) for tensor in model.graph.initializer} & content.keys()
    return model.SerializeToString(deterministic=True), kept


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    """Rename what nodes use, and within subgraphs what comes from outside."""
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = new.get(name, name)
        for sub in subgraphs(node):
            own = {v.name for v in (*sub.input, *sub.initializer)} | {n for inner in sub.node for n in inner.output}
            outer = {old: name for old, name in new.items() if old not in own}
            if outer:
                _rename(sub, outer)
