"""Calls of a function on any number of ranks, one after another, on virtual ranks or on processes.

The kinds of targets that use this module return results that are compared with the results of other calls, or
with the oracle's.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.processes.launch import launch
from ringlab.comm.protocol import Comm, Work, Wrapper
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.virtual.threads import in_another_thread
from ringlab.conformance.checks import LOADS, refuse_unknown
from ringlab.conformance.checks.arguments import FORMS
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.run.caller_state import changed, kept_modes, state
from ringlab.conformance.run.folder import leave, rank_path, ranks_left
from ringlab.conformance.run.loading import VIRTUAL, named
from ringlab.conformance.run.run import RAISED, WRONG_RESULT, Trouble, in_words
from ringlab.conformance.run.stacks import standing, tell_stacks
from ringlab.conformance.run.troubles import crash_in, described, first_trouble, over_the_limit
from ringlab.conformance.target.argument_names import AROUND, GROUPS, THROUGH
from ringlab.conformance.target.calling import (
    CannotCall,
    check_callable,
    name_of,
    parameters,
    required,
    swallows,
    written,
)
from ringlab.conformance.target.claims import RING, TORCH
from ringlab.errors import BackendError
from ringlab.temporary import TemporaryFolder

ResultOf: TypeAlias = Callable[..., Any]
_IN_A_ROW = 3  # after this many failed calls in a row on P ranks, no more calls are made on P ranks
_ENDED = 2  # the limit for calls that hang or end their process, in a row or not


class OnRanks(Protocol):
    """A call as a hashable dataclass; P is the number of its ranks."""

    @property
    def P(self) -> int:  # noqa: N802
        """Return the number of ranks."""


C = TypeVar("C", bound=OnRanks)
R = TypeVar("R")


class Calls(Generic[C, R]):
    """Calls one function, and keeps the results of all ranks of each call, or the reason why there are none.

    result: computes one rank's result of a call, from the function, the call, the ring if there is one, the
    rank and the seed.
    limit: seconds for each call on processes. given: the arguments that a function may have, besides those of
    `around`.
    names: returns the arguments that a case gives; None if each case gives all of them.
    refusable: whether an error in a case may be a refusal of its arguments; no such cases by default.
    draws: whether the function may draw random numbers, or set a seed.

    A result needs a list `changed`, to which the names of the changed parts of the caller's state are added. A
    case may have two more fields. default: the name of the default dtype of new tensors. beside: whether each
    rank of a ring makes another call in a second thread, once just before its first message and once just after
    it.

    Raises: BackendError unless the target is a function that has one of these arguments and requires no other
    argument.
    """

    def __init__(
        self,
        target: Any,
        result: ResultOf,
        seed: int,
        limit: float,
        given: Collection[str],
        names: Callable[[C], Collection[str]] | None = None,
        refusable: Callable[[C], bool] = lambda case: False,
        draws: bool = False,
    ) -> None:
        self.target, self.result, self.seed, self.limit = target, result, seed, limit
        self.names: Callable[[C], Collection[str]] = names or (lambda case: given)
        self.refusable, self.draws = refusable, draws
        self.function = function = named(target) if isinstance(target, str) else target
        check_parameters(function, {*given, *AROUND})
        self.over_ring = not {"ring", "comm"}.isdisjoint(parameters(function))
        self.done: dict[C, list[R] | Trouble] = {}
        self.seconds: dict[C, float] = {}

    def make(self, cases: Iterable[C]) -> None:
        """Make the calls of the cases that were not made yet.

        Raises: CannotCall if the function does not accept the arguments of a case.
        """
        left = [case for case in dict.fromkeys(cases) if case not in self.done]
        with redirect_stdout(sys.stderr):  # because a report may go to stdout
            for P in sorted({case.P for case in left}):
                make = self._on_virtual_ranks if self.over_ring else self._on_processes
                make(P, [case for case in left if case.P == P])

    def of(self, *cases: C) -> list[list[R]]:
        """Return the results of all ranks for each of the cases. Raises: Failed if a case has no result."""
        for case in cases:
            if isinstance(trouble := self.done[case], Trouble):
                raise Failed(f"{trouble} ({case})")
        return [found for case in cases if not isinstance(found := self.done[case], Trouble)]

    def refusal(self, case: C) -> Trouble | None:
        """Return the error by which the function may have refused the arguments of a case, or None."""
        trouble = self.done[case]
        if isinstance(trouble, Trouble) and trouble.kind == RAISED and self.refusable(case):
            return trouble
        return None

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Return the parameters to which no case gave a value, including `*args` and `**kwargs`."""
        asked = {
            *AROUND,
            *required(self.function),
            *(name for case in self.done for name in self.names(case)),
        }
        return tuple(name for name in written(self.function) if name not in asked)

    def _on_virtual_ranks(self, P: int, cases: Sequence[C]) -> None:
        for case in cases:
            begun = time.monotonic()
            try:
                with kept_modes():
                    set_default_dtype(case)
                    before = state(numbers=not self.draws)
                    made = VirtualCluster(P, memory=False).run(self._on_ring, case).results
                    made[0].changed += changed(before)
                    self.done[case] = made
            except Exception as error:
                _raise_if_not_called(error)
                self.done[case] = described(error)
            self.seconds[case] = time.monotonic() - begun

    def _on_ring(self, ring: Ring, case: C) -> R:
        def beside() -> None:
            VirtualCluster(case.P, memory=False).run(self._on_another_ring, case)

        grad = torch.is_grad_enabled()
        over = Ring(_Interrupted(ring.comm, beside)) if getattr(case, "beside", False) else ring
        made: Any = self.result(self.function, case, over, ring.rank, self.seed)
        made.changed += [] if torch.is_grad_enabled() == grad else ["the grad mode"]
        return made

    def _on_another_ring(self, ring: Ring, case: C) -> None:
        self.result(self.function, case, ring, ring.rank, self.seed + 1)

    def _on_processes(self, P: int, cases: Sequence[C]) -> None:
        """Make the calls in one launch; after a failed call, start a new launch for the others."""
        left, in_a_row, ended = list(cases), 0, 0
        while left and in_a_row < _IN_A_ROW and ended < _ENDED:
            begun = time.monotonic()
            made = self._launched(P, left)
            self.seconds |= dict.fromkeys(left[:made], (time.monotonic() - begun) / made)
            last = self.done[left[made - 1]]
            if isinstance(last, Trouble) and self.refusal(left[made - 1]) is None:
                in_a_row = in_a_row + 1 if made == 1 else 1
                ended += last.kind not in (RAISED, WRONG_RESULT)
            left = left[made:]
        self.done |= dict.fromkeys(left, Trouble("not run", f"calls before it failed, on P={P}"))

    def _launched(self, P: int, cases: Sequence[C]) -> int:
        """Make the calls up to the first one that fails; return the number of calls made."""
        failure: Exception = RuntimeError("a rank left no result")
        arguments = (P, self.target, self.result, cases, self.seed, self.limit, self.draws)
        with TemporaryFolder(prefix="ringlab-check-") as name:
            try:
                launch(_program, *arguments, name, timeout=2 * self.limit * len(cases), memory=False)
            except Exception as error:
                _raise_if_not_called(error)
                failure = error
            for index, case in enumerate(cases):
                parts = ranks_left(Path(name), index, P)
                if None in parts or any(isinstance(part, _RankTrouble) for part in parts):
                    self.done[case] = _trouble_of(failure, parts)
                    return index + 1
                self.done[case] = parts
        return len(cases)


