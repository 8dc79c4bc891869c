"""Run a patient once on virtual ranks, and measure its errors against the oracle, its messages and its times.

The inputs, the true results and the error bounds come from the conformance suite
(`ringlab.conformance.checks.measuring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.trace import Trace
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.run.run import Run, inputs
from ringlab.conformance.tolerance import Results, relative_error, score_rounding
from ringlab.errors import CourseError
from ringlab.layout import Layout, layout_names
from ringlab_course.clinic.patients import Patient

WARD_LAYOUTS = layout_names()
DTYPES = ("float32", "bfloat16")
MOST_RANKS, MOST_TOKENS = 8, 64


@dataclass(frozen=True)
class Case:
    """The input of a patient: `ranks` shards of `tokens` tokens each, one head of 4 dimensions."""

    ranks: int
    tokens: int
    layout: str = "contiguous"
    causal: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for what, value, most in (("ranks", self.ranks, MOST_RANKS), ("tokens", self.tokens, MOST_TOKENS)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
                raise CourseError(f"{what}= from 1 to {most}", repr(value))
        for what, name, among in (("layout", self.layout, WARD_LAYOUTS), ("dtype", self.dtype, DTYPES)):
            if name not in among:
                raise CourseError(f"{what}= one of {', '.join(among)}", repr(name))
        if not isinstance(self.causal, (bool, np.bool_)):
            raise CourseError("causal= True or False", repr(self.causal))

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"ranks={self.ranks} tokens={self.tokens} {self.layout} {mask} {self.dtype}"

    @property
    def run(self) -> Run:
        """Return the suite's run with the sizes of this case. Inputs, truth and bounds follow from it."""
        S = self.ranks * self.tokens
        return Run(self.ranks, S, self.layout, bool(self.causal), H=1, K=1, D=4, dtype=self.dtype)


@dataclass(frozen=True)
class RankInputs:
    """The inputs of all ranks of a run, as lists with one entry per rank."""

    qs: list[Tensor]
    ks: list[Tensor]
    vs: list[Tensor]
    douts: list[Tensor]
    outs: list[Tensor]
    lses: list[Tensor]
    positions: list[Tensor]
    layout: Layout

    def of(self, returns: Sequence[str]) -> tuple[list[Tensor], ...]:
        """Return the arguments that differ between ranks: those of a backward if the program returns dq."""
        if "dq" not in returns:
            return self.qs, self.ks, self.vs
        return self.douts, self.qs, self.ks, self.vs, self.outs, self.lses


@lru_cache(maxsize=128)
def shards_of(run: Run) -> RankInputs:
    """Return the shards of a run. The oracle's out has the dtype of q, and its lse the dtype of the state."""
    q, k, v, dout = inputs(run)
    true, _ = expected(run.plain)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.from_numpy(true.out).to(q.dtype), torch.from_numpy(true.lse).to(wide)
    layout = LAYOUTS[run.layout](run.S, run.P)
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(run.P)]
    qs, ks, vs, douts, outs = ([x.index_select(-2, own) for own in positions] for x in (q, k, v, dout, out))
    lses = [lse.index_select(-1, own) for own in positions]
    return RankInputs(qs, ks, vs, douts, outs, lses, positions, layout)


