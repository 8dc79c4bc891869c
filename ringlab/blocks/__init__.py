"""Attention of one query block on one K/V block: the backends, by name."""

from __future__ import annotations

from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import Naive
from ringlab.blocks.native import Native
from ringlab.blocks.protocol import Block
from ringlab.errors import BackendError

_ALL: tuple[Block, ...] = (Naive(), Blockwise(), Native())
_BLOCKS = {block.name: block for block in _ALL}


def available() -> tuple[str, ...]:
    """Return the names of the block backends."""
    return tuple(_BLOCKS)


def get_block(name: str | Block, q: Tensor) -> Block:
    """Return the backend called `name` after making sure that it can compute tensors like `q`.

    "auto" is `native` where that supports `q`, else `blockwise`.
    Raises: BackendError for an unknown name, or where the backend does not support `q`.
    """
    if not isinstance(name, str):
        return name
    if name == "auto":
        name = "native" if _BLOCKS["native"].supports(q) is None else "blockwise"
    if name not in _BLOCKS:
        raise BackendError(f"a block among {', '.join(_BLOCKS)} or auto", repr(name))
    if reason := _BLOCKS[name].supports(q):
        raise BackendError(f"tensors that the block '{name}' supports: it {reason}", "", "use block='auto'")
    return _BLOCKS[name]
