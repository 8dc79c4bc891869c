"""Is communication hidden? Seconds of a block and of a hop, and the tokens per rank from which a hop hides.

A block of c queries against c keys takes 4·B·H·D·c² FLOPs; meanwhile K and V of c tokens travel,
2·B·K·D·e·c bytes of e each. With F FLOP/s and B bytes/s one way,

    4·H·D·c² / F  >=  2·K·D·e·c / B      ⇔      c  >=  e·F / (2·B) · K/H

A balanced causal layout leaves half of every block to compute, so c doubles. Batch and head dim
fall out. Source: arXiv 2310.01889, section 3 (there e = 2 and K = H: c >= F/B).
"""

from __future__ import annotations

import math

from ringlab.cost.flops import attention_flops
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import gradient_bytes_per_token
from ringlab.errors import CostError


def block_s(sizes: Attention, tokens: float, flops_per_s: float, *, backward: bool = False) -> float:
    """Return the seconds in which a rank of `tokens` tokens computes one block: half of it if causal, balanced."""
    _check(tokens=tokens, flops_per_s=flops_per_s)
    per_pair = attention_flops(sizes, 1, backward) / (2 if sizes.causal else 1)
    return per_pair * tokens**2 / flops_per_s


def hop_s(
    sizes: Attention, tokens: float, bytes_per_s: float, latency_s: float = 0.0, *, backward: bool = False
) -> float:
    """Return the seconds in which a block of `tokens` tokens moves on; backward, dK and dV with it in float32.

    bytes_per_s counts ONE direction of the link: half of what data sheets print for NVLink.
    """
    _check(tokens=tokens, bytes_per_s=bytes_per_s)
    return latency_s + _bytes_per_token(sizes, backward) * tokens / bytes_per_s


def least_tokens_hidden(
    flops_per_s: float,
    bytes_per_s: float,
    sizes: Attention,
    *,
    latency_s: float = 0.0,
    backward: bool = False,
) -> float:
    """Return the tokens per rank from which a hop takes no longer than a block; round up.

    flops_per_s as the kernel reaches them; causal sizes mean a balanced layout (contiguous: pass
    causal=False, since its slowest rank computes whole blocks). Latency makes it a quadratic.
    Raises: CostError for rates that are not above zero.
    """
    _check(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    quadratic = block_s(sizes, 1, flops_per_s, backward=backward)
    linear = _bytes_per_token(sizes, backward) / bytes_per_s
    if latency_s == 0:
        return linear / quadratic
    return (linear + math.sqrt(linear**2 + 4 * quadratic * latency_s)) / (2 * quadratic)


def _bytes_per_token(sizes: Attention, backward: bool) -> int:
    return sizes.block_bytes_per_token + (gradient_bytes_per_token(sizes) if backward else 0)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise CostError(f"{name} > 0, a finite number", f"{value!r}")
