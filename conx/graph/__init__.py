"""The ONNX side of conx, used when packing: the only place that imports onnx."""
