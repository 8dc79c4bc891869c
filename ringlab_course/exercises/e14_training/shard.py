"""Checks of 14.shard: a rank's tokens, labels and positions, out of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("14.shard")

IGNORE = -100
NAMES = ("tokens", "labels", "positions")
Labels = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def shifted(tokens: np.ndarray) -> np.ndarray:
    """Return the token after each, IGNORE after the last."""
    labels = np.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    return labels


def labels_of(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return a rank's labels, made before the sequence is cut."""
    return np.where(counts, shifted(tokens), IGNORE)[:, own]


def labels_after_the_cut(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the labels that come of cutting first: the token after each in the shard."""
    return np.where(counts[:, own], shifted(tokens[:, own]), IGNORE)


def _rolled(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.where(counts, np.roll(tokens, -1, axis=1), IGNORE)[:, own]


def _ends_with(last: Callable[[np.ndarray], Any]) -> Labels:
    """Labels whose last column is not IGNORE, but `last` of the last tokens."""

    def labels(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
        every = shifted(tokens)
        every[:, -1] = last(tokens[:, -1])
        return np.where(counts, every, IGNORE)[:, own]

    return labels


def _before(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    labels = np.full_like(tokens, IGNORE)
    labels[:, 1:] = tokens[:, :-1]
    return np.where(counts, labels, IGNORE)[:, own]


def _counts_of_the_label(tokens: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    later = np.zeros_like(counts)
    later[:, :-1] = counts[:, 1:]
    return np.where(later, shifted(tokens), IGNORE)[:, own]


def _imitation(
    labels: Labels = labels_of, positions: Callable[[np.ndarray], np.ndarray] = lambda own: own
) -> Any:
    def imitate(tokens: Any, counts: Any, own: Any) -> tuple[np.ndarray, ...]:
        tokens, counts, own = (np.asarray(x) for x in (tokens, counts, own))
        return tokens[:, own], labels(tokens, counts, own), positions(own)

    return imitate


MISTAKES = (
    mistake("shifts_after_the_cut", _imitation(labels_after_the_cut)),
    mistake("label_is_the_token", _imitation(lambda tokens, counts, own: np.where(counts, tokens, IGNORE)[:, own])),
    mistake("label_is_the_token_before", _imitation(_before)),
    mistake("wraps_around", _imitation(_rolled)),
    mistake("zero_at_the_end", _imitation(_ends_with(np.zeros_like))),
    mistake("repeats_the_last", _imitation(_ends_with(lambda last: last))),
    mistake("ignores_counts", _imitation(lambda tokens, counts, own: shifted(tokens)[:, own])),
    mistake("counts_of_the_label", _imitation(_counts_of_the_label)),
    mistake("positions_from_zero", _imitation(positions=lambda own: np.arange(len(own)))),
)  # fmt: skip


def _cases(
    subject: Any, rng: np.random.Generator, made: Iterable[Layout], rows: int, share: float
) -> Iterator[Answered]:
    for layout in made:
        numbers = rng.permutation(rows * layout.S) + rng.integers(100_000)  # no token comes twice
        tokens = torch.tensor(numbers.tolist()).view(rows, layout.S)
        counts = torch.from_numpy(rng.random((rows, layout.S)) < share)
        counts[:, -1] = True
        for rank in range(layout.P):
            own = torch.tensor(layout.positions(rank).tolist(), dtype=torch.int64)
            inputs = tokens, counts, own
            answer = subject.call(*inputs)
            truth = _imitation()(*inputs)
            parts = expect_tuple(answer, NAMES)
            got = tuple(
                expect_array(part, right.shape, name=name)
                for name, part, right in zip(NAMES, parts, truth, strict=True)
            )
            text = f"{layout.name}, S={layout.S}, P={layout.P}, rank {rank}, own = {own.tolist()}"
            yield Answered(got, truth, 0.0, inputs, NAMES, text)


def _check_labels(subject: Any, rng: np.random.Generator) -> None:
    made = (layouts.contiguous(6, 2), layouts.zigzag(12, 3), layouts.striped(6, 2))
    compare_all(_cases(subject, rng, made, 2, 2.0), MISTAKES)


def _check_counts(subject: Any, rng: np.random.Generator) -> None:
    compare_all(_cases(subject, rng, (layouts.contiguous(12, 2), layouts.zigzag(24, 3)), 3, 0.5), MISTAKES)


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    made = (layouts.contiguous(1, 1), layouts.contiguous(2, 4), layouts.zigzag(5, 3), layouts.striped(7, 3))
    compare_all(_cases(subject, rng, made, 1, 0.7), MISTAKES)


STAGE = Stage(
    id="14.shard",
    function="shard_batch",
    title="A shard of the batch",
    hints=(
        "Which rank holds the token after the last one of your first chunk? Can you look it up once the sequence is cut?",
        "Make the labels of the whole batch first: the next token, and −100 in the last column and where `counts` is False. "
        "Then take the columns `own` of tokens and labels. Which positions do these have?",
        r"$\ell_t = x_{t+1}$ if $t < S-1$ and $c_t$, else $-100$; then rank $r$ takes $t \in \mathrm{own}_r$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("labels", 2, "visible", "tokens, labels and positions: contiguous, zig-zag, striped", _check_labels),
        Check("counts", 1, "visible", "only some predictions count", _check_counts),
        Check("edges", 1, "held-out", "ranks without tokens, sequences of one token, ragged shards", _check_edges),
    ),
)  # fmt: skip
