"""Decode with heads and tokens spread over the same ranks equals decode on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import ShapeError
from ringlab.mask import Mask
from ringlab.merge import Partial
from ringlab.schedules.cache import ShardedCache
from ringlab.serving import decode_heads
from ringlab.serving.owners import MERGES
from tests.serving.problems import Batch, assert_batch, decode_batch

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


@pytest.mark.parametrize("given", [None, 8])
def test_all_heads_as_one_ranks_own_are_refused(given: int | None) -> None:
    """A q with all heads is refused where a rank's own heads are needed: the output would be that of other heads."""

    def program(ring: Ring) -> Any:
        cache = ShardedCache(ring, batch=1, kv_heads=2, head_dim=8)
        k, v, q = torch.randn(3, 1, 8, 5, 8, generator=torch.Generator().manual_seed(0))
        cache.append(k[:, :2], v[:, :2])
        # Slightly different on each rank, as if each had computed q itself.
        q = q[:, :, :1] * (1 + 1e-3 * ring.rank)
        assert decode_heads(q, cache, queries="all", heads=given).shape[1] == 4
        assert decode_heads(q.chunk(2, dim=1)[ring.rank], cache, heads=given).shape[1] == 4
        with pytest.raises(ShapeError, match="queries='all' for one of all heads"):
            decode_heads(q, cache, heads=given)
        with pytest.raises(ShapeError, match="8 query heads on all ranks together"):
            decode_heads(q.chunk(2, dim=1)[ring.rank], cache, queries="all", heads=8)
        return True

    assert VirtualCluster(2, memory=False).run(program).results == [True, True]


@pytest.mark.parametrize("merge", MERGES)
def test_rows_without_any_key_are_zero(merge: str) -> None:
    """If no rank has a key, out is 0 and lse −inf, without NaN; a NaN in a partial stays NaN."""

    def program(ring: Any, fill: float) -> Partial:
        out, lse = torch.full((1, 4, 1, 2), fill), torch.full((1, 4, 1), -math.inf if fill == 0 else fill)
        return MERGES[merge](ring.comm, Partial(out, lse))

    for part in VirtualCluster(2).run(program, 0.0).results:
        assert part.out.tolist() == [[[[0, 0]]] * 2] and (part.lse == -math.inf).all()
    for part in VirtualCluster(2).run(program, math.nan).results:
        assert part.out.isnan().all() and part.lse.isnan().all()
