"""What the planner counts for attention, against the bytes that the ring program itself takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import ringlab.cost.shape_block as shape_block
from ringlab.cost import memory
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_work
from ringlab.cost.planner import Request
from ringlab.cost.planner.degrees import Degrees
from ringlab.cost.planner.ledger import ledger
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.layout import zigzag
from tests.cost.planner_cases import small_model

HEADS = [(32, 32), (32, 16), (32, 8), (32, 4), (8, 1)]
RANKS = [1, 2, 3, 4, 8]
OF_ATTENTION = ("K/V in flight", "dK and dV in float32", "float32 accumulators")


@pytest.fixture(autouse=True, scope="module")
def first_backward() -> None:
    """Torch keeps some tensors of a process's first backward for a while: that one is measured too large."""
    simulate(Attention(1, 2, 2, 8), zigzag(16, 2), hardware("h100"), backward=True)


def measured_bytes(H: int, K: int, P: int, backward: bool, tokens: int = 256, dtype: str = "bfloat16") -> int:
    """The peak of the rank that needs most, and its own q, k and v."""
    sizes = Attention(1, H, K, 128, dtype)
    peak = simulate(sizes, zigzag(tokens * P, P), hardware("h100"), backward=backward).peak_bytes
    return int(peak.max()) + own_bytes(sizes, tokens)


def own_bytes(sizes: Attention, tokens: int) -> int:
    return (sizes.H + 2 * sizes.K) * sizes.D * tokens * (2 if sizes.dtype == "bfloat16" else 4)


def counted_bytes(H: int, K: int, P: int, backward: bool, tokens: int = 256) -> int:
    """Attention's part of the ledger: its entries, and q, k, v, out and lse of what the layer holds."""
    request = Request(
        small_model(H=H, K=K), tokens * P, replace(hardware("h100"), ranks_per_node=P), tp=1, ring=P, ulysses=1,
        fsdp=1, purpose="training" if backward else "prefill",
    )  # fmt: skip
    book = ledger(request, Degrees(1, 1, P, 1, 1), "none")
    lse = 4 * H * tokens
    held = own_bytes(request.attention, tokens) + 2 * H * 128 * tokens + lse
    return held + sum(book.of(name) for name in OF_ATTENTION)


def misses(counted: Callable[[int, int, int, bool], int]) -> list[tuple[int, int, int, bool]]:
    """The cases that the count does not hold, or exceeds by more than it may."""
    return [
        (H, K, P, backward)
        for H, K in HEADS
        for P in RANKS
        for backward in (False, True)
        if not 1 <= counted(H, K, P, backward) / measured_bytes(H, K, P, backward) <= 1.3
    ]


def test_the_ledger_holds_what_the_ring_takes_and_little_more() -> None:
    assert misses(counted_bytes) == []


def test_the_ledger_of_64000_tokens_on_8_ranks() -> None:
    """32 query heads, 4 K/V heads, backward: 494 MB and 82 MB of its own."""
    measured = measured_bytes(32, 4, 8, True, tokens=8000)
    assert measured == pytest.approx(494e6 + 82e6, rel=0.005)
    assert measured <= counted_bytes(32, 4, 8, True, tokens=8000) <= 1.05 * measured


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("P", RANKS)
def test_work_of_either_dtype_is_counted(dtype: str, P: int) -> None:
    for H, K in HEADS:
        sizes = Attention(1, H, K, 128, dtype)
        out = H * 128 * 256 * (2 if dtype == "bfloat16" else 4) + 4 * H * 256
        for backward in (False, True):
            counted = own_bytes(sizes, 256) + out + attention_work(sizes, 256, P, backward).total_bytes
            assert 1 <= counted / measured_bytes(H, K, P, backward, dtype=dtype) <= 1.3


def test_six_blocks_are_the_papers_and_ten_are_ours() -> None:
    """As the docstring of `attention_bytes` says: 7.05 blocks, and q, k and v."""
    block = 32 * 128 * 256 * 2
    for P in (3, 4, 8):
        assert (measured_bytes(32, 32, P, False) / block - 3) == pytest.approx(7.05, abs=0.005)
        assert memory.attention_bytes(Attention(1, 32, 32, 128), 256, P) == 6 * block


def test_a_backward_sums_dq_in_float32_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of bfloat16 with K = H on three ranks, in blocks: dq 2, out 1, two slots 4, dK and dV three times 4."""
    block, rows = 32 * 128 * 256 * 2, 3 * 32 * 256 * 4
    own = 3 * block
    assert measured_bytes(32, 32, 3, True) == own + 19 * block + rows
    in_dtype_of_q(monkeypatch)
    assert measured_bytes(32, 32, 3, True) < own + 19 * block + rows


def in_dtype_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake: dq added up in bfloat16."""
    right = shape_block.ShapeBackward.take

    def take(self, tiles, k, v):  # type: ignore[no-untyped-def]
        found = right(self, tiles, k, v)
        if self.total is not self.q:
            self.total = self.total.to(self.q.dtype)
        return found

    monkeypatch.setattr(shape_block.ShapeBackward, "take", take)


def without(*names: str) -> Callable[[int, int, int, bool], int]:
    """Attention's part, entries of these names left out."""

    def counted(H: int, K: int, P: int, backward: bool) -> int:
        kept = [name for name in OF_ATTENTION if name not in names]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(f"{__name__}.OF_ATTENTION", tuple(kept))
            return counted_bytes(H, K, P, backward)

    return counted


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_a_forgotten_entry_is_noticed(name: str) -> None:
    assert misses(without(name))
