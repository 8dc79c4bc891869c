"""The exceptions that a check raises: a wrong answer, a missing function, or an error in the learner's code.

If the ranks of a ring cannot finish, `reason` returns the name of the mistake that caused this.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import ringlab
from ringlab.errors import CommError, DeadlockError, OffLimitsError, RankFailedError


class Failure(AssertionError):
    """A wrong answer.

    `message` describes the fault in words. It contains no value of the inputs, so that it may be shown for
    hidden checks too; values go into `counterexample`. `misconception` is the name of the common mistake that
    explains the answer, or None. `allowed` are the relative errors that the check allows in the parts of an
    answer. `read` turns an answer into the form that the check compares, so two answers with equal forms are
    equivalent. `otherwise` is the Failure to report if no mistake of the stage gives the answer.
    """

    allowed: Sequence[float] = ()
    read: Callable[[Any], Any] | None = None
    otherwise: Failure | None = None

    def __init__(self, message: str, counterexample: str = "", misconception: str | None = None) -> None:
        self.message, self.counterexample, self.misconception = message, counterexample, misconception
        super().__init__(f"{message}\n{counterexample}".strip())

    def __reduce__(self) -> tuple[Any, ...]:  # the default would pass the joined text as `message`
        return type(self), (self.message, self.counterexample, self.misconception)


class NotWritten(Failure):
    """The learner has not written this function yet: it is missing or raises NotImplementedError."""


class Crashed(Failure):
    """The learner's code raised; `counterexample` is the traceback of the learner's own lines."""


def own_lines(error: BaseException) -> str:
    """Return the last three lines of the learner's own code in the traceback of `error`, and the error.

    Lines of ringlab, of the standard library and of installed packages are left out.
    """
    lines = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if is_own(code.co_filename) and not is_ours(frame):
            source = linecache.getline(code.co_filename, number).strip()
            lines.append(f"in {code.co_name}, line {number}: {source}")
    lines = lines[-3:]
    text = str(error) or "no message"
    return "\n".join([*lines, f"{type(error).__name__}: {text}"])


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that the learner's code raised, without the errors that wrap it.

    A virtual rank or Triton's interpreter wraps exceptions. A NotImplementedError of the interpreter itself
    stays wrapped, because it is about Triton and not about the exercise.
    """
    while (inside := error.__cause__) is not None:
        wrapped = type(error).__name__ == "InterpreterError"
        if wrapped and isinstance(inside, NotImplementedError):
            raised = traceback.extract_tb(inside.__traceback__)
            wrapped = not raised or is_own(raised[-1].filename)
        if not wrapped and not isinstance(error, RankFailedError):
            break
        error = inside
    return error


def as_failure(name: str, error: BaseException) -> Failure:
    """Return the Failure that tells the learner about an exception in the function `name`."""
    cause = cause_of(error)
    if isinstance(cause, NotImplementedError):
        return NotWritten(
            f"`{name}` is not written yet: {cause}" if str(cause) else f"`{name}` is not written yet."
        )
    if isinstance(cause, OffLimitsError):
        return left_to_others(name, own_lines(cause))
    if isinstance(cause, CommError):
        return stuck(name, cause)
    return crashed(name, type(cause).__name__, own_lines(cause))


def stuck(function: str, error: CommError) -> Crashed:
    """Return the Failure for an error of communication; a deadlock is described rank by rank."""
    text = f"`{function}`: the ranks cannot finish ({type(error).__name__})."
    # The last line describes the circle of waiting ranks. The other lines are not searched, because they
    # contain the learner's tags, which may be any text.
    drawn = (error.got.splitlines() or [""])[-1]
    if isinstance(error, DeadlockError) and (found := _CYCLE.fullmatch(drawn.strip())):
        ranks = found[1].split(" → ")
        waits = [f"waits for rank {rank}" for rank in ranks[1:]]
        text += f" They wait for each other in a circle: rank {ranks[0]} {', which '.join(waits)}."
    elif isinstance(error, DeadlockError):
        text += " Somebody waits for a rank that has ended already."
    return Crashed(text, str(error))


