"""Shards that only positions can say give the oracle's results or are refused, and each token has one owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlab import plain_ring
from ringlab.conformance.target.claims import LENGTHS, ORDERS, as_target
from tests.conformance.reports import evidence, quick


def refusing(error: type[Exception], needed: Any) -> Any:
    """Return the plain ring, which raises `error` unless `needed` holds for the positions of every rank."""

    def attend(q, k, v, *, ring, causal, positions):
        if not needed(positions):
            raise error("these shards are not supported")
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    return attend


@pytest.mark.parametrize(("error", "ok"), [(ValueError, True), (IndexError, False)])
@pytest.mark.parametrize(
    "needed",
    [
        lambda positions: all((each.diff() > 0).all() for each in positions),
        lambda positions: len({len(each) for each in positions}) == 1,
    ],
)
def test_shards_that_only_positions_can_say_may_be_refused(
    needed: Any, error: type[Exception], ok: bool
) -> None:
    report = quick(refusing(error, needed), only=("any shards",))
    assert report.ok == ok and "these shards are not supported" in evidence(report, "any shards")


def test_shards_that_only_positions_can_say_are_asked_only_without_claims_of_layouts() -> None:
    (found,) = quick(plain_ring.attend, only=("any shards",), layouts=("zigzag",)).findings[1:]
    assert not found.applies and "zigzag only" in found.evidence
    even = quick(plain_ring.attend, only=("any shards",), ragged=False)
    assert even.ok and even.runs < quick(plain_ring.attend, only=("any shards",)).runs


@pytest.mark.parametrize("layout", [*ORDERS, *LENGTHS])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_each_token_has_one_owner_in_shards_that_only_positions_can_say(layout: str, P: int) -> None:
    shards = as_target(plain_ring.attend).positions(layout, 24, P)
    assert len(shards) == P and sorted(np.concatenate(shards).tolist()) == [*range(24)]


def test_a_short_shard_lies_between_long_ones() -> None:
    target = as_target(plain_ring.attend)
    lengths = [[len(each) for each in target.positions(layout, 24, 3)] for layout in LENGTHS]
    assert lengths == [[10, 3, 11], [1, 0, 23]]
