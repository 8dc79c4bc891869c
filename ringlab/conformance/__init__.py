"""Checks for anybody's ring attention, and the bounds they hold results to: `check(function)`, `Target`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlab.conformance.runner import Report as Report
    from ringlab.conformance.runner import check as check
    from ringlab.conformance.target.claims import Target as Target

_HOME = {"check": "runner", "Report": "runner", "Target": "target.claims"}
__all__ = ["Report", "Target", "check"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
