"""Published claims about the messages between ranks that name wrong senders, receivers or contents."""

from __future__ import annotations

from typing import Any

import torch

from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.cost.flops import layout_work
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic, ulysses_traffic
from ringlab.errors import DeadlockError
from ringlab.layout import contiguous
from ringlab_course.errata.entry import Entry, Figure


def _hops() -> dict[str, Any]:
    P, layout = 8, contiguous(64, 8)
    q = k = v = torch.zeros(1, 1, 64, 16)

    def program(ring: Ring) -> None:
        shards = (layout.shard(x, ring.rank) for x in (q, k, v))
        ring_attention(*shards, ring=ring, layout=layout)

    trace = VirtualCluster(P).run(program).trace
    sent, block = trace.bytes_sent(rank=0), 2 * 8 * 16 * 4  # K and V of 8 tokens, head dim 16, float32
    return {
        "P": P,
        "rounds": trace.rounds(0),
        "blocks": sent // block,
        "more": f"1/{sent // block}",
    }


def _one_by_one() -> dict[str, Any]:
    def ends(program: Any) -> bool:
        try:
            VirtualCluster(4).run(program)
        except DeadlockError:
            return True
        return False

    def in_turn(ring: Ring) -> None:
        k, v = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
        for x in (k, v):  # each operation is over before the next one begins, as on one CUDA stream
            ring.comm.exchange(send=(x,), to=ring.next).wait()
        for x in (k, v):
            ring.comm.exchange(receive=(torch.empty_like(x),), source=ring.previous).wait()

    def together(ring: Ring) -> None:
        ring.post(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)).wait()

    return {"P": 4, "in_turn": ends(in_turn), "together": ends(together)}


def _neighbours() -> dict[str, Any]:
    P = 8

    def ring_exchange(ring: Ring) -> None:
        x = torch.zeros(16)
        for _ in range(P - 1):
            x = ring.shift(x)

    def all_to_all(ring: Ring) -> None:
        for distance in range(1, P):
            to, source = (ring.rank + distance) % P, (ring.rank - distance) % P
            ring.comm.exchange(
                send=(torch.zeros(16),), to=to, receive=(torch.empty(16),), source=source
            ).wait()

    sizes, S = Attention(H=32, K=8, D=128), 131072
    ring_bytes = ring_traffic(sizes, S, P).total_bytes
    ulysses_bytes = ulysses_traffic(sizes, S, P).total_bytes
    return {
        "P": P,
        "ring": len(VirtualCluster(P).run(ring_exchange).trace.peers(0)),
        "all": len(VirtualCluster(P).run(all_to_all).trace.peers(0)),
        "ratio": ring_bytes / ulysses_bytes,
        "H": sizes.H,
        "K": sizes.K,
        "S": S,
    }


def _sent(schedule: str, S: int, P: int) -> int:
    """Return the bytes that rank 0 sends to attend to S tokens in float32, with 8 heads of 16 dimensions."""
    layout = contiguous(S, P)
    q = k = v = torch.zeros(1, 8, S, 16)

    def program(ring: Ring) -> None:
        shards = (layout.shard(x, ring.rank) for x in (q, k, v))
        ring_attention(*shards, ring=ring, layout=layout, schedule=schedule)

    return VirtualCluster(P).run(program).trace.bytes_sent(rank=0)


def _heads_or_tokens() -> dict[str, Any]:
    S, P = 512, 8
    exchanged, gathered = _sent("ulysses", S, P), _sent("allgather", S, P)
    row = S // P * 16 * 4  # one head of a rank's own tokens
    return {
        "P": P,
        "H": 8,
        "heads": exchanged // 4 // row // (P - 1),  # of Q, K, V and out, sent to each of the others
        "all": gathered // 2 // row // (P - 1),
        "ratio": exchanged / gathered,
    }


def _longer() -> dict[str, Any]:
    P, S = 8, 512
    once, twice = _sent("ring", S, P), _sent("ring", 2 * S, P)
    work = [layout_work(contiguous(length, P)).sum() for length in (S, 2 * S)]
    return {"P": P, "S": S, "twice": 2 * S, "bytes": twice / once, "work": float(work[1] / work[0])}