def _trouble_of(failure: Exception, parts: Sequence[Any]) -> Trouble:
    """Return the trouble of a rank that hung or ended, or else that of the rank that failed first."""
    reported = first_trouble(failure, [x if isinstance(x, _RankTrouble) else None for x in parts])
    if reported is not None and reported.kind != RAISED:
        return reported
    return crash_in(failure) or reported or described(failure)


def _raise_if_not_called(error: BaseException) -> None:
    """Raise the CannotCall behind an error, if any, because all other calls would fail in the same way."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotCall):
            raise cause
        cause = cause.__cause__


def around(ring: Ring | None, rank: int, P: int, group: Any = None) -> dict[str, Any]:
    """Return the values of the arguments in `AROUND`, by name; process groups exist only without a ring.

    group: the process group, if it is not the world.
    """
    known: dict[str, Any] = {"ring": ring, "comm": ring and ring.comm, "rank": rank, "world_size": P}
    return (
        known
        if ring is not None
        else {**known, **dict.fromkeys(GROUPS, group or torch.distributed.group.WORLD)}
    )


def check_parameters(function: Any, given: Collection[str]) -> None:
    """Check that `given` has all arguments that the function requires, and at least one that it takes.

    Raises: BackendError otherwise.
    """
    among = f"a function with parameters among {', '.join(sorted(given))}"
    check_callable(function)
    if parameters(function).isdisjoint({*given} - {*AROUND}):
        raise BackendError(among, f"{name_of(function)}({', '.join(written(function))})")
    if missing := sorted(required(function) - {*given}):
        raise BackendError(among, f"one that requires {', '.join(missing)}", "bind it, or give it a default")


class Failed(Exception):
    """A call that has no result."""


@dataclass
class _RankTrouble:
    """The trouble of one rank, which takes the place of the rank's result."""

    trouble: Trouble


