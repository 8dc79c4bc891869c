"""The contract of an exercise as data: its stages, checks and misconceptions.

A contract contains neither a learner's code nor a verdict. `ringlab_course.checking.reports` runs its checks
on a `Subject` (`ringlab_course.checking.subject`) and need not know in which process the learner's code
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlab.errors import CourseError
from ringlab_course.checking.failures import Failure

if TYPE_CHECKING:
    import numpy as np

    from ringlab_course.checking.subject import Subject

TIERS = ("visible", "stress", "held-out")
KINDS = ("function", "ring", "kernel", "mesh")
ATTENTION = "torch attention"
"""The entry of `Exercise.may_use` that stands for PyTorch's own attention."""
CHECK_KINDS = ("correctness", "cost", "speed")
"""The subjects of checks. A check of one kind counts only if all checks of the earlier kinds hold."""


@dataclass(frozen=True)
class Misconception:
    """A common mistake: its name, the message for the learner and, for kernels and JAX, a function that imitates it.

    `imitate` takes the inputs of an `Emulated` case and returns the wrong answer (`ringlab_course.checking.emulated`).
    It is None for mistakes that are found by running the stage's wrong answers, or by counts such as rounds and bytes.
    """

    name: str
    message: str
    imitate: Callable[..., Any] | None = None

    def failure(self, counterexample: str = "") -> Failure:
        """Return the `Failure` that names this misconception."""
        return Failure(self.message, counterexample, self.name)


@dataclass(frozen=True)
class Check:
    """One property that is verified: `run(subject, rng)` returns None or raises `Failure`.

    `kind` is "correctness" (the values of the answer), "cost" (bytes, messages, memory, work) or "speed"
    (time). A wrong answer earns no points for being cheap, and a costly answer earns none for being quick.
    """

    id: str
    points: int
    tier: str
    title: str
    run: Callable[[Subject, np.random.Generator], None]
    kind: str = "correctness"

    def __post_init__(self) -> None:
        _require(
            self.kind in CHECK_KINDS,
            f"one of the kinds {', '.join(CHECK_KINDS)}",
            f"{self.kind!r} in check {self.id!r}",
        )
        _require(
            self.tier in TIERS, f"one of the tiers {', '.join(TIERS)}", f"{self.tier!r} in check {self.id!r}"
        )
        _require(self.points >= 0, "points of 0 or more", f"{self.points} in check {self.id!r}")
        _require(bool(self.title), "a title", f"none in check {self.id!r}")


@dataclass(frozen=True)
class Stage:
    """One function that the learner writes, with its checks and hints.

    `kind` is "function" (arrays in, arrays out), "ring" (a ring program), "kernel" (a function that launches
    Triton kernels; they run in Triton's interpreter) or "mesh" (a program of one device in JAX, on simulated
    devices). `helpers` names other functions of the notebook that this function may call. `may_change` names
    the arguments that it may change in place. It must not change the others, unless its kind is "kernel".
    If `waits` is true and a helper is wrong, the stage's report says only that the helper must be mended
    first. It names no fault of the stage itself.
    """

    id: str
    function: str
    title: str
    checks: tuple[Check, ...]
    hints: tuple[str, str, str]
    misconceptions: tuple[Misconception, ...] = ()
    kind: str = "function"
    helpers: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    waits: bool = True

    def __post_init__(self) -> None:
        _require(
            self.kind in KINDS, f"one of the kinds {', '.join(KINDS)}", f"{self.kind!r} in stage {self.id!r}"
        )
        _require(
            len(self.hints) == 3,
            "three hints: a question, a direction, a line of mathematics",
            f"{len(self.hints)} in stage {self.id!r}",
        )
        _unique([c.id for c in self.checks], f"checks of stage {self.id!r}")
        _unique([m.name for m in self.misconceptions], f"misconceptions of stage {self.id!r}")
        _require(
            any(c.tier == "visible" for c in self.checks), "a visible check", f"none in stage {self.id!r}"
        )
        _require(
            any(c.kind == "correctness" for c in self.checks),
            "a check of correctness: without one, a wrong answer earns points for its low cost",
            f"none in stage {self.id!r}",
        )

    @property
    def points(self) -> int:
        """The total number of points of all checks."""
        return sum(check.points for check in self.checks)

    def check(self, check_id: str) -> Check:
        """Return the check called `check_id`. Raises: CourseError if there is none."""
        return _named(self.checks, "id", check_id, f"checks of stage {self.id}")

    def misconception(self, name: str) -> Misconception:
        """Return the misconception called `name`. Raises: CourseError if there is none."""
        return _named(self.misconceptions, "name", name, f"misconceptions of stage {self.id}")


@dataclass(frozen=True)
class Exercise:
    """All stages of one exercise notebook.

    may_use: the modules of ringlab that a submission may call although they contain answers to other
    exercises; `ATTENTION` stands for PyTorch's own attention. All other code that contains an answer is off
    limits (see `ringlab_course.checking.forbidden`). about: functions that are off limits in this exercise,
    although other exercises may call them. without: packages that submissions may not use, such as "torch"
    in an exercise about NumPy.
    """

    id: str
    slug: str
    title: str
    stages: tuple[Stage, ...]
    may_use: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _unique([s.id for s in self.stages], f"stages of exercise {self.id!r}")
        for stage in self.stages:
            _require(stage.id.startswith(f"{self.id}."), f"stage ids that begin with {self.id}.", stage.id)

    @property
    def points(self) -> int:
        """The total number of points of all stages."""
        return sum(stage.points for stage in self.stages)

    def stage(self, stage_id: str) -> Stage:
        """Return the stage called `stage_id`. Raises: CourseError if there is none."""
        return _named(self.stages, "id", stage_id, f"stages of exercise {self.id}")


def _require(holds: bool, needed: str, got: str) -> None:
    if not holds:
        raise CourseError(needed, got)


def _unique(names: list[str], what: str) -> None:
    twice = sorted({n for n in names if names.count(n) > 1})
    _require(not twice, f"different names for the {what}", f"{', '.join(twice)} more than once")


def _named(items: tuple[Any, ...], attribute: str, name: str, what: str) -> Any:
    for item in items:
        if getattr(item, attribute) == name:
            return item
    known = ", ".join(getattr(item, attribute) for item in items) or "none"
    raise CourseError(f"one of the {what}: {known}", repr(name))
