"""What lessons and exercises call: predict, compare, check, hint, progress, needs_triton, needs_extra.

Loaded at first use, so that `import ringlab.course` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "predict": "ringlab.course.predictions",
    "compare": "ringlab.course.predictions",
    "check": "ringlab.course.notebook",
    "hint": "ringlab.course.notebook",
    "progress": "ringlab.course.notebook",
    "needs_triton": "ringlab.course.kernels",
    "needs_extra": "ringlab.course.extras",
}
__all__ = [*_HOME]

if TYPE_CHECKING:
    from ringlab.course.extras import needs_extra as needs_extra
    from ringlab.course.kernels import needs_triton as needs_triton
    from ringlab.course.notebook import check as check
    from ringlab.course.notebook import hint as hint
    from ringlab.course.notebook import progress as progress
    from ringlab.course.predictions import compare as compare
    from ringlab.course.predictions import predict as predict


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ringlab.course' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
