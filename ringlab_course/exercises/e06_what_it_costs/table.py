"""Checks of 06.table: the Striped Attention paper's theoretical maximum speed-ups, computed from FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import misconceptions_of

MODELS: dict[str, dict[str, int]] = {
    "1B": {"vocabulary": 32000, "d_model": 2048, "d_ff": 5504, "layers": 22, "ffn_matrices": 2},
    "3B": {"vocabulary": 32000, "d_model": 3200, "d_ff": 8640, "layers": 26, "ffn_matrices": 2},
    "7B": {"vocabulary": 32000, "d_model": 4096, "d_ff": 11008, "layers": 32, "ffn_matrices": 2},
}
TOKENS = (16384, 32768, 65536, 98304, 131072, 196608, 262144)
PUBLISHED = {
    "1B": (1.46, 1.57, 1.65, 1.68, 1.70, 1.71, 1.72),
    "3B": (1.38, 1.51, 1.61, 1.65, 1.67, 1.69, 1.71),
    "7B": (1.34, 1.47, 1.58, 1.62, 1.65, 1.68, 1.70),
}
"""Maximum speed-ups on 4 A100 GPUs, with attention weighted by 2. Source: arXiv 2311.09431, table 3."""
RANKS, WEIGHT = 4, 2.0


Asked = tuple[dict[str, int], int, int, float]
"""The arguments model, ranks, tokens and attention weight."""


def max_speedup(model: dict[str, int], ranks: int, tokens: int, attention_weight: float = 1.0) -> float:
    """Return the right answer: the contiguous causal ring's time divided by the balanced ring's."""
    d, c = model["d_model"], tokens / ranks
    weights = d * ((4 * d + model["ffn_matrices"] * model["d_ff"]) * model["layers"] + model["vocabulary"])
    linear = 2 * c * weights
    attention = attention_weight * 4 * d * c**2 * model["layers"]
    return (linear + attention * (ranks - 0.5)) / (linear + attention * ranks / 2)


def _text(model: dict[str, int], ranks: int, tokens: int, weight: float) -> str:
    sizes = ", ".join(f"{key}={value}" for key, value in model.items())
    return f"{sizes}; ranks={ranks}, tokens={tokens}, attention_weight={weight:g}"


def _compare(subject: Any, asked: Iterable[Asked]) -> None:
    compare_all(_cases(subject, asked))


def _cases(subject: Any, asked: Iterable[Asked]) -> Iterator[Answered]:
    for model, ranks, tokens, weight in asked:
        answer = subject.call(model, ranks, tokens, attention_weight=weight)
        truth = max_speedup(model, ranks, tokens, weight)
        yield answered_number(answer, truth, text=_text(model, ranks, tokens, weight), unit="times")


def _tiny(rng: np.random.Generator) -> dict[str, int]:
    """Return a model small enough for pencil and paper.

    It has more layers than `_small` has ranks, and more than any constant factor in the counts, so that these
    numbers cannot be confused.
    """
    d_model, d_ff = 2 * int(rng.integers(2, 17)), 4 * int(rng.integers(2, 17))
    vocabulary, layers = 10 * int(rng.integers(2, 30)), int(rng.integers(5, 9))
    return {"vocabulary": vocabulary, "d_model": d_model, "d_ff": d_ff, "layers": layers, "ffn_matrices": 2}


def _small(rng: np.random.Generator) -> list[Asked]:
    """Return two tiny models on 3 and 4 ranks.

    Two ranks would not do, because N − 1 equals N/2 there, and mistakes look alike.
    """
    return [(_tiny(rng), ranks, ranks * int(rng.integers(2, 40)), 1.0) for ranks in (3, 4)]


def _check_counts(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on tiny models without a weight on the attention's FLOPs."""
    _compare(subject, _small(rng))


def _check_weight(subject: Any, rng: np.random.Generator) -> None:
    model, ranks, tokens, _ = _small(rng)[1]
    weights = (1.0, 2.0, float(rng.integers(5, 40)) / 4)
    _compare(subject, [(model, ranks, tokens, weight) for weight in weights])


def _check_published(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on the paper's models on 4 ranks, at contexts near those of its table.

    Counts without a weight come first, because the known mistakes in them have names.
    """
    _compare(subject, _small(rng))
    contexts = [tokens + RANKS * int(rng.integers(1, 2048)) for tokens in TOKENS]
    _compare(subject, [(model, RANKS, tokens, WEIGHT) for model in MODELS.values() for tokens in contexts])


def _check_other_models(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on models with other sizes than the paper's and with three feed-forward matrices.

    On one rank there is no speed-up.
    """
    gated = {"vocabulary": 128256, "d_model": 4096, "d_ff": 14336, "layers": 32, "ffn_matrices": 3}
    gpt = {**gated, "ffn_matrices": 2}
    asked = ((gpt, 1, 1.0), (gpt, 8, 1.0), (gpt, 8, 3.0), (gated, 8, 1.0), (gated, 64, 2.5))
    _compare(
        subject,
        [(model, ranks, ranks * int(rng.integers(1024, 16384)), weight) for model, ranks, weight in asked],
    )


HINTS = (
    "How many blocks of L × L score elements does the slowest rank compute under each of the two layouts?",
    "Each of the two times is linear plus weighted attention. Linear: 2 FLOPs per weight and token, for L tokens; the "
    "weights of every layer, and the output layer once. Attention: 4·d FLOPs per score element and layer. The last rank of "
    "the contiguous layout computes all earlier blocks and half of its own; a balanced rank computes an equal share of the "
    "visible half.",
    r"$\dfrac{\ell + w\,a\,(N-\frac12)}{\ell + w\,a\,\frac N2}$ with $a = 4 d L^2 \cdot \mathrm{layers}$ and "
    r"$\ell = 2L\,d\,[(4d + m f)\,\mathrm{layers} + V]$",
)

STAGE = Stage(
    id="06.table",
    function="max_speedup",
    title="A published table, recomputed",
    hints=HINTS,
    misconceptions=misconceptions_of("06.table"),
    checks=(
        Check("counts", 2, "visible", "a model small enough for paper", _check_counts),
        Check("weight", 1, "visible", "attention at a lower rate than the linear layers", _check_weight),
        Check(
            "published", 3, "visible", "the paper's three models, at contexts near its own", _check_published
        ),
        Check("other_models", 1, "held-out", "other models and numbers of ranks", _check_other_models),
    ),
)
