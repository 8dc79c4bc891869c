"""What notebooks with Triton kernels need first: Triton itself, or a kind word where there is none."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ringlab.errors import CourseError

REMEDY = (
    "pip install triton" if sys.platform == "linux" else "use Linux, or a Linux virtual machine or container"
)


class Stop(Exception):
    """Ends a run of a notebook with a sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:  # what IPython shows instead
        return [str(self)]


def triton_is_missing() -> str:
    """Return why kernels cannot run on this machine, empty text where they can."""
    if find_spec("triton") is not None:
        return ""
    where = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, "this machine")
    return f"Triton is not installed: it comes with PyTorch on Linux, and there is none for {where}."


def needs_triton() -> None:
    """Return where Triton is installed; elsewhere end the notebook's run here, and say so.

    Raises: Stop, which a notebook shows as plain text.
    """
    if missing := triton_is_missing():
        raise Stop(
            f"{missing}\nThis notebook ends here for you. You can read it as it was run, in notebooks/ on disk or on "
            f"the web pages; to run it, {REMEDY}. No other lesson needs Triton but 12 and 13."
        )


def require_triton() -> None:
    """Return where Triton is installed. Raises: CourseError elsewhere."""
    if missing := triton_is_missing():
        raise CourseError("Triton, whose interpreter runs the kernels of this exercise", missing, REMEDY)
