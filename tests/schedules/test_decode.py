"""Decode against a cache on several ranks equals decode against the whole cache; its messages do not grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome
from ringlab.conformance.tolerance import bounds, relative_error, truth
from ringlab.layout import Layout, striped, zigzag
from ringlab.mask import Mask
from ringlab.schedules import decode as module
from ringlab.schedules.cache import ShardedCache
from ringlab.schedules.decode import MERGES, cache_tiles, decode
from tests.laws.draw import MAKERS, Shape, tensors

MASKS = st.one_of(
    st.builds(Mask, causal=st.booleans()),
    st.builds(Mask, causal=st.booleans(), window=st.integers(1, 9)),
    st.builds(Mask, window=st.one_of(st.none(), st.integers(1, 5)), prefix=st.integers(0, 9)),
)


@dataclass(frozen=True)
class Generation:
    """A prefill with a layout, followed by steps of `new` tokens each."""

    prefill: Layout
    steps: int
    new: int
    H: int = 4
    K: int = 2
    mask: Mask = field(default_factory=Mask)
    merge: str = "all-reduce"
    dtype: torch.dtype = torch.float64
    block: str = "naive"
    softcap: float | None = None
    Dv: int = 0
    sinks: tuple[float, ...] | None = None

    @property
    def S(self) -> int:
        return self.prefill.S + self.steps * self.new

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all tokens, including the generated tokens."""
        return tensors(Shape(2, self.H, self.K, self.S, self.S, 8, self.Dv), 0, self.dtype)[:3]


def generate(ring: Ring, run: Generation) -> tuple[Tensor, Tensor, list[int]]:
    """Return out and lse of the generated tokens, and each rank's number of tokens at the end."""
    q, k, v = run.tensors()
    layout, start = run.prefill, run.prefill.S
    shards = (layout.shard(x[..., :start, :], ring.rank) for x in (k, v))
    cache = ShardedCache.of_shards(ring, layout, *shards)
    found = []
    for token in range(start, run.S, run.new):
        here = slice(token, token + run.new)
        cache.append(k[..., here, :], v[..., here, :])
        how: dict[str, Any] = {
            "mask": run.mask,
            "merge": run.merge,
            "block": run.block,
            "softcap": run.softcap,
            "sinks": None if run.sinks is None else torch.tensor(run.sinks, dtype=run.dtype),
        }
        found.append(decode(q[..., here, :], cache, return_lse=True, **how))
    out, lse = zip(*found, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2), cache.lengths


def on_virtual_ranks(run: Generation) -> Outcome:
    return VirtualCluster(run.prefill.P, memory=False).run(generate, run)


def assert_equals_one_process(results: list[Any], run: Generation) -> None:
    """Fail unless all ranks have the same bits, within the bounds derived for each step's attention."""
    q, k, v = run.tensors()
    out, lse, _ = results[0]
    for other in results[1:]:
        assert torch.equal(out, other[0]) and torch.equal(lse, other[1]), "ranks have different bits"
    for step in range(run.steps):
        S = run.prefill.S + (step + 1) * run.new
        dout = torch.zeros((*q.shape[:2], S, v.shape[-1]), dtype=q.dtype)
        part = q[..., :S, :], k[..., :S, :], v[..., :S, :], dout
        sinks = None if run.sinks is None else torch.tensor(run.sinks, dtype=run.dtype).double().numpy()
        how: dict[str, Any] = {"mask": run.mask, "softcap": run.softcap, "sinks": sinks}
        true = truth(*part, **how)
        allowed = bounds(*part, true=true, **how)
        here = slice(step * run.new, (step + 1) * run.new)
        for name, mine, whole in (("out", out[..., here, :], true.out), ("lse", lse[..., here], true.lse)):
            rows = whole[..., -run.new :, :] if name == "out" else whole[..., -run.new :]
            # The bound is relative to the largest entry of the whole, and `relative_error` to that of the
            # rows.
            scale = np.abs(whole).max() / np.abs(rows).max()
            assert relative_error(mine, rows) <= allowed[name] * scale, f"{name} of step {step} is wrong"


