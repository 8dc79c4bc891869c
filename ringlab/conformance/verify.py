"""ringlab's comparison with the oracle, for every transport, block, schedule and case of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringlab.blocks import available as blocks
from ringlab.blocks import get_block
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.cases import Case, attend, cases_of, covering, join, problem, refusal
from ringlab.conformance.tolerance import NAMES, errors
from ringlab.errors import BackendError
from ringlab.schedules import available as schedules

GLOO_RANKS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Job:
    """One case, with one choice for each of the other axes."""

    transport: str
    block: str
    schedule: str
    case: Case


@dataclass(frozen=True)
class Finding:
    """The errors of one job and their bounds, both relative to the largest true value."""

    job: Job
    errors: dict[str, float]
    bounds: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Return error / bound for each result; 0 if both are 0."""
        return {n: self.errors[n] / self.bounds[n] if self.errors[n] else 0.0 for n in NAMES}

    @property
    def ok(self) -> bool:
        """Return whether every error is within its bound; a NaN error is not."""
        return all(self.errors[name] <= self.bounds[name] for name in NAMES)

    @property
    def worst(self) -> str:
        """Return the name of the result that is closest to its bound."""
        return max(NAMES, key=lambda name: self.ratios[name])

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        job = self.job
        axes = {"transport": job.transport, "block": job.block, "schedule": job.schedule, **asdict(job.case)}
        return {**axes, "ok": self.ok, "errors": self.errors, "bounds": self.bounds}


def jobs(quick: bool = False) -> list[Job]:
    """Return all jobs, or with `quick` a selection that still contains every value of every axis.

    The Triton block takes part if it accepts tensors on the CPU, that is, in its interpreter. It takes part
    under the ring schedule, on virtual ranks, in the dtypes that it can compute.
    """
    cases = covering()
    met = {(s, block): set(cases_of(s, block)) for s in schedules() for block in blocks()}
    asked = [
        (case, s, block) for case in cases for s in schedules() for block in blocks() if case in met[s, block]
    ]
    asked = [job for job in asked if refusal(*job[:2]) is None]
    virtual = [Job("virtual", block, s, case) for case, s, block in asked]
    gloo = [Job("gloo", block, s, case) for case, s, block in asked if case.P in GLOO_RANKS]
    triton = [Job("virtual", "triton", "ring", case) for case in cases if _supports("triton", case)]
    if not quick:
        return virtual + triton + gloo
    few = [job for job in triton if job.case.P <= 2]
    return virtual[::7] + few[::3] + [job for job in gloo if job.case.P == 2][::7]


def _supports(block: str, case: Case) -> bool:
    try:
        get_block(block, torch.empty(1, 1, 1, case.D, dtype=getattr(torch, case.dtype)))
    except BackendError:
        return False
    return True


def verify(
    selected: Iterable[Job] | None = None, progress: Callable[[Finding], None] = lambda finding: None
) -> list[Finding]:
    """Return the findings of the `selected` jobs (default: all), and call `progress` with each finding."""
    findings = []
    for finding in _findings(list(jobs() if selected is None else selected)):
        progress(finding)
        findings.append(finding)
    return findings


def summary(findings: list[Finding]) -> dict[str, Any]:
    """Return a dict for JSON with `ok`, the number of `cases`, the `worst` case, and all findings."""
    worst = max(findings, key=lambda finding: finding.ratios[finding.worst])
    return {
        "ok": all(finding.ok for finding in findings),
        "cases": len(findings),
        "worst": {"result": worst.worst, "ratio": worst.ratios[worst.worst], **worst.as_dict()},
        "failed": [finding.as_dict() for finding in findings if not finding.ok],
        "findings": [finding.as_dict() for finding in findings],
    }


def _findings(selected: list[Job]) -> Iterator[Finding]:
    for job in selected:
        if job.transport == "virtual":
            outcome = VirtualCluster(job.case.P, memory=False).run(attend, job.case, job.block, job.schedule)
            yield _finding(job, outcome.results)
    for world_size in GLOO_RANKS:
        group = [job for job in selected if job.transport == "gloo" and world_size == job.case.P]
        if group:
            outcome = launch(_attend_all, world_size, group, timeout=1800.0, memory=False)
            for job, shards in zip(group, zip(*outcome.results, strict=True), strict=True):
                yield _finding(job, list(shards))


def _attend_all(ring: Ring, group: list[Job]) -> list[tuple[torch.Tensor, ...]]:
    return [attend(ring, job.case, job.block, job.schedule) for job in group]


def _finding(job: Job, shards: list[tuple[torch.Tensor, ...]]) -> Finding:
    expected = problem(job.case)
    return Finding(job, errors(join(job.case, shards), expected.true), dict(expected.bounds))
