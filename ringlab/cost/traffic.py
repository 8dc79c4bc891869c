"""Bytes on the wire: those that one rank sends in one attention layer, per step and in total.

All equal those of `ringlab.schedules`, byte for byte; Ulysses and the hybrid assume equally many tokens
on each rank. Ulysses (arXiv 2309.14509) turns the shard of tokens into a shard of heads by all-to-all and
back; the hybrid (arXiv 2405.07719) makes rings of Ulysses groups. Backward counts the backward pass alone.

Is communication hidden? Seconds of a block and of a hop, and the tokens per rank that hide a hop.

A block of c queries against c keys takes 2·B·H·(D + Dv)·c² FLOPs, with Dv the head dim of v, D as a rule; meanwhile K
and V of c tokens travel, B·K·(D + Dv)·e·c bytes of e each. With F FLOP/s and B bytes/s one way,

    2·H·(D + Dv)·c² / F  >=  K·(D + Dv)·e·c / B      ⇔      c  >=  e·F / (2·B) · K/H

A balanced causal layout leaves half of every block to compute, so c doubles. Batch and head dims
fall out. Source: arXiv 2310.01889, section 3 (there e = 2 and K = H: c >= F/B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ringlab.cost.flops import attention_flops
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.errors import CostError, WorldSizeError
from ringlab.layout import Layout, contiguous


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank sends in each step, in order, and the number of its messages.

    Each step that can run while a block is computed has an entry; an all-to-all is one step.
    """

    by_step_bytes: tuple[int, ...]
    messages: int

    @property
    def per_step_bytes(self) -> int:
        """Return the most bytes sent in one step."""
        return max(self.by_step_bytes, default=0)

    @property
    def steps(self) -> int:
        """Return the number of steps in which something is sent."""
        return sum(sent > 0 for sent in self.by_step_bytes)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all steps."""
        return sum(self.by_step_bytes)


def state_bytes(dtype: str) -> int:
    """Return the bytes of one element of dK and dV on the wire: float32, or float64 for float64."""
    return 8 if dtype == "float64" else 4


def gradient_bytes_per_token(sizes: Attention) -> int:
    """Return the bytes that dK and dV of one token take on the wire: B·K·(D + Dv)·4."""
    return sizes.B * sizes.K * (sizes.D + sizes.value_dim) * state_bytes(sizes.dtype)


def ring_traffic(
    sizes: Attention,
    layout: Layout | int,
    P: int | None = None,
    *,
    rank: int | None = None,
    backward: bool = False,
) -> Traffic:
    """Return the traffic of `rank` around the ring; if None, of the rank that sends most.

    Forward: K and V of the current block, P−1 hops. Backward: K and V once more, P−1 hops, with dK
    and dV in float32, P hops: the last one brings them home.
    `layout` may be a number of tokens, dealt contiguously to P ranks.
    Raises: CostError for tokens or ranks below one; WorldSizeError for a P other than the layout's.
    """
    layout = _layout(layout, P)
    if rank is None:
        return _largest(ring_traffic(sizes, layout, rank=r, backward=backward) for r in range(layout.P))
    P = layout.P
    held = [layout.length((rank - step) % P) for step in range(P)]
    blocks = [sizes.block_bytes_per_token * tokens for tokens in held[: P - 1]]
    if not backward:
        return Traffic(tuple(blocks), P - 1)
    if P == 1:
        return Traffic((), 0)
    gradients = [gradient_bytes_per_token(sizes) * tokens for tokens in held]
    sent = tuple(block + gradient for block, gradient in zip([*blocks, 0], gradients, strict=True))
    return Traffic(sent, 2 * P - 1)


def allgather_traffic(
    sizes: Attention,
    layout: Layout | int,
    P: int | None = None,
    *,
    rank: int | None = None,
    backward: bool = False,
) -> Traffic:
    """Return the traffic of `rank` if all ranks gather all K/V first; if None, of the rank that sends most.

    Forward: its own K, then its own V, to each of the P−1 others. Backward: the same again, and to each
    other rank the dK and dV of that rank's tokens in float32 (a reduce-scatter).
    Raises: as `ring_traffic`.
    """
    layout = _layout(layout, P)
    if rank is None:
        return _largest(allgather_traffic(sizes, layout, rank=r, backward=backward) for r in range(layout.P))
    others = layout.P - 1
    gathered = sizes.block_bytes_per_token * layout.length(rank) * others
    if not backward:
        return Traffic((gathered,) if others else (), 2 * others)
    scattered = gradient_bytes_per_token(sizes) * (layout.S - layout.length(rank))
    return Traffic((gathered, scattered) if others else (), 3 * others)


def ulysses_traffic(sizes: Attention, S: int, P: int, *, backward: bool = False) -> Traffic:
    """Return the traffic of a rank of ceil(S/P) tokens: all-to-alls of Q, K and V, and of the output.

    Each of the P ranks ends with H/P query heads and K/P K/V heads of all tokens, or if P exceeds K
    with the one K/V head that its query heads need. Backward: as many bytes, of dO, dQ, dK and dV; dK and dV
    of a head that several ranks hold are in float32, since they are summed at home.
    Raises: CostError for heads that P ranks cannot share, or tokens or ranks below one.
    """
    _check_degrees(S, P)
    heads = shared_heads(sizes, P)
    if P == 1:
        return Traffic((), 0)
    size, sent = element_bytes(sizes.dtype), -(-S // P) * (P - 1) * sizes.B
    query, out = (sent * (sizes.H // P) * dim * size for dim in (sizes.D, sizes.value_dim))
    block = sent * heads * (sizes.D + sizes.value_dim)
    home = block * (state_bytes(sizes.dtype) if P > sizes.K else size)
    before, after = (out, query + home) if backward else (query + block * size, out)
    return Traffic((before, after), 4 * (P - 1))


def hybrid_traffic(sizes: Attention, S: int, ring: int, ulysses: int, *, backward: bool = False) -> Traffic:
    """Return the traffic of a rank in rings of `ring` groups of `ulysses` ranks each: P = ring · ulysses.

    A group shares the heads of S/ring tokens by all-to-all; then each rank runs a ring for its heads
    with the ranks at the same place in the other groups. Steps: all-to-all, hops, all-to-all.
    Raises: CostError for heads that the group cannot share, or tokens or ranks below one.
    """
    _check_degrees(S, ring * ulysses)
    outer = ulysses_traffic(sizes, -(-S // ring), ulysses, backward=backward)
    inner = replace(sizes, H=sizes.H // ulysses, K=shared_heads(sizes, ulysses))
    hops = ring_traffic(inner, S, ring, backward=backward)
    around = (outer.by_step_bytes[:1], outer.by_step_bytes[1:])
    return Traffic((*around[0], *hops.by_step_bytes, *around[1]), outer.messages + hops.messages)


def shared_heads(sizes: Attention, ulysses: int) -> int:
    """Return the number of K/V heads that a rank of a Ulysses group holds.

    Raises: CostError unless the group's degree divides H, and divides K or is a multiple of it.
    """
    if sizes.H % ulysses:
        raise CostError(
            f"a Ulysses degree that divides the H={sizes.H} query heads",
            f"{ulysses}",
            f"divisors: {', '.join(str(d) for d in range(1, sizes.H + 1) if sizes.H % d == 0)}",
        )
    if sizes.K % ulysses and ulysses % sizes.K:
        raise CostError(
            f"a Ulysses degree that divides the K={sizes.K} key/value heads, or is a multiple of them",
            f"{ulysses}",
        )
    return max(1, sizes.K // ulysses)


def _layout(layout: Layout | int, P: int | None) -> Layout:
    if isinstance(layout, Layout):
        if P not in (None, layout.P):
            raise WorldSizeError(f"{layout.P} ranks, those of {layout!r}", f"{P}")
        return layout
    _check_degrees(layout, 1 if P is None else P)
    return contiguous(layout, 1 if P is None else P)


def _check_degrees(S: int, P: int) -> None:
    for name, value in (("tokens", S), ("ranks", P)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CostError(f"{name} >= 1, an integer", f"{value!r}")


def _largest(traffics: Iterable[Traffic]) -> Traffic:
    return max(traffics, key=lambda traffic: traffic.total_bytes)


def block_s(sizes: Attention, tokens: float, flops_per_s: float, *, backward: bool = False) -> float:
    """Return the seconds that a rank of `tokens` tokens computes one block: half of it if causal, balanced.

    Raises: CostError for tokens or rates that are not above zero.
    """
    _check(tokens=tokens, flops_per_s=flops_per_s)
    per_pair = attention_flops(sizes, 1, backward) / (2 if sizes.causal else 1)
    return per_pair * tokens**2 / flops_per_s


def hop_s(
    sizes: Attention, tokens: float, bytes_per_s: float, latency_s: float = 0.0, *, backward: bool = False
) -> float:
    """Return the seconds of one hop of a block of `tokens` tokens; backward, with its dK and dV in float32.

    bytes_per_s counts ONE direction of the link: half of the figure that data sheets print for NVLink.
    Raises: CostError for tokens or rates that are not above zero.
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
    """Return the fewest tokens per rank for which a hop takes no longer than a block; round up.

    flops_per_s: the rate that the kernel reaches. Causal sizes assume a balanced layout (contiguous: pass
    causal=False, since its slowest rank computes whole blocks). Latency makes it a quadratic equation.
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
