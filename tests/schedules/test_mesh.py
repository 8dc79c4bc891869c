"""Rows of ranks have each of their ranks' tokens once, at the place that the row's layout gives.

On processes, schedules have the bits of the virtual cluster, and its errors word for word. There are few
launches of processes, because each launch takes time.

If a block backend computes whole steps, every schedule gives it as many K/V blocks as announced, even if a
mask skips some blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.errors import RinglabError, ShapeError
from ringlab.layout import Layout, Run, contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.plan import tiles
from ringlab.schedules import available, mesh
from ringlab.schedules.all_to_all import heads_of
from ringlab.schedules.mesh import rows_of_ranks
from ringlab.schedules.ring import RingSchedule
from tests.comm.test_ring import assert_rows_and_columns, rows_and_columns
from tests.laws.draw import MAKERS
from tests.schedules import test_cache, test_decode, test_exact
from tests.schedules.problems import Problem, assert_equals_the_oracle, solve


def law_rows_hold_their_ranks_tokens(layout: Layout, ulysses: int) -> None:
    rows = rows_of_ranks.__wrapped__(layout, ulysses)
    assert rows.layout.P == layout.P // ulysses
    for rank in range(layout.P):
        row = rank // ulysses
        of_row, own = rows.layout.positions(row), layout.positions(rank)
        seen = np.zeros(len(own), int)
        for stretch in rows.spans[rank]:
            assert (of_row[stretch.in_row] == own[stretch.in_rank]).all()
            seen[stretch.in_rank] += 1
        assert (seen == 1).all()
    assert sum(rows.layout.lengths) == layout.S  # the layout itself refuses tokens with two owners


@pytest.mark.thorough
@given(st.sampled_from(MAKERS), st.integers(0, 40), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3)]))
def test_rows_hold_their_ranks_tokens(make: object, S: int, degrees: tuple[int, int]) -> None:
    ring, ulysses = degrees
    law_rows_hold_their_ranks_tokens(make(S, ring * ulysses), ulysses)  # type: ignore[operator]


def test_the_law_notices_stretches_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_end_to_end", lambda runs: [slice(0, run.length) for run in runs])
    with pytest.raises(AssertionError):
        law_rows_hold_their_ranks_tokens(zigzag(16, 4), 2)


def test_runs_in_another_order_are_laid_where_they_belong() -> None:
    """Runs in any stored order are placed rightly; ringlab's own layouts have their runs in order."""
    layout = Layout(8, 2, "any", ((Run(6, 1, 2), Run(0, 1, 2)), (Run(2, 1, 4),)))
    for ulysses in (1, 2):
        law_rows_hold_their_ranks_tokens(layout, ulysses)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_rows_of_a_layout_are_that_layout(make: object) -> None:
    """The rows of a layout are the same layout of fewer ranks, so a row has as few tiles as a rank."""
    layout = make(64, 8)  # type: ignore[operator]
    for ulysses in (2, 4):
        rows, alone = rows_of_ranks(layout, ulysses).layout, make(64, 8 // ulysses)  # type: ignore[operator]
        for row in range(8 // ulysses):
            assert (rows.positions(row) == alone.positions(row)).all()
            assert len(tiles(rows, row, 0)) <= len(tiles(alone, row, 0))


def test_one_row_is_the_sequence_itself() -> None:
    """One row of all ranks is the sequence in order, with one causal tile, for every layout."""
    for layout in (contiguous(50, 4), striped(50, 4), zigzag(50, 4)):
        rows = rows_of_ranks(layout, 4).layout
        assert rows.ranks == ((Run(0, 1, 50),),)
        assert [tile.causal for tile in tiles(rows, 0, 0)] == [True]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_a_rank_has_the_key_value_head_of_each_of_its_query_heads(K: int, ranks: int, group: int) -> None:
    H = K * group
    if H % ranks or (K % ranks and ranks % K):
        return
    held = []
    for member in range(ranks):
        queries, keys = heads_of(H, member, ranks), heads_of(K, member, ranks)
        here = queries.stop - queries.start
        inside = here // (keys.stop - keys.start)  # query heads per key/value head, on this rank
        for number, head in enumerate(range(queries.start, queries.stop)):
            assert keys.start + number // inside == head // group
        held += range(queries.start, queries.stop)
    assert held == list(range(H))


def on_four(ring: Ring) -> tuple[Any, list[tuple[Tensor, ...]]]:
    return rows_and_columns(ring), test_exact.solve_all(ring)


@pytest.mark.thorough
def test_rows_columns_and_schedules() -> None:
    mine, its = launch(on_four, 4, threads=1), VirtualCluster(4, memory=False).run(on_four)
    assert_rows_and_columns([moved for moved, _ in mine.results])
    for (_, solved), (_, expected) in zip(mine.results, its.results, strict=True):
        for one, other in zip(solved, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refusals(ring: Ring) -> list[RinglabError | None]:
    return test_exact.call_all(ring) + test_cache.all_of_them(ring)


def on_three(ring: Ring) -> tuple[int, list[RinglabError | None], list[tuple[Tensor, Tensor, list[int]]]]:
    refused = refusals(ring)
    sent = sum(e.bytes_sent for e in ring.comm.trace.exchanges(ring.rank))  # type: ignore[attr-defined]
    return sent, refused, test_decode.generate_all(ring)


@pytest.mark.thorough
def test_refusals_and_decode() -> None:
    mine, its = launch(on_three, 3, threads=1), VirtualCluster(3, memory=False).run(on_three)
    for (sent, refused, decoded), (_, expected, tokens) in zip(mine.results, its.results, strict=True):
        assert sent == 0
        assert [(type(e), str(e)) for e in refused] == [(type(e), str(e)) for e in expected]
        assert None not in refused
        for (out, lse, lengths), (out_, lse_, lengths_) in zip(decoded, tokens, strict=True):
            assert torch.equal(out, out_) and torch.equal(lse, lse_) and lengths == lengths_


pytestmark = pytest.mark.needs_triton
FEW = Problem(contiguous(24, 4), 4, 2, Mask(documents=(12, 9, 3)), D=16, dtype=torch.float32)


@pytest.mark.parametrize("schedule", available())
def test_documents_that_save_hops(schedule: str) -> None:
    assert_equals_the_oracle(solve(FEW, schedule, block="triton"), FEW)


def test_a_count_that_is_too_large_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of blocks that is too large is noticed, because the last block never comes."""
    monkeypatch.setattr(RingSchedule, "block_count", lambda self, call: len(call.offsets) + 1)
    with pytest.raises(ShapeError, match="lse of shape"):
        assert_equals_the_oracle(solve(FEW, "ring", block="triton"), FEW)
