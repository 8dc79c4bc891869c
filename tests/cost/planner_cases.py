"""Requests and made-up hardware that tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

import ringlab.cost.planner.memory_table as memory_table
import ringlab.cost.planner.ring_time as work
import ringlab.cost.planner.search as search
import ringlab.cost.planner.step_time as step_time
from ringlab.cost.hardware import Hardware, Link, Reached, hardware
from ringlab.cost.models import Model, model


def ideal(
    inside: float = 300e9, between: float = 25e9, ranks_per_node: int = 8, **changes: object
) -> Hardware:
    """Return an A100 that reaches its peak, on links without latency."""
    return replace(
        hardware("a100"),
        name="ideal",
        inside=Link("inside", inside, 0.0, "made up"),
        between=Link("between", between, 0.0, "made up"),
        reached=Reached(),
        ranks_per_node=ranks_per_node,
        **changes,  # type: ignore[arg-type]
    )


def small_model(H: int = 32, K: int = 32, layers: int = 1, **changes: int) -> Model:
    """Return a model of the given sizes whose heads have 128 dims."""
    sizes = {"d_model": H * 128, "d_ff": 4 * H * 128, "vocabulary": 1000} | changes
    return replace(model("llama3-8b"), name="small", H=H, K=K, D=128, layers=layers, **sizes)


def forget() -> None:
    """Empty the planner's caches."""
    cached = (
        search.search,
        search._at_once,
        step_time._ring_of,
        step_time.ring_sizes,
        memory_table._state,
        memory_table._at_work,
        work.ring_work,
        work.window_work,
    )
    for function in cached:
        function.cache_clear()


def fails(checks: Iterable[Callable[[], object]], mutant: tuple[object, str, object]) -> bool:
    """Return whether a check fails with one mutant: (object, attribute name, replacement)."""
    forget()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*mutant)
            return any(_fails(check) for check in checks)
    finally:
        forget()


def _fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except Exception:  # not only AssertionError, because a mutant's arithmetic may fail
        return True
    return False
