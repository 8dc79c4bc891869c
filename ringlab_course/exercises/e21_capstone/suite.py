"""The conformance suite's runs made by a learner's functions, wherever they run: in the notebook, or in the judge's workers.

The suite plans the runs, holds what comes of them to its bounds and writes the evidence. What a run
sent is what the transport saw, in the judge the judge itself. Only a rank's process could tell what
lies in whose memory and which products of matrices it made: nothing here asks a worker for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ringlab import oracle
from ringlab.conformance import checks
from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.checks.check import Check
from ringlab.conformance.report.findings import Finding
from ringlab.conformance.run import run as drawn
from ringlab.conformance.run.run import Meter, Ran, RankResult, Run, Trouble, join
from ringlab.conformance.suite import check_source
from ringlab.conformance.target.claims import Claims
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.exercises.e21_capstone.parts import OWNERS

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
WIDE, TOKENS = 8192, 16
"""Head dim and tokens per rank where memory is looked at: a K/V block of 1 MiB, beside which pages are little."""


def named(*names: str) -> tuple[Check, ...]:
    """Return the suite's checks of these names."""
    return checks.chosen(names)


def claims(names: tuple[str, ...], **changes: Any) -> Claims:
    """Return what a learner's ring claims: everything, on these layouts and numbers of ranks."""
    plain = Claims(
        name="your functions", over="ring", layouts=tuple(OWNERS), causal=(False, True),
        dtypes=("float32", "bfloat16", "float64"), ranks=(1, 2, 3, 4), grouped=True, ragged=True,
        backward=names == BACKWARD, schedule="ring", scale=True,
    )  # fmt: skip
    return replace(plain, **changes)