MESSAGES = (
    Entry(
        "isend, isend, irecv, irecv, one after the other, is not a ring but a deadlock",
        "Post the sends of K and V, then the receives, each on its own, and wait for all of them.",
        "If each operation ends before the next one begins, as unbatched operations do on one NCCL stream, every "
        "rank sends first, and all {P} wait for somebody to receive. Give both halves to the transport at once "
        "with `batch_isend_irecv`, or let even ranks send first and odd ranks receive first.",
        "Non-blocking sends over gloo hide the problem, so a test on CPUs passes.",
        "11",
        (
            Figure("in_turn", "one after the other: a deadlock", False),
            Figure("together", "both halves at once: a deadlock", False, holds=True),
        ),
        _one_by_one,
    ),
    Entry(
        "The forward of a ring of P ranks takes P − 1 rounds of communication, not P",
        "K and V make P rounds. (A version in circulation sends P times.)",
        "After P − 1 hops every block has been everywhere: each of {P} ranks sends {rounds} times. A P-th hop "
        "would bring each block home, where it never left. In backward, dK and dV do make P hops, because they "
        "must come home.",
        "It adds {more} to the traffic, after the last block, when no computation is left to hide it.",
        "05",
        (
            Figure("rounds", "rounds of the forward ring on 8 ranks", 8),
            Figure("blocks", "K/V blocks that a rank sends", 8),
        ),
        _hops,
    ),
    Entry(
        "Ring and all-to-all are two patterns, not two words for one",
        "The devices exchange K and V in an all-to-all (ring) pattern.",
        "In a ring, each of {P} ranks sends to {ring} other rank, one K/V block after the other. In an all-to-all, "
        "each sends to all {all} others, different parts of Q, K, V and of the output: that is Ulysses. For {H} "
        "query and {K} key/value heads and S = {S}, the ring sends {ratio} times as many bytes, and can hide them.",
        "They load a network differently. The time of a block limits the ring, and the number of heads limits the "
        "all-to-all.",
        "05",
        (
            Figure("ring", "ranks that each sends to, ring of 8", 7),
            Figure("all", "ranks that each sends to, all-to-all of 8", 7, holds=True),
            Figure("ratio", "bytes sent, ring relative to all-to-all", None, "{:.3g}"),
        ),
        _neighbours,
        drawing="schedules",
    ),
    Entry(
        "Ulysses gives a rank the K and V of all tokens for some of the heads, not for all",
        "Before it attends, each rank gathers all chunks of K and V, as in an all-gather.",
        "A rank receives all tokens of *its* heads, and gives up its own tokens of the other heads. With {H} heads "
        "on {P} ranks, each of the others is sent {heads} head of K and V, where an all-gather sends all {all}. Q and "
        "out are exchanged too, and all that together is {ratio} of the bytes of an all-gather.",
        "If the claim were true, Ulysses would need the memory of the whole sequence. In fact a rank holds as many numbers after the "
        "exchange as before it.",
        "15",
        (
            Figure("heads", "heads of K and V that a rank sends to each other rank, Ulysses", 8),
            Figure("all", "the same, all-gather", 8, holds=True),
            Figure("ratio", "bytes sent, Ulysses relative to an all-gather", None, "{:.3g}"),
        ),
        _heads_or_tokens,
    ),
    Entry(
        "The communication of a ring grows with the sequence, not with its square",
        "Attention is quadratic, and so are the bytes that a ring sends.",
        "Every rank sends P − 1 blocks of K and V, and a block has S/P tokens: from {S} tokens to {twice}, the bytes "
        "grow {bytes} times. The work grows {work} times.",
        "This difference is the reason why rings work: the longer the sequence, the better computation hides "
        "communication.",
        "06",
        (
            Figure("bytes", "growth of a rank's bytes when the sequence is twice as long", 4.0, "{:.3g}"),
            Figure("work", "growth of the work", 4.0, "{:.3g}", holds=True),
        ),
        _longer,
    ),
)
