"""Errors that state what was needed, what came instead, and the remedy.

Code that needs an optional package calls `require_package` first, so that the error names the extra that installs it.
"""

from __future__ import annotations

import importlib.util
import re


class RinglabError(Exception):
    """Base of every error that is raised on purpose. Its attributes are `needed`, `got` and `remedy`.

    >>> print(WorldSizeError("a rank from 0 to 3", "rank=4", "count ranks from 0"))
    needed: a rank from 0 to 3
       got: rank=4
    remedy: count ranks from 0
    """

    def __init__(self, needed: str, got: str = "", remedy: str = "") -> None:
        self.needed, self.got, self.remedy = needed, got, remedy
        lines = [f"needed: {needed}"]
        if got:
            lines.append(f"   got: {got}")
        if remedy:
            lines.append(f"remedy: {remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:  # the default method would pass the whole message as `needed`
        return type(self), (self.needed, self.got, self.remedy)


def in_one_line(error: BaseException) -> str:
    """Return the text of an error in one line.

    >>> in_one_line(WorldSizeError("a rank from 0 to 3", "rank=4", "count ranks from 0"))
    'needed: a rank from 0 to 3; got: rank=4; remedy: count ranks from 0'
    """
    return " ".join(re.sub(r"\n\s*(got|remedy): ", r"; \1: ", str(error)).split())


class MissingExtraError(RinglabError, ImportError):
    """A package that an extra of ringlab installs is missing; `remedy` is the command that installs it."""

    def __str__(self) -> str:  # on one line, which is enough for a missing package
        return re.sub(r"\n\s*", "; ", super().__str__())


class ShapeError(RinglabError, ValueError):
    """A tensor has the wrong number of axes, or axes that do not fit each other."""


class DtypeError(RinglabError, TypeError):
    """The dtypes of tensors are mixed or not supported."""


class DeviceError(RinglabError, ValueError):
    """Tensors are on different devices, or a device does not support the operation."""


class LayoutError(RinglabError, ValueError):
    """A layout is impossible, or belongs to another sequence length or world size."""


class MaskError(RinglabError, ValueError):
    """A mask is impossible, or the code that computes attention does not support it."""


class WorldSizeError(RinglabError, ValueError):
    """The number of ranks does not fit a layout or a schedule, or a rank's number is out of range."""


class BackendError(RinglabError, ValueError):
    """A block backend, schedule or transport is unknown or cannot run here."""


class CacheError(RinglabError, RuntimeError):
    """A paged cache has too few free pages, or does not contain the sequence."""


class CostError(RinglabError, ValueError):
    """The cost of a model, hardware or request is unknown; `remedy` names the nearest known one."""


class LabError(RinglabError, RuntimeError):
    """A lab cannot start, or a file of results is invalid; `remedy` names the change to make."""


class EditError(RinglabError, ValueError):
    """A file of edits is invalid, or an edit does not fit its base text."""


class TrainingError(RinglabError, ValueError):
    """Training cannot continue with the batch, the recipe or the checkpoint that it was given."""


class GradientError(RinglabError, RuntimeError):
    """The program asks for a derivative that attention over a ring does not support."""


class CommError(RinglabError, RuntimeError):
    """Base of all errors of communication between ranks."""


class AgreementError(CommError):
    """Ranks were called with different arguments. The error is raised on every rank before any data moves."""


class MismatchError(CommError):
    """A message's shape, dtype or tag differs from what its receiver expects."""


class DeadlockError(CommError):
    """No rank can continue, and at least one rank has not finished."""


class UnreceivedError(CommError):
    """A rank finished while a message to or from this rank was still undelivered."""


class PeerDiedError(CommError):
    """Another rank ended before it sent or received a message for which this rank waits.

    waits: the messages for which this rank waits, in words, or "" if the transport does not know them.
    """

    waits = ""


class TransportTimeout(CommError, TimeoutError):
    """A message did not arrive in time."""


class RankFailedError(CommError):
    """A rank's program raised an exception, which is the `__cause__` of this error."""


class CourseError(RinglabError):
    """Something is wrong with a lesson, an exercise or a progress file."""


class OffLimitsError(CourseError):
    """A submission calls ringlab or PyTorch for the part that the learner must write."""


class SandboxError(RinglabError, RuntimeError):
    """The sandbox in which student code must run cannot be set up."""


def apart(*numbers: float, digits: int = 6, kind: str = "g") -> tuple[str, ...]:
    """Return numbers as texts of `digits` digits, or of more digits if unequal numbers would look equal.

    kind: the format "g", "f" or "e" of Python.

    >>> apart(3.74773808, 3.74773811), apart(2.0, 2.0, digits=2)
    (('3.74773808', '3.74773811'), ('2', '2'))
    """
    values = [float(each) for each in numbers]
    for count in range(digits, 18):
        texts = tuple(f"{each:.{count}{kind}}" for each in values)
        if len({*texts}) == len({*map(repr, values)}):
            return texts
    return tuple(map(repr, values))


def require_package(name: str, extra: str, user: str) -> None:
    """Check that the package `name` can be imported.

    extra: the extra of ringlab that installs the package. user: what needs it, in words.
    Raises: MissingExtraError if it cannot.

    >>> require_package("numpy", "figures", "figures")
    >>> require_package("no_such_package", "figures", "figures")
    Traceback (most recent call last):
    ringlab.errors.MissingExtraError: needed: no_such_package, for figures; got: not installed; remedy: pip install 'ringlab[figures]'
    """
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"{name}, for {user}", "not installed", f"pip install 'ringlab[{extra}]'")
