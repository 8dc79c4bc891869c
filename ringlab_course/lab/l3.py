"""Lab L3, make it faster: time an entrant's ring and ringlab's on the same ranks, and rank correct entrants.

Each run has one entrant, so that an entrant that crashes or hangs does not spoil the results of others.
score = ringlab's time / the entrant's time, the median over rounds, for forward and backward. A score above 1
means that the entrant is faster than ringlab. Each call has different inputs, and its result is checked after
the clock has stopped. One wrong result makes the entrant wrong.
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
"""The number of independent inputs of a run. Each call gets one of them, with changed heads and signs."""


@dataclass(frozen=True)
class L3:
    """Settings of lab L3. S must be divisible by 2P.

    target: "package.module:function" or "peer:NAME", as for `ringlab check`.
    """

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
            raise LabError(f"one of the layouts {', '.join(layout_names())}", repr(self.layout))
        if self.target == OURS:
            raise LabError("an entrant other than ringlab", repr(self.target), "package.module:function")

    def check(self, P: int) -> None:
        """Raise LabError unless the entrant can be loaded, and `P` ranks can share the tokens."""
        expect_ranks(P)
        if self.S < 2 * P or self.S % (2 * P):
            raise LabError(f"tokens divisible by {2 * P}, twice the ranks", f"S={self.S}, P={P}", "--tokens")
        if self.S < 16:
            raise LabError("at least 16 tokens", f"S={self.S}")
        _loaded(self.target)

    def needed_bytes(self, P: int, rank: int = 0, device: torch.device | None = None) -> int:
        """Return the most bytes that a rank allocates.

        These are whole sequences, the tensors of both rings, and on rank 0 the references.
        """
        return self.H * self.S * self.D * 8 * (32 if rank == 0 else 16) + 2 ** (30 if rank == 0 else 29)


def cases(ring: Ring, settings: L3, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield, for each pass, which entrants are right in a first call, and then the results of all calls.

    These are the errors of all calls, bounds, times and scores. Each case is yielded as soon as it is
    measured.
    """
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
    except (Exception, SystemExit) as error:  # the entrant's module may raise anything when it is imported
        raise LabError(f"an entrant {target}", f"{type(error).__name__}: {error}") from error
    try:
        takes = inspect.signature(found.function).parameters.values()
    except (TypeError, ValueError):  # the signature of a function written in C is unknown
        return found
    if not any(each.kind is each.VAR_POSITIONAL for each in takes) and len(takes) < 3:
        raise LabError(f"an entrant {target} that takes q, k and v", f"{len(takes)} parameters")
    return found
