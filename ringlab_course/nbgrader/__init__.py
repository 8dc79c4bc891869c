"""Grading with nbgrader: its commands, gradebook, feedback and formgrader, with scores from ringlab's judge.

nbgrader by itself runs submissions in a Jupyter kernel and reads the scores from the outputs, so a submission
that overwrites a check gets full marks. With ringlab, nbgrader runs no submission: `ringlab nbgrader config`
writes a configuration that replaces the classes that read and execute submissions by `converters.Submitted`
and `converters.Judged`. nbgrader is an optional extra and is imported only in `converters`.
"""

from __future__ import annotations

from ringlab.errors import require_package


def require_nbgrader() -> None:
    """Raise MissingExtraError if nbgrader is not installed."""
    require_package("nbgrader", "nbgrader", "ringlab nbgrader")
