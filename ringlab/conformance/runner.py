"""All checks of a target: its runs are planned, made once each, and judged as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ringlab.conformance import checks
from ringlab.conformance.isolation import Isolated
from ringlab.conformance.perform import VIRTUAL, TargetSpec, on_virtual_ranks, transport_of
from ringlab.conformance.plan_runs import Check, Plan, Verdict, size
from ringlab.conformance.runs import TWO_RINGS, Ran, Run, Trouble, measure
from ringlab.conformance.target import Claims
from ringlab.errors import BackendError

LIMIT = 30.0
"""Seconds for the import of a target, and for each run."""
HUNG = 2
"""Runs in a row that may hang; each costs the limit."""
ALLOWED = "allowed, "
"""How the evidence begins of a check that fails on purpose, as the target says."""
NO_TARGET = "not run: the target could not be imported"
_SMALLER = 12  # runs at most, in the search for a smaller counterexample of one check
_EXPLAINED = 3  # checks at most, whose counterexample is made smaller


@dataclass(frozen=True)
class Finding:
    """The result of one check. `applies` is False if the target does not claim the property checked."""

    name: str
    asks: str
    ok: bool
    evidence: str
    seconds: float
    applies: bool = True
    counterexample: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding, ready for JSON."""
        return dict(self.__dict__)


