"""Train the model of `conx demo` and write it: `python tools/train_demo.py`, a minute or two, with the extra `dev`.

A convolutional network that names the digits of scikit-learn: 1,797 images of 8 x 8 pixels (E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998). It is trained on 1,437 of them, and
names 355 of the other 360 rightly (0.9861).

Training is plain NumPy in float32: gradients by hand, Adam (Kingma and Ba, 2015, algorithm 1). The number of epochs was
chosen by cross-validation within the 1,437. Everything is seeded, so that a second run on the same machine gives the
same files. On another machine or with another NumPy, matrix products may add in another order: then the held-out images
are the same, and the weights differ, at first in their last digits and in the end visibly.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

__all__ = ["build", "main", "probabilities", "split", "train"]

FOLDER = Path(__file__).resolve().parent.parent / "conx" / "demo_data"
SEED = 0
HELD_OUT = 360
LEAST = 0.98  # of the held-out images named rightly; a worse model is not written
EPOCHS, BATCH, RATE = 100, 64, 2e-3
BRIGHTEST = np.float32(16)  # a pixel is 0 to 16

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]
# Dims of the weights: kernels are [out, in, 3, 3], matrices [out, in]. Pooling halves the image after conv2.
SHAPES = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "conv3": (32, 32, 3, 3), "fc1": (256, 512), "fc2": (10, 256)}


def split() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images [n, 1, 8, 8] of 0 to 16 and their digits [n]: to train on, then held out."""
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(pixels))
    images = pixels[order].astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = digits[order].astype(np.uint8)
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def train(images: Array, labels: npt.NDArray[np.uint8]) -> Weights:
    """Weights fitted to images [n, 1, 8, 8] of 0 to 1 and their digits."""
    rng = np.random.default_rng(SEED)
    weights: Weights = {}
    for name, shape in SHAPES.items():
        spread = np.sqrt(2 / np.prod(shape[1:]))  # He et al., 2015: keeps the size of activations from layer to layer
        weights[f"{name}.weight"] = (rng.standard_normal(shape) * spread).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
    square = {name: np.zeros_like(weight) for name, weight in weights.items()}
    steps = EPOCHS * -(-len(images) // BATCH)
    for step, batch in enumerate(batches(len(images), rng), start=1):
        slopes = gradients(weights, shifted(images[batch], rng), labels[batch], rng)
        rate = RATE * (1 - (step - 1) / steps)
        for name, slope in slopes.items():
            mean[name] += np.float32(0.1) * (slope - mean[name])
            square[name] += np.float32(0.001) * (slope * slope - square[name])
            move = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
            weights[name] -= (rate * move).astype(np.float32)
    return weights


def batches(count: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    """Indices of each batch of each epoch."""
    for _ in range(EPOCHS):
        order = rng.permutation(count)
        yield from np.split(order, range(BATCH, count, BATCH))


def shifted(images: Array, rng: np.random.Generator) -> Array:
    """Each image moved by up to a pixel, so that the network sees more than there is."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(padded, (8, 8), axis=(2, 3))
    down, right = rng.integers(0, 3, (2, len(images)))
    moved: Array = windows[np.arange(len(images)), :, down, right]
    return moved


def probabilities(weights: Weights, images: Array) -> Array:
    """[n, 10] of the ten digits, for images [n, 1, 8, 8] of 0 to 1."""
    return forward(weights, images, None)["y"]


def gradients(weights: Weights, images: Array, labels: npt.NDArray[np.uint8], rng: np.random.Generator) -> Weights:
    """Of the mean cross entropy over a batch, with half of the hidden units dropped."""
    dropped = (rng.random((len(images), len(weights["fc1.bias"]))) < 0.5) * np.float32(2)
    seen = forward(weights, images, dropped)
    found: Weights = {}

    def matrix(name: str, slope: Array, inputs: Array) -> Array:
        found[f"{name}.weight"], found[f"{name}.bias"] = slope.T @ inputs, slope.sum(0)
        return slope @ weights[f"{name}.weight"]

    def kernel(name: str, slope: Array, inputs: Array) -> Array:
        weight = weights[f"{name}.weight"]
        sums = slope.reshape(*slope.shape[:2], -1) @ patches(inputs).swapaxes(1, 2)
        found[f"{name}.weight"], found[f"{name}.bias"] = sums.sum(0).reshape(weight.shape), slope.sum((0, 2, 3))
        return convolve(slope, weight[:, :, ::-1, ::-1].swapaxes(0, 1))

    slope = (seen["y"] - np.eye(10, dtype=np.float32)[labels]) / np.float32(len(labels))
    slope = matrix("fc2", slope, seen["hidden"]) * dropped * (seen["hidden"] > 0)
    slope = matrix("fc1", slope, seen["c3"].reshape(len(images), -1)).reshape(seen["c3"].shape)
    slope = kernel("conv3", slope * (seen["c3"] > 0), seen["pooled"])
    slope = np.where(seen["c2"] == unpool(seen["pooled"]), unpool(slope), np.float32(0)) * (seen["c2"] > 0)
    slope = kernel("conv2", slope, seen["c1"])
    kernel("conv1", slope * (seen["c1"] > 0), images)
    return found


def forward(weights: Weights, images: Array, dropped: Array | None) -> dict[str, Array]:
    """All activations of the network, by name."""

    def convolved(name: str, inputs: Array) -> Array:
        return relu(convolve(inputs, weights[f"{name}.weight"]) + weights[f"{name}.bias"][:, None, None])

    def multiplied(name: str, inputs: Array) -> Array:
        return inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    seen = {"c1": convolved("conv1", images)}
    seen["c2"] = convolved("conv2", seen["c1"])
    seen["pooled"] = seen["c2"].reshape(len(images), -1, 4, 2, 4, 2).max((3, 5))
    seen["c3"] = convolved("conv3", seen["pooled"])
    hidden = relu(multiplied("fc1", seen["c3"].reshape(len(images), -1)))
    seen["hidden"] = hidden if dropped is None else hidden * dropped
    scores = multiplied("fc2", seen["hidden"])
    powers = np.exp(scores - scores.max(1, keepdims=True))
    seen["y"] = powers / powers.sum(1, keepdims=True)
    return seen


def relu(values: Array) -> Array:
    """The positive part."""
    return values * (values > 0)


def convolve(images: Array, kernels: Array) -> Array:
    """3 x 3 kernels over images [n, in, h, w] with zeros around them: [n, out, h, w]."""
    count, _, height, width = images.shape
    return (kernels.reshape(len(kernels), -1) @ patches(images)).reshape(count, -1, height, width)


def patches(images: Array) -> Array:
    """The 3 x 3 surroundings of each pixel, one a column: [n, in * 9, h * w]."""
    count, channels, height, width = images.shape
    windows = sliding_window_view(np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1))), (height, width), axis=(2, 3))
    return windows.reshape(count, channels * 9, height * width)


def unpool(pooled: Array) -> Array:
    """Each value four times, as pooling found it."""
    return pooled.repeat(2, axis=2).repeat(2, axis=3)


def build(weights: Weights) -> onnx.ModelProto:
    """The network as ONNX: `images`, float32 [n, 1, 8, 8] of 0 to 1, to `probabilities`, [n, 10]."""

    def layer(operator: str, name: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(operator, [inputs, f"{name}.weight", f"{name}.bias"], [output], name, **attributes)

    around = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        layer("Conv", "conv1", "images", "c1", **around),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        layer("Conv", "conv2", "r1", "c2", **around),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("MaxPool", ["r2"], ["pooled"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        layer("Conv", "conv3", "pooled", "c3", **around),
        helper.make_node("Relu", ["c3"], ["r3"], "relu3"),
        helper.make_node("Flatten", ["r3"], ["flat"], "flatten"),
        layer("Gemm", "fc1", "flat", "f1", transB=1),
        helper.make_node("Relu", ["f1"], ["hidden"], "relu4"),
        layer("Gemm", "fc2", "hidden", "scores", transB=1),
        helper.make_node("Softmax", ["scores"], ["probabilities"], "softmax", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="conx tools/train_demo.py"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Train, measure, write."""
    images, labels, held_images, held_labels = split()
    weights = train(images.astype(np.float32) / BRIGHTEST, labels)
    found = probabilities(weights, held_images.astype(np.float32) / BRIGHTEST).argmax(1)
    right = int((found == held_labels).sum())
    print(f"{right} of {HELD_OUT} held-out images named rightly ({right / HELD_OUT:.4f})")
    if right < LEAST * HELD_OUT:
        raise SystemExit(f"less than {LEAST}: nothing was written")
    FOLDER.mkdir(exist_ok=True)
    onnx.save(build(weights), FOLDER / "digits.onnx")
    np.savez_compressed(FOLDER / "held_out.npz", images=held_images, labels=held_labels)


if __name__ == "__main__":
    main()
