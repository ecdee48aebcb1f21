"""Decoding on an NVIDIA GPU: kernels, and the pipeline that feeds them. `cupy_device` is the only importer of cupy."""
