"""`check` makes all checks of a target: it plans the runs, makes each once, and judges them on arrival."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ringlab.conformance import checks
from ringlab.conformance.checks import LOADS, guesses
from ringlab.conformance.checks.check import Check, Plan, Verdict, size
from ringlab.conformance.checks.measuring import measure, truth_of
from ringlab.conformance.report.counterexample import Search, is_gross, troubled
from ringlab.conformance.report.diagnosis import GAVE_UP, NO_TARGET, NOT_ASKED, NOT_CALLED, STOPPED
from ringlab.conformance.report.findings import ALLOWED, Finding, Report
from ringlab.conformance.run.arguments import names_given
from ringlab.conformance.run.isolation import Isolated
from ringlab.conformance.run.loading import VIRTUAL, TargetSpec, transport_of
from ringlab.conformance.run.run import ANY_LAYOUT, ENDLESS, GIVEN, Ran, Run, Trouble
from ringlab.conformance.run.source import Guessing, Source
from ringlab.conformance.run.virtual import InThisProcess
from ringlab.errors import BackendError

LIMIT = 30.0
"""The seconds for the import of a target, and for each run."""
_REPEATS = 3
"""The number of times that a wrong plain run is repeated, to find a target that is wrong by chance."""
_IN_A_ROW = 2
"""The number of runs that may reach the time limit one after the other."""
_EXPLAINED = 3  # the most checks that get a smaller counterexample
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
    fail_fast: whether to stop at the first check that fails.
    limit: seconds for each run; a longer run fails, whether it hangs or is only slow.
    transport: "virtual", or a transport of `ringlab.launch`, for targets over ringlab's Comm; targets over
    torch.distributed run on processes.
    isolate: whether to make the runs in child processes; otherwise they are made in this process on virtual
    ranks, where a run that hangs cannot be stopped.
    progress: a function that is called with each finding.

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

    def opened() -> Isolated | InThisProcess:
        return Isolated(spec, limit) if isolate else InThisProcess(spec)

    with opened() as source:
        return report_on(
            source, spec, quick=quick, seed=seed, only=only, fail_fast=fail_fast, limit=limit, progress=progress, opened=opened
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

    opened: returns another source of the same target for guesses (see `guesses.right_if`); without it, no
    guesses are made.
    Raises: BackendError for an unknown check.
    """
    name = spec.what if isinstance(spec.what, str) else ""
    report = Report(name, "", spec.transport, quick, seed, limit)
    return _Suite(source, selected(only, quick), report, progress, fail_fast, opened).run()


def check_source(source: Source, among: Sequence[Check], *, seed: int = 0) -> Report:
    """Return the findings of the quick checks in `among` about the target whose runs `source` makes."""
    return _Suite(source, _quick(among), Report("", "", VIRTUAL, True, seed, LIMIT)).run()


def selected(only: Sequence[str], quick: bool) -> tuple[Check, ...]:
    """Return the checks named in `only`; if it is empty, all checks, or with `quick` those of the quick tier.

    Raises: BackendError for an unknown check.
    """
    chosen = checks.chosen(tuple(only))
    return _quick(chosen) if quick and not only else chosen