def crashed(function: str, error: str, text: str) -> Crashed:
    """Return the Failure for an exception whose type is called `error`; `text` is its message."""
    if error == "BackendError" and "within the memory of" in text:
        return Crashed(
            f"`{function}`: a kernel reaches outside of a tensor's memory. On a GPU that is a fault, or somebody else's "
            "data. Is a mask missing, or a row's beginning wrong?",
            text,
        )
    return Crashed(f"`{function}` raised {error}.", text)


def not_an_answer(function: str, text: str) -> Failure:
    """Return the Failure for an answer that cannot be sent from one process to another; `text` says why."""
    return Failure(
        f"`{function}` should answer with arrays, numbers or texts, or with lists, tuples, sets or dicts of them.",
        text,
    )


def left_to_others(function: str, text: str = "") -> Crashed:
    """Return the Failure for a call of code that is off limits.

    `text` is `own_lines` of the error, or "" to hide them. `function` is the function that the check ran. The
    message blames the function that contains the call, which may be another one.
    """
    lines = text.splitlines()
    holders = [found[1] for line in lines if (found := _OWN_LINE.match(line))]
    used = [line.partition("got: ")[2].strip() for line in lines if "got: " in line]
    message = (
        f"`{holders[-1] if holders else function}` leaves the work to {used[0] if used else 'ringlab or PyTorch'}. "
        "This exercise is about writing it: put code of your own in its place."
    )
    return Crashed(message, "\n".join(line for line in lines if _OWN_LINE.match(line)))


_OWN_LINE = re.compile(r"in ([^\W\d]\w{0,60}|<\w+>), line \d+: ")
_CYCLE = re.compile(r"cycle: (\d{1,4}(?: → \d{1,4})+)")
_INSTALLED = [sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")]
_OURS = (str(Path(ringlab.__file__).parent), str(Path(__file__).parents[1]))
_NOT_OWN = tuple(f"{Path(place).resolve()}/" for place in (*_INSTALLED, *_OURS))


def is_ours(frame: FrameType) -> bool:
    """Return whether this frame runs code of ringlab or the course, or of one of their dataclasses."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("ringlab", "ringlab_course")


@cache
def is_own(filename: str) -> bool:
    """Return whether a file is the learner's, and not part of ringlab, the standard library or a package."""
    if filename.startswith("<frozen"):
        return False
    return not str(Path(filename).resolve() if Path(filename).exists() else filename).startswith(_NOT_OWN)


BROKEN_RULES = {
    "a receive buffer that is also sent": "one_buffer",
    "written while it was sent": "writes_what_is_sent",
}
"""Mistakes that break a rule of exchange. The keys are phrases in the transport's errors about these rules."""


def broken_rule(crash: Crashed) -> str | None:
    """Return the name of the mistake that broke a rule of exchange, or None if no rule was broken."""
    return next((name for text, name in BROKEN_RULES.items() if text in crash.counterexample), None)


def reason(crash: Crashed, *, ragged: bool) -> str | None:
    """Return the name of the mistake that made the ranks fail, or None if no known mistake did."""
    text = crash.counterexample
    if name := broken_rule(crash):
        return name
    if re.search(r"'tuple' (object )?(has no|and )|concatenate tuple|and 'tuple'|not tuple|a tuple of", text):
        return "does_not_unpack"
    if ragged and ("MismatchError" in crash.message or re.search(r"size of tensor|shape", text)):
        return "assumes_equal_lengths"
    if not any(name in crash.message for name in ("DeadlockError", "UnreceivedError", "PeerDiedError")):
        return None
    if "ended without it" not in text and "never waited" in text:
        return "never_waits"
    return "leaves_the_ring"
