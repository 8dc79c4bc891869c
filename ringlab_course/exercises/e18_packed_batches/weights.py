"""Checks of 18.weights: the weight of every token in a loss in which all documents count equally."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

BOUND = 1e-6
"""The allowed relative error. Weights are quotients of small whole numbers, and may be float32."""


@dataclass(frozen=True)
class Problem:
    """The document of each token on every rank, which tokens count, and the number n of all documents."""

    documents: list[torch.Tensor]
    counted: list[torch.Tensor]
    n: int
    text: str

    def counts(self) -> np.ndarray:
        """Return how many tokens of each document count on all ranks together."""
        total = np.zeros(self.n)
        for own, counts in zip(self.documents, self.counted, strict=True):
            np.add.at(total, own[counts].numpy(), 1)
        return total


def problem(rng: np.random.Generator, held: Sequence[Sequence[int]], n: int, share: float = 0.7) -> Problem:
    """Return a problem in which rank r holds held[r][d] tokens of document d.

    share: the probability that a token counts. If a rank holds tokens of a document, at least one of them counts.
    """
    documents = [torch.from_numpy(np.repeat(np.arange(n), own)) for own in held]
    counted = [torch.from_numpy(rng.random(len(own)) < share) for own in documents]
    for document in range(n):
        for own, counts in zip(documents, counted, strict=True):
            here = np.flatnonzero(own.numpy() == document)
            if len(here):
                counts[int(rng.choice(here))] = True
    return Problem(
        documents, counted, n, f"P={len(held)}, tokens of each document by rank: {[list(x) for x in held]}"
    )


def truth(rank: int, given: Problem) -> np.ndarray:
    """Return the weights of a rank's tokens in a loss that is the mean of the documents' means."""
    counts, own = given.counts(), given.documents[rank].numpy()
    return given.counted[rank].numpy() / (np.maximum(counts, 1)[own] * np.count_nonzero(counts))


def _run(subject: Any, given: Problem) -> Any:
    try:
        return subject.run_ring(len(given.documents), given.counted, given.documents, n=given.n)
    except Crashed as crash:
        stuck = re.search(r"DeadlockError|UnreceivedError|PeerDiedError|MismatchError", crash.message)
        if stuck and any(not counts.any() for counts in given.counted):
            raise STAGE.misconception("skips_the_reduction").failure(
                f"{given.text}\n{crash.counterexample}"
            ) from None
        raise


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    for rank, answer in enumerate(results):
        right = truth(rank, given)
        got = expect_array(answer, right.shape, name="the weights")
        text = f"{given.text}: rank {rank}, counted {given.counted[rank].int().tolist()}"
        if np.isnan(got).any():
            raise STAGE.misconception("not_a_number").failure(text)
        yield Answered((got,), (right,), BOUND, names=("the weights",), text=text)


def _verify(subject: Any, *cases: Problem) -> None:
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _drawn(rng: np.random.Generator, shape: tuple[int, int]) -> list[list[int]]:
    """Return random numbers of tokens, at least one, of each document on each rank."""
    return [[int(n) for n in row] for row in rng.integers(1, 6, shape)]


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on one rank, then on two ranks with documents that are whole on a rank."""
    a, b, c = (int(n) for n in rng.permutation(np.arange(2, 8))[:3])
    alone = problem(rng, [[a, b, 1]], 3)
    _verify(subject, alone, problem(rng, [[a, b, 0], [0, 0, c]], 3))


def _check_shared(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on documents that have tokens on several ranks."""
    some = _drawn(rng, (3, 4))
    some[0][3] = some[2][0] = 0  # these documents are not on all ranks
    _verify(subject, problem(rng, _drawn(rng, (2, 2)), 2), problem(rng, some, 4))


def _check_none(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on documents in which no token counts, empty documents, and ranks without tokens."""
    given = problem(rng, [[*_drawn(rng, (1, 3))[0], 0], [0, 0, 0, 0], [2, 3, 0, 0]], 4)
    for own, counts in zip(given.documents, given.counted, strict=True):
        counts[own == 1] = False
    _verify(subject, given)


def _check_messages(subject: Any, rng: np.random.Generator) -> None:
    """Check that there is one reduction for all documents.

    all_reduce makes P − 1 exchanges of all n numbers. Reduce-scatter and all-gather make twice as many
    exchanges, of n / P numbers.
    """
    P, n = 3, 6
    held = _drawn(rng, (P, n))
    held[0][n - 1] = 0  # this document is not on all ranks, which helps to tell mistakes apart
    given = problem(rng, held, n)
    run = _run(subject, given)
    compare_all(_answers(run.results, given))
    for rank in range(P):
        rounds, sent = run.trace.rounds(rank), run.trace.bytes_sent(rank)
        in_parts = rounds == 2 * (P - 1) and sent <= rounds * n // P * 8
        if rounds > P - 1 and not in_parts:
            text = f"{given.text}: rank {rank} made {rounds} exchanges, one reduction makes {P - 1}"
            raise STAGE.misconception("a_message_for_each").failure(text)
        if not rounds:
            raise Failure("No rank can know the counts of the others without a message.", given.text)


STAGE = Stage(
    id="18.weights",
    function="token_weights",
    title="Weights of the loss",
    kind="ring",
    hints=(
        "Two ranks hold a part of the same document each. Which number must both of them know before they can weigh a token?",
        "Count your own tokens that count, by document, in a vector of n numbers, and reduce it once. It tells you both how "
        "many tokens of each document count, and how many documents count at all.",
        r"$c_d = \sum_r c_{r,d}$, $\;m = \#\{d : c_d > 0\}$, $\;w_t = 1 / (m \, c_{d_t})$ if token $t$ counts, else 0",
    ),
    misconceptions=misconceptions_of("18.weights"),
    checks=(
        Check("values", 1, "visible", "one rank, and documents that lie on one rank each", _check_values),
        Check("shared", 2, "visible", "documents that several ranks share", _check_shared),
        Check("none", 1, "visible", "documents of which nothing counts, ranks without tokens", _check_none),
        Check("messages", 1, "held-out", "one reduction for all documents", _check_messages, kind="cost"),
    ),
)  # fmt: skip
