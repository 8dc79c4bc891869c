"""ringlab's own ring passes its own checks: every layout, schedule and block; and on every transport."""

from __future__ import annotations

import pytest

from ringlab.conformance import own
from ringlab.conformance.runner import check
from ringlab.conformance.target import Target


@pytest.mark.parametrize("name", ["ring", "allgather", "naive", "blockwise"])
def test_our_ring_passes_on_virtual_ranks(name: str) -> None:
    target: Target = getattr(own, name)
    report = check(target, quick=True, isolate=False)
    assert report.failed == []
    applies = {finding.name: finding.applies for finding in report.findings}
    assert applies["masks"] and applies["scale"] and applies["bytes"] == (name != "allgather")


@pytest.mark.parametrize(("name", "seed"), [("dv", 6), ("ragged", 36)])
def test_our_ring_is_not_blamed_for_bad_luck(name: str, seed: int) -> None:
    """Here it errs by a little more than twice the plainest implementation, which is lucky."""
    assert check(own.ring, quick=True, seed=seed, only=(name,), isolate=False).failed == []


def test_a_check_of_the_full_tier_that_is_asked_for_by_name_is_made() -> None:
    report = check(own.ring, quick=True, only=("more seeds",), isolate=False)
    assert [each.name for each in report.findings] == ["loads", "more seeds"] and report.runs > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "symmetric", "shared-gpu"])
@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_our_ring_passes_on_processes(name: str, transport: str) -> None:
    report = check(
        f"ringlab.conformance.own:{name}", quick=True, transport=transport, ranks=(2,), limit=60.0,
        layouts=("contiguous", "zigzag"),
    )  # fmt: skip
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}
    assert report.transport == transport


@pytest.mark.slow
def test_a_ring_over_torch_distributed_passes_in_gloo_processes() -> None:
    report = check("ringlab.conformance.plain_distributed:attend", quick=True, limit=60.0, ranks=(1, 3))
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}
    assert (report.over, report.transport) == ("torch.distributed", "gloo")


@pytest.mark.slow
def test_an_all_to_all_that_sends_to_one_rank_is_a_hop() -> None:
    """Its split sizes say so; one that sends to several, as the wrong ring below does, is a collective."""
    report = check(
        "tests.conformance.by_all_to_all:attend",
        quick=True,
        limit=60.0,
        ranks=(3,),
        only=("forward", "rounds", "bytes"),
    )
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}


@pytest.mark.slow
def test_a_wrong_ring_over_torch_distributed_is_found() -> None:
    """It adds the blocks' outputs, sends its whole shard to everybody, and goes on when a rank is gone."""
    report = check(
        "tests.conformance.wrong_distributed:attend",
        quick=True,
        limit=20.0,
        ranks=(3,),
        only=("forward", "rounds", "gather", "rank dies"),
    )
    assert report.failed == ["forward", "rounds", "gather", "rank dies"]