@settings(max_examples=40)
@given(
    st.sampled_from(MAKERS), st.integers(0, 20), st.integers(1, 6), st.integers(1, 4), MASKS,
    st.sampled_from(MERGES), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([0, 3, 11]), st.booleans(),
)  # fmt: skip
def test_equals_one_process(
    make: Any, S: int, P: int, new: int, mask: Mask, merge: str, heads: tuple[int, int], Dv: int, sunk: bool
) -> None:
    sinks = (0.5, -1.0, 2.0, -1e4)[: heads[0]] if sunk else None
    run = Generation(make(S, P), 2, new, *heads, mask, merge, Dv=Dv, sinks=sinks)
    assert_equals_one_process(on_virtual_ranks(run).results, run)


SINKS = (0.5, -1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ("naive", torch.float64),
        ("blockwise", torch.bfloat16),
        ("native", torch.float32),
        ("auto", torch.float32),
    ],
)
def test_every_block_with_a_soft_cap(block: str, dtype: torch.dtype) -> None:
    run = Generation(
        zigzag(61, 4), 2, 2, mask=Mask(window=40), dtype=dtype, block=block, Dv=5, sinks=SINKS, softcap=1.5
    )
    assert_equals_one_process(on_virtual_ranks(run).results, run)


@given(MASKS, st.integers(1, 4), st.integers(0, 20), st.integers(0, 2**16))
def test_cache_tiles_are_the_mask(mask: Mask, n: int, before: int, seed: int) -> None:
    """Tiles of the cache have each visible pair once and no other pair, for any set of keys on the rank."""
    S = before + n
    positions = np.flatnonzero(np.random.default_rng(seed).random(S) < 0.6)
    met = np.zeros((n, len(positions)), int)
    for tile in cache_tiles(mask, positions, S, n):
        met[tile.rows, tile.keys] += 1
    assert (met == mask.visible(np.arange(S - n, S), positions)).all()


@pytest.mark.parametrize(("merge", "P", "messages"), [("all-reduce", 4, 3), ("tree", 4, 2), ("tree", 6, 3)])
def test_bytes_per_token_do_not_depend_on_the_length(merge: str, P: int, messages: int) -> None:
    """Decoding a token sends out and lse once to each other rank, or once in each round of a tree, at any length."""
    for S in (20, 2000):
        run = Generation(striped(S, P), 1, 3, merge=merge, dtype=torch.float32, Dv=5, sinks=SINKS)
        trace = on_virtual_ranks(run).trace
        sent = [[e.bytes_sent for e in trace.exchanges(rank) if e.bytes_sent] for rank in range(P)]
        assert max(sent, key=sum) == [2 * 4 * 3 * (5 + 1) * 4] * messages  # B · H · n · (Dv + 1) numbers


def prefill_and_generate(ring: Ring) -> tuple[Tensor, Tensor]:
    """Return a ring's rows over the prompt, and the row of a decoded token after the prompt."""
    layout = zigzag(30, ring.world_size)
    q, k, v, _ = tensors(Shape(1, 4, 2, 31, 31, 8), 1)
    shards = [layout.shard(x[..., :30, :], ring.rank) for x in (q, k, v)]
    out = ring_attention(*shards, ring=ring, layout=layout, block="naive")
    cache = ShardedCache.of_shards(ring, layout, *shards[1:], room=1)
    cache.append(k[..., 30:, :], v[..., 30:, :])
    return out, decode(q[..., 30:, :], cache, block="naive")


def test_prefill_by_ring() -> None:
    """The ring's rows and the decoded row together equal one causal attention."""
    results = VirtualCluster(3, memory=False).run(prefill_and_generate).results
    prompt = zigzag(30, 3).unshard([out for out, _ in results])
    whole = tensors(Shape(1, 4, 2, 31, 31, 8), 1)
    true = truth(*whole, causal=True)
    mine = torch.cat([prompt, results[0][1]], dim=2)
    assert relative_error(mine, true.out) <= bounds(*whole, causal=True, true=true)["out"]


RUNS = [
    Generation(zigzag(17, 4), 2, 1, mask=Mask(window=6), merge=merge, dtype=torch.float32, Dv=3, sinks=SINKS)
    for merge in MERGES
]


def test_decode_marks_nothing_for_blocks_that_are_not_thread_safe() -> None:
    """A thread-safe block leaves no mark on the attention function, because the next block may not be safe."""
    on_virtual_ranks(RUNS[0])
    assert not hasattr(module.attend_to_cache, "thread_safe")
