"""Lab L3, make it faster: an entrant beside ringlab on the same ranks; only who is right is ranked.

One entrant a run, so that one that crashes or hangs takes nobody else's figures along.
score = ringlab's time / the entrant's, median over rounds, forward and backward: above 1 the entrant is faster.
Every call is looked at when its clock has stopped, each has other inputs, and one wrong call is a wrong entrant.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ringlab.bench.contest import Passed, case, compete, judged
from ringlab.bench.interleaved import speed_ratio
from ringlab.bench.problem import Problem, draw
from ringlab.bench.reference import sample
from ringlab.comm.ring import Ring
from ringlab.conformance.run.loading import load
from ringlab.conformance.target.claims import Target
from ringlab.errors import LabError
from ringlab.layout import layout_names
from ringlab_course.lab.l1 import Truth
from ringlab_course.lab.l2 import entrant
from ringlab_course.lab.result import expect_attention, expect_ranks

OURS = "ringlab"
DRAWS = 2
"""Independent inputs of a run; each call gets one of them, turned by heads and signs."""


@dataclass(frozen=True)
class L3:
    """target: "package.module:function" or "peer:NAME", as `ringlab check` takes them; S must be divisible by 2P."""

    target: str
    S: int = 8192
    H: int = 8
    D: int = 64
    dtype: str = "float32"
    layout: str = "zigzag"
    block: str = "auto"
    rounds: int = 11
    seed: int = 0

    def __post_init__(self) -> None:
        expect_attention(self.H, self.D, self.dtype, self.rounds, self.seed, self.block)
        if self.layout not in layout_names():
            raise LabError(f"a layout among {', '.join(layout_names())}", repr(self.layout))
        if self.target == OURS:
            raise LabError("an entrant beside ringlab", repr(self.target), "package.module:function")

    def check(self, P: int) -> None:
        """Raise LabError unless the entrant is there, and `P` ranks can share the tokens."""
        expect_ranks(P)
        if self.S < 2 * P or self.S % (2 * P):
            raise LabError(f"tokens divisible by {2 * P}, twice the ranks", f"S={self.S}, P={P}", "--tokens")
        if self.S < 16:
            raise LabError("16 tokens at least", f"S={self.S}")
        _loaded(self.target)

    def needed_bytes(self, P: int, rank: int = 0) -> int:
        """Return the bytes that a rank allocates at most: whole sequences, both rings' tensors, rank 0's references."""
        return self.H * self.S * self.D * 8 * (32 if rank == 0 else 16) + 2 ** (30 if rank == 0 else 29)


def cases(ring: Ring, settings: L3, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield, by pass and as each ends: which entrants are right in a first call; then errors of all calls, bounds, times and scores."""
    P = ring.world_size
    settings.check(P)
    problem = Problem(settings.H, settings.S, settings.D, True, settings.dtype)
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    draws = [draw(problem, str(device), generator) for _ in range(DRAWS)]
    tokens = sample(settings.S, torch.Generator().manual_seed(settings.seed + 1))
    entrants = {OURS: entrant(settings.layout, settings.block), settings.target: _loaded(settings.target)}
    truth = Truth(ring, draws, tokens)
    for passed in compete(ring, draws, entrants, tokens, settings.rounds, seed=settings.seed):
        errors = truth.errors(passed)
        if ring.rank != 0:
            yield {}
        elif not passed.times:
            contenders = judged(passed.of, errors, truth.all)
            yield {"case": "first call", "P": P, "S": settings.S, "pass": passed.of, "contenders": contenders}
        else:
            yield _scored(
                {"S": settings.S, **case(P, passed.of, errors, truth.all, passed.times, OURS)}, passed
            )


def _scored(found: dict[str, Any], passed: Passed) -> dict[str, Any]:
    for name, each in found["contenders"].items():
        del each["ratio"]  # rounded
        each["score"] = 1 / speed_ratio(passed.times, OURS, name)
        each["calls_looked_at"] = len(passed.looks[name])
    return {"case": "contest", **found}


def _loaded(target: str) -> Target:
    try:
        found = load(target)
    except Exception as error:  # what an import of anybody's module raises
        raise LabError(f"an entrant {target}", f"{type(error).__name__}: {error}") from error
    try:
        takes = inspect.signature(found.function).parameters.values()
    except (TypeError, ValueError):  # one of C's, of which nothing is known
        return found
    if not any(each.kind is each.VAR_POSITIONAL for each in takes) and len(takes) < 3:
        raise LabError(f"an entrant {target} that takes q, k and v", f"{len(takes)} parameters")
    return found
