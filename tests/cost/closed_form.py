r"""Makespans that can be worked out by hand: where all shards hold L tokens and all links are alike.

Let T(r, s) be when rank r begins step s, c(r, s) its computation there and h the time of a hop, bytes
over bandwidth plus latency. It posts the exchange of step s at T(r, s), a message starts when both
its ends are posted, and the rank waits for its sending and its receiving:

    T(r, s+1) = max( T(r, s) + c(r, s),  max(T(r−1, s), T(r, s), T(r+1, s)) + h ),   T(r, 0) = 0

and the ring is done at max over r of T(r, P−1) + c(r, P−1). If one rank computes at least as long as
every other in each step, nobody is ever later than it: by induction T(r, s) ≤ T(r*, s), and so
T(r*, s+1) = T(r*, s) + max(c(r*, s), h). With first(c) at its own block and later(c) at all others,

    makespan = max(first, h) + (P − 2)·max(later, h) + later        for P ≥ 2, and first for P = 1.

In units of score elements, for one rank and kernels that compute visible pairs only:

    no mask      first = later = L²
    contiguous   rank P−1 meets all keys of all others: first L(L+1)/2, later L²
    striped      rank P−1 meets keys 0 … i with row i, everywhere: first = later = L(L+1)/2
    zig-zag      two pieces of n = L/2: the own block n² + 2·n(n+1)/2; any other one 2n²,
                 all rows with its first piece or the second piece's rows with all of it
"""

from __future__ import annotations

from ringlab.cost.sizes import Attention
from ringlab.errors import CostError


def hop_s(sizes: Attention, L: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds in which K and V of L tokens go to the next rank."""
    return L * sizes.block_bytes_per_token / bytes_per_s + latency_s


def ring_s(P: int, first_s: float, later_s: float, hop_s: float) -> float:
    """Return the makespan where one rank computes longest in each step: its own block, then P-1 others."""
    if P < 1:
        raise CostError("P >= 1 ranks", f"P={P}")
    if P == 1:
        return first_s
    return max(first_s, hop_s) + (P - 2) * max(later_s, hop_s) + later_s


def uniform_s(P: int, L: int, score_s: float, hop_s: float) -> float:
    """Return the makespan without a mask; `score_s` seconds per score element, all heads together."""
    return ring_s(P, L * L * score_s, L * L * score_s, hop_s)


def contiguous_s(P: int, L: int, score_s: float, hop_s: float) -> float:
    """Return the makespan of the causal forward under the contiguous layout."""
    return ring_s(P, L * (L + 1) / 2 * score_s, L * L * score_s, hop_s)


def striped_s(P: int, L: int, score_s: float, hop_s: float) -> float:
    """Return the makespan of the causal forward under the striped layout."""
    return ring_s(P, L * (L + 1) / 2 * score_s, L * (L + 1) / 2 * score_s, hop_s)


def zigzag_s(P: int, L: int, score_s: float, hop_s: float) -> float:
    """Return the makespan of the causal forward under the zig-zag layout. Raises: CostError for odd L."""
    if L % 2:
        raise CostError("shards of two equal pieces, L even", f"L={L}", f"L={L + 1}")
    n = L // 2
    return ring_s(P, (2 * n * n + n) * score_s, 2 * n * n * score_s, hop_s)


def backward_uniform_s(P: int, block_s: float, kv_hop_s: float, dkv_hop_s: float) -> float:
    """Return the makespan of the backward without a mask, where computing hides both hops of a step.

    The gradients of each block make P hops, and behind the last one there is nothing to hide it.
    Raises: CostError where a step takes longer to send than to compute.
    """
    if P > 1 and block_s < kv_hop_s + dkv_hop_s:
        raise CostError("a block that takes at least as long as both hops", f"{block_s} s")
    return P * block_s + (dkv_hop_s if P > 1 else 0.0)


def allgather_s(P: int, block_s: float, transfer_s: float, latency_s: float = 0.0) -> float:
    """Return the makespan of the all-gather forward without a mask, with nothing to hide it.

    K comes from all others, P-1 messages of `transfer_s` by one port, then V, then P blocks.
    """
    gather = (P - 1) * transfer_s + latency_s if P > 1 else 0.0
    return 2 * gather + P * block_s
