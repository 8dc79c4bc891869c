"""Checks of 18.shard: a rank's tokens, labels and positions, taken from a packed row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
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


def document_of(cu: np.ndarray) -> np.ndarray:
    """Return the number of the document of every token in the row."""
    return np.repeat(np.arange(len(cu) - 1), np.diff(cu))


def truth(tokens: Any, cu_seqlens: Any, own: Any) -> tuple[np.ndarray, ...]:
    """Return a rank's tokens, labels and positions.

    A label is the next token of the same document, or IGNORE at the document's last token. Positions are
    counted from the start of the document.
    """
    tokens, cu, own = (np.asarray(x, np.int64) for x in (tokens, cu_seqlens, own))
    labels = np.append(tokens[1:], IGNORE)
    labels[cu[1:][np.diff(cu) > 0] - 1] = IGNORE
    return tokens[own], labels[own], own - cu[document_of(cu)[own]]


def bounds(lengths: Sequence[int]) -> torch.Tensor:
    """Return the cu_seqlens, int32, of documents of these lengths."""
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)


def _cases(
    subject: Any,
    rng: np.random.Generator,
    packed: Sequence[tuple[Sequence[int], Callable[[int, int], Layout], int]],
    *,
    turned: bool = False,
) -> Iterator[Answered]:
    """Yield the answers for all ranks of packed rows.

    With `turned`, ranks store their tokens in reverse order.
    """
    for lengths, make, P in packed:
        layout, cu = make(sum(lengths), P), bounds(lengths)
        tokens = torch.from_numpy(rng.permutation(layout.S) + rng.integers(100_000))  # no token comes twice
        for rank in range(P):
            own = torch.tensor(layout.positions(rank).tolist()[:: -1 if turned else 1], dtype=torch.int64)
            inputs = tokens, cu, own
            right = truth(*inputs)
            got = expect_arrays(subject.call(*inputs), right, NAMES)
            text = f"cu_seqlens {cu.tolist()}, {layout.name}, P={P}, rank {rank}, own = {own.tolist()}"
            yield Answered(got, right, 0.0, names=NAMES, text=text)


def lengths_of(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """Return different lengths of at least two tokens."""
    return [int(n) for n in rng.permutation(np.arange(2, most))[:count]]


def _check_labels(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a single rank, then on ranks whose contiguous shards divide documents."""
    packed = [(lengths_of(rng, 2, 6), layouts.contiguous, 1), (lengths_of(rng, 3, 7), layouts.contiguous, 2)]
    compare_all(_cases(subject, rng, [*packed, (lengths_of(rng, 4, 9), layouts.contiguous, 3)]))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    packed = [(lengths_of(rng, 3, 9), make, P) for make, P in ((layouts.zigzag, 2), (layouts.striped, 3))]
    turned = _cases(subject, rng, [(lengths_of(rng, 2, 6), layouts.zigzag, 2)], turned=True)
    compare_all(chain(_cases(subject, rng, packed), turned))


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on empty documents, documents of one token, and ranks without tokens."""
    a, b, c = lengths_of(rng, 3, 9)
    packed = [
        ([1], layouts.contiguous, 2),
        ([a, 0, 1, b], layouts.zigzag, 2),
        ([0, c, 1, 1, 0], layouts.striped, 3),
    ]
    compare_all(_cases(subject, rng, packed))


STAGE = Stage(
    id="18.shard",
    function="shard_packed",
    title="A shard of a packed row",
    hints=(
        "Which token of a document has no next one? And where, before or after the cut, do you still know the next one of all "
        "others?",
        "Make the labels of the whole row: the next token everywhere, then −100 at the last token of every document. Number the "
        "tokens of the whole row from the start of their document. Only then take `own` of all three. Which bound is the last "
        "one at or before a token?",
        r"$\ell_t = x_{t+1}$ if $t + 1 < \mathrm{cu}_{d_t + 1}$, else $-100$; $\quad p_t = t - \mathrm{cu}_{d_t}$, "
        r"$\;d_t$ the largest $d$ with $\mathrm{cu}_d \le t$",
    ),
    misconceptions=misconceptions_of("18.shard"),
    checks=(
        Check("labels", 2, "visible", "documents cut by contiguous shards", _check_labels),
        Check("layouts", 1, "visible", "zig-zag and striped, and tokens stored in another order", _check_layouts),
        Check("edges", 1, "held-out", "documents of one token and of none, ranks without tokens", _check_edges),
    ),
)  # fmt: skip
