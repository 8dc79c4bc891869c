"""The reasons why a run has no result: the troubles of its ranks, in the words of a report."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringlab.comm.processes.launch import ProcessesFailedError
from ringlab.conformance.run.run import (
    HUNG,
    RAISED,
    SLOW,
    WRONG_RESULT,
    RankResult,
    Run,
    Trouble,
    gave,
)
from ringlab.conformance.run.stacks import Standing
from ringlab.conformance.target.calling import CannotCall
from ringlab.errors import in_one_line

_LONGEST = 600  # the most characters of an error


class WrongResult(Exception):
    """Raised if the target returned something other than the results of attention."""


def _trouble_of(error: BaseException) -> Trouble:
    """Return the trouble that corresponds to an exception in a run, with its text."""
    if isinstance(error, WrongResult):
        return Trouble(WRONG_RESULT, str(error))
    if isinstance(error, ModuleNotFoundError):
        return Trouble("a package is missing", str(error))
    cause = error.__cause__ if type(error).__name__.endswith("FailedError") else None
    if cause is not None:
        return _trouble_of(cause)
    return Trouble(
        RAISED, f"{type(error).__name__}: {in_one_line(error)[:_LONGEST]}", isinstance(error, CannotCall)
    )


def described(error: BaseException) -> Trouble:
    """Return the trouble that corresponds to an exception in a run.

    An exception without a text is described by the line that raised it. Lone surrogates, which no file can
    contain, are written as escapes.
    """
    trouble = _trouble_of(error)
    trouble = replace(trouble, text=trouble.text.encode(errors="backslashreplace").decode())
    if not trouble.text.endswith(": "):
        return trouble
    while type(error).__name__.endswith("FailedError") and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    where = f", raised by {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return replace(trouble, text=f"{trouble.text.removesuffix(': ')} without a text{where}")


def over_the_limit(limit: float, what: str, standing: Standing, words: str = "") -> Trouble:
    """Return the trouble of a run or a call that reached its limit of seconds. words: further words about it.

    Only ranks that all wait for each other would never end. Otherwise more time may be enough.
    """
    told = f"the limit of {limit:g} s for {what} (--limit) was reached{standing.words}"
    if standing.stuck:
        return Trouble(HUNG, f"{told}{words}")
    slow = "; not every rank waits for another one, so the target may only be slow: give it a larger --limit"
    return Trouble(SLOW, f"{told}{slow if standing.words else ''}{words}")


def first_trouble(failure: Exception | None, parts: Sequence[Any]) -> Trouble | None:
    """Return the trouble of the rank that failed first; others often report only that this rank ended."""
    troubles = {rank: part.trouble for rank, part in enumerate(parts) if part is not None and part.trouble}
    first = failure.rank if isinstance(failure, ProcessesFailedError) else -1
    order = sorted(troubles, key=lambda rank: (troubles[rank].kind == RAISED, rank != first, rank))
    return troubles[order[0]] if order else None


def crash_in(failure: Exception | None) -> Trouble | None:
    """Return the trouble of the first process that ended without a result, or None."""
    for rank, text in sorted(_texts_of_ranks(failure).items()):
        if text.startswith(("its process ended", "killed by signal")):
            return Trouble("crashed", f"rank {rank}: {text}")
    return None


def stopped_in(failure: Exception | None, parts: Sequence[RankResult | None]) -> tuple[int, ...]:
    """Return the ranks that continued after another rank had failed, and had to be stopped.

    Return () if some rank raised an error. Then the target does notice the failure, and a rank that still
    waits does so inside gloo, which sometimes does not notice that its peer has ended.
    """
    if any(part is not None and part.trouble is not None for part in parts):
        return ()
    texts = _texts_of_ranks(failure)
    return tuple(rank for rank, text in texts.items() if text.startswith("stopped by launch"))


def _texts_of_ranks(failure: Exception | None) -> dict[int, str]:
    return failure.errors if isinstance(failure, ProcessesFailedError) else {}


def returned_in(run: Run, parts: Sequence[RankResult | None]) -> tuple[int, ...]:
    """Return the ranks of processes on which the target returned.

    Return () if a shard had a wrong shape and some rank raised an error. This error ends the job. Another
    rank may have finished before the error, and could not know of it.
    """
    said = any(
        part is not None and part.trouble is not None and part.trouble.kind == RAISED for part in parts
    )
    return () if said and run.fault == "wrong shape" else gave(parts)
