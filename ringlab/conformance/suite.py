"""All checks of a target: its runs are planned, made once each, and judged as they arrive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ringlab.conformance import checks
from ringlab.conformance.checks import LOADS, guesses
from ringlab.conformance.checks.check import Check, Plan, Verdict, size
from ringlab.conformance.checks.measuring import measure, truth_of
from ringlab.conformance.report.counterexample import Search, is_gross, smaller_runs, troubled
from ringlab.conformance.report.diagnosis import NO_TARGET, NOT_ASKED, NOT_CALLED, STOPPED
from ringlab.conformance.report.findings import ALLOWED, Finding, Report
from ringlab.conformance.run.arguments import names_given
from ringlab.conformance.run.isolation import HUNG, Isolated
from ringlab.conformance.run.loading import VIRTUAL, TargetSpec, transport_of
from ringlab.conformance.run.run import ANY_LAYOUT, GIVEN, Ran, Run, Trouble
from ringlab.conformance.run.source import Guessing, Source
from ringlab.conformance.run.virtual import InThisProcess
from ringlab.conformance.target.claims import Claims
from ringlab.errors import BackendError

LIMIT = 30.0
"""Seconds for the import of a target, and for each run."""


AGAIN = 2
"""How often the runs of a check are made again where a busy machine alone could be the cause of its verdict."""


_IN_A_ROW = 2
"""Runs in a row that may hang; each costs the limit."""


_EXPLAINED = 3  # checks at most, whose counterexample is made smaller


Opened = Callable[[], AbstractContextManager[Guessing]]


def check(
    target: Any,
    *,
    quick: bool = False,
    seed: int = 0,
    only: Sequence[str] = (),
    fail_fast: bool = False,
    limit: float = LIMIT,
    transport: str = VIRTUAL,
    device: str = "cpu",
    isolate: bool = True,
    progress: Callable[[Finding], None] = lambda finding: None,
    **claims: Any,
) -> Report:
    """Return the findings about `target`: a function, a `Target`, or "package.module:name".

    claims: fields of `Target` that replace the target's own, such as layouts=("contiguous",).
    fail_fast: stop at the first check that fails. limit: seconds for each run; a longer run has hung. transport: "virtual", or one of
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
    spec = TargetSpec(target, transport, device, claims)
    if not limit > 0:
        raise BackendError("a limit above 0 seconds", repr(limit))

    def source_of(spec: TargetSpec) -> Isolated | InThisProcess:
        return Isolated(spec, limit) if isolate else InThisProcess(spec)

    with source_of(spec) as source:
        return report_on(
            source, spec, quick=quick, seed=seed, only=only, fail_fast=fail_fast, limit=limit, progress=progress,
            opened=lambda: source_of(spec),
        )  # fmt: skip


def report_on(
    source: Source,
    spec: TargetSpec,
    *,
    quick: bool,
    seed: int,
    only: Sequence[str],
    fail_fast: bool,
    limit: float,
    progress: Callable[[Finding], None],
    opened: Opened | None = None,
) -> Report:
    """Return the findings about the target of `spec`, whose runs `source` makes; see `check`.

    opened: returns another source of the same target, for guesses (see `guesses.right_if`); none are made if it is None.
    Raises: BackendError for an unknown check.
    """
    suite = _Suite(source, spec, selected(only, quick), quick, seed, limit, progress, opened)
    suite.fail_fast = fail_fast
    return suite.report()


def selected(only: Sequence[str], quick: bool) -> tuple[Check, ...]:
    """Return the checks named in `only`; if none are, all, or with `quick` those of the quick tier.

    Raises: BackendError for an unknown check.
    """
    chosen = checks.chosen(tuple(only))
    return _quick(chosen) if quick and not only else chosen


def check_source(source: Source, among: Sequence[Check], *, seed: int = 0) -> Report:
    """Return the findings of the quick ones `among` these checks, about a target whose runs `source` makes."""
    nothing = TargetSpec("")
    return _Suite(source, nothing, _quick(among), True, seed, LIMIT, lambda finding: None).report()


