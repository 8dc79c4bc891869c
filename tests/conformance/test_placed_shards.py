"""Shards that only positions can describe give the oracle's results or are refused; each token has one owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringlab import plain_ring
from ringlab.conformance.target.claims import LENGTHS, ORDERS, as_target
from tests.conformance.reports import evidence, failed, quick


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


@pytest.mark.parametrize("layouts", [("contiguous", "striped", "zigzag"), ("contiguous",)])
def test_no_check_asks_for_an_order_that_is_refused(layouts: tuple[str, ...]) -> None:
    """`same memory` also takes its first positions from other orders."""
    attend = refusing(ValueError, lambda positions: all((each.diff() > 0).all() for each in positions))
    report = quick(attend, only=("same memory", "any shards"), layouts=layouts, ranks=(1, 2, 3))
    assert failed(report) == {}
    wrong = refusing(IndexError, lambda positions: all((each.diff() > 0).all() for each in positions))
    assert [*failed(quick(wrong, only=("any shards",), ranks=(2, 3)))] == ["any shards"]


def test_an_allowed_failure_of_an_argument_is_allowed_in_other_shards() -> None:
    def attend(q, k, v, *, ring, causal, positions, window=None):  # ignores the window
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    asked: dict[str, Any] = {"only": ("window", "far positions", "any shards"), "ranks": (2, 3)}
    assert {*failed(quick(attend, **asked))} >= {"window", "any shards"}
    assert failed(quick(attend, **asked, allow={"window": "not yet"})) == {}


def test_an_argument_that_other_orders_refuse_is_named() -> None:
    def attend(q, k, v, *, ring, causal, positions, prefix=0):
        if prefix and any((each.diff() <= 0).any() for each in positions):
            raise NotImplementedError("a prefix needs ascending positions")
        mask = (positions[ring.rank][:, None] >= torch.cat(positions)) | (torch.cat(positions) < prefix)
        return gathered(q, k, v, ring, mask if causal else torch.ones_like(mask))

    report = quick(attend, only=("any shards",), ranks=(3,), schedule="any", backward=False, ragged=False)
    assert report.ok and "refused: " in evidence(report, "any shards")
    assert "a prefix needs ascending positions" in evidence(report, "any shards")


def gathered(q: Tensor, k: Tensor, v: Tensor, ring: Any, mask: Tensor) -> Tensor:
    """Return attention of this rank's rows over the gathered keys that the mask shows."""
    k, v = (
        torch.cat(list(ring.all_gather(x)), 2).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)
    )
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


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