def _program(
    ring: Ring,
    target: Any,
    result: ResultOf,
    cases: Sequence[Any],
    seed: int,
    limit: float,
    draws: bool,
    folder: str,
) -> None:
    function = named(target) if isinstance(target, str) else target
    tell_stacks(Path(folder), ring.rank)
    for index, case in enumerate(cases):
        path = rank_path(Path(folder), index, ring.rank)
        watchdog = threading.Timer(limit, _hung, (path, ring.world_size, limit))
        watchdog.start()
        try:
            with kept_modes():
                set_default_dtype(case)
                before = state(numbers=not draws)
                made = result(function, case, None, ring.rank, seed)
                made.changed += changed(before)
                leave(path, made)
        except BaseException as error:
            leave(path, _RankTrouble(described(error)))
            raise
        finally:
            watchdog.cancel()


class _Interrupted(Wrapper):
    """A transport of one rank; another call is made in a second thread just before its first message, and just after.

    If a function keeps a buffer between its calls, the buffer then holds values of the other call.
    """

    def __init__(self, inner: Comm, other: Callable[[], None]) -> None:
        super().__init__(inner)
        self.other, self.left = other, 2

    def exchange(self, **message: Any) -> Work:
        """Send and receive as the inner transport does."""
        self._interrupt()
        return _InterruptedWork(self.inner.exchange(**message), self._interrupt)

    def _interrupt(self) -> None:
        if self.left:
            self.left -= 1
            in_another_thread(self.other)


class _InterruptedWork(Work):
    def __init__(self, inner: Work, then: Callable[[], None]) -> None:
        self.inner, self.then = inner, then

    def wait(self) -> tuple[Tensor, ...]:
        received = self.inner.wait()
        self.then()
        return received


def set_default_dtype(case: Any) -> None:
    """Set the default dtype of a case, if it has one. `kept_modes` restores it."""
    if name := getattr(case, "default", ""):
        torch.set_default_dtype(getattr(torch, name))


def _hung(path: Path, P: int, limit: float) -> None:
    leave(path, _RankTrouble(over_the_limit(limit, "one call", standing(path.parent, range(P)))))
    os._exit(1)


@dataclass(frozen=True)
class CallCheck(Generic[C, R]):
    """One line of a table of checks.

    cases: returns the cases for these numbers of ranks. calls: returns the calls that a case needs. wrong:
    returns a sentence on the fault of a case, or ""; it raises Failed if one of the calls has no result.
    needs: groups of parameters; the function must have at least one parameter of each group.
    more: returns cases that depend on the function; it is called after the cases of all checks, and of `more`
    of earlier checks, are made. A function may refuse some of these cases. If a check has no `more`, the
    function must refuse all or none of its cases.
    large: whether its calls are large, so that the quick tier leaves them out.
    """

    name: str
    asks: str
    cases: Callable[[tuple[int, ...]], list[C]]
    calls: Callable[[C], list[C]]
    wrong: Callable[[Calls[C, R], C], str]
    needs: tuple[tuple[str, ...], ...] = ()
    more: Callable[[Calls[C, R], tuple[int, ...]], list[C]] | None = None
    large: bool = False


def numbers_of_ranks(ranks: Sequence[int] | None, quick: bool) -> tuple[int, ...]:
    """Return `ranks`, or if it is None the numbers of ranks of the quick or the full tier."""
    return ((2, 3) if quick else (2, 3, 4)) if ranks is None else tuple(ranks)


def report(
    calls: Calls[C, R],
    checks: Sequence[CallCheck[C, R]],
    only: Sequence[str],
    ranks: tuple[int, ...],
    what: str,
    skip: Mapping[str, str],
    quick: bool,
) -> Report:
    """Return the findings of the checks called `only`; if it is empty, of all checks, or with `quick` of all but large ones.

    what: the kind of target. skip: the reasons why checks do not apply, by name of the check.

    Raises: BackendError for an unknown check.
    """
    refuse_unknown(only, [check.name for check in checks])
    selected = [check for check in checks if check.name in only or not (only or (quick and check.large))]
    reasons = {check.name: skip.get(check.name) or lacks(check.needs, calls.function) for check in selected}
    wanted = [check for check in selected if not reasons[check.name]]
    cases = {check.name: check.cases(ranks) for check in wanted}
    calls.make(each for check in wanted for case in cases[check.name] for each in check.calls(case))
    for check in wanted:
        if check.more is not None:
            cases[check.name] = check.more(calls, ranks)
            calls.make(each for case in cases[check.name] for each in check.calls(case))
    target, function = calls.target, calls.function
    name = target if isinstance(target, str) else name_of(function)
    over, transport = (RING, VIRTUAL) if calls.over_ring else (TORCH, "gloo")
    loads = Finding(LOADS, "the target can be imported", True, f"{name}, {what} over {over}", 0.0)
    found = [_finding(check, calls, cases.get(check.name, []), reasons[check.name]) for check in selected]
    seconds = sum(calls.seconds.values())
    made = len(calls.done), seconds
    return Report(
        name, over, transport, quick, calls.seed, calls.limit, [loads, *found], *made, not_asked=calls.not_asked
    )  # fmt: skip


