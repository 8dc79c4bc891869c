"""Run a learner's functions for the conformance suite, in the notebook or in the judge's workers.

The suite plans the runs, compares results with its bounds and writes the evidence. The transport counts the
bytes that a run sends; in the judge, the judge itself is the transport. Only the rank's own process could
report which tensors share memory and which products of matrices it computed. A worker's report could be
false, so the judge does not use such reports.
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
"""The head dim and the tokens per rank for measuring memory.

A K/V block takes 1 MiB, which is large compared with pages.
"""


def named(*names: str) -> tuple[Check, ...]:
    """Return the suite's checks with these names."""
    return checks.chosen(names)


def claims(names: tuple[str, ...], **changes: Any) -> Claims:
    """Return the claims of a learner's ring: all features, on these layouts and numbers of ranks."""
    plain = Claims(
        name="your functions", over="ring", layouts=tuple(OWNERS), causal=(False, True),
        dtypes=("float32", "bfloat16", "float64"), ranks=(1, 2, 3, 4), grouped=True, ragged=True,
        backward=names == BACKWARD, schedule="ring", scale=True,
    )  # fmt: skip
    return replace(plain, **changes)


@dataclass
class Learners:
    """A learner's ring function as a source of runs.

    names: the results, FORWARD or BACKWARD. A backward gets the true out and lse, so that it is judged on its
    own. rans and crashes: the outcomes of the runs so far.
    """

    subject: Any
    names: tuple[str, ...]
    claimed: Claims
    rans: dict[Run, Ran] = field(default_factory=dict)
    crashes: dict[Run, Crashed] = field(default_factory=dict)
    skipped: set[Run] = field(default_factory=set)

    def claims(self) -> Claims | Trouble:
        """Return the claims about the function."""
        return self.claimed

    def skip(self, run: Run) -> None:
        """Skip a run whose outcome is no longer needed."""
        self.skipped.add(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped.

        Raises: Failure if an answer has the wrong form.
        """
        for run in runs:
            if run in self.skipped:
                continue
            if run not in self.rans:
                self.rans[run] = self._made(run)
            yield self.rans[run]

    def failing(self, selected: Sequence[Check], seed: int) -> Finding | None:
        """Return the finding of the first of these checks that fails, or None if all of them hold."""
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
        """Return the outcome of one run, and the work of each rank in the unit that the subject counts."""
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
        """Return a rank's results by name. Raises: Failure if they are not arrays of the right shapes."""
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
    """Return the whole q, k, v and dout of a run, which must not be changed."""
    return drawn.inputs(run)


def shards_of(run: Run, names: tuple[str, ...]) -> list[list[torch.Tensor]]:
    """Return the shards of each argument, one per rank: of q, k, v, or of dout, q, k, v, out, lse."""
    q, k, v, dout = inputs(run)
    whole = [q, k, v] if names == FORWARD else [dout, q, k, v, *given(run)]
    return [[x.index_select(2, own) for own in _held(run)] for x in whole]


def _held(run: Run) -> list[torch.Tensor]:
    """Return the positions of the tokens in each rank's shards.

    With the fault "wrong shape", rank 1 lacks its last token.
    """
    owned = positions_of(run)
    if run.fault == "wrong shape":
        owned[1] = owned[1][:-1]
    return owned


@lru_cache(maxsize=32)
def given(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the true (out, lse) of a run, with out in q's dtype and lse in the dtype of the state."""
    q, k, v, _ = inputs(run)
    out, lse = (torch.from_numpy(x) for x in oracle.attention(q, k, v, causal=run.causal, scale=run.scale))
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def wide_runs(check: Check) -> Check:
    """Return the suite's check of memory, on blocks that are large compared with a process's other memory."""

    def wide(plan: Any) -> list[Run]:
        return [replace(run, S=TOKENS * run.P, D=WIDE, H=1, K=1, causal=False) for run in check.runs(plan)]

    return replace(check, runs=wide)


def _faults(run: Run) -> Faults | None:
    """Return the suite's fault as a network fault that the judge can simulate."""
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
