"""What a lesson needs beyond the learner's install: an extra, or a kind word where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from ringlab.course.kernels import Stop
from ringlab.errors import CourseError

MODULES = {"jax": ("jax", "jaxlib")}
"""Extras of pyproject.toml that lessons ask for, and the modules each of them brings."""


def extra_is_missing(extra: str) -> str:
    """Return what of the extra is not installed, and the command that installs it; empty text where all is there.

    Raises: CourseError for an extra that no lesson asks for.
    """
    if extra not in MODULES:
        raise CourseError(f"an extra out of {', '.join(MODULES)}", repr(extra))
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if not missing:
        return ""
    command = f"pip install -c requirements.lock -e '.[{extra}]'"
    return (
        f"{' and '.join(missing)} not installed here. In the folder of the course, with its environment active:\n"
        f"    {command}"
    )


def needs_extra(extra: str) -> None:
    """Return where the extra is installed; elsewhere end the notebook's run here, and say what to type.

    Raises: Stop, which a notebook shows as plain text; CourseError for an extra that no lesson asks for.
    """
    if missing := extra_is_missing(extra):
        raise Stop(
            f"This notebook needs the extra [{extra}], which lesson and exercise 17 need alone: {missing}\n"
            "Then restart the kernel and run on. You can also read it as it was run, in notebooks/ on disk or on the web pages."
        )


def require_extra(extra: str) -> None:
    """Return where the extra is installed. Raises: CourseError elsewhere, and for an extra that no lesson asks for."""
    if missing := extra_is_missing(extra):
        raise CourseError(f"the extra [{extra}], which this exercise is about", "", missing)
