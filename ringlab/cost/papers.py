"""Published figures, recomputed: speed-ups of the Striped Attention paper, lengths of Ring Attention's paper.

Sources: arXiv 2311.09431 (striped), arXiv 2310.01889 (ring). Each docstring states the assumptions that the
papers leave open; no assumption is fitted to a row of a table.
"""

from __future__ import annotations

import math

from ringlab.cost import memory
from ringlab.cost.flops import (
    attention_flops,
    layout_work,
    linear_flops,
    slowest_per_step,
    vocabulary_flops,
)
from ringlab.cost.models import Model
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous, striped

SEQUENCE_BLOCKS = 6
"""Blocks of the Ring Attention paper's shortest sequence per host: q, k, v, the arriving k and v, out."""
ARCHITECTURES = ("vanilla", "memory-efficient", "blockwise", "ring")
"""The paper's four architectures: scores materialised; not materialised; with the feed-forward blockwise too; with attention in a ring."""


def striped_speedup(
    model: Model, ranks: int, tokens: int, attention_weight: float = 1.0, tile: tuple[int, int] | None = None
) -> float:
    """Return the greatest speed-up of striped over contiguous ring attention.

    (linear + w·attention_contiguous) / (linear + w·attention_striped): forward FLOPs of a rank with
    `tokens`/`ranks` tokens, where each step of attention takes as long as its slowest rank, and
    communication is hidden. `attention_weight` w is the cost of an attention FLOP relative to a
    FLOP of a linear layer: 2 on A100 (TF32), 1 on TPUs. If `tile` is None, only visible pairs count, which
    gives the paper's "theoretical maximum speed-up"; with a tile, all tiles that are not entirely masked
    count.
    Raises: CostError for fewer tokens than ranks, a weight that is not above zero, or layers that are not alike.
    Source: arXiv 2311.09431, section 4; its tables count two feed-forward matrices.
    """
    _check_striped(ranks, tokens, attention_weight)
    own = -(-tokens // ranks)
    linear = linear_flops(model, own) + vocabulary_flops(model, own)
    ring, balanced = (
        linear + attention_weight * _attention_flops(model, layout, tile)
        for layout in (contiguous(tokens, ranks), striped(tokens, ranks))
    )
    return ring / balanced


def ring_minimum(flops_per_s: float, bytes_per_s: float) -> tuple[float, float]:
    """Return the fewest tokens of a block that hide its hop, c = F/B, and of a host's whole sequence, 6·c.

    bytes_per_s counts one direction. Assumed: half precision, no mask, as many K/V heads as query heads.
    Raises: CostError for rates that are not above zero. Source: arXiv 2310.01889, table 2.
    """
    for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not math.isfinite(value) or value <= 0:
            raise CostError(f"{name} > 0, a finite number", f"{value!r}")
    block = flops_per_s / bytes_per_s
    return block, SEQUENCE_BLOCKS * block


def ring_context_bytes(model: Model, tokens: int, devices: int, architecture: str) -> int:
    """Return the bytes that each of `devices` devices needs to train with `tokens` tokens on each device.

    In the Ring Attention paper's setting (sections 4 and 5.1), everything is in float32. Weights, gradients
    and Adam's moments are fully sharded (FSDP over all devices). Each device has one sequence or, under ring
    attention, `tokens` tokens of the only sequence.
    Assumed: a layer keeps for its backward the activation of the paper's table 1, in float32 instead of
    bfloat16. With batch b, sequence s, width h, heads n and c tokens in a block, the table's bytes in
    bfloat16 are:

        vanilla           8·b·s·h + 2·b·n·s²    the scores are materialised
        memory-efficient  8·b·s·h
        blockwise         2·b·s·h               the feed-forward too is computed by blocks
        ring              2·b·s·h               and one layer at a time uses the ring's six blocks of 2·b·c·h

    One layer's weights and gradient are gathered. Logits are held once, in float32: their gradient is written over them.
    Raises: CostError for an unknown architecture, or layers that are not alike.
    """
    if architecture not in ARCHITECTURES:
        raise CostError(f"one of the architectures {', '.join(ARCHITECTURES)}", repr(architecture))
    sizes = model.only.attention(dtype="float32", causal=False)
    stream = 4 * tokens * model.d_model  # bytes of a float32 tensor as wide as the residual
    kept = stream if architecture in ("blockwise", "ring") else 4 * stream
    if architecture == "vanilla":
        kept += 4 * model.H * tokens**2
    working = memory.attention_bytes(sizes, tokens, devices) if architecture == "ring" else 0
    state = memory.state_bytes(model, "float32", "float32", fsdp=devices)
    return state + model.layers * kept + working + memory.logits_bytes(model, tokens)


def ring_max_context(model: Model, devices: int, memory_bytes: float, architecture: str) -> int:
    """Return the longest context in tokens, a power of two per device as in the paper; 0 if no context fits.

    Under ring attention the devices' tokens together are one context.
    Raises: CostError for an unknown architecture.
    Source: arXiv 2310.01889, table 3; the assumptions are those of `ring_context_bytes`.
    """
    tokens = 1
    while tokens < 2**40 and ring_context_bytes(model, tokens, devices, architecture) <= memory_bytes:
        tokens *= 2
    tokens //= 2
    return tokens * devices if architecture == "ring" else tokens


def _attention_flops(model: Model, layout: Layout, tile: tuple[int, int] | None) -> int:
    """Return the forward FLOPs of all layers' attention if every step waits for its slowest rank."""
    work = slowest_per_step(layout_work(layout, tile=tile)).sum()
    return model.layers * attention_flops(model.only.attention(), int(work))


def _check_striped(ranks: int, tokens: int, attention_weight: float) -> None:
    if ranks < 1 or tokens < ranks:
        raise CostError("at least one rank, and a token for each", f"{tokens} tokens on {ranks} ranks")
    if not math.isfinite(attention_weight) or attention_weight <= 0:
        raise CostError("attention_weight > 0, a finite number", f"{attention_weight!r}")
