"""Decode with heads and tokens spread over the same ranks is decode on one process; and wrong merges are noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, agreement
from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.errors import ShapeError
from ringlab.layout import contiguous
from ringlab.mask import Mask
from ringlab.merge import Partial, with_sinks
from ringlab.schedules.cache import ShardedCache
from ringlab.schedules.decode import attend_to_cache
from ringlab.serving import decode as module
from ringlab.serving import decode_heads, owners
from ringlab.serving.owners import MERGES
from tests.serving.problems import Batch, assert_batch, decode_batch, on, sinks_of

MASKS = st.one_of(
    st.just(Mask()),
    st.builds(Mask, window=st.integers(1, 9)),
    st.builds(Mask, window=st.one_of(st.none(), st.integers(1, 5)), prefix=st.integers(0, 9)),
)


def on_virtual_ranks(batch: Batch) -> list[Any]:
    return VirtualCluster(batch.P, memory=False).run(decode_batch, batch).results


@st.composite
def batches(draw: Any) -> Batch:
    P, K, group = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    count, interleave = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
    lengths = tuple(draw(st.integers(0, 20)) for _ in range(count))
    new = tuple(draw(st.integers(1, 3)) for _ in range(count))
    queries, merge = draw(st.sampled_from(["own", "all"])), draw(st.sampled_from(list(MERGES)))
    page = interleave * draw(st.integers(1, 3))
    heads = K * P * group, K
    sunk = draw(st.booleans())
    more: dict[str, Any] = {"sunk": sunk, "Dv": draw(st.sampled_from([8, 3]))}
    return Batch(P, lengths, new, *heads, page, interleave, None, queries, merge, draw(MASKS), **more)


@settings(max_examples=15)
@given(batches())
def test_a_batch_of_any_lengths_equals_one_process(batch: Batch) -> None:
    assert_batch(on_virtual_ranks(batch), batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("given", [None, 8])
def test_all_heads_as_one_ranks_own_are_refused(given: int | None, dtype: torch.dtype) -> None:
    """As `decode` takes them: out would have the shape of q, and be that of other heads."""

    def program(ring: Ring) -> Any:
        cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8, dtype=dtype)
        k, v, q = torch.randn(3, 1, 8, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        cache.append(k[:, :2], v[:, :2])
        q = q[:, :, :1] * (1 + 1e-3 * ring.rank)  # each rank computed it by itself, and rounded otherwise
        assert decode_heads(q, cache, queries="all", heads=given).shape[1] == 4
        assert decode_heads(q.chunk(2, dim=1)[ring.rank], cache, heads=given).shape[1] == 4
        with pytest.raises(ShapeError, match="queries='all' for one of all heads"):
            decode_heads(q, cache, heads=given)
        with pytest.raises(ShapeError, match="8 query heads on all ranks together"):
            decode_heads(q.chunk(2, dim=1)[ring.rank], cache, queries="all", heads=8)
        return True

    assert VirtualCluster(2, memory=False).run(program).results == [True, True]


def changes(alter: Callable[[Partial, int], Partial]) -> Callable[..., Partial]:
    """Return an attention to this rank's tokens whose partial is altered, given the number of these tokens."""

    def attend(q: Tensor, cache: Any, *others: Any) -> Partial:
        return alter(attend_to_cache(q, cache, *others), len(cache.positions))

    return attend


def averages(comm: Comm, part: Partial) -> Partial:
    out, lse = (owners.exchange_heads(comm, x, "mutant") for x in (part.out, part.lse.unsqueeze(-1)))
    return Partial(sum(out) / comm.world_size, reduce(torch.logaddexp, lse)[..., 0])  # type: ignore[arg-type]


def of_the_next_rank(comm: Comm, x: Tensor, tag: str) -> list[Tensor]:
    share = x.shape[1] // comm.world_size
    return EXCHANGE(comm, x.roll(share, dims=1), tag)


