"""Checks of 14.shard: the tokens, labels and positions of one rank, cut from whole sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_arrays
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import misconceptions_of

IGNORE = -100
NAMES = ("tokens", "labels", "positions")


def truth(tokens: Any, counts: Any, own: Any) -> tuple[np.ndarray, ...]:
    """Return a rank's tokens, labels and positions.

    A label is the next token. It is IGNORE at the end of a sequence, and where the prediction does not count.
    """
    tokens, counts, own = (np.asarray(x) for x in (tokens, counts, own))
    labels = np.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    return tokens[:, own], np.where(counts, labels, IGNORE)[:, own], own


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
            right = truth(*inputs)
            got = expect_arrays(subject.call(*inputs), right, NAMES)
            text = f"{layout.name}, S={layout.S}, P={layout.P}, rank {rank}, own = {own.tolist()}"
            yield Answered(got, right, 0.0, names=NAMES, text=text)


def _check_labels(subject: Any, rng: np.random.Generator) -> None:
    made = (layouts.contiguous(6, 2), layouts.zigzag(12, 3), layouts.striped(6, 2))
    compare_all(_cases(subject, rng, made, 2, 2.0))


def _check_counts(subject: Any, rng: np.random.Generator) -> None:
    compare_all(_cases(subject, rng, (layouts.contiguous(12, 2), layouts.zigzag(24, 3)), 3, 0.5))


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    made = (layouts.contiguous(1, 1), layouts.contiguous(2, 4), layouts.zigzag(5, 3), layouts.striped(7, 3))
    compare_all(_cases(subject, rng, made, 1, 0.7))


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
    misconceptions=misconceptions_of("14.shard"),
    checks=(
        Check("labels", 2, "visible", "tokens, labels and positions: contiguous, zig-zag, striped", _check_labels),
        Check("counts", 1, "visible", "only some predictions count", _check_counts),
        Check("edges", 1, "held-out", "ranks without tokens, sequences of one token, ragged shards", _check_edges),
    ),
)  # fmt: skip
