"""Gather sampled rows from all ranks and compare them with the float64 reference on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringlab.bench.contest import Passed, Sampled, joined, worst_of
from ringlab.bench.problem import Inputs
from ringlab.bench.reference import Reference, reference
from ringlab.comm.ring import Ring


class Truth:
    """The references of some draws, on rank 0, which computes them; it says what a pass got wrong."""

    def __init__(self, ring: Ring, draws: Sequence[Inputs], tokens: Tensor) -> None:
        self.ring, self.count, self.device = ring, len(tokens), draws[0].q.device
        self.by_draw = [_on_cpu(reference(each, True, tokens)) for each in draws] if ring.rank == 0 else []

    @property
    def all(self) -> Reference:
        """Return the references as one, on rank 0."""
        return joined(self.by_draw)

    def errors(self, passed: Passed) -> dict[str, dict[str, Tensor]]:
        """Return the largest errors over all of each entrant's calls, for `contest.judged`; nothing on other ranks."""
        calls = {
            name: [
                (look.draw, [gather_rows(self.ring, look.sampled, self.count, self.device)]) for look in looks
            ]
            for name, looks in passed.looks.items()
        }
        return {name: worst_of(each, self.by_draw) for name, each in calls.items() if self.by_draw}


def _on_cpu(expected: Reference) -> Reference:
    true, bounds = ({name: x.cpu() for name, x in of.items()} for of in (expected.true, expected.bounds))
    return replace(expected, tokens=expected.tokens.cpu(), true=true, bounds=bounds)


def gather_rows(ring: Ring, own: Sampled, count: int, device: torch.device) -> Sampled:
    """Return the `count` sampled rows of which each rank has some; rows that nobody has are NaN.

    They are summed over ranks in float64, which changes none: each row is one rank's, the others add zeros.
    """
    given = torch.zeros(count, dtype=torch.float64)
    given[own.numbers] = 1.0
    given = ring.all_reduce(given.to(device)).cpu()
    rows = {}
    for name, part in own.rows.items():
        whole = torch.zeros(part.shape[0], count, part.shape[2], dtype=torch.float64)
        whole[:, own.numbers] = torch.nan_to_num(part.double(), nan=0.0, posinf=0.0, neginf=0.0)
        rows[name] = ring.all_reduce(whole.to(device)).cpu()
        rows[name][:, given != 1.0] = torch.nan
    finite = ring.all_reduce(torch.tensor([float(own.finite)], device=device))
    return Sampled(list(range(count)), rows, bool(finite.item() == ring.world_size))