def _quick(among: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(each for each in among if each.tier == "quick")


class _Suite:
    """One check of one target, from the first run to the last finding."""

    plan: Plan

    def __init__(
        self,
        source: Source,
        selected: tuple[Check, ...],
        report: Report,
        progress: Callable[[Finding], None] = lambda finding: None,
        fail_fast: bool = False,
        opened: Opened | None = None,
    ) -> None:
        self.source, self.selected, self.result = source, selected, report
        self.progress, self.fail_fast, self.opened = progress, fail_fast, opened
        self.planned: dict[str, list[Run]] = {}
        self.done: dict[Run, Ran] = {}
        self.findings: dict[str, Finding] = {}
        self.counters: dict[str, Run] = {}
        self.gave_up = False
        self.again, self.tries = dict[str, list[Run]](), Counter[str]()
        self.more = set[Run]()

    def run(self) -> Report:
        """Return the report after all stages."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # leaves the other cores to the ranks, which compute in other processes
        start = time.monotonic()
        try:
            if self._reads_the_claims():
                self._plan_the_runs()
                self._make_and_judge()
                self._make_again()
                self._name_what_is_left()
                self._look_for_smaller()
        finally:
            torch.set_num_threads(threads)
        self.result.findings = [
            self.findings[name] for name in (LOADS, *(each.name for each in self.selected))
        ]
        self.result.runs, self.result.seconds = len(self.done), time.monotonic() - start
        return self.result

    def _reads_the_claims(self) -> bool:
        """Import the target, and return whether its claims are valid."""
        start = time.monotonic()
        # Autograd's first use takes a second for imports. Do it now, while child processes import the target.
        truth_of(Run(1, 2, ANY_LAYOUT, causal=True, D=2))
        claims, result = self.source.claims(), self.result
        took, asks = time.monotonic() - start, "the target can be imported"
        if isinstance(claims, Trouble):
            self._found(Finding(LOADS, asks, False, str(claims), took))
            self._not_run(NO_TARGET)
            return False
        result.target, result.over = result.target or claims.name, claims.over
        result.transport = transport_of(claims.over, result.transport)
        evidence = f"{claims.name} over {claims.over}, layouts {', '.join(claims.layouts)}; q is ({', '.join(claims.axes)})"
        self._found(Finding(LOADS, asks, True, evidence, took))
        self.plan = Plan(claims, result.quick, result.seed)
        return True

    def _plan_the_runs(self) -> None:
        """Plan the runs of each check that applies. Raises: BackendError for an unknown check in `allow`."""
        claims = self.plan.claims
        if unknown := sorted({*dict(claims.allow)} - {*checks.names()}):
            raise BackendError(f"allow= of checks among {', '.join(checks.names())}", ", ".join(unknown))
        for each in self.selected:
            reason = each.needs(self.plan)
            self.planned[each.name] = [] if reason else list(dict.fromkeys(each.runs(self.plan)))
            if reason:
                evidence = f"does not apply: {reason}"
                self._found(Finding(each.name, each.asks, True, evidence, 0.0, applies=False))
        asked = {_of_arguments(run) for runs in self.planned.values() for run in runs}
        given = {name for run in asked for name in names_given(claims, run)}
        self.result.not_asked = tuple(name for name in claims.open if name not in given)

    def _make_and_judge(self) -> None:
        """Make each run once, and judge each check as soon as its verdict is certain."""
        runs = dict.fromkeys(run for planned in self.planned.values() for run in planned)
        hung: list[Ran] = []  # runs in a row that reached the limit although no rank was made to die or stall
        for ran in self.source.made(sorted(runs, key=lambda run: (run.ends, run.P))):
            self.done[ran.run] = ran
            if ran.trouble is not None and ran.trouble.uncallable and _is_plain(ran.run):
                self._cannot_call(ran.trouble)
                return
            hangs = ran.trouble is not None and ran.trouble.kind in ENDLESS and not ran.run.ends
            hung = [*hung, ran] if hangs else []
            for each in self._undecided():
                if ran.run in self.planned[each.name]:
                    self._judge(each, ran)
            if len(hung) >= _IN_A_ROW:
                self._give_up(hung)
            if self._stops():
                for unneeded in runs.keys() - self.done.keys():
                    self.source.skip(unneeded)
            if (not hung and self._is_called_wrongly()) or self._stops():
                break

    def _make_again(self) -> None:
        """Make the runs that the checks in `again` wait for, and judge these checks by all their runs."""
        if self.result.right_if:
            return
        for each in self.selected:
            while each.name in self.again and each.name not in self.findings and not self._stops():
                waiting = self.again.pop(each.name)
                self.done.update({ran.run: ran for ran in self.source.made(waiting)})
                if waiting[-1] in self.done:  # else another check has let go of this run
                    self._judge(each, self.done[waiting[-1]])

    def _name_what_is_left(self) -> None:
        """Record the reason for each check that was not judged."""
        self._not_run(NOT_ASKED if self.result.right_if else STOPPED if self._stops() else "not run")

    def _look_for_smaller(self) -> None:
        """Find smaller counterexamples and places of wrong values by a few more runs, unless runs reach the limit."""
        if self.result.right_if or not self.findings[LOADS].ok:
            return
        checked = [each for each in self.selected if each.name in self.counters][:_EXPLAINED]
        searches = [
            Search(self.done[self.counters[each.name]], each.names, self.plan.claims) for each in checked
        ]
        wanted = {run for search in searches for run in search.runs} if not self.gave_up else set()
        made = {ran.run: ran for ran in self.source.made(sorted(wanted, key=size))} if wanted else {}
        for each, search in zip(checked, searches, strict=True):
            text, where = search.found(made)
            self.findings[each.name] = replace(self.findings[each.name], counterexample=text, where=where)

    def _judge(self, each: Check, ran: Ran) -> None:
        """Judge a check if all its runs are made, or if the latest run, `ran`, settles the verdict."""
        planned = self.planned[each.name]
        rans = [self.done[run] for run in planned if run in self.done]
        spared = self.more if each.spares_more else set()
        failed = next((ran for ran in rans if ran.trouble is not None and ran.run not in spared), None)
        ends = failed if not each.tolerant else None
        if ends is not None:
            verdict = Verdict(False, f"{ends.trouble} ({ends.run})")
            self._let_go(each.name)
        elif (
            not each.tolerant
            and (settled := each.settled_by(self.plan, ran)) is not None
            and is_gross(ran, each.names)
        ):  # a small error may come from a wrong claim of dtypes; a later run may show a larger error
            verdict = settled
            self._let_go(each.name)
        elif len(rans) == len(planned):
            verdict = each.judge(self.plan, rans)
            if (verdict.by_time or verdict.more) and self.tries[each.name] < each.rounds:
                self.again[each.name] = [*verdict.more] or planned
                self.planned[each.name] = [*planned, *verdict.more]
                self.more.update(verdict.more)
                self.tries[each.name] += 1
                return
        else:
            return
        reason = dict(self.plan.claims.allow).get(each.name)
        if not verdict.ok and reason and failed is None:
            verdict = Verdict(True, f"{ALLOWED}{reason}: {verdict.evidence}")
        elif verdict.counter is not None and each.by_values:
            self.counters[each.name] = verdict.counter
        self._found(
            Finding(
                each.name, each.asks, verdict.ok, verdict.evidence, sum(ran.seconds for ran in rans),
                applies=not verdict.evidence.startswith("does not apply"), where=troubled(ends) if ends is not None else None,
            )
        )  # fmt: skip

    def _cannot_call(self, trouble: Trouble) -> None:
        """End the check with one error, because all other calls would fail in the same way."""
        found = self.findings[LOADS]
        self._found(replace(found, asks="the target can be called", ok=False, evidence=str(trouble)))
        self._not_run(NOT_CALLED)

    def _is_called_wrongly(self) -> bool:
        """Return whether a plain check has failed and another way to call the target is right.

        A wrong way to call the target explains all other failures.
        """
        failed = any(name in guesses.PLAIN and not found.ok for name, found in self.findings.items())
        if self.opened is None or not failed:
            return False
        opened, self.opened = self.opened, None  # the guesses are made only once
        if not self._is_wrong_by_chance():
            self.result.right_if = guesses.right_if(self.plan.claims, partial(self._guessing, opened))
        return bool(self.result.right_if)

    def _is_wrong_by_chance(self) -> bool:
        """Return whether a wrong plain run is right when it is repeated, so that no guess explains it."""
        wrong = [self.counters[name] for name in self.counters if name in guesses.PLAIN][:1]
        again = (ran for _ in range(_REPEATS) for ran in self.source.made(wrong))
        return any(ran.trouble is None and all(each.ok for each in measure(ran)) for ran in again)

    def _guessing(self, opened: Opened) -> AbstractContextManager[Guessing]:
        if self._stops() and self.result.transport == VIRTUAL and isinstance(self.source, Guessing):
            return nullcontext(self.source)
        # Open a new source, because a launch of processes would first make all runs planned for it.
        return opened()

    def _stops(self) -> bool:
        return self.fail_fast and not all(found.ok for found in self.findings.values())

    def _give_up(self, hung: Sequence[Ran]) -> None:
        """After several runs in a row that reached the limit, fail every check that waits for runs with the same number of ranks.

        If they had two numbers of ranks, fail all checks that are not decided.
        """
        self.gave_up = True
        last, numbers = hung[-1], sorted({ran.run.P for ran in hung})
        where = f"P = {', '.join(map(str, numbers))}"
        evidence = f"{GAVE_UP}: {len(hung)} runs, {where}; {last.trouble} ({last.run})"
        for each in self._undecided():
            left = [run for run in self.planned[each.name] if run not in self.done]
            if len(numbers) > 1 or any(run.P in numbers for run in left):
                self._found(Finding(each.name, each.asks, False, evidence, 0.0))
                self._let_go(each.name)

    def _let_go(self, name: str) -> None:
        """Skip the remaining runs of a check, except those that another undecided check needs."""
        awaited = {
            run for other in self._undecided() if other.name != name for run in self.planned[other.name]
        }
        for run in self.planned[name]:
            if run not in awaited and run not in self.done:
                self.source.skip(run)

    def _undecided(self) -> list[Check]:
        return [each for each in self.selected if each.name not in self.findings]

    def _not_run(self, evidence: str) -> None:
        for each in self._undecided():
            self._found(Finding(each.name, each.asks, False, evidence, 0.0))

    def _found(self, finding: Finding) -> None:
        self.findings[finding.name] = finding
        self.progress(finding)


def _is_plain(run: Run) -> bool:
    """Return whether the call of a run has no arguments that only some targets take."""
    return not any(getattr(run, field) for field in GIVEN)


def _of_arguments(run: Run) -> Run:
    """Return the run reduced to the fields that determine the arguments of its call."""
    fields = {field: getattr(run, field) for field in (*GIVEN, "causal", "scale", "S", "B", "dropout_seed")}
    return Run(1, layout=ANY_LAYOUT, **fields)
