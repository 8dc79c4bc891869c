"""Checks of 19.decode: one new token, with query heads and the tokens of the cache divided among ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.numbers import attend, random, rounding_bound
from ringlab_course.checking.wrong_answers import misconceptions_of

_PARTNER = re.compile(r"sends float\S+? .*? to rank (\d+) .*?; rank \d+ expects .*? from rank \1 ")
"""Matches, in the report of waiting ranks, a rank that sends to the rank from which it expects a message."""


@dataclass(frozen=True)
class Problem:
    """The query heads (B, H/P, 1, D) of each rank, and the keys and values (B, K, L, D) on each rank."""

    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]

    @property
    def world_size(self) -> int:
        return len(self.qs)

    @property
    def text(self) -> str:
        held = ", ".join(str(k.shape[2]) for k in self.ks)
        heads = self.world_size * self.qs[0].shape[1]
        return f"P={self.world_size}, {held} tokens on the ranks, {heads} query and {self.ks[0].shape[1]} K/V heads"

    def whole(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all query heads, keys and values in float64."""
        return tuple(np.concatenate([oracle.float64(x) for x in xs], axis) for xs, axis in zip((self.qs, self.ks, self.vs), (1, 2, 2), strict=True))  # type: ignore[return-value]  # fmt: skip

    def own(self, rank: int, out: np.ndarray) -> np.ndarray:
        """Return a rank's heads, taken from the output of all heads."""
        heads = self.qs[0].shape[1]
        return out[:, rank * heads : (rank + 1) * heads]


def problem(rng: np.random.Generator, held: Sequence[int], H: int, K: int, D: int = 4, B: int = 1) -> Problem:
    """Return a problem with H query heads in all, whose rank r holds held[r] tokens."""
    P = len(held)
    qs = [random(rng, B, H // P, 1, D) for _ in range(P)]
    ks, vs = ([random(rng, B, K, L, D) for L in held] for _ in range(2))
    return Problem(qs, ks, vs)


def truth(rank: int, given: Problem) -> np.ndarray:
    """Return the right output of a rank: its heads, attending to the tokens of all ranks."""
    return given.own(rank, attend(*given.whole())[0])


def _run(subject: Any, given: Problem) -> Any:
    try:
        return subject.run_ring(given.world_size, given.qs, given.ks, given.vs)
    except Crashed as crash:
        text, name = crash.counterexample, None
        if "that has finished" in text and any(k.shape[2] == 0 for k in given.ks):
            name = "does_not_take_part"
        elif _PARTNER.search(text) and given.world_size > 2:
            name = "receives_from_the_receiver"
        if name is None:
            raise
        raise STAGE.misconception(name).failure(f"{given.text}\n{text}") from None


def _answers(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    q, k, v = given.whole()
    for rank, answer in enumerate(results):
        right = truth(rank, given)
        got = expect_array(answer, right.shape, name="out")
        text = f"{given.text}: rank {rank}"
        if np.isnan(got).any():
            raise STAGE.misconception("nan_on_an_empty_rank").failure(text)
        bound = rounding_bound(q, k, v, attend(q, k, v))
        yield Answered((got,), (right,), bound, names=("out",), text=text)


def _verify(subject: Any, cases: Iterable[Problem]) -> None:
    compare_all(each for case in cases for each in _answers(_run(subject, case).results, case))


def _drawn(rng: np.random.Generator, P: int, most: int = 9) -> list[int]:
    """Return a number of tokens for each rank, at least two and all different."""
    return [int(n) for n in rng.permutation(np.arange(2, max(most, P + 3)))[:P]]


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((1, 1, 1), (2, 2, 2), (2, 4, 4), (3, 6, 6))
    _verify(subject, [problem(rng, _drawn(rng, P), H, K) for P, H, K in sizes])


def _check_groups(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on fewer K/V heads than query heads, more ranks than K/V heads, and a batch."""
    sizes = ((2, 8, 4, 1), (4, 8, 2, 1), (4, 4, 1, 2))
    _verify(subject, [problem(rng, _drawn(rng, P), H, K, B=B) for P, H, K, B in sizes])


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on ranks that hold no token yet, as at the beginning of every sequence."""
    few = int(rng.integers(1, 5))
    _verify(subject, [problem(rng, [few, 0], 2, 2), problem(rng, [1, 0, few, 0], 4, 2)])


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    """Check that a rank sends to every other rank its own queries and the partial of that rank's heads."""
    for held in ([3, 4, 2, 5], [30, 41, 22, 50]):
        P, H, D = 4, 8, 8
        given = problem(rng, held, H, 2, D)
        outcome = _run(subject, given)
        compare_all(_answers(outcome.results, given))
        needed = (P - 1) * (H // P) * (D + D + 1) * 4
        everything = (P - 1) * (H // P * D + H * (D + 1)) * 4
        for rank in range(P):
            sent = outcome.trace.bytes_sent(rank)
            text = f"{given.text}: rank {rank} sent {sent:,} bytes, {needed:,} are enough"
            if sent == everything:
                raise STAGE.misconception("everybody_gets_all_heads").failure(text)
            if sent > needed and sent >= (P - 1) * given.ks[rank].nbytes:
                raise STAGE.misconception("gathers_the_cache").failure(text)
            if sent > needed:
                raise Failure("More bytes travel than queries and partials have.", text)
            if sent < needed // 2:
                raise Failure("Fewer bytes travel than queries and partials have.", text)


STAGE = Stage(
    id="19.decode",
    function="decode",
    title="Decode with divided heads",
    kind="ring",
    helpers=("merge_all",),
    hints=(
        "A rank has the queries of a few heads and the keys of a few tokens. What must it receive, so that all its tokens are seen by all "
        "heads? And whose results does it then hold?",
        "Gather the queries along the heads. Attend to your own tokens with all of them: (out, lse). Then give each rank the part of its "
        "heads, and merge what you receive: P partials of your own heads.",
        r"$(o_{h,r}, L_{h,r})$ of head $h$ on rank $r$'s tokens goes to the owner of $h$, which merges over $r$",
    ),
    misconceptions=misconceptions_of("19.decode"),
    checks=(
        Check("values", 2, "visible", "one rank, two and three", _check_values),
        Check("groups", 1, "visible", "several query heads to a K/V head, fewer K/V heads than ranks", _check_groups),
        Check("empty", 1, "visible", "ranks that hold no token", _check_empty),
        Check("bytes", 2, "visible", "queries once, and to each rank the partial of its heads", _check_bytes, kind="cost"),
    ),
)  # fmt: skip
