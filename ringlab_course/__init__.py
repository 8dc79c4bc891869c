"""Functions for lessons and exercises: predict, compare, check, hint, progress, needs_triton, needs_extra.

Each function is loaded when it is first used, so that `import ringlab_course` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "predict": "ringlab_course.notebook.predictions",
    "compare": "ringlab_course.notebook.predictions",
    "check": "ringlab_course.notebook.checks",
    "hint": "ringlab_course.notebook.checks",
    "progress": "ringlab_course.notebook.checks",
    "needs_triton": "ringlab_course.checking.requirements",
    "needs_extra": "ringlab_course.checking.requirements",
}
__all__ = [*_HOME, "corpus"]

if TYPE_CHECKING:
    from ringlab_course.checking.requirements import needs_extra as needs_extra
    from ringlab_course.checking.requirements import needs_triton as needs_triton
    from ringlab_course.notebook import corpus as corpus
    from ringlab_course.notebook.checks import check as check
    from ringlab_course.notebook.checks import hint as hint
    from ringlab_course.notebook.checks import progress as progress
    from ringlab_course.notebook.predictions import compare as compare
    from ringlab_course.notebook.predictions import predict as predict


def __getattr__(name: str) -> Any:
    if name == "corpus":
        return importlib.import_module("ringlab_course.notebook.corpus")
    if name not in _HOME:
        raise AttributeError(f"module 'ringlab_course' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
