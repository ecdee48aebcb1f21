"""Load time: from a .conx file to a running session. The only place that imports onnxruntime; never onnx."""
