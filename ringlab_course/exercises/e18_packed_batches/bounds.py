"""Checks of 18.bounds: where packed documents begin and end, from each token's position in its document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("bounds at each token", "documents")
SHOWN = 12
Answer = tuple[np.ndarray, np.ndarray]


def truth(position_ids: Any) -> Answer:
    """Return (cu_seqlens, documents). A document begins wherever a position is 0."""
    begins = np.asarray(position_ids) == 0
    return np.append(np.flatnonzero(begins), len(begins)), np.cumsum(begins) - 1


def _cases(subject: Any, rng: np.random.Generator, packed: Sequence[Sequence[int]]) -> Iterator[Answered]:
    for lengths in packed:
        ids = torch.cat([torch.arange(n) for n in lengths])
        right = truth(ids)
        text = f"position_ids = [{_listed(ids)}]"
        cu, documents = expect_tuple(subject.call(ids), ("cu_seqlens", "documents"))
        cu, text = _bounds(cu, right[0], text)
        documents = expect_array(documents, right[1].shape, name="documents")
        answer, wanted = (_marks(cu, len(ids)), documents), (_marks(right[0], len(ids)), right[1])
        yield Answered(answer, wanted, 0.0, names=NAMES, text=text)


def _bounds(cu: Any, right: np.ndarray, text: str) -> tuple[np.ndarray, str]:
    """Return the learner's cu_seqlens, and the text of the case with these bounds added.

    Raises: Failure unless cu_seqlens are one-dimensional int32.
    """
    if hasattr(cu, "shape") and len(cu.shape) == 1:
        cu = expect_array(cu, cu.shape, name="cu_seqlens")
    else:
        expect_array(cu, right.shape, name="cu_seqlens")
    text = f"{text}\nyour cu_seqlens = [{_listed(cu)}], expected [{_listed(right)}]"
    if cu.dtype == np.int64:
        raise STAGE.misconception("wide_bounds").failure(text)
    if cu.dtype != np.int32:
        raise Failure(f"cu_seqlens should be int32, but is {cu.dtype}.", text)
    return cu, text


def _marks(cu: np.ndarray, S: int) -> np.ndarray:
    """Return how often each of 0 … S is among the bounds, and the number of other bounds.

    In this form, two lists of bounds can be compared even if their lengths differ.
    """
    inside = cu[(cu >= 0) & (cu <= S)]
    return np.append(np.bincount(inside, minlength=S + 1), len(cu) - len(inside))


def _listed(numbers: Any) -> str:
    items = [int(n) for n in numbers[: SHOWN + 1]]
    return ", ".join(map(str, items[:SHOWN])) + (", …" if len(items) > SHOWN else "")


def _drawn(rng: np.random.Generator, count: int, most: int) -> list[int]:
    """Return different lengths of at least two tokens."""
    return [int(n) for n in rng.permutation(np.arange(2, most))[:count]]


def _check_bounds(subject: Any, rng: np.random.Generator) -> None:
    packed = [_drawn(rng, 1, 500), _drawn(rng, 2, 40), _drawn(rng, 4, 40)]
    compare_all(_cases(subject, rng, packed))


def _check_one_token(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on documents of one token.

    In one row such a document is between two others, in one row there are two at each end, and one row has no other
    documents.
    """
    (a, b), (c,) = _drawn(rng, 2, 9), _drawn(rng, 1, 30)
    ones = [1] * int(rng.integers(2, 100))
    compare_all(_cases(subject, rng, [[a, 1, b], [1, 1, c, 1, 1], ones]))


def _check_long(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a row of hundreds of documents, from one token to some hundreds of tokens long."""
    lengths = [int(n) for n in rng.geometric(0.02, 300)]
    compare_all(_cases(subject, rng, [lengths]))


STAGE = Stage(
    id="18.bounds",
    function="bounds_of",
    title="Bounds from position ids",
    hints=(
        "Which position does the first token of every document have? Which position can no other token have?",
        "Find the tokens whose position is 0; they are the bounds, but for the last one. A running sum over them counts the "
        "documents.",
        r"$\mathrm{cu} = (t : p_t = 0) \cup \{S\}$, $\quad d_t = \#\{u \le t : p_u = 0\} - 1$",
    ),
    misconceptions=misconceptions_of("18.bounds"),
    checks=(
        Check("bounds", 1, "visible", "documents of two tokens and more", _check_bounds),
        Check("one_token", 1, "visible", "documents of one token", _check_one_token),
        Check("long", 1, "held-out", "hundreds of documents", _check_long),
    ),
)  # fmt: skip
