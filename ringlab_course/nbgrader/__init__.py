"""Grading with nbgrader: its commands, gradebook, feedback and formgrader, with the scores of ringlab's judge.

nbgrader runs what learners hand in inside its own process's kernel and reads the scores from the outputs,
so a submission that overwrites a check gets full marks. Here it runs nothing: `ringlab nbgrader config`
writes a configuration that puts `converters.Submitted` and `converters.Judged` in place of what reads
and executes submissions. nbgrader is an optional extra and is imported in `converters` only.
"""

from __future__ import annotations

from ringlab.errors import require_package


def require_nbgrader() -> None:
    """Raise MissingExtraError if nbgrader is not installed."""
    require_package("nbgrader", "nbgrader", "ringlab nbgrader")