@dataclass(frozen=True)
class Errors:
    """The relative error of one result, its bound, each rank's error, and the tokens beyond the bound."""

    error: float
    bound: float
    by_rank: tuple[float, ...]
    tokens: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether the error is within its bound. NaN never is."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Findings:
    """The findings of an examination. `stopped`: the reason why the ranks did not end, empty if they did."""

    case: Case
    errors: dict[str, Errors] = field(default_factory=dict)
    messages: int = 0
    sent: int = 0
    needed: int = 0
    trace: Trace | None = None
    stopped: str = ""

    @property
    def well(self) -> bool:
        """Return whether the ranks ended, with results within their bounds and no more bytes than needed."""
        return not self.stopped and all(each.ok for each in self.errors.values()) and self.sent <= self.needed

    @property
    def journal(self) -> str:
        """Return the messages that each rank sent, in order, as text: tag, bytes and receiver."""
        if self.trace is None:
            return f"{self.case}: the ranks did not end, so there is no journal"
        lines = [f"{self.case}: messages by rank, in order"]
        for rank in range(self.case.ranks):
            sends = [each for each in self.trace.exchanges(rank) if each.bytes_sent]
            text = ", ".join(f"{each.tag} {each.bytes_sent} B to {each.to}" for each in sends)
            lines.append(f"  rank {rank}  {text or 'none'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        if self.stopped:
            return f"{self.case}: the ranks did not end\n{self.stopped}"
        lines = [f"{self.case}: {'well' if self.well else 'ill'}"]
        for name, each in self.errors.items():
            ranks = "  ".join(_shown(error, each.bound) for error in each.by_rank)
            worst = max(each.by_rank, key=lambda error: np.inf if np.isnan(error) else error)
            where = f"   tokens {_listed(each.tokens)}" if each.tokens else ""
            lines.append(f"  {name:4} error {_shown(worst, each.bound)}   by rank  {ranks}{where}")
        lines.append(f"  a rank sent {self.messages} messages, {self.sent} bytes; {self.needed} are needed")
        return "\n".join(lines)


def _shown(error: float, bound: float) -> str:
    """Return an error as text: "rounding" within the bound, because its digits differ between machines."""
    return "rounding" if error <= bound else f"{'NaN' if np.isnan(error) else f'{error:.1e}':>8}"


def _listed(tokens: Sequence[int], most: int = 8) -> str:
    return f"{' '.join(map(str, tokens[:most]))}{' …' if len(tokens) > most else ''}"


def examine(patient: Patient, case: Case) -> Findings:
    """Return the findings of one run of `patient` on `case`."""
    run = case.run
    given = shards_of(run)
    arguments = given.of(patient.returns)

    def program(ring: Any) -> Any:
        own = [each[ring.rank].clone() for each in arguments]
        return patient.program(ring, *own, positions=given.positions, causal=case.causal)

    try:
        outcome = VirtualCluster(run.P, memory=False).run(program)
    except Exception as error:
        return Findings(case, stopped=str(error) or type(error).__name__)
    events = [outcome.trace.exchanges(rank) for rank in range(run.P)]
    sends = [[event for event in each if event.bytes_sent] for each in events]
    return Findings(
        case,
        errors_of(run, patient.returns, outcome.results),
        max(len(each) for each in sends),
        max(sum(event.bytes_sent for event in each) for each in sends),
        max(needed_bytes(run, patient.returns, rank) for rank in range(run.P)),
        outcome.trace,
    )


@lru_cache(maxsize=256)
def bounded(plain: Run) -> tuple[Results, dict[str, float]]:
    """Return the true results of a plain run and the bounds of their errors.

    The bounds are twice those of the suite, plus the error that rounded scores can cause. They are wider for
    two reasons: a backward computes the weights again from the lse that it gets, and with few tokens the
    plainest implementation may have a small error by chance.
    """
    true, limits = expected(plain)
    more = score_rounding(*inputs(plain), causal=plain.causal, scale=plain.scale, true=true)
    return true, {name: 2 * limits[name] + more[name] for name in limits}


def errors_of(run: Run, returns: Sequence[str], results: Sequence[Any]) -> dict[str, Errors]:
    """Return the errors of the ranks' results by name, after rounding all but lse to q's dtype.

    returns: the names of the tensors in the tuple that each rank returned.
    """
    true, bounds = bounded(run.plain)
    layout, dtype = LAYOUTS[run.layout](run.S, run.P), getattr(torch, run.dtype)
    found = {}
    for number, name in enumerate(returns):
        right = getattr(true, name)
        whole, by_rank, beyond = np.full(right.shape, np.nan), [], list[int]()
        largest = np.abs(right[np.isfinite(right)]).max(initial=0.0) or 1.0
        for rank in range(run.P):
            own = layout.positions(rank)
            part, there = results[rank][number].detach(), right[:, :, own]
            part = (part if name == "lse" else part.to(dtype)).double().numpy()
            if part.shape != there.shape:
                by_rank.append(np.inf)
                continue
            whole[:, :, own] = part
            apart = np.abs(np.where(part == there, 0.0, part - there)) / largest
            by_rank.append(float(apart.max(initial=0.0)))
            rows = (apart if apart.ndim == 4 else apart[..., None]).max(axis=(0, 1, 3), initial=0.0)
            beyond += own[~(rows <= bounds[name])].tolist()
        found[name] = Errors(
            float(relative_error(whole, right)), bounds[name], tuple(by_rank), tuple(sorted(beyond))
        )
    return found


def needed_bytes(run: Run, returns: Sequence[str], rank: int) -> int:
    """Return the bytes that `rank` has to send.

    K and V make P − 1 hops. In a backward, dK and dV make P hops in the dtype of the state.
    """
    P, dtype = run.P, getattr(torch, run.dtype)
    if P == 1:
        return 0
    layout = LAYOUTS[run.layout](run.S, P)
    vectors = [2 * run.B * run.K * run.D * layout.length((rank - step) % P) for step in range(P)]
    blocks = dtype.itemsize * sum(vectors[:-1])
    if "dq" not in returns:
        return blocks
    return blocks + torch.promote_types(dtype, torch.float32).itemsize * sum(vectors)
