"""The interface of a source of runs of a target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from ringlab.conformance.run.run import Ran, Run, Trouble
from ringlab.conformance.target.claims import Claims


class Source(Protocol):
    """A source of runs of a target: child processes, this process, or workers in a sandbox."""

    def claims(self) -> Claims | Trouble:
        """Return the target's claims, or the reason why there is no target."""

    def skip(self, run: Run) -> None:
        """Skip a run that no check needs any more."""

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped, in order."""


@runtime_checkable
class Guessing(Protocol):
    """A source of runs that can give a target axes other than those that it claims."""

    def made_as(self, axes: str, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run in order, with these axes of the target."""
