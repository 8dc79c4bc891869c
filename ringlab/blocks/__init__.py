"""Attention of one query block on one K/V block: the backends, by name."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import Naive
from ringlab.blocks.native import Native
from ringlab.blocks.protocol import Block
from ringlab.errors import BackendError

_EVERYWHERE: tuple[Block, ...] = (Naive(), Blockwise(), Native())
_BLOCKS = {block.name: block for block in _EVERYWHERE}
_TRITON = "triton"


def available() -> tuple[str, ...]:
    """Return the names of the block backends that compute any floating point dtype on every machine."""
    return tuple(_BLOCKS)


def known() -> tuple[str, ...]:
    """Return the names of all block backends; `triton` needs a GPU, or its interpreter, and no float64."""
    return (*_BLOCKS, _TRITON)


def get_block(name: str | Block, q: Tensor, wishes: frozenset[str] = frozenset()) -> Block:
    """Return the backend called `name` after making sure that it can compute tensors like `q`.

    `wishes`: what else it must compute, "softcap" or "dropout". "auto" is `native` where that can, else `blockwise`.
    Raises: BackendError for an unknown name, or where the backend cannot compute `q` or what is wished for.
    """
    if name == "auto":
        name = "native" if not wishes and _BLOCKS["native"].supports(q) is None else "blockwise"
    block = _named(name) if isinstance(name, str) else name
    if reason := block.supports(q):
        raise BackendError(f"tensors that the block '{block.name}' supports: it {reason}", "", _instead(q))
    if missing := wishes - getattr(block, "offers", frozenset()):
        raise BackendError(
            f"a block that computes {' and '.join(sorted(missing))}",
            f"the block '{block.name}', which does not",
            "use block='blockwise', or block='auto', which takes it",
        )
    return block


def choice(asked: str | Block, chosen: Block, wishes: frozenset[str]) -> tuple[str, str] | None:
    """Return what was asked for and the block that computes, for the trace, where these are two; None elsewhere."""
    if asked == "auto":
        return "block='auto'", chosen.name
    if wishes and isinstance(chosen, Native):
        return f"block='native' with {' and '.join(sorted(wishes))}", Blockwise.name
    return None


def _named(name: str) -> Block:
    if name not in known():
        raise BackendError(f"a block among {', '.join(known())} or auto", repr(name))
    return _triton() if name == _TRITON else _BLOCKS[name]


def _instead(q: Tensor) -> str:
    """Return what to do where the block that was asked for does not support `q`: name one that does, if any does."""
    for name in ("native", "blockwise"):
        if _named(name).supports(q) is None:
            return f"use block='{name}'"
    return f"no block computes {q.dtype}: convert q, k and v with .to(torch.bfloat16)"


@cache
def _triton() -> Block:
    """The block that needs Triton; its package is imported at first use."""
    from ringlab.blocks.triton import TritonBlock

    return TritonBlock()
