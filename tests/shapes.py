"""The shape check of a test run: arguments and results must have the shapes that annotations state.

conftest.py installs `checked` through jaxtyping's import hook. Functions without a shape in their
annotations are left to mypy. The functions that users call are not checked either: for a wrong shape
they must raise an error of ringlab's own, and the check would raise first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray

FRONT_DOORS = {
    "ringlab.attention.ring_attention",
    "ringlab.blocks.protocol.BackwardRows.__init__",
    "ringlab.blocks.triton.steps.TritonBackward.differentiate",
    "ringlab.blocks.triton.steps.TritonForward.attend",
    "ringlab.latent.latent_attention",
    "ringlab.oracle.attention",
    "ringlab.oracle.gradients",
    "ringlab.scan.attention.linear_attention",
    "ringlab.scan.halo.halo",
    "ringlab.scan.halo.short_convolution",
    "ringlab.schedules.cache.ShardedCache.append",
    "ringlab.schedules.cache.ShardedCache.append_shards",
    "ringlab.schedules.cache.ShardedCache.check_shards",
    "ringlab.schedules.cache.ShardedCache.of_shards",
    "ringlab.schedules.decode.decode",
    "ringlab.serving.chunks.prefill",
    "ringlab.serving.decode.decode_heads",
    "ringlab.serving.helix.HelixGrid.attend",
    "ringlab.serving.paged_cache.PagedCache.append",
    "ringlab.serving.paged_cache.PagedCache.append_shards",
    "ringlab.serving.paged_cache.PagedCache.check_shards",
}
"""Functions that must refuse wrong shapes themselves, as the tests of their modules check."""

_IMPORTS_ARRAYS = re.compile(r"^\s*(from|import) (jaxtyping|ringlab\.types)\b", re.MULTILINE)
seen: set[str] = set()
"""Names of the functions that have the check, so that a test can see that functions are checked."""


def modules() -> list[str]:
    """Return the modules of ringlab that import array types, by name."""
    root = Path(__file__).parents[1]
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((root / "ringlab").rglob("*.py"))}
    named = [
        path.relative_to(root).with_suffix("")
        for path, text in sources.items()
        if _IMPORTS_ARRAYS.search(text)
    ]
    return [".".join(path.parts).removesuffix(".__init__") for path in named]


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a check that refuses arguments and results whose shapes contradict its annotations."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name in FRONT_DOORS or not states_shape(function):
        return function
    seen.add(name)
    return beartype(function)


def states_shape(function: Callable[..., Any]) -> bool:
    """Return whether an annotation of `function` is or contains a jaxtyping array."""
    signature = inspect.signature(function)
    hints = [p.annotation for p in signature.parameters.values()]
    return any(map(_holds_array, [*hints, signature.return_annotation]))


def _holds_array(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(map(_holds_array, get_args(hint)))
