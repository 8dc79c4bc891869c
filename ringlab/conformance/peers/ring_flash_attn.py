"""ring-flash-attn: its contiguous, zig-zag and striped rings over flash-attn's kernels, here over the stand-in.

The kernels take float16 and bfloat16. Its `__init__` imports transformers, which the package does not
declare; the modules of the rings do without, and are loaded without it. On one rank its backward sends to
itself, which gloo refuses.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from ringlab.conformance.peers.flash_attn import in_place_of_flash_attn
from ringlab.conformance.target import Target

PACKAGE = "ring_flash_attn"
RANKS = (2, 3, 4, 8)
DTYPES = ("float16", "bfloat16")


def contiguous() -> Target:
    """Return the plain ring. Raises: ImportError without the package."""
    return make("ring_flash_attn", "ring_flash_attn_func", "contiguous")


def zigzag() -> Target:
    """Return the zig-zag ring, causal only. Raises: ImportError without the package."""
    return make("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func", "zigzag")


def stripe() -> Target:
    """Return the striped ring, causal only. Raises: ImportError without the package."""
    return make("stripe_flash_attn", "stripe_flash_attn_func", "striped")


def make(module: str, function: str, layout: str) -> Target:
    """Return one of the package's functions as a target. Raises: ImportError without the package."""
    with in_place_of_flash_attn():
        found = importlib.import_module(f"{_bare().__name__}.{module}")
    return of(getattr(found, function), layout)


def of(function: Callable[..., Any], layout: str, **options: Any) -> Target:
    """Return a function with flash-attn's parameters and a `group` as a target on one layout."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, group: Any
    ) -> Sequence[Tensor]:
        out, lse, *_ = function(
            q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True, group=group, **options
        )
        return out, lse

    causal = (False, True) if layout == "contiguous" else (True,)
    return Target(
        attend, over="torch.distributed", layouts=(layout,), causal=causal, dtypes=DTYPES, ranks=RANKS,
        ragged=False, axes="BLHD",
    )  # fmt: skip


def _bare() -> ModuleType:
    """The package with its folder, but without the imports of its `__init__`."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        bare = ModuleType(PACKAGE)
        bare.__path__ = list(spec.submodule_search_locations or ())
        bare.__spec__ = spec
        sys.modules[PACKAGE] = bare
    return sys.modules[PACKAGE]
