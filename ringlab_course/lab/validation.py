"""Checks of a lab's settings before any rank starts: a setting that cannot be measured is refused by name."""

from __future__ import annotations

from ringlab.blocks import known
from ringlab.errors import LabError

DTYPES = ("float32", "bfloat16", "float16")


def expect_attention(H: int, D: int, dtype: str, rounds: int, seed: int, block: str = "auto") -> None:
    """Raise LabError unless heads, head dim, dtype, rounds, seed and block are such as can be measured."""
    if dtype not in DTYPES:
        raise LabError(f"a dtype among {', '.join(DTYPES)}", repr(dtype), "--dtype")
    if min(H, D) < 1:
        raise LabError("a head and a column at least", f"H={H}, D={D}", "--heads, --head-dim")
    if rounds < 1:
        raise LabError("a round at least", str(rounds), "--rounds")
    if not 0 <= seed < 2**62:
        raise LabError("a seed from 0 to 2⁶² − 1", str(seed), "--seed")
    if block not in (*known(), "auto"):
        raise LabError(f"a block among {', '.join(known())} or auto", repr(block), "--block")


def expect_ranks(P: int) -> None:
    """Raise LabError unless there are two ranks or more."""
    if P < 2:
        raise LabError(
            "two ranks or more, for an exchange", str(P), "--ranks 2, or torchrun --nproc-per-node 2"
        )