def lacks(needs: Sequence[Collection[str]], function: Any) -> str:
    """Return words for a group of which the function has no parameter, or ""."""
    there = parameters(function) | ({*THROUGH} if swallows(function) else set())
    for names in needs:
        if there.isdisjoint(names):
            return f"it has no parameter {' or '.join(names)}"
    return ""


def _finding(check: CallCheck[C, R], calls: Calls[C, R], cases: Sequence[C], lack: str) -> Finding:
    lack = lack or ("" if cases else "it has no call for these numbers of ranks and these parameters")
    if lack:
        return Finding(check.name, check.asks, True, f"{NOT_ASKED}{lack}", 0.0, applies=False)
    seconds = sum(calls.seconds.get(each, 0.0) for each in {x for case in cases for x in check.calls(case)})
    ok, evidence, compared = _verdict(check, calls, cases)
    applies = not evidence.startswith(NOT_ASKED)
    case = vars(compared) if compared is not None and applies else None
    return Finding(check.name, check.asks, ok or not applies, evidence, seconds, applies, case=case)


def _verdict(check: CallCheck[C, R], calls: Calls[C, R], cases: Sequence[C]) -> tuple[bool, str, C | None]:
    """Return whether a check passes, its evidence, and the case whose results are wrong, if there is one."""
    raised = {case: trouble for case in cases if (trouble := calls.refusal(case)) is not None}
    if raised and len(raised) == len(cases) and all(_is_about_form(each) for each in raised.values()):
        first = f"{raised[cases[0]]} ({cases[0]})"
        return True, f"{NOT_ASKED}could not be asked, the argument may have another form: {first}", None
    refusals = {case: each for case, each in raised.items() if each.refuses}
    text = next((f"{trouble} ({case})" for case, trouble in refusals.items()), "")
    if text and len(refusals) == len(cases):
        return True, f"refused: {text}", None
    if text and check.more is None:
        return False, f"refused here and not elsewhere: {text}", None
    for case in cases:
        compared: C | None = case
        try:
            wrong = "" if case in refusals else check.wrong(calls, case)
        except Failed as failed:
            wrong, compared = str(failed), None
        if wrong:
            return False, wrong, compared
    also = f"; refused in {len(refusals)}: {text}" if text else ""
    return True, f"{len(cases)} calls, from {cases[0]} to {cases[-1]}{also}", None


def _is_about_form(trouble: Trouble) -> bool:
    return any(form in trouble.text for form in FORMS)


NOT_ASKED = "does not apply: "


def itself(case: C) -> list[C]:
    """Return a list of only this case, for checks that need no other call."""
    return [case]


def changed_inputs(calls: Calls[C, Any], case: C, fault: str = "was changed in place") -> str:
    """Return a sentence with this fault of the first input in `changed`, or "" if there is no such input."""
    (ranks,) = calls.of(case)
    found = next(((rank, each.changed[0]) for rank, each in enumerate(ranks) if each.changed), None)
    return f"{found[1]} {fault} on rank {found[0]} ({case})" if found else ""


def made(
    usual: Callable[[tuple[int, ...]], list[C]], also: Callable[[C], bool] = lambda case: True
) -> Callable[[Calls[C, Any], tuple[int, ...]], list[C]]:
    """Return a function for `CallCheck.more`; it returns the usual cases, and cases of all checks that have a result.

    also: whether a case of another check is included.
    """

    def cases(calls: Calls[C, Any], ranks: tuple[int, ...]) -> list[C]:
        others = [case for case, found in calls.done.items() if not isinstance(found, Trouble) and also(case)]
        return [*dict.fromkeys([*usual(ranks), *others])]

    return cases


def unusual(case: Any, usual: Any) -> list[str]:
    """Return the fields in which a case differs from the usual one, each with its value."""
    return [f"{name} {in_words(value)}" for name, value in vars(case).items() if value != vars(usual)[name]]


def distance(found: Float[np.ndarray, "..."], right: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return the absolute difference of each pair of entries; it is infinite if one of them is NaN."""
    return np.nan_to_num(np.abs(found - right), nan=math.inf)
