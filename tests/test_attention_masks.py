"""Masks save the predicted bytes of messages over every transport; tests/substrates checks the values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import (
    Mask,
    VirtualCluster,
    contiguous,
    launch,
    per_document,
    plan,
    ring_attention,
    zigzag,
)
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Trace
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import RinglabError
from ringlab.layout import Layout

H, K, D = 4, 2, 16


def inputs(S: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    draw = np.random.default_rng(7).standard_normal
    shapes = (1, H, S, D), (1, K, S, D), (1, K, S, D), (1, H, S, D)
    return tuple(torch.from_numpy(draw(shape)).to(dtype) for shape in shapes)


def program(
    ring: Ring,
    layout: Layout,
    mask: Mask,
    schedule: str = "ring",
    backward: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    *qkv, dout = (layout.shard(x, ring.rank) for x in inputs(layout.S, dtype))
    q, k, v = (x.requires_grad_(backward) for x in qkv)
    out, lse = ring_attention(
        q, k, v, ring=ring, layout=layout, mask=mask, schedule=schedule, block="naive", return_lse=True
    )
    return (out.detach(), lse, *(torch.autograd.grad(out, (q, k, v), dout) if backward else ()))


def hops(w: int, S: int, P: int) -> int:
    """Return the hops of K and V: the number of other ranks that have some of the w − 1 keys before a rank's first row."""
    return min(P - 1, math.ceil((w - 1) / (S // P)))


def sent(trace: Trace, P: int) -> set[int]:
    return {trace.bytes_sent(rank=rank) for rank in range(P)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_fall_with_the_window_as_the_closed_form_says(dtype: torch.dtype) -> None:
    """Contiguous K and V make `hops` hops in each pass, and float32 dK and dV make one more, home."""
    S, P = 96, 6
    layout, block = contiguous(S, P), 2 * (S // P) * K * D
    for w in (1, 2, 16, 17, 18, 33, 49, 64, 65, 81, 82, 96, 1000):
        n = hops(w, S, P)
        cluster = VirtualCluster(P, memory=False)
        forward = cluster.run(program, layout, Mask(window=w), "ring", False, dtype).trace
        both = cluster.run(program, layout, Mask(window=w), "ring", True, dtype).trace
        of_forward = n * block * dtype.itemsize
        home = (n + 1) * block * 4 if n else 0
        assert sent(forward, P) == {of_forward}, w
        assert sent(both, P) == {2 * of_forward + home}, w
    assert [hops(w, S, P) for w in (1, 2, 17, 18, 81, 82, 1000)] == [0, 1, 1, 2, 5, 5, 5]


@given(P=st.integers(1, 8), length=st.integers(1, 9), w=st.integers(1, 90))
def test_the_plan_makes_as_many_hops_as_the_closed_form(P: int, length: int, w: int) -> None:
    n = hops(w, P * length, P)
    assert plan.plan(contiguous(P * length, P), Mask(window=w)).offsets == tuple(range(n + 1))


def test_a_window_under_zigzag_needs_two_blocks_of_seven() -> None:
    """The keys before a rank's two chunks are on the previous rank and on the next one, which is P − 1 hops away."""
    layout, mask = zigzag(64, 8), Mask(window=2)
    assert plan.plan(layout, mask).offsets == (0, 1, 7)
    for schedule in ("ring", "allgather"):
        trace = VirtualCluster(8, memory=False).run(program, layout, mask, schedule, False).trace
        assert sent(trace, 8) == {2 * 2 * (64 // 8) * K * D * 4}


@settings(max_examples=20)
@given(P=st.integers(1, 5), S=st.integers(1, 30), w=st.integers(1, 40), data=st.data())
def test_other_masks_send_what_their_hops_say(P: int, S: int, w: int, data: st.DataObject) -> None:
    """The plan gives the bytes sent under every layout; none are sent if ranks have whole documents."""
    layout = data.draw(st.sampled_from([contiguous, zigzag]))(S, P)
    mask = Mask(window=w, documents=(S // 3, S - S // 3))
    trace = VirtualCluster(P, memory=False).run(program, layout, mask, "ring", False).trace
    lengths, offsets = layout.lengths, plan.plan(layout, mask).offsets
    for rank in range(P):
        blocks = sum(lengths[(rank - distance) % P] for distance in offsets[:-1])
        assert trace.bytes_sent(rank=rank) == 2 * blocks * K * D * 4


def test_documents_that_lie_whole_on_ranks_send_nothing() -> None:
    layout, mask = contiguous(32, 4), Mask(documents=(8,) * 4)
    assert sent(VirtualCluster(4).run(program, layout, mask).trace, 4) == {0}


WINDOWS: list[tuple[Layout, Mask]] = [
    # Blocks make two of three hops, so gradients skip a rank on their way home.
    (contiguous(60, 4), Mask(window=17)),
    (contiguous(61, 4), Mask(window=2)),
    (contiguous(60, 4), Mask(causal=False, window=9)),
    (contiguous(64, 4), Mask(documents=(20, 44), window=12)),
    (per_document((31, 9, 24), 4), Mask(documents=(31, 9, 24), prefix=(0, 4, 2))),
    # A block is seen at distances 1 and 3, so it skips the rank at distance 2.
    (zigzag(64, 4), Mask(window=5)),
]


def all_windows(ring: Ring) -> list[tuple[Tensor, ...]]:
    return [program(ring, layout, mask, dtype=torch.float64) for layout, mask in WINDOWS]


def on_virtual_ranks(**options: Any) -> list[list[tuple[Tensor, ...]]]:
    return VirtualCluster(4, memory=False, **options).run(all_windows).results


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b)
        for these, those in zip(one, other, strict=True)
        for x, y in zip(these, those, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["gloo", "symmetric", "shared-gpu"])
def test_processes_give_the_same_bits_and_send_the_same_bytes(transport: str) -> None:
    """Real processes, too, can jump over ranks that see nothing, and send gradients home past other ranks."""
    outcome = launch(all_windows, 4, transport=transport, threads=1, timeout=60, memory=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        virtual = VirtualCluster(4, memory=False).run(all_windows)
    finally:
        torch.set_num_threads(threads)
    assert same(outcome.results, virtual.results)
    for rank in range(4):
        assert outcome.trace.bytes_sent(rank=rank) == virtual.trace.bytes_sent(rank=rank)


def test_late_messages_change_nothing() -> None:
    late = [Fault("delay", rank, exchange) for rank in range(4) for exchange in range(0, 12, 2)]
    assert same(on_virtual_ranks(faults=late), on_virtual_ranks())


def test_a_message_home_that_is_dropped_is_an_error() -> None:
    def run(**options: Any) -> Any:
        return VirtualCluster(4, memory=False, **options).run(program, *WINDOWS[0])

    made = [exchange for exchange in run().trace.exchanges(1) if not exchange.control]
    assert (made[-1].tag, made[-1].to, made[-1].source) == ("dkv 2", 3, 3)
    with pytest.raises(RinglabError, match="dkv 2"):
        run(faults=[Fault("drop", 1, len(made) - 1)])
