"""The check that is named for a wrong ring finds it, and the plain rings pass all checks.

ringlab's own ring passes these checks with every layout, schedule and block, and on every transport.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringlab import plain_ring
from ringlab.conformance import checks, mutants, self_targets, styles
from ringlab.conformance.checks.arguments import ARGUMENT_CHECKS
from ringlab.conformance.checks.dropout import DROPOUT_CHECKS
from ringlab.conformance.mutants import MUTANTS, Mutant
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import Target
from ringlab.errors import EditError

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    # That mutant is found only if there are runs on 16 ranks.
    few = mutant.found_by == "peak memory" and name != "keeps_every_block"
    claims: dict[str, Any] = {"ranks": (1, 2, 3, 4, 8)} if few else {}
    report = check(mutant.target(), quick=True, only=(mutant.found_by,), isolate=False, **claims)
    assert report.failed == [mutant.found_by], report.findings[-1].evidence


def test_the_plain_ring_passes() -> None:
    """The plain ring passes with one seed; it takes no arguments and declares that lse has no gradient."""
    report = check(plain_ring.attend, quick=True, isolate=False)
    assert report.failed == []
    left_out = {finding.name for finding in report.findings if not finding.applies}
    without_names = {"value dims", "cross-attention", "mixed dtypes", "neutral values"}
    assert (
        left_out
        == {"gradient of lse", *(each.name for each in (*ARGUMENT_CHECKS, *DROPOUT_CHECKS))} - without_names
    )


def test_every_check_finds_a_mutant_that_is_named_for_it() -> None:
    finders = {mutant.found_by for mutant in MUTANTS.values()}
    assert {each.name for each in checks.CHECKS} - finders == set()


def test_a_hunk_that_does_not_apply_once_is_an_error_that_names_the_wrong_ring() -> None:
    with pytest.raises(EditError, match=r"wrong ring 'absent', hunk 1(.|\n)*got: 0 times"):
        Mutant("absent", "forward", "", "-nothing like this", "forward").source()
    with pytest.raises(EditError, match=r"wrong ring 'often', hunk 1(.|\n)*got: [1-9][0-9]* times"):
        Mutant("often", "forward", "", "-    return out, lse", "forward").source()


def test_a_wrong_ring_and_a_style_can_be_named_on_the_command_line() -> None:
    assert (
        mutants.averages_blocks.name == "averages_blocks" and styles.two_hops_ahead.name == "two_hops_ahead"
    )
    for module in (mutants, styles):
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name


@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_our_ring_passes_on_virtual_ranks(name: str) -> None:
    target: Target = getattr(self_targets, name)
    report = check(target, quick=True, isolate=False)
    assert report.failed == []
    applies = {finding.name: finding.applies for finding in report.findings}
    assert applies["masks"] and applies["scale"] and applies["bytes"] == (name != "allgather")


@pytest.mark.parametrize(("name", "seed"), [("dv", 6), ("ragged", 36)])
def test_our_ring_is_not_blamed_for_bad_luck(name: str, seed: int) -> None:
    """A run in which the plainest implementation is lucky does not make our ring fail."""
    assert check(self_targets.ring, quick=True, seed=seed, only=(name,), isolate=False).failed == []


def test_a_check_of_the_full_tier_that_is_asked_for_by_name_is_made() -> None:
    report = check(self_targets.ring, quick=True, only=("more seeds",), isolate=False)
    assert [each.name for each in report.findings] == ["loads", "more seeds"] and report.runs > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transport", "part"),
    [("ring", "gloo", 0), ("ring", "symmetric", 1), ("ring", "shared-gpu", 2), ("allgather", "gloo", 3)],
)
def test_our_ring_passes_on_processes(name: str, transport: str, part: int) -> None:
    """Our ring passes a quarter of the checks over each transport; the next test makes all of them."""
    quick = [each.name for each in checks.CHECKS if each.tier == "quick"]
    report = check(
        f"ringlab.conformance.self_targets:{name}", quick=True, only=quick[part::4], transport=transport,
        ranks=(2,), limit=60.0, layouts=("contiguous", "zigzag"),
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
    """An all-to-all whose split sizes name one receiver is a hop; with several, it is a collective."""
    report = check(
        "tests.conformance.bad_targets:by_all_to_all",
        quick=True,
        limit=60.0,
        ranks=(3,),
        only=("forward", "rounds", "bytes"),
    )
    assert {each.name: each.evidence for each in report.findings if not each.ok} == {}


@pytest.mark.slow
def test_a_wrong_ring_over_torch_distributed_is_found() -> None:
    """The wrong ring adds the blocks' outputs, sends its shard to all ranks, and goes on without a rank."""
    report = check(
        "tests.conformance.bad_targets:gather_and_average",
        quick=True,
        limit=20.0,
        ranks=(3,),
        only=("forward", "rounds", "gather", "rank dies"),
    )
    assert report.failed == ["forward", "rounds", "gather", "rank dies"]
