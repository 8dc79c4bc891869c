"""Requirements that a notebook has beyond a plain install of ringlab: Triton or an extra.

If a requirement is missing, the notebook ends with a sentence that says how to install it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ringlab.errors import CourseError

REMEDY = (
    "pip install triton" if sys.platform == "linux" else "use Linux, or a Linux virtual machine or container"
)
MODULES = {"jax": ("jax", "jaxlib")}
"""The extras of pyproject.toml that lessons require, and the modules that each extra installs."""


class Stop(Exception):
    """Ends a run of a notebook with a sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:  # the method that IPython calls to show the exception
        return [str(self)]


def triton_is_missing() -> str:
    """Return why kernels cannot run on this machine, or "" if they can."""
    if find_spec("triton") is not None:
        return ""
    where = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, "this machine")
    return f"Triton is not installed: it comes with PyTorch on Linux, and there is none for {where}."


def needs_triton() -> None:
    """Return None if Triton is installed; otherwise end the notebook's run here and say why.

    Raises: Stop, which a notebook shows as plain text.
    """
    if missing := triton_is_missing():
        raise Stop(
            f"{missing}\nThis notebook ends here for you. You can read it as it was run, in notebooks/ on disk or on "
            f"the web pages; to run it, {REMEDY}. Only lessons 12 and 13 need Triton."
        )


def require_triton() -> None:
    """Return None if Triton is installed. Raises: CourseError if it is not."""
    if missing := triton_is_missing():
        raise CourseError("Triton, whose interpreter runs the kernels of this exercise", missing, REMEDY)


def extra_is_missing(extra: str) -> str:
    """Return the missing modules of the extra and the command that installs them, or "" if none is missing.

    Raises: CourseError for an extra that no lesson uses.
    """
    if extra not in MODULES:
        raise CourseError(f"one of the extras {', '.join(MODULES)}", repr(extra))
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if not missing:
        return ""
    command = f"pip install -c requirements.lock -e '.[{extra}]'"
    return (
        f"{' and '.join(missing)} not installed here. In the folder of the course, with its environment active:\n"
        f"    {command}"
    )


def needs_extra(extra: str) -> None:
    """Return None if the extra is installed; otherwise end the notebook's run and name the install command.

    Raises: Stop, which a notebook shows as plain text; CourseError for an extra that no lesson uses.
    """
    if missing := extra_is_missing(extra):
        raise Stop(
            f"This notebook needs the extra [{extra}], used only by lesson and exercise 17: {missing}\n"
            "Then restart the kernel and run the notebook again. You can also read it with its outputs, in notebooks/ on disk "
            "or on the web pages."
        )


def require_extra(extra: str) -> None:
    """Return None if the extra is installed. Raises: CourseError if it is not, or if no lesson uses it."""
    if missing := extra_is_missing(extra):
        raise CourseError(f"the extra [{extra}], which this exercise is about", "", missing)
