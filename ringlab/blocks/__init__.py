"""Block backends by name: attention of some query rows over one K/V block.

naive      the definition: all scores at once, in torch
blockwise  tile by tile in torch, memory linear in the sequence
native     torch's flash attention operators
cudnn      cuDNN's attention, called through torch's operators; needs a GPU
flex       torch's FlexAttention: compiled on a GPU; on a CPU uncompiled and without its own backward
flash      the flash-attn packages, versions 2, 3 and 4; needs a GPU
triton     kernels that compute all tiles of a K/V block in one launch; needs a GPU or Triton's interpreter
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.cudnn import Cudnn
from ringlab.blocks.flash import VERSIONS
from ringlab.blocks.flex import Flex
from ringlab.blocks.library import LibraryBlock
from ringlab.blocks.naive import Naive
from ringlab.blocks.native import Native
from ringlab.blocks.protocol import Block, Query, Value
from ringlab.comm.protocol import Comm
from ringlab.errors import BackendError

_EVERYWHERE: tuple[Block, ...] = (Naive(), Blockwise(), Native())
_BLOCKS = {block.name: block for block in (*_EVERYWHERE, Cudnn(), Flex())}
_FLASH, _TRITON = "flash", "triton"

AUTO = ("native", "blockwise")
"""The blocks that "auto" tries, in this order. It takes the first that supports the tensors.

`cudnn`, `flash` and `flex` are not among them, because they have not been measured in a ring on a GPU yet.
`triton` is not among them, because it may not be the fastest.
"""


def available() -> tuple[str, ...]:
    """Return the names of the block backends that run on every machine, with every floating point dtype.

    >>> available()
    ('naive', 'blockwise', 'native')
    """
    return tuple(block.name for block in _EVERYWHERE)


def known() -> tuple[str, ...]:
    """Return the names of all block backends.

    `triton` needs a GPU or Triton's interpreter, and does not support float64. `cudnn` and `flash` need
    a GPU, and support float16 and bfloat16. `flex` supports no dropout, and no float64 on a GPU.

    >>> known()
    ('naive', 'blockwise', 'native', 'cudnn', 'flex', 'flash', 'triton')
    """
    return (*_BLOCKS, _FLASH, _TRITON)


def get_block(
    name: str | Block, q: Query, requirements: frozenset[str] = frozenset(), v: Value | None = None
) -> Block:
    """Return the block backend called `name`, after a check that it supports tensors like `q`.

    "auto" means the first block of `AUTO` that supports `q` and `v` and meets all requirements itself. A
    library's block, such as `native`, passes tiles with requirements to `blockwise`, so "auto" skips such a
    block if there are requirements. A block object is returned unchanged.
    requirements: the score rules that the block must support, among "softcap" and "dropout". v: the values,
    if their head dim differs from that of `q`.
    Raises: BackendError for an unknown name, for an object that is not a block, or for a block that does not
    support `q`, `v` and all requirements.

    >>> import torch
    >>> get_block("auto", torch.empty(1, 2, 16, 8)).name
    'native'
    """
    both = (q,) if v is None else (q, v)
    if name == "auto":
        name = next((each for each in AUTO if _fits(_named(each, both), both, requirements)), AUTO[-1])
    block = _named(name, both) if isinstance(name, str) else name
    if not callable(getattr(block, "supports", None)):
        raise BackendError(f"one of the blocks {', '.join(known())} or auto, or a block object", repr(block))
    if reason := _unsupported(block, both):
        raise BackendError(f"tensors that the block '{block.name}' supports: it {reason}", "", _remedy(both))
    if missing := requirements - block.supported_rules:
        raise BackendError(
            f"a block that supports {' and '.join(sorted(missing))}",
            f"the block '{block.name}', which does not",
            "use block='blockwise', or block='auto', which chooses it",
        )
    return block


def record_block(comm: Comm, asked: str | Block, chosen: Block, requirements: frozenset[str]) -> None:
    """Record in the trace of `comm` which block computes, if its name is not the one that the caller asked for.

    asked: "auto", a name or a block object, as for `get_block`. chosen: the block that `get_block` returned.

    >>> from ringlab import VirtualCluster
    >>> run = VirtualCluster(1).run(lambda ring: record_block(ring.comm, "native", Native(), frozenset({"softcap"})))
    >>> [(choice.asked, choice.chosen) for choice in run.trace.choices()]
    [("block='native' with softcap", 'blockwise')]
    """
    if asked == "auto":
        comm.record_choice("block='auto'", chosen.name)
    elif requirements and isinstance(chosen, LibraryBlock):
        needed = " and ".join(sorted(requirements))
        comm.record_choice(f"block='{chosen.name}' with {needed}", Blockwise.name)
    elif isinstance(asked, str) and asked != chosen.name:
        comm.record_choice(f"block='{asked}'", chosen.name)


def record_short_tiles(comm: Comm, block: Block, sizes: Iterable[tuple[int, int]]) -> None:
    """Record in the trace of `comm` that `blockwise` computes the tiles that are too short for `block`, if any are.

    sizes: the number of rows and the number of keys of each tile.

    >>> from ringlab import VirtualCluster
    >>> run = VirtualCluster(1).run(lambda ring: record_short_tiles(ring.comm, Cudnn(), [(1, 64)]))
    >>> [(choice.asked, choice.chosen) for choice in run.trace.choices()]
    [("block='cudnn' for tiles with fewer than 2 rows or keys", 'blockwise')]
    """
    if not isinstance(block, LibraryBlock) or block.shortest == 1:
        return
    if any(block.too_short(rows, keys) for rows, keys in sizes):
        asked = f"block='{block.name}' for tiles with fewer than {block.shortest} rows or keys"
        comm.record_choice(asked, Blockwise.name)


def _named(name: str, tensors: tuple[Tensor, ...]) -> Block:
    if name not in known():
        raise BackendError(f"one of the blocks {', '.join(known())} or auto", repr(name))
    if name == _FLASH:
        return _newest(tensors)
    return _triton() if name == _TRITON else _BLOCKS[name]


def _newest(tensors: tuple[Tensor, ...]) -> Block:
    """Return the newest version of flash-attn that supports these tensors.

    If no version does, return one whose `supports` states the reason: the newest installed version, or version 2 if
    none is installed.
    """
    fitting = (block for block in VERSIONS if _unsupported(block, tensors) is None)
    installed = (block for block in VERSIONS if block.missing() is None)
    return next(fitting, None) or next(installed, None) or VERSIONS[-1]


def _fits(block: Block, tensors: tuple[Tensor, ...], requirements: frozenset[str]) -> bool:
    """Return whether the block supports these tensors, and computes tiles with the requirements itself."""
    itself = not (requirements and isinstance(block, LibraryBlock))
    return itself and _unsupported(block, tensors) is None


def _unsupported(block: Block, tensors: tuple[Tensor, ...]) -> str | None:
    """Return the reason why the block does not support one of these tensors, or None if it supports all."""
    return next((reason for x in tensors if (reason := block.supports(x))), None)


def _remedy(tensors: tuple[Tensor, ...]) -> str:
    """Return the remedy for unsupported tensors: a block that supports them, or else a conversion."""
    for name in ("native", "blockwise"):
        if _unsupported(_named(name, tensors), tensors) is None:
            return f"use block='{name}'"
    return f"no block computes {tensors[0].dtype}: convert q, k and v with .to(torch.bfloat16)"


@cache
def _triton() -> Block:
    """Return the Triton block; its package is imported on first use."""
    from ringlab.blocks.triton import TritonBlock

    return TritonBlock()
