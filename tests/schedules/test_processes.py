"""On processes: the bits of the virtual cluster, and its errors word for word. Few launches, for each takes its time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.errors import RinglabError
from tests.comm.test_subgroup import assert_rows_and_columns, rows_and_columns
from tests.schedules import test_cache, test_decode, test_exact, test_refuses


def on_four(ring: Ring) -> tuple[Any, list[tuple[Tensor, ...]]]:
    return rows_and_columns(ring), test_exact.solve_all(ring)


def test_rows_columns_and_schedules() -> None:
    mine, its = launch(on_four, 4, threads=1), VirtualCluster(4, memory=False).run(on_four)
    assert_rows_and_columns([moved for moved, _ in mine.results])
    for (_, solved), (_, expected) in zip(mine.results, its.results, strict=True):
        for one, other in zip(solved, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refusals(ring: Ring) -> list[RinglabError | None]:
    return test_refuses.call_all(ring) + test_cache.all_of_them(ring)


def on_three(ring: Ring) -> tuple[int, list[RinglabError | None], list[tuple[Tensor, Tensor, list[int]]]]:
    refused = refusals(ring)
    sent = sum(e.bytes_sent for e in ring.comm.trace.exchanges(ring.rank))  # type: ignore[attr-defined]
    return sent, refused, test_decode.generate_all(ring)


def test_refusals_and_decode() -> None:
    mine, its = launch(on_three, 3, threads=1), VirtualCluster(3, memory=False).run(on_three)
    for (sent, refused, decoded), (_, expected, tokens) in zip(mine.results, its.results, strict=True):
        assert sent == 0
        assert [(type(e), str(e)) for e in refused] == [(type(e), str(e)) for e in expected]
        assert None not in refused
        for (out, lse, lengths), (out_, lse_, lengths_) in zip(decoded, tokens, strict=True):
            assert torch.equal(out, out_) and torch.equal(lse, lse_) and lengths == lengths_
