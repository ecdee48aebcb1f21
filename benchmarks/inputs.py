"""Real inputs for every model of the corpus, labelled tasks where there are labels, and agreement where there are none.

``feeds(key, limit)`` serves calibration and timing, ``score(key, run)`` says how well a model does its task, and
``agreement(key, reference, run)`` how far a packed model is from its original. Each model's own preprocessing lies in
the module of its kind; this one only knows which is which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnxruntime

from benchmarks import file_kinds, photo_feeds, reading, sentence_embedding, sounds
from benchmarks.corpus import MODELS, fetch
from benchmarks.feeds import CALIBRATION, COMPARISON, Array, Feed, Outputs, Run
from benchmarks.measure import output_error
from benchmarks.sentence_embedding import minilm_embed
from benchmarks.sounds import log_spectrum_distance
from benchmarks.texts import sentences
from conx.feeds import generated_feeds

__all__ = ["SCORED", "agreement", "feeds", "generated_feeds", "log_spectrum_distance", "minilm_embed", "score"]

_SILEROS = ("silero", "silero_16k", "silero_half", "silero_legacy")
_MINILMS = ("minilm", "minilm_int8")

_FEEDS: dict[str, Callable[[int, int], list[Feed]]] = {
    **dict.fromkeys(_MINILMS, sentence_embedding.feeds),
    "ppocr6_rec": reading.line_feeds,
    "ppocr4_rec": reading.line_feeds,
    "ppocr4_cls": reading.line_feeds,
    "ppocr4_det": reading.page_feeds,
    "ddddocr": reading.captcha_feeds,
    "ddddocr_old": reading.captcha_feeds,
    "magika": file_kinds.feeds,
    "opennsfw": photo_feeds.opennsfw_feeds,
    "vit_s": photo_feeds.vit_feeds,
    "vgg16": photo_feeds.vgg16_feeds,
    "imgly_small": photo_feeds.imgly_feeds,
    "imgly_medium": photo_feeds.imgly_feeds,
    "fr_age": photo_feeds.face_age_feeds,
    "piper": sounds.piper_feeds,
    "kokoro": sounds.kokoro_feeds,
    "speechmos": partial(sounds.wave_feeds, "speechmos"),
    "basic_pitch": partial(sounds.wave_feeds, "basic_pitch"),
    **{key: partial(sounds.silero_feeds, key) for key in _SILEROS},
}
_SCORES: dict[str, Callable[[Run, int | None], dict[str, float]]] = {
    **dict.fromkeys(_MINILMS, sentence_embedding.score),
    **{key: reading.line_score(key) for key in ("ppocr6_rec", "ppocr4_rec")},
    **{key: reading.captcha_score(key) for key in ("ddddocr", "ddddocr_old")},
    "magika": file_kinds.score,
}
SCORED = frozenset(_SCORES)

# Of models whose inputs are generated: one more than the largest number that an input may hold (rows of the table
# that it indexes).
_LIMITS = {
    "rxnmap": {"atoms": 121, "neighbors": 17, "distances": 13, "roles": 4},
    "tashkeel": {"input": 236},
}
_CLASSIFIERS = {"magika", "opennsfw", "vgg16", "ppocr4_cls", "ppocr4_rec", "ppocr6_rec", "ddddocr", "ddddocr_old"}
_TEXT_THRESHOLD = 0.3  # PP-OCR's: a pixel above it is text


def feeds(key: str, limit: int = 16, seed: int = CALIBRATION) -> list[Feed]:
    """Gives inputs that the model would meet, or generated ones where no such data is at hand.

    Args:
        key: a key of ``corpus.MODELS``.
        limit: how many at most.
        seed: which draw; what is compared or scored comes from other draws than the default.

    Raises:
        KeyError: no such key.
        RegistryError: the model or its data is not to be had.
    """
    if key in _FEEDS:
        return _FEEDS[key](limit, seed)
    path = fetch(key)
    if path.suffix != ".onnx":
        raise ValueError(f"{key} is no ONNX model: {MODELS[key].kind}")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return generated_feeds(session.get_inputs(), seed=seed, count=limit, limits=_LIMITS.get(key))


def score(key: str, run: Run, limit: int | None = None) -> dict[str, float]:
    """Scores a model on its labelled task.

    Args:
        key: one of `SCORED`; which preprocessing and which labels.
        run: the model under test: the original, a packed one, a quantized one.
        limit: fewer samples than the task's full number, for a quick look.

    Returns:
        Figures by name, such as ``cer`` (edits per character) or ``exact`` (share).

    Raises:
        KeyError: the model has no labelled task.
    """
    return _SCORES[key](run, limit)


def agreement(key: str, reference: Run, run: Run, limit: int = 32) -> dict[str, float]:
    """Compares a model with its original on the same inputs.

    Args:
        key: which inputs, and which figures suit the model.
        reference: the original.
        run: the model under test.
        limit: number of inputs, of another draw than `feeds` gives by default.

    Returns:
        For a synthesizer ``log_spectrum_db`` and ``length_ratio``; for any other what `output_error` gives, and with
        it ``top1`` (share of equal most probable classes) for a classifier, ``iou`` of the text's pixels for a text
        detector, ``mean_cosine`` and ``min_cosine`` of sentence embeddings, and ``track`` (largest difference of the
        speech probability in 10 s) for a speech detector.
    """
    if key in _MINILMS:
        return _embedding_agreement(reference, run, limit)
    inputs = feeds(key, limit, COMPARISON)
    want, got = [reference(feed) for feed in inputs], [run(feed) for feed in inputs]
    if key in ("piper", "kokoro"):
        return _sound_agreement(want, got)
    figures = output_error(want, got)
    if key in _CLASSIFIERS:
        figures["top1"] = float(np.mean(np.concatenate([_same_class(*both) for both in zip(want, got, strict=True)])))
    if key == "ppocr4_det":
        masks = [np.concatenate([_first(output).ravel() for output in side]) > _TEXT_THRESHOLD for side in (want, got)]
        figures["iou"] = float(np.sum(masks[0] & masks[1])) / max(1.0, float(np.sum(masks[0] | masks[1])))
    if key in _SILEROS:
        tracks = [sounds.silero_track(key, side) for side in (reference, run)]
        figures["track"] = float(np.abs(tracks[0] - tracks[1]).max())
    return figures


def _embedding_agreement(reference: Run, run: Run, limit: int) -> dict[str, float]:
    texts = sentences(limit, COMPARISON)
    cosines = (minilm_embed(reference, texts) * minilm_embed(run, texts)).sum(axis=1)
    return {"mean_cosine": float(cosines.mean()), "min_cosine": float(cosines.min())}


def _sound_agreement(want: list[Outputs], got: list[Outputs]) -> dict[str, float]:
    sounded = [(_first(one), _first(other)) for one, other in zip(want, got, strict=True)]
    ratios = np.array([other.size / one.size for one, other in sounded])
    return {
        "log_spectrum_db": float(np.mean([log_spectrum_distance(one, other) for one, other in sounded])),
        "length_ratio": float(ratios[np.abs(ratios - 1).argmax()]),
    }


def _same_class(want: Outputs, got: Outputs) -> Array:
    same: Array = np.equal(_first(want).argmax(axis=-1), _first(got).argmax(axis=-1))
    return same.ravel()


def _first(outputs: Outputs) -> Array:
    return next(iter(outputs.values()))
