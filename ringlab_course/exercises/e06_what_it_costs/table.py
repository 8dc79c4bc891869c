"""Checks of 06.table: the Striped Attention paper's theoretical maximum speed-ups, from a count of FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import answered_number
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("06.table")

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
"""Maximum speed-ups on 4 A100, attention weighed twice. Source: arXiv 2311.09431, table 3."""
RANKS, WEIGHT = 4, 2.0


Asked = tuple[dict[str, int], int, int, float]
"""Model, ranks, tokens, weight."""


def max_speedup(model: dict[str, int], ranks: int, tokens: int, attention_weight: float = 1.0) -> float:
    """Return the time of the contiguous causal ring over the balanced one's: the truth of this stage."""
    return _ratio(model, ranks, tokens, attention_weight)


def _ratio(
    model: dict[str, int],
    ranks: int,
    tokens: float,
    weight: float,
    *,
    busiest: float | None = None,
    balanced: float | None = None,
    linear_factor: float = 1.0,
    vocabulary_times: float = 1.0,
    matrices: int | None = None,
    attention_factor: float = 1.0,
    chunk: float | None = None,
) -> float:
    """The paper's bound with some of its counts replaced by others."""
    d, c = model["d_model"], tokens / ranks
    width = (4 * d + (matrices or model["ffn_matrices"]) * model["d_ff"]) * model["layers"]
    linear = linear_factor * 2 * c * d * (width + vocabulary_times * model["vocabulary"])
    attention = attention_factor * weight * 4 * d * (c if chunk is None else chunk) ** 2 * model["layers"]
    slow = ranks - 0.5 if busiest is None else busiest
    even = ranks / 2 if balanced is None else balanced
    return (linear + attention * slow) / (linear + attention * even)


def _with(**changes: Any) -> Any:
    """Return an imitation with other counts; a change may be a function of (model, ranks, tokens)."""

    def imitate(model: dict[str, int], ranks: int, tokens: int, attention_weight: float = 1.0) -> float:
        chosen = {k: v(model, ranks, tokens) if callable(v) else v for k, v in changes.items()}
        return _ratio(model, ranks, tokens, **{"weight": attention_weight, **chosen})

    return imitate


def _weighs_linear(model: dict[str, int], ranks: int, tokens: int, attention_weight: float = 1.0) -> float:
    return _ratio(model, ranks, tokens, 1.0 / attention_weight)


def _upside_down(*inputs: Any, **keywords: Any) -> float:
    return 1 / max_speedup(*inputs, **keywords)


def _one_linear_layer(model: dict[str, int], ranks: int, tokens: int, attention_weight: float = 1.0) -> float:
    """The linear layers of one layer, the attention of all."""
    return _ratio({**model, "layers": 1}, ranks, tokens, attention_weight * model["layers"])


COUNTS = (
    mistake("only_attention", _with(linear_factor=0.0)),
    mistake("own_block_whole", _with(busiest=lambda model, ranks, tokens: ranks)),
    mistake("own_block_left_out", _with(busiest=lambda model, ranks, tokens: ranks - 1)),
    mistake("mean_not_slowest", _with(busiest=lambda model, ranks, tokens: ranks / 2)),
    mistake("balanced_sees_all", _with(balanced=lambda model, ranks, tokens: ranks)),
    mistake("one_product", _with(attention_factor=0.5)),
    mistake("multiply_adds", _with(linear_factor=0.5)),
    mistake("whole_sequence", _with(chunk=lambda model, ranks, tokens: tokens)),
    mistake("linear_whole_sequence", _with(linear_factor=lambda model, ranks, tokens: ranks)),
    mistake("all_tokens", _with(chunk=lambda *given: given[2], linear_factor=lambda *given: given[1])),
    mistake("layers_in_attention", _with(attention_factor=lambda model, ranks, tokens: 1 / model["layers"])),
    mistake("layers_in_linear", _one_linear_layer),
    mistake("no_vocabulary", _with(vocabulary_times=0.0)),
    mistake("vocabulary_per_layer", _with(vocabulary_times=lambda model, ranks, tokens: model["layers"])),
    mistake("upside_down", _upside_down),
)
MATRICES = (
    mistake("always_three_matrices", _with(matrices=3)),
    mistake("always_two_matrices", _with(matrices=2)),
)
WEIGHTS = (
    mistake("ignores_the_weight", _with(weight=1.0)),
    mistake("weighs_the_linear", _weighs_linear),
)
MISTAKES = (*COUNTS, *MATRICES, *WEIGHTS)


def _text(model: dict[str, int], ranks: int, tokens: int, weight: float) -> str:
    sizes = ", ".join(f"{key}={value}" for key, value in model.items())
    return f"{sizes}; ranks={ranks}, tokens={tokens}, attention_weight={weight:g}"


