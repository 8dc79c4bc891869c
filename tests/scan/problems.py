"""Small problems of linear attention, of every kind, for laws and mutants."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.conformance.kinds.scan_cases import attend_to, join
from ringlab.conformance.kinds.scan_tolerance import Inputs, Results, bounds, errors, truth
from ringlab.layout import Layout, contiguous, dealt, zigzag
from ringlab.merge import state_dtype
from ringlab.scan.graph import SCANS


@dataclass(frozen=True)
class Problem:
    """Linear attention with two heads of v over the ranks of a layout."""

    layout: Layout
    kind: str = "gated-delta"
    documents: tuple[int, ...] = ()
    initial: bool = True
    K: int = 1
    D: int = 3
    Dv: int = 2
    dtype: torch.dtype = torch.float64
    strongest: float = 1.0
    seed: int = 0

    def inputs(self) -> Inputs:
        """Return the whole inputs, and the gradients of the results."""
        generator, S, H = np.random.default_rng(self.seed), self.layout.S, 2

        def draw(*shape: int) -> Tensor:
            return torch.from_numpy(generator.standard_normal(shape))

        q, k, v, dout = (
            draw(1, self.K, S, self.D),
            draw(1, self.K, S, self.D),
            draw(1, H, S, self.Dv),
            draw(1, H, S, self.Dv),
        )
        if "delta" in self.kind:
            k = k / k.norm(dim=-1, keepdim=True)
        decay = -self.strongest * torch.from_numpy(generator.exponential(size=(1, H, S)))
        beta = torch.from_numpy(generator.uniform(0, 2, (1, H, S))) if "delta" in self.kind else None
        state = state_dtype(self.dtype)
        return Inputs(
            q.to(self.dtype),
            k.to(self.dtype),
            v.to(self.dtype),
            decay.to(state) if self.kind in ("decay", "gated-delta") else None,
            None if beta is None else beta.to(self.dtype),
            draw(1, H, self.D, self.Dv).to(state) if self.initial else None,
            dout.to(self.dtype),
            draw(1, H, self.D, self.Dv).to(state),
            self.documents,
        )


def solve(problem: Problem, scan: str, chunk: int = 4) -> Results:
    """Return the results of the whole sequence, from virtual ranks."""
    layout = problem.layout
    cluster = VirtualCluster(layout.P, memory=False)
    return join(layout, cluster.run(attend_to, problem.inputs(), layout, scan, chunk).results)


def wrong(results: Results, problem: Problem) -> dict[str, Any]:
    """Return the results whose error is larger than allowed, with (error, allowed)."""
    inputs = problem.inputs()
    true = truth(inputs)
    allowed, measured = bounds(inputs, true), errors(results, true)
    return {name: (measured[name], allowed[name]) for name in measured if not measured[name] <= allowed[name]}


def cut(S: int, *places: float) -> tuple[int, ...]:
    """Return lengths of documents that begin at these fractions of the sequence; two fractions may be equal."""
    ends = [0, *sorted(round(S * place) for place in places), S]
    return tuple(b - a for a, b in pairwise(ends))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, str, int]:
    """Return a problem, a scan and the length of a chunk."""
    S, P = draw(st.integers(1, 18)), draw(st.integers(1, 5))
    make = draw(st.sampled_from([contiguous, zigzag, lambda S, P: dealt(S, P, chunk=3)]))
    places = draw(st.lists(st.floats(0, 1), max_size=3))
    problem = Problem(
        make(S, P),
        draw(st.sampled_from(["plain", "decay", "delta", "gated-delta"])),
        cut(S, *places) if places else (),
        draw(st.booleans()),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from([1, 4])),
        draw(st.sampled_from([torch.float64, torch.float32])),
        draw(st.sampled_from([0.01, 1.0, 50.0])),
        draw(st.integers(0, 99)),
    )
    return problem, draw(st.sampled_from(list(SCANS))), draw(st.sampled_from([1, 3, 64]))