@dataclass(repr=False)
class Report:
    """The findings about a target, check by check, and how it was run.

    >>> found = [Finding("lse", "lse", ok=False, evidence="error 0.1, bound 1e-6", seconds=0.2)]
    >>> report = Report("mine:attend", "ring", "virtual", True, 0, 30.0, found)
    >>> report.ok, report.failed
    (False, ['lse'])
    >>> report
    Report(mine:attend: 1 checks, failed: lse)
    """

    target: str
    over: str
    transport: str
    quick: bool
    seed: int
    limit: float
    findings: list[Finding] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        """Return one line: a notebook shows the last value of a cell."""
        verdict = f"failed: {', '.join(self.failed)}" if self.failed else "none failed"
        return f"Report({self.target}: {len(self.findings)} checks, {verdict})"

    @property
    def ok(self) -> bool:
        """Return whether there are findings and no check failed."""
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    @property
    def failed(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [finding.name for finding in self.findings if not finding.ok]

    def as_dict(self) -> dict[str, Any]:
        """Return the report, ready for JSON: `ok`, `checks` with name, ok, evidence and seconds, and the other fields."""
        plain = {key: value for key, value in self.__dict__.items() if key != "findings"}
        return {"ok": self.ok, **plain, "checks": [finding.as_dict() for finding in self.findings]}


def check(
    target: Any,
    *,
    quick: bool = False,
    seed: int = 0,
    only: Sequence[str] = (),
    limit: float = LIMIT,
    transport: str = VIRTUAL,
    device: str = "cpu",
    isolate: bool = True,
    progress: Callable[[Finding], None] = lambda finding: None,
    **claims: Any,
) -> Report:
    """Return the findings about `target`: a function, a `Target`, or "package.module:name".

    claims: fields of `Target` that replace the target's own, such as layouts=("contiguous",).
    limit: seconds for each run; a longer run has hung. transport: "virtual", or one of
    `ringlab.launch`, for targets over ringlab's Comm; targets over torch.distributed run on processes.
    isolate: run in child processes; otherwise in this one, on virtual ranks, where nothing can stop them.
    progress: called with each finding.

    Raises: BackendError for an unknown check, or a limit that is not above 0.

    >>> from ringlab import ring_attention
    >>> def attend(q, k, v, *, ring, layout, causal):
    ...     return ring_attention(q, k, v, ring=ring, layout=layout, causal=causal)
    >>> check(attend, only=["precision"], isolate=False, layouts=["zigzag"], ranks=[2]).ok
    True
    """
    selected = checks.chosen(tuple(only))
    if quick and not only:
        selected = _quick(selected)
    if not limit > 0:
        raise BackendError("a limit above 0 seconds", repr(limit))
    spec = TargetSpec(target, transport, device, claims)
    with Isolated(spec, limit) if isolate else _Here(spec) as source:
        return _Suite(source, spec, selected, quick, seed, limit, progress).report()


class Source(Protocol):
    """A source of runs of a target: child processes, this process, or workers in a sandbox."""

    def claims(self) -> Claims | Trouble:
        """Return the target's claims, or the reason why there is no target."""

    def skip(self, run: Run) -> None:
        """Skip a run that no check needs any more."""

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped, in order."""


def check_source(source: Source, selected: Sequence[Check], *, seed: int = 0) -> Report:
    """Return the findings of the quick ones among the `selected` checks, about a target whose runs `source` makes."""
    nothing = TargetSpec("")
    return _Suite(source, nothing, _quick(selected), True, seed, LIMIT, lambda finding: None).report()


def _quick(selected: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(each for each in selected if each.tier == "quick")


class _Here:
    """Runs made in this process, on virtual ranks."""

    def __init__(self, spec: TargetSpec) -> None:
        self.target, self.device = spec.target(), spec.device
        self.skipped: set[Run] = set()

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def claims(self) -> Claims | Trouble:
        return self.target.claims()

    def skip(self, run: Run) -> None:
        self.skipped.add(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        for run in runs:
            if run not in self.skipped:
                yield on_virtual_ranks(self.target, run, self.device)


class _Suite:
    """One check of one target from the first run to the last finding."""

    def __init__(
        self,
        source: Source,
        spec: TargetSpec,
        selected: tuple[Check, ...],
        quick: bool,
        seed: int,
        limit: float,
        progress: Callable[[Finding], None],
    ) -> None:
        self.source, self.spec, self.progress = source, spec, progress
        self.selected = selected
        self.done: dict[Run, Ran] = {}
        self.findings: dict[str, Finding] = {}
        self.counters: dict[str, Run] = {}
        self.gave_up, self.again = False, dict[str, list[Run]]()
        name = spec.what if isinstance(spec.what, str) else ""
        self.result = Report(name, "", spec.transport, quick, seed, limit)

    def report(self) -> Report:
        start = time.monotonic()
        claims = self.source.claims()
        took = time.monotonic() - start
        if isinstance(claims, Trouble):
            self._found(Finding(checks.LOADS, "the target can be imported", False, str(claims), took))
            for each in self.selected:
                self._found(Finding(each.name, each.asks, False, NO_TARGET, 0.0))
        else:
            self.result.target, self.result.over = self.result.target or claims.name, claims.over
            self.result.transport = transport_of(claims.over, self.result.transport)
            evidence = f"{claims.name} over {claims.over}, layouts {', '.join(claims.layouts)}; q is ({', '.join(claims.axes)})"
            self._found(Finding(checks.LOADS, "the target can be imported", True, evidence, took))
            self._run(Plan(claims, self.result.quick, self.result.seed))
        order = [checks.LOADS, *(each.name for each in self.selected)]
        self.result.findings = [self.findings[name] for name in order]
        self.result.runs, self.result.seconds = len(self.done), time.monotonic() - start
        return self.result

    def _run(self, plan: Plan) -> None:
        planned: dict[str, list[Run]] = {}
        if unknown := sorted({*dict(plan.claims.allow)} - {*checks.names()}):
            raise BackendError(f"allow= of checks among {', '.join(checks.names())}", ", ".join(unknown))
        for each in self.selected:
            reason = each.needs(plan)
            planned[each.name] = [] if reason else list(dict.fromkeys(each.runs(plan)))
            if reason:
                self._found(
                    Finding(each.name, each.asks, True, f"does not apply: {reason}", 0.0, applies=False)
                )
        runs = dict.fromkeys(run for each in planned.values() for run in each)
        hung: list[Ran] = []  # in a row, with no fault that others could wait for
        for ran in self.source.made(sorted(runs, key=lambda run: (run.ends, run.P))):
            self.done[ran.run] = ran
            hangs = ran.trouble is not None and ran.trouble.kind == "hung" and not ran.run.ends
            hung = [*hung, ran] if hangs else []
            for each in self.selected:
                if each.name not in self.findings and ran.run in planned[each.name]:
                    self._judge(plan, each, planned, ran)
            if len(hung) >= HUNG:
                self._give_up(hung, planned)
        self._make_again(plan, planned)
        for each in self.selected:
            if each.name not in self.findings:
                self._found(Finding(each.name, each.asks, False, "not run", 0.0))
        self._look_for_smaller()

    def _judge(self, plan: Plan, each: Check, planned: dict[str, list[Run]], ran: Ran) -> None:
        """Judge a check if all its runs are made, or the last one, `ran`, settles it."""
        rans = [self.done[run] for run in planned[each.name] if run in self.done]
        failed = next((ran for ran in rans if ran.trouble is not None), None)
        if failed is not None and not each.tolerant:
            verdict = Verdict(False, f"{failed.trouble} ({failed.run})")
            self._let_go(each.name, planned)
        elif not each.tolerant and (settled := each.settled_by(plan, ran)) is not None:
            verdict = settled
            self._let_go(each.name, planned)
        elif len(rans) == len(planned[each.name]):
            verdict = each.judge(plan, rans)
            if (verdict.by_time or verdict.more) and each.name not in self.again:
                self.again[each.name] = [*verdict.more] or planned[each.name]
                planned[each.name] = [*planned[each.name], *verdict.more]
                return
        else:
            return
        applies = not verdict.evidence.startswith("does not apply")
        seconds = sum(ran.seconds for ran in rans)
        reason = dict(plan.claims.allow).get(each.name)
        if not verdict.ok and reason and failed is None:
            verdict = Verdict(True, f"{ALLOWED}{reason}: {verdict.evidence}")
        elif verdict.counter is not None and each.by_values:
            self.counters[each.name] = verdict.counter
        self._found(Finding(each.name, each.asks, verdict.ok, verdict.evidence, seconds, applies))

    def _make_again(self, plan: Plan, planned: dict[str, list[Run]]) -> None:
        """Make the runs that the checks in `again` wait for, and judge these checks by all of theirs."""
        for each in self.selected:
            if each.name in self.again and each.name not in self.findings:
                self.done.update({ran.run: ran for ran in self.source.made(self.again[each.name])})
                self._judge(plan, each, planned, self.done[planned[each.name][-1]])

    def _give_up(self, hung: Sequence[Ran], planned: dict[str, list[Run]]) -> None:
        """After runs that hung in a row, fail the checks that wait for runs on as many ranks; if two numbers hung, all."""
        self.gave_up = True
        last, numbers = hung[-1], sorted({ran.run.P for ran in hung})
        where = f"P = {', '.join(map(str, numbers))}"
        evidence = f"not run: {len(hung)} runs in a row hung, {where}; {last.trouble} ({last.run})"
        for each in self.selected:
            left = [run for run in planned[each.name] if run not in self.done]
            if each.name not in self.findings and (len(numbers) > 1 or any(run.P in numbers for run in left)):
                self._found(Finding(each.name, each.asks, False, evidence, 0.0))
                self._let_go(each.name, planned)

    def _let_go(self, name: str, planned: dict[str, list[Run]]) -> None:
        """Skip the runs of a check that no undecided check needs."""
        awaited = {
            run
            for other, runs in planned.items()
            if other != name and other not in self.findings
            for run in runs
        }
        for run in planned[name]:
            if run not in awaited and run not in self.done:
                self.source.skip(run)

    def _look_for_smaller(self) -> None:
        """Find smaller counterexamples for wrong values in a few more runs, unless runs hang."""
        if self.gave_up:
            return
        names = {each.name: each.names for each in self.selected}
        order = [each.name for each in self.selected if each.name in self.counters]
        counters = {name: self.counters[name] for name in order[:_EXPLAINED]}
        wanted = [run for counter in counters.values() for run in smaller_runs(counter)]
        made = {ran.run: ran for ran in self.source.made(list(dict.fromkeys(wanted)))} if wanted else {}
        for name, counter in counters.items():
            for run in smaller_runs(counter):
                ran = made.get(run)
                wrong = [m for m in measure(ran, names[name]) if not m.ok] if ran and not ran.trouble else []
                if wrong:
                    worst = max(wrong, key=lambda each: each.ratio)
                    self.findings[name] = replace(self.findings[name], counterexample=str(worst))
                    break

    def _found(self, finding: Finding) -> None:
        self.findings[finding.name] = finding
        self.progress(finding)


def smaller_runs(counter: Run) -> list[Run]:
    """Return runs smaller than `counter`, the smallest first, that may show the same error; none of packed documents or two rings."""
    if counter.documents or counter.use == TWO_RINGS:
        return []
    lean = replace(counter, B=1, H=counter.H // counter.K, K=1, D=4, meter=False, moved=None, twice=False)
    sizes = [(P, S) for P in (1, 2, 3) if P <= counter.P for S in (P, 2 * P, 4 * P) if S <= counter.S]
    candidates = [replace(lean, P=P, S=S) for P, S in sizes]
    return sorted((run for run in candidates if size(run) < size(counter)), key=size)[:_SMALLER]


__all__ = ["LIMIT", "Finding", "Report", "Source", "check", "check_source", "measure", "smaller_runs"]
