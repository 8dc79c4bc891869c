"""ring-flash-attn: its contiguous, zig-zag and striped rings, over the stand-in for flash-attn.

The kernels of flash-attn take float16 and bfloat16. The package's `__init__` imports transformers, which the
package does not declare as a dependency. The modules of the rings do not need it, and are loaded without
`__init__`. On one rank its backward sends to itself, which gloo refuses.
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
from ringlab.conformance.target.claims import Target
from ringlab.layout import per_document

PACKAGE = "ring_flash_attn"
RANKS = (2, 3, 4, 8)
DTYPES = ("float16", "bfloat16")
_CLAIMS: dict[str, Any] = {"over": "torch.distributed", "dtypes": DTYPES, "ranks": RANKS, "ragged": False}


def contiguous() -> Target:
    """Return the plain ring. Raises: ImportError without the package."""
    return make("ring_flash_attn", "ring_flash_attn_func", "contiguous")


def zigzag() -> Target:
    """Return the zig-zag ring, causal only. Raises: ImportError without the package."""
    return make("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func", "zigzag")


def stripe() -> Target:
    """Return the striped ring, causal only. Raises: ImportError without the package."""
    return make("stripe_flash_attn", "stripe_flash_attn_func", "striped")


def kvpacked() -> Target:
    """Return the zig-zag ring of K and V in one tensor. Raises: ImportError without the package."""
    function = _function("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_kvpacked_func")

    def attend(q: Tensor, kv: Tensor, causal: bool, scale: float | None, group: Any) -> Sequence[Tensor]:
        return _two(function(q, kv, softmax_scale=scale, causal=causal, return_attn_probs=True, group=group))

    return Target(attend, layouts=("zigzag",), causal=(True,), axes="BLHD", **_CLAIMS)


def qkvpacked() -> Target:
    """Return the zig-zag ring of Q, K and V in one tensor. Raises: ImportError without the package."""
    function = _function("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_qkvpacked_func")

    def attend(qkv: Tensor, causal: bool, scale: float | None, group: Any) -> Sequence[Tensor]:
        return _two(function(qkv, softmax_scale=scale, causal=causal, return_attn_probs=True, group=group))

    return Target(attend, layouts=("zigzag",), causal=(True,), axes="BLHD", **_CLAIMS)


def varlen() -> Target:
    """Return the zig-zag ring of packed documents, each cut separately. Raises: ImportError."""
    function = _function("zigzag_ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen_func")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, scale: float | None,
        group: Any, world_size: int,
    ) -> Sequence[Tensor]:  # fmt: skip
        own = cu_seqlens // world_size, max_seqlen // world_size
        return _two(
            function(q, k, v, *own, softmax_scale=scale, causal=causal, return_attn_probs=True, group=group)
        )

    return Target(
        attend, layouts={"zig-zag by document": _by_document}, causal=(True,), axes="LHD", **_CLAIMS
    )


def llama3() -> Target:
    """Return the gather of K and V of packed documents, a few heads at a time. Raises: ImportError."""
    module = "llama3_flash_attn_varlen"
    function, prepare = (
        _function(module, f"llama3_flash_attn_{name}") for name in ("varlen_func", "prepare_cu_seqlens")
    )

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float | None, group: Any, rank: int,
        world_size: int,
    ) -> Sequence[Tensor]:  # fmt: skip
        *own, keys = prepare(cu_seqlens, causal, rank, world_size)
        options = {"softmax_scale": scale, "causal": causal, "return_attn_probs": True, "group": group}
        return _two(function(q, k, v, *own, heads_k_stride=1, local_k_slice=keys, **options))

    return Target(
        attend, layouts=("contiguous",), causal=(False, True), axes="LHD", schedule="any", **_CLAIMS
    )


def make(module: str, function: str, layout: str) -> Target:
    """Return one of the package's functions as a target. Raises: ImportError without the package."""
    return of(_function(module, function), layout)


def of(function: Callable[..., Any], layout: str, **options: Any) -> Target:
    """Return a function with flash-attn's parameters and a `group` as a target on one layout."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, group: Any
    ) -> Sequence[Tensor]:
        return _two(
            function(
                q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True, group=group, **options
            )
        )

    masks = (False, True) if layout == "contiguous" else (True,)
    return Target(attend, layouts=(layout,), causal=masks, axes="BLHD", **_CLAIMS)


def _two(found: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return out and lse of (out, lse, weights)."""
    return found[:2]


def _by_document(S: int, P: int, documents: tuple[int, ...]) -> Sequence[Any]:
    layout = per_document(documents or (S,), P)
    return [layout.positions(rank) for rank in range(P)]


def _function(module: str, name: str) -> Callable[..., Any]:
    with in_place_of_flash_attn():
        function: Callable[..., Any] = getattr(importlib.import_module(f"{_bare().__name__}.{module}"), name)
    return function


def _bare() -> ModuleType:
    """Return the package with its folder, but without the imports of its `__init__`."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        bare = ModuleType(PACKAGE)
        bare.__path__ = list(spec.submodule_search_locations or ())
        bare.__spec__ = spec
        sys.modules[PACKAGE] = bare
    return sys.modules[PACKAGE]
