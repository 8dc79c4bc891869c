"""Grading with nbgrader: its commands, gradebook, feedback and formgrader, with the scores of ringlab's judge.

nbgrader runs what learners hand in inside its own process's kernel and reads the scores from the outputs,
so a submission that overwrites a check gets full marks. Here it runs nothing: `ringlab nbgrader config`
writes a configuration that puts `converters.Submitted` and `converters.Judged` in place of what reads
and executes submissions. nbgrader is an optional extra and is imported in `converters` only.
"""

from __future__ import annotations

import importlib.util

from ringlab.errors import CourseError

REMEDY = "pip install 'ringlab[nbgrader]' (in a checkout: pip install -c requirements.lock -e '.[nbgrader]')"


def no_nbgrader() -> str | None:
    """Return why nothing can be graded with nbgrader here, None if it can."""
    if importlib.util.find_spec("nbgrader") is None:
        return f"needs nbgrader: {REMEDY}"
    return None


def require_nbgrader() -> None:
    """Raise CourseError, which names the extra, where nbgrader is not installed."""
    if no_nbgrader():
        raise CourseError("nbgrader", "no package of this name here", REMEDY)