@dataclass
class Learners:
    """A learner's ring function as a source of runs.

    names: what it returns, FORWARD or BACKWARD; a backward is given the true out and lse, so that it is
    judged by itself. rans and crashes: what came of the runs so far.
    """

    subject: Any
    names: tuple[str, ...]
    claimed: Claims
    rans: dict[Run, Ran] = field(default_factory=dict)
    crashes: dict[Run, Crashed] = field(default_factory=dict)
    skipped: set[Run] = field(default_factory=set)

    def claims(self) -> Claims | Trouble:
        """Return what is claimed of the function."""
        return self.claimed

    def skip(self, run: Run) -> None:
        """Let a run go that nobody waits for any more."""
        self.skipped.add(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield what came of each run that was not skipped. Raises: what is no answer to a run at all."""
        for run in runs:
            if run in self.skipped:
                continue
            if run not in self.rans:
                self.rans[run] = self._made(run)
            yield self.rans[run]

    def failing(self, selected: Sequence[Check], seed: int) -> Finding | None:
        """Return what the first of these checks finds that does not hold; None where all hold."""
        for each in selected:
            for finding in check_source(self, [each], seed=seed).findings:
                if not finding.ok:
                    return finding
        return None

    def _made(self, run: Run) -> Ran:
        try:
            outcome = self.outcome(run)
        except Crashed as crash:
            self.crashes[run] = crash
            ended = "did not end" in crash.message or "was ended" in crash.message
            told = f"{crash.message} {' '.join(crash.counterexample.split())[:300]}".strip()
            return Ran(run, trouble=Trouble("hung" if ended else "raised", told))
        if any(isinstance(result, Ended) for result in outcome.results):
            return _after_a_death(run, outcome.results)
        return self._joined(run, outcome)

    def _joined(self, run: Run, outcome: Any) -> Ran:
        return join(run, [self._part(run, rank, outcome) for rank in range(run.P)])

    def outcome(self, run: Run) -> Any:
        """Return the outcome of one run on all ranks."""
        return self.subject.run_ring(
            run.P, *shards_of(run, self.names), faults=_faults(run), **_keywords(run)
        )

    def efforts(self, run: Run) -> tuple[Ran, list[float]]:
        """Return what came of one run, and how much each rank computes in it, in whatever the subject counts."""
        outcome, efforts = self.subject.efforts(run.P, *shards_of(run, self.names), **_keywords(run))
        return self._joined(run, outcome), efforts

    def _part(self, run: Run, rank: int, outcome: Any) -> RankResult:
        arrays = self._arrays(run, rank, outcome.results[rank])
        notes = [
            ("types", f"{name} is {_name(x.dtype)} for inputs of {run.dtype} (rank {rank}; {run})")
            for name, x in arrays.items()
            if name != "lse" and _name(x.dtype) != run.dtype
        ]
        wide = {name: oracle.float64(x) for name, x in arrays.items()}
        part = RankResult(positions=_held(run)[rank].numpy(), arrays=wide, notes=notes)
        if run.meter:
            trace, peak = outcome.trace, outcome.memory[rank].peak_bytes
            meter = Meter(trace.bytes_sent(rank), trace.rounds(rank), tuple(sorted(trace.peers(rank))), peak)
            part.forward, part.backward = (meter, None) if self.names == FORWARD else (None, meter)
        return part

    def _arrays(self, run: Run, rank: int, result: Any) -> dict[str, Any]:
        """The rank's results by name. Raises: Failure where they are no such arrays."""
        length = len(_held(run)[rank])
        query, key = (run.B, run.H, length, run.D), (run.B, run.K, length, run.D)
        shapes = {"out": query, "lse": query[:3], "dq": query, "dk": key, "dv": key}
        parts = expect_tuple(result, self.names, name=f"the result of rank {rank}")
        for name, part in zip(self.names, parts, strict=True):
            expect_array(part, shapes[name], name=name)
        return dict(zip(self.names, parts, strict=True))


def positions_of(run: Run) -> list[torch.Tensor]:
    """Return the global positions of each rank's tokens."""
    layout = LAYOUTS[run.layout](run.S, run.P)
    return [torch.from_numpy(layout.positions(rank)) for rank in range(run.P)]


def _keywords(run: Run) -> dict[str, Any]:
    return {"positions": positions_of(run), "causal": run.causal, "scale": run.scale}


@lru_cache(maxsize=8)
def inputs(run: Run) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dout of a run, whole, for reading only."""
    return drawn.inputs(run)


def shards_of(run: Run, names: tuple[str, ...]) -> list[list[torch.Tensor]]:
    """Return each argument's shards, one per rank: q, k, v, or dout, q, k, v, out, lse."""
    q, k, v, dout = inputs(run)
    whole = [q, k, v] if names == FORWARD else [dout, q, k, v, *given(run)]
    return [[x.index_select(2, own) for own in _held(run)] for x in whole]


def _held(run: Run) -> list[torch.Tensor]:
    """The positions of the tokens in each rank's shards: under the fault of a wrong shape rank 1 lacks its last one."""
    owned = positions_of(run)
    if run.fault == "wrong shape":
        owned[1] = owned[1][:-1]
    return owned


@lru_cache(maxsize=32)
def given(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the true (out, lse) of a run, out as a forward stores it, lse in the state's dtype."""
    q, k, v, _ = inputs(run)
    out, lse = (torch.from_numpy(x) for x in oracle.attention(q, k, v, causal=run.causal, scale=run.scale))
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def wide_runs(check: Check) -> Check:
    """Return the suite's check of memory on blocks that stand out from what an operating system counts besides."""

    def wide(plan: Any) -> list[Run]:
        return [replace(run, S=TOKENS * run.P, D=WIDE, H=1, K=1, causal=False) for run in check.runs(plan)]

    return replace(check, runs=wide)


def _faults(run: Run) -> Faults | None:
    """The suite's faults, as those of a network that the judge can make."""
    if run.fault.startswith("dies"):
        return Faults(kill=(1, min(1, run.P - 2) if run.fault == "dies" else 0))
    if run.fault == "stalls":
        return Faults(seed=run.seed, delay=3.0, slow=(1, 8.0), late=0.5)
    return None


def _after_a_death(run: Run, results: Sequence[Any]) -> Ran:
    told = [result for result in results if isinstance(result, Ended) and result.text]
    text = f"{told[0].error}: {' '.join(told[0].text.split())[:300]}" if told else "rank 1 was killed"
    returned = tuple(rank for rank, result in enumerate(results) if not isinstance(result, Ended))
    return Ran(run, trouble=Trouble("raised", text), returned=returned)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
