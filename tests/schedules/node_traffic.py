"""Bytes of the schedules that cross nodes, or merge partial results: double ring and decode.

Ranks side by side make nodes of `node` ranks each. Backward counts the backward pass alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import Traffic, gradient_bytes_per_token, ring_traffic, state_bytes
from ringlab.errors import CostError


@dataclass(frozen=True)
class NodeTraffic:
    """What leaves a node: bytes of all its ranks, and of the rank that sends most of it."""

    node_bytes: int
    busiest_rank_bytes: int


def double_ring_traffic(sizes: Attention, S: int, P: int, node: int, *, backward: bool = False) -> Traffic:
    """Return what a rank of ceil(S/P) tokens sends in a double ring: as many bytes and messages as in a ring.

    Raises: CostError for ranks that do not fill whole nodes.
    """
    _nodes(P, node)
    return ring_traffic(sizes, -(-S // P) * P, P, backward=backward)


def between_nodes(
    sizes: Attention, S: int, P: int, node: int, *, double: bool, backward: bool = False
) -> NodeTraffic:
    """Return what leaves a node of ranks of ceil(S/P) tokens, in a double ring or in a ring.

    In a ring one rank of a node sends to the next: P − 1 blocks of K and V, and in backward P of dK and dV too.
    In a double ring each of the n ranks sends N − 1 blocks to its place in the next of the N nodes, so P − n of
    them leave the node, and in backward N of dK and dV.
    Raises: CostError for ranks that do not fill whole nodes.
    """
    nodes, tokens = _nodes(P, node), -(-S // P)
    if nodes == 1:
        return NodeTraffic(0, 0)
    blocks, gradients, senders = (nodes - 1, nodes, node) if double else (P - 1, P, 1)
    per_rank = blocks * sizes.block_bytes_per_token * tokens
    if backward:
        per_rank += gradients * gradient_bytes_per_token(sizes) * tokens
    return NodeTraffic(senders * per_rank, per_rank)


def decode_traffic(sizes: Attention, P: int, *, new: int = 1, merge: str = "all-reduce") -> Traffic:
    """Return what the busiest of `P` ranks sends to decode `new` tokens of each sequence, however long these are.

    out and lse in the state dtype, to each of P − 1 others at once, or once in each of log2 P rounds of a tree.
    Where P is no power of two, a rank that speaks for one beyond it sends it the result too.
    Raises: CostError for an unknown merge.
    """
    message = sizes.B * sizes.H * new * (sizes.D + 1) * state_bytes(sizes.dtype)
    if merge == "all-reduce":
        return Traffic((message * (P - 1),) if P > 1 else (), P - 1)
    if merge != "tree":
        raise CostError("merge= one of all-reduce, tree", repr(merge))
    rounds = P.bit_length() - 1
    steps = rounds + (P != 1 << rounds)
    return Traffic((message,) * steps, steps)


def _nodes(P: int, node: int) -> int:
    if node < 1 or P % node:
        raise CostError(f"nodes of which {P} ranks fill some wholly", f"{node} ranks to a node")
    return P // node