def _quick(among: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(each for each in among if each.tier == "quick")


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
        opened: Opened | None = None,
    ) -> None:
        self.source, self.spec, self.progress, self.opened = source, spec, progress, opened
        self.selected = selected
        self.done: dict[Run, Ran] = {}
        self.findings: dict[str, Finding] = {}
        self.counters: dict[str, Run] = {}
        self.gave_up = self.fail_fast = False
        self.again, self.tries = dict[str, list[Run]](), Counter[str]()
        name = spec.what if isinstance(spec.what, str) else ""
        self.result = Report(name, "", spec.transport, quick, seed, limit)

    def report(self) -> Report:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the ranks compute on the other cores meanwhile
        try:
            return self._report()
        finally:
            torch.set_num_threads(threads)

    def _report(self) -> Report:
        start = time.monotonic()
        # Autograd's first use imports for a second. Child processes are importing now, too.
        truth_of(Run(1, 2, ANY_LAYOUT, causal=True, D=2))
        claims = self.source.claims()
        took = time.monotonic() - start
        if isinstance(claims, Trouble):
            self._found(Finding(LOADS, "the target can be imported", False, str(claims), took))
            for each in self.selected:
                self._found(Finding(each.name, each.asks, False, NO_TARGET, 0.0))
        else:
            self.result.target, self.result.over = self.result.target or claims.name, claims.over
            self.result.transport = transport_of(claims.over, self.result.transport)
            evidence = f"{claims.name} over {claims.over}, layouts {', '.join(claims.layouts)}; q is ({', '.join(claims.axes)})"
            self._found(Finding(LOADS, "the target can be imported", True, evidence, took))
            self._run(Plan(claims, self.result.quick, self.result.seed))
        order = [LOADS, *(each.name for each in self.selected)]
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
        self.result.not_asked = _not_asked(plan.claims, runs)
        hung: list[Ran] = []  # in a row, with no fault that others could wait for
        for ran in self.source.made(sorted(runs, key=lambda run: (run.ends, run.P))):
            self.done[ran.run] = ran
            if ran.trouble is not None and ran.trouble.uncallable and _is_plain(ran.run):
                self._cannot_call(ran.trouble)
                return
            hangs = ran.trouble is not None and ran.trouble.kind == HUNG and not ran.run.ends
            hung = [*hung, ran] if hangs else []
            for each in self.selected:
                if each.name not in self.findings and ran.run in planned[each.name]:
                    self._judge(plan, each, planned, ran)
            if len(hung) >= _IN_A_ROW:
                self._give_up(hung, planned)
            if self._stops():
                for unneeded in runs.keys() - self.done.keys():
                    self.source.skip(unneeded)
            if (not hung and self._is_called_wrongly(plan.claims)) or self._stops():
                break
        if not self.result.right_if and not self._stops():
            self._make_again(plan, planned)
        for each in self.selected:
            if each.name not in self.findings:
                left = NOT_ASKED if self.result.right_if else STOPPED if self._stops() else "not run"
                self._found(Finding(each.name, each.asks, False, left, 0.0))
        if not self.result.right_if:
            self._look_for_smaller(plan.claims)

    def _cannot_call(self, trouble: Trouble) -> None:
        """End with one error: all other calls would fail in the same way."""
        found = self.findings[LOADS]
        self._found(replace(found, asks="the target can be called", ok=False, evidence=str(trouble)))
        for each in self.selected:
            if each.name not in self.findings:
                self._found(Finding(each.name, each.asks, False, NOT_CALLED, 0.0))

    def _judge(self, plan: Plan, each: Check, planned: dict[str, list[Run]], ran: Ran) -> None:
        """Judge a check if all its runs are made, or the last one, `ran`, settles it."""
        rans = [self.done[run] for run in planned[each.name] if run in self.done]
        failed = next((ran for ran in rans if ran.trouble is not None), None)
        if failed is not None and not each.tolerant:
            verdict = Verdict(False, f"{failed.trouble} ({failed.run})")
            self._let_go(each.name, planned)
        elif (
            not each.tolerant
            and (settled := each.settled_by(plan, ran)) is not None
            and is_gross(ran, each.names)
        ):  # after an error as small as rounding, which a wrong claim of dtypes may explain, a later run may show more
            verdict = settled
            self._let_go(each.name, planned)
        elif len(rans) == len(planned[each.name]):
            verdict = each.judge(plan, rans)
            if (verdict.by_time or verdict.more) and self.tries[each.name] < AGAIN:
                self.again[each.name] = [*verdict.more] or planned[each.name]
                planned[each.name] = [*planned[each.name], *verdict.more]
                self.tries[each.name] += 1
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
        where = troubled(failed) if failed is not None and not each.tolerant else None
        self._found(
            Finding(each.name, each.asks, verdict.ok, verdict.evidence, seconds, applies, where=where)
        )

    def _is_called_wrongly(self, claims: Claims) -> bool:
        """Whether a plain check has failed, and another way to call the target is right, so that all other failures follow."""
        failed = any(name in guesses.PLAIN and not found.ok for name, found in self.findings.items())
        if self.opened is None or not failed:
            return False
        self.result.right_if = guesses.right_if(claims, partial(self._guessing, self.opened))
        self.opened = None  # once is enough
        return bool(self.result.right_if)

    def _guessing(self, opened: Opened) -> AbstractContextManager[Guessing]:
        if self._stops() and self.result.transport == VIRTUAL and isinstance(self.source, Guessing):
            return nullcontext(
                self.source
            )  # a launch of processes would make its other runs first, skipped or not
        return opened()

    def _stops(self) -> bool:
        return self.fail_fast and not all(found.ok for found in self.findings.values())

    def _make_again(self, plan: Plan, planned: dict[str, list[Run]]) -> None:
        """Make the runs that the checks in `again` wait for, and judge these checks by all of theirs."""
        for each in self.selected:
            while each.name in self.again and each.name not in self.findings and not self._stops():
                waiting = self.again.pop(each.name)
                self.done.update({ran.run: ran for ran in self.source.made(waiting)})
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

    def _look_for_smaller(self, claims: Claims) -> None:
        """Find smaller counterexamples for wrong values, and where they are, in a few more runs unless runs hang."""
        checked = [each for each in self.selected if each.name in self.counters][:_EXPLAINED]
        searches = [Search(self.done[self.counters[each.name]], each.names, claims) for each in checked]
        wanted = {run for search in searches for run in search.runs} if not self.gave_up else set()
        made = {ran.run: ran for ran in self.source.made(sorted(wanted, key=size))} if wanted else {}
        for each, search in zip(checked, searches, strict=True):
            text, where = search.found(made)
            self.findings[each.name] = replace(self.findings[each.name], counterexample=text, where=where)

    def _found(self, finding: Finding) -> None:
        self.findings[finding.name] = finding
        self.progress(finding)


def _is_plain(run: Run) -> bool:
    """Whether a run gives a target nothing that only some targets take."""
    return not any(getattr(run, field) for field in GIVEN)


def _not_asked(claims: Claims, runs: Iterable[Run]) -> tuple[str, ...]:
    """The parameters of the target to which none of these runs gives a value."""
    asked = {name for run in {_of_arguments(run) for run in runs} for name in names_given(claims, run)}
    return tuple(name for name in claims.open if name not in asked)


def _of_arguments(run: Run) -> Run:
    """The run without all that no argument depends on."""
    fields = {field: getattr(run, field) for field in (*GIVEN, "causal", "scale", "S", "dropout_seed")}
    return Run(1, layout=ANY_LAYOUT, **fields)


__all__ = [
    "ALLOWED",
    "LIMIT",
    "NO_TARGET",
    "Finding",
    "Report",
    "check",
    "check_source",
    "measure",
    "report_on",
    "smaller_runs",
]
