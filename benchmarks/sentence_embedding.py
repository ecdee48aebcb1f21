"""MiniLM as a sentence embedder: tokens in, one vector of length 1 out, and two tasks that show what quality costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer

from benchmarks.corpus import fetch
from benchmarks.feeds import SCORING, Feed, Run
from benchmarks.texts import entries, mails, pairs

__all__ = ["feeds", "minilm_embed", "retrieval_recall", "score", "spam_accuracy"]

_BATCH = 32
_LONGEST = 256  # tokens; what the sentence-transformers model was trained for


def feeds(limit: int, seed: int) -> list[Feed]:
    """Draws ``limit`` definitions of WordNet with their examples, one text a feed."""
    drawn = random.Random(seed).sample(entries(), limit)
    return [_feed(["; ".join((entry.definition, *entry.examples))], _LONGEST) for entry in drawn]


def minilm_embed(run: Run, texts: Sequence[str], longest: int = _LONGEST) -> NDArray[np.float32]:
    """Embeds texts: the mean over the tokens of the last hidden state, scaled to length 1.

    Args:
        run: the model, with inputs ``input_ids``, ``attention_mask``, ``token_type_ids`` and one output
            [batch, tokens, width].
        texts: any number.
        longest: tokens after which a text is cut.

    Returns:
        [texts, width] float32.
    """
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # alike lengths: little padding
    rows: dict[int, NDArray[np.float32]] = {}
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        feed = _feed([texts[number] for number in batch], longest)
        (hidden,) = run(feed).values()
        mask = feed["attention_mask"][:, :, None].astype(np.float32)
        mean = (hidden.astype(np.float32) * mask).sum(axis=1) / mask.sum(axis=1)
        rows.update(zip(batch, mean / np.linalg.norm(mean, axis=1, keepdims=True), strict=True))
    return np.stack([rows[number] for number in range(len(texts))])


def retrieval_recall(run: Run, count: int = 1000) -> float:
    """Share of example sentences whose nearest definition, among ``count``, is their own."""
    drawn = pairs(count, SCORING)
    examples = minilm_embed(run, [example for example, _ in drawn])
    definitions = minilm_embed(run, [definition for _, definition in drawn])
    nearest = (examples @ definitions.T).argmax(axis=1)
    return float((nearest == np.arange(count)).mean())


def spam_accuracy(run: Run, train: int = 1000, test: int = 500) -> float:
    """Accuracy of a logistic regression on the embeddings of mails, on mails that it was not fitted to."""
    drawn = mails(train + test, SCORING)
    vectors = minilm_embed(run, [text[:4000] for text, _ in drawn])
    labels = np.array([spam for _, spam in drawn])
    model = LogisticRegression(max_iter=1000).fit(vectors[:train], labels[:train])
    return float(model.score(vectors[train:], labels[train:]))


def score(run: Run, limit: int | None) -> dict[str, float]:
    """Both tasks; ``limit`` is the number of pairs, and two thirds of it that of the mails to learn from."""
    count = limit or 1000
    return {"recall@1": retrieval_recall(run, count), "spam_accuracy": spam_accuracy(run, count, count // 2)}


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(fetch("minilm").with_name("tokenizer.json")))
    tokenizer.enable_padding()
    return tokenizer


def _feed(texts: list[str], longest: int) -> Feed:
    tokenizer = _tokenizer()
    tokenizer.enable_truncation(longest)
    encoded = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([text.ids for text in encoded], np.int64),
        "attention_mask": np.array([text.attention_mask for text in encoded], np.int64),
        "token_type_ids": np.array([text.type_ids for text in encoded], np.int64),
    }