EXCHANGE = owners.exchange_heads
EMPTY = "ranks without keys"
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "lse in base 2 is taken for base e": (
        module, "attend_to_cache", changes(lambda part, held: Partial(part.out, part.lse / math.log(2))),
    ),
    "partials are weighted by the number of tokens": (
        module, "attend_to_cache",
        changes(lambda part, held: Partial(part.out, torch.full_like(part.lse, math.log(held or 1e-300)))),
    ),
    EMPTY: (
        module, "attend_to_cache",
        changes(lambda part, held: Partial(part.out, part.lse.nan_to_num(neginf=0.0))),
    ),
    "lse is e to the lse": (
        module, "attend_to_cache", changes(lambda part, held: Partial(part.out, part.lse.exp())),
    ),
    "heads go to the next rank": (owners, "exchange_heads", of_the_next_rank),
}  # fmt: skip


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_notices(name: str, merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = on(3, merge=merge)
    assert_batch(on_virtual_ranks(batch), batch)
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError, match="is wrong"):
        assert_batch(on_virtual_ranks(batch), batch)


WRONG_SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "out is not scaled before the sum": torch.ones_like,
    "out is scaled by e^lse": torch.exp,
    "each rank counts alike": lambda lse: torch.full_like(lse, 1 / len(lse)),
    "shares are computed from the largest lse": lambda lse: torch.exp(lse - lse.amax(dim=0)),
}


@pytest.mark.parametrize("name", WRONG_SHARES)
def test_the_oracle_notices_wrong_shares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = on(3, merge="reduce-scatter")
    monkeypatch.setattr(owners, "shares", WRONG_SHARES[name])
    with pytest.raises(AssertionError, match="is wrong"):
        assert_batch(on_virtual_ranks(batch), batch)


SINKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sinks are forgotten": ("with_sinks", lambda whole, sinks: whole),
    "every rank has the sinks of the first heads": ("own_heads", lambda comm, heads: slice(0, heads // comm.world_size)),
    "every rank counts the sinks": (
        "attend_to_cache",
        lambda q, *others: with_sinks(attend_to_cache(q, *others), sinks_of(q.shape[1], q.dtype)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("name", SINKS)
def test_the_oracle_notices_wrong_sinks(name: str, merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = on(3, queries="all", merge=merge, sunk=True)
    assert_batch(on_virtual_ranks(batch), batch)
    monkeypatch.setattr(module, *SINKS[name])
    with pytest.raises(AssertionError, match="is wrong"):
        assert_batch(on_virtual_ranks(batch), batch)


def test_the_oracle_notices_partials_that_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MERGES, "all-to-all", averages)
    with pytest.raises(AssertionError, match="is wrong"):
        assert_batch(on_virtual_ranks(on(3)), on(3))


def test_the_oracle_notices_new_tokens_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each rank kept the tokens that it was given: the ranks would not agree either."""
    batch = Batch(3, (8,), (2,), 6, layout=contiguous(8, 3))
    assert_batch(on_virtual_ranks(batch), batch)
    monkeypatch.setattr(ShardedCache, "_next_owner", lambda self: self.ring.rank)
    monkeypatch.setattr(agreement, "agree", lambda *what: None)
    with pytest.raises(AssertionError, match="is wrong"):
        assert_batch(on_virtual_ranks(batch), batch)


@pytest.mark.parametrize("merge", MERGES)
def test_rows_without_any_key_are_zero(merge: str) -> None:
    """No rank has a key: 0 and −inf, no NaN. And NaN stays NaN."""

    def program(ring: Any, fill: float) -> Partial:
        out, lse = torch.full((1, 4, 1, 2), fill), torch.full((1, 4, 1), -math.inf if fill == 0 else fill)
        return MERGES[merge](ring.comm, Partial(out, lse))

    for part in VirtualCluster(2).run(program, 0.0).results:
        assert part.out.tolist() == [[[[0, 0]]] * 2] and (part.lse == -math.inf).all()
    for part in VirtualCluster(2).run(program, math.nan).results:
        assert part.out.isnan().all() and part.lse.isnan().all()


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(0, 2**16), st.sampled_from([0.0, 1e3, -1e3]))
def test_shares_add_up_to_one(P: int, seed: int, offset: float) -> None:
    """However large lse is; a rank without keys has none."""
    lse = torch.randn(P, 2, 3, 4, generator=torch.Generator().manual_seed(seed)) + offset
    lse[0] = -math.inf
    if P > 1:
        shares = owners.shares(lse)
        assert (shares[0] == 0).all()
        assert (shares.sum(dim=0) - 1).abs().max() <= P * torch.finfo(torch.float32).eps
