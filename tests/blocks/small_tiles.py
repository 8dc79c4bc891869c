"""The Triton block with tiles small enough that a short sequence has many."""

from __future__ import annotations

from ringlab.blocks.triton import TritonBlock
from ringlab.blocks.triton.configs import Config


def small_tiles(block_m: int = 32, block_n: int = 16, precision: str = "ieee") -> TritonBlock:
    """Return a block whose kernels hold or walk over `block_m` rows and `block_n` keys."""
    config = Config(block_m, block_n, num_warps=4, num_stages=1, precision=precision)
    return TritonBlock(precision, dict.fromkeys(("forward_step", "backward_dq", "backward_dkv"), config))
