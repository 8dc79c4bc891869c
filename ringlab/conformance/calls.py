"""Calls of a function on any number of ranks: on virtual ranks, or on processes, one call after another.

For kinds of targets whose results are compared with each other, or with the oracle's, call by call.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance import perform
from ringlab.conformance.checks import LOADS
from ringlab.conformance.loading import named
from ringlab.conformance.perform import VIRTUAL
from ringlab.conformance.runner import Finding, Report
from ringlab.conformance.runs import Trouble
from ringlab.conformance.target import RING, TORCH, parameters
from ringlab.errors import BackendError

ResultOf: TypeAlias = Callable[..., Any]
_GIVEN_UP = 3  # calls that fail on one number of ranks; each costs new processes


class OnRanks(Protocol):
    """A call, as data that can be a key; P: its ranks."""

    @property
    def P(self) -> int:  # noqa: N802
        """Return the number of ranks."""


C = TypeVar("C", bound=OnRanks)
R = TypeVar("R")


class Calls(Generic[C, R]):
    """Makes the calls of one function, and keeps the results of all ranks of each, or its trouble.

    result: makes one rank's result of a call, from the function, the call, the ring if there is one, the rank and the seed.
    limit: seconds for each call on processes.
    """

    def __init__(self, target: Any, result: ResultOf, seed: int, limit: float) -> None:
        self.target, self.result, self.seed, self.limit = target, result, seed, limit
        self.function = function = named(target) if isinstance(target, str) else target
        self.over_ring = not {"ring", "comm"}.isdisjoint(parameters(function))
        self.done: dict[C, list[R] | Trouble] = {}
        self.seconds: dict[C, float] = {}

    def make(self, cases: Iterable[C]) -> None:
        """Make those cases that are not made yet."""
        left = [case for case in dict.fromkeys(cases) if case not in self.done]
        for P in sorted({case.P for case in left}):
            make = self._on_virtual_ranks if self.over_ring else self._on_processes
            make(P, [case for case in left if case.P == P])

    def of(self, *cases: C) -> list[list[R]]:
        """Return the results of all ranks for each of the cases. Raises: Failed if one of them has none."""
        for case in cases:
            if isinstance(trouble := self.done[case], Trouble):
                raise Failed(f"{trouble} ({case})")
        return [found for case in cases if not isinstance(found := self.done[case], Trouble)]

    def has_one_of(self, names: Sequence[str]) -> None:
        """Return if the target is a function with one of these parameters. Raises: BackendError otherwise."""
        if not callable(self.function) or parameters(self.function).isdisjoint(names):
            raise BackendError(f"a function with a parameter {' or '.join(names)}", repr(self.function))

    def _on_virtual_ranks(self, P: int, cases: Sequence[C]) -> None:
        for case in cases:
            begun = time.monotonic()
            try:
                self.done[case] = VirtualCluster(P, memory=False).run(self._on_ring, case).results
            except Exception as error:
                self.done[case] = perform.described(error)
            self.seconds[case] = time.monotonic() - begun

    def _on_ring(self, ring: Ring, case: C) -> R:
        made: R = self.result(self.function, case, ring, ring.rank, self.seed)
        return made

    def _on_processes(self, P: int, cases: Sequence[C]) -> None:
        """Make the cases in one launch, and those after a failed one in another."""
        left, failures = list(cases), 0
        while left and failures < _GIVEN_UP:
            begun = time.monotonic()
            made = self._launched(P, left)
            self.seconds |= dict.fromkeys(left[:made], (time.monotonic() - begun) / made)
            failures += isinstance(self.done[left[made - 1]], Trouble)
            left = left[made:]
        self.done |= dict.fromkeys(left, Trouble("not run", f"{failures} runs on {P} ranks failed"))

    def _launched(self, P: int, cases: Sequence[C]) -> int:
        """Make cases up to the first that fails; return how many were made."""
        failure: Exception = RuntimeError("a rank left no result")
        with tempfile.TemporaryDirectory(prefix="ringlab-step-") as name:
            try:
                timeout = self.limit * len(cases)
                launch(
                    _program,
                    P,
                    self.target,
                    self.result,
                    cases,
                    self.seed,
                    name,
                    timeout=timeout,
                    memory=False,
                )
            except Exception as error:
                failure = error
            for index, case in enumerate(cases):
                parts = perform.ranks_left(Path(name), index, P)
                trouble = perform.first_trouble(
                    failure, [x if isinstance(x, _Trouble) else None for x in parts]
                )
                if trouble or None in parts:
                    self.done[case] = trouble or perform.described(failure)
                    return index + 1
                self.done[case] = parts
        return len(cases)


class Failed(Exception):
    """A call has no result."""


@dataclass
class _Trouble:
    """The trouble of one rank, in the place of its result."""

    trouble: Trouble


def _program(ring: Ring, target: Any, result: ResultOf, cases: Sequence[Any], seed: int, folder: str) -> None:
    function = named(target) if isinstance(target, str) else target
    for index, case in enumerate(cases):
        path = perform.rank_path(Path(folder), index, ring.rank)
        try:
            perform.leave(path, result(function, case, None, ring.rank, seed))
        except Exception as error:
            perform.leave(path, _Trouble(perform.described(error)))
            raise


@dataclass(frozen=True)
class Check(Generic[C, R]):
    """One line of a table. cases: by the numbers of ranks. calls: those that a case needs. needs: parameters, by name.

    wrong: a sentence on the fault of a case, or "". Raises: Failed if one of its calls has no result.
    """

    name: str
    asks: str
    cases: Callable[[tuple[int, ...]], list[C]]
    calls: Callable[[C], list[C]]
    wrong: Callable[[Calls[C, R], C], str]
    needs: tuple[str, ...] = ()


def report(
    calls: Calls[C, R],
    checks: Sequence[Check[C, R]],
    only: Sequence[str],
    ranks: tuple[int, ...],
    lacks: Mapping[str, str],
    what: str,
) -> Report:
    """Return the findings of the checks called `only`, or of all. lacks: why a check does not apply, by name. what: the kind of target.

    Raises: BackendError for an unknown check.
    """
    known = [check.name for check in checks]
    if unknown := sorted({*only} - {*known}):
        raise BackendError(f"checks among {', '.join(known)}", ", ".join(map(repr, unknown)))
    selected = [check for check in checks if check.name in only or not only]
    wanted = [check for check in selected if not lacks.get(check.name)]
    calls.make(each for check in wanted for case in check.cases(ranks) for each in check.calls(case))
    target, function = calls.target, calls.function
    name = target if isinstance(target, str) else getattr(function, "__qualname__", repr(function))
    over, transport = (RING, VIRTUAL) if calls.over_ring else (TORCH, "gloo")
    loads = Finding(LOADS, "the target can be imported", True, f"{name}, {what} over {over}", 0.0)
    found = [
        _finding(check, calls, ranks) if check in wanted
        else Finding(check.name, check.asks, True, f"does not apply: {lacks[check.name]}", 0.0, applies=False)
        for check in selected
    ]  # fmt: skip
    seconds = sum(calls.seconds.values())
    return Report(
        name, over, transport, False, calls.seed, calls.limit, [loads, *found], len(calls.done), seconds
    )


def _finding(check: Check[C, R], calls: Calls[C, R], ranks: tuple[int, ...]) -> Finding:
    cases, wrong = check.cases(ranks), ""
    for case in cases:
        try:
            wrong = wrong or check.wrong(calls, case)
        except Failed as failed:
            wrong = str(failed)
    evidence = f"{len(cases)} cases: {'; '.join(map(str, cases))}"[:100]
    needed = {each for case in cases for each in check.calls(case)}
    seconds = sum(calls.seconds.get(each, 0.0) for each in needed)
    return Finding(check.name, check.asks, not wrong, wrong or evidence, seconds)