def _compare(subject: Any, asked: Iterable[Asked]) -> None:
    """Compare all; a mistake is named only if it fits them all."""
    compare_all(_cases(subject, asked), MISTAKES)


def _cases(subject: Any, asked: Iterable[Asked]) -> Iterator[Answered]:
    for model, ranks, tokens, weight in asked:
        keywords = {"attention_weight": weight}
        yield answered_number(
            subject.call(model, ranks, tokens, **keywords),
            max_speedup(model, ranks, tokens, weight),
            (model, ranks, tokens),
            _text(model, ranks, tokens, weight),
            "times",
            keywords,
        )


def _tiny(rng: np.random.Generator) -> dict[str, int]:
    """Return a model small enough for paper."""
    d_model, d_ff = 2 * int(rng.integers(2, 17)), 4 * int(rng.integers(2, 17))
    vocabulary, layers = 10 * int(rng.integers(2, 30)), int(rng.integers(2, 7))
    return {"vocabulary": vocabulary, "d_model": d_model, "d_ff": d_ff, "layers": layers, "ffn_matrices": 2}


def _small(rng: np.random.Generator) -> list[Asked]:
    """Return two tiny models on which every wrong count gives another ratio than the truth and than all others.

    With 2 ranks N − 1 and N/2 are the same, and so are others.
    """
    while True:
        asked = [(_tiny(rng), ranks, ranks * int(rng.integers(2, 40)), 1.0) for ranks in (3, 4)]
        ratios = [[m.imitate(*each) for each in asked] for m in (*COUNTS, MATRICES[0]) if m.imitate]
        ratios.append([max_speedup(*each) for each in asked])
        if not any(np.allclose(a, b, rtol=1e-4) for a, b in itertools.combinations(ratios, 2)):
            return asked


def _check_counts(subject: Any, rng: np.random.Generator) -> None:
    """The attention's FLOPs are not weighed."""
    _compare(subject, _small(rng))


def _check_weight(subject: Any, rng: np.random.Generator) -> None:
    model, ranks, tokens, _ = _small(rng)[1]
    weights = (1.0, 2.0, float(rng.integers(5, 40)) / 4)
    _compare(subject, [(model, ranks, tokens, weight) for weight in weights])


def _check_published(subject: Any, rng: np.random.Generator) -> None:
    """The paper's models on its 4 ranks, at contexts near those of its table; the plain counts first, to name mistakes."""
    _compare(subject, _small(rng))
    contexts = [tokens + RANKS * int(rng.integers(1, 2048)) for tokens in TOKENS]
    _compare(subject, [(model, RANKS, tokens, WEIGHT) for model in MODELS.values() for tokens in contexts])


def _check_other_models(subject: Any, rng: np.random.Generator) -> None:
    """Three feed-forward matrices and sizes that are not the paper's; one rank gains nothing."""
    gated = {"vocabulary": 128256, "d_model": 4096, "d_ff": 14336, "layers": 32, "ffn_matrices": 3}
    gpt = {**gated, "ffn_matrices": 2}
    asked = ((gpt, 1, 1.0), (gpt, 8, 1.0), (gpt, 8, 3.0), (gated, 8, 1.0), (gated, 64, 2.5))
    _compare(
        subject,
        [(model, ranks, ranks * int(rng.integers(1024, 16384)), weight) for model, ranks, weight in asked],
    )


HINTS = (
    "How many blocks of c × c score elements does the slowest rank compute under each of the two layouts?",
    "Each of the two times is linear plus weighted attention. Linear: 2 FLOPs per weight and token, for c tokens; the "
    "weights of every layer, and the output layer once. Attention: 4·d FLOPs per score element and layer. The last rank of "
    "the contiguous layout computes all earlier blocks and half of its own; a balanced rank computes an equal share of the "
    "visible half.",
    r"$\dfrac{\ell + w\,a\,(N-\frac12)}{\ell + w\,a\,\frac N2}$ with $a = 4 d c^2 \cdot \mathrm{layers}$ and "
    r"$\ell = 2c\,d\,[(4d + m f)\,\mathrm{layers} + V]$",
)

STAGE = Stage(
    id="06.table",
    function="max_speedup",
    title="A published table, recomputed",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check("counts", 2, "visible", "a model small enough for paper", _check_counts),
        Check("weight", 1, "visible", "attention at a lower rate than the linear layers", _check_weight),
        Check(
            "published", 3, "visible", "the paper's three models, at contexts near its own", _check_published
        ),
        Check("other_models", 1, "held-out", "other models and numbers of ranks", _check_other_models),
    ),
)
