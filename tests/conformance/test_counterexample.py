"""A counterexample names the places of wrong values, in a run as small as the claims allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ringlab import plain_ring
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.counterexample import ONE_HOT, _blocks, located, smaller_runs, wide_runs
from ringlab.conformance.run.loading import load
from ringlab.conformance.run.run import Ran, Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import Target, as_target

HALF_OF_DK = "tests.conformance.wrong_values:half_of_dk"


def shown(mutant: str, name: str, counter: Run) -> dict[str, Any]:
    """Return where the values of the first wide run are wrong."""
    run = wide_runs(counter, (name,), (2, 3, 4))[0]
    where: Any = located(on_virtual_ranks(MUTANTS[mutant].target(), run))
    return dict(where)


@pytest.mark.parametrize(
    ("mutant", "name", "causal", "said"),
    [
        ("skips_the_last_block", "out", False, "the block of step 3 is missing on every rank"),
        ("skips_its_own_block", "out", False, "a rank's own block is missing on every rank"),
        ("gradients_stay", "dk", False, "the blocks of steps 1, 2 and 3 are missing on every rank"),
        ("sees_one_too_many", "out", True, "the key 1 after each query is seen, though the mask hides it"),
    ],
)
def test_the_map_names_the_fault(mutant: str, name: str, causal: bool, said: str) -> None:
    where = shown(mutant, name, Run(2, 48, "contiguous", causal))
    assert said in diagnosis.blocks_of(where)


@pytest.mark.parametrize(
    ("target", "name", "said"),
    [
        ("ringlab.conformance.mutants:no_scale_in_dq", "dq", "dq is 5.66 times the true one (√D)."),
        ("tests.conformance.wrong_values:returns_dv_as_dk", "dk", "dk is the true dv; dv is the true dk."),
        ("tests.conformance.wrong_values:keeps_gradients_of_the_rank_before", "dk", "each rank holds the dk of the rank before it."),
        ("ringlab.conformance.mutants:lse_in_base_two", "lse", "lse is 1.44 times the true one (log₂ e, as in base 2)."),
    ],
)  # fmt: skip
def test_a_result_is_recognized_if_it_is_right_in_another_way(target: str, name: str, said: str) -> None:
    run = wide_runs(Run(2, 48, "zigzag", True), (name,), (2, 3, 4))[0]
    assert (
        diagnosis.relations_of(located(on_virtual_ranks(load(target), run)))
        == f"Of the wrong results, {said}"
    )


@pytest.mark.parametrize("mutant", ["skips_the_last_block", "sees_one_too_many", "gradients_stay"])
def test_other_wrong_results_are_taken_for_nothing_else(mutant: str) -> None:
    assert diagnosis.relations_of(shown(mutant, "out", Run(2, 48, "zigzag", True))) == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bounds", [2.5, 20.0])
def test_noise_is_taken_for_no_factor(dtype: str, bounds: float) -> None:
    run = Run(2, 16, "contiguous", True, dtype=dtype)
    ran = on_virtual_ranks(load("ringlab.plain_ring:attend"), run)
    right, limits = expected(run.plain)
    noise = (
        np.random.default_rng(0).uniform(-1, 1, right.out.shape)
        * bounds
        * limits["out"]
        * np.abs(right.out).max()
    )
    ran.arrays["out"] = right.out + noise
    where: Any = located(ran)
    assert not where["results"][0]["ok"] and diagnosis.relations_of(where) == ""


def test_a_block_that_counts_twice_is_told_from_one_that_is_halved() -> None:
    source = MUTANTS["skips_the_last_block"].right
    again = "            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)\n"
    assert again in source
    twice = source.replace(again, again + again.replace("            ", "            if step == 1: ", 1))
    space: dict[str, Any] = {"__name__": "ringlab.plain_ring"}
    exec(compile(twice, "<twice>", "exec"), space)
    run = wide_runs(Run(2, 48, "contiguous", False), ("out",), (4,))[0]
    where: Any = located(on_virtual_ranks(Target(space["attend"]).completed(), run))
    assert "the block of step 1 counts twice on every rank" in diagnosis.blocks_of(where)
    run = wide_runs(Run(2, 48, "contiguous", False), ("dk",), (4,))[0]
    halved: Any = located(on_virtual_ranks(load(HALF_OF_DK), run))
    assert diagnosis.blocks_of(halved) == "" and "every rank but the last" in diagnosis.results_of(halved)


def test_a_block_counts_twice_only_where_all_of_its_pairs_do() -> None:
    """A block counts twice only if all its pairs do, not if five of its eight rows have doubled weights."""
    run = Run(2, 16, "contiguous", False, H=1, K=1, D=16)
    positions = [np.arange(8), np.arange(8, 16)]
    true = np.full((16, 16), 1 / 16)
    half = true.copy()
    for rows, others in zip(positions, positions[::-1], strict=True):
        half[np.ix_(rows[:5], rows)], half[np.ix_(rows[:5], others)] = 1 / 8, 0.0
    double = np.full((16, 16), 1 / 24)
    double[:, 8:] *= 2
    for actual, said in ((half, []), (double, [(0, 1), (1, 1)])):
        assert _blocks(actual, true, Ran(run, positions=positions), "out", 1e-6)["twice"] == said


def test_no_block_is_missing_where_a_scale_is() -> None:
    """A missing scale in backward is not reported as a missing block, though some weights of dv are 0."""

    class Unscaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Any, *qkv: Any) -> Any:
            out, lse = plain_ring.forward(call, *(x.detach() for x in qkv))
            ctx.call, ctx.kept = call, (*qkv, out, lse)
            ctx.mark_non_differentiable(lse)
            return out.to(qkv[0].dtype), lse

        @staticmethod
        def backward(ctx: Any, dout: Any, _: Any) -> Any:
            found = plain_ring.backward(replace(ctx.call, scale=1.0), *ctx.kept, dout)
            return None, *(x.to(dout.dtype) for x in found)

    def attend(ring, q, k, v, *, causal, positions):
        return Unscaled.apply(plain_ring.Call(ring, positions, causal, q.shape[-1] ** -0.5), q, k, v)

    for name in ("blind rows", "dv", "dq"):
        report = check(attend, quick=True, only=(name,), isolate=False, layouts=("contiguous",))
        words = str(report)
        assert not report.ok and "missing" not in words and "twice" not in words


def test_a_fault_of_some_heads_is_shown_on_one_rank_with_these_heads() -> None:
    def attend(ring, q, k, v, *, causal, positions):
        if q.shape[1] == 3 * k.shape[1] > 3:
            k, v = (x.repeat(1, 3, 1, 1) for x in (k, v))
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    report = check(attend, only=("grouped heads",), isolate=False, layouts=("contiguous",))
    assert diagnosis.first(report.findings).startswith("out is wrong on one rank")
    assert "with P = 1, S = 1, contiguous, no mask, H/K = 6/2" in diagnosis.first(report.findings)
    assert report.findings[-1].where["shown"]["pairs"] is not None


@pytest.mark.parametrize("name", ONE_HOT)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_one_hot_input_shows_each_pair(name: str, layout: str) -> None:
    """A one-hot input shows each visible pair, and pairs that a causal mask hides contribute nothing."""
    run = wide_runs(Run(2, 24, layout, True), (name,), (2, 3, 4))[0]
    assert run.one_hot == ONE_HOT[name] and run.D >= run.S and run.P == 4
    right = getattr(expected(run.plain)[0], name)[0, 0, :, : run.S]
    pairs = right.T if name in ("dv", "dk") else right
    visible = np.tri(run.S, dtype=bool)
    assert (pairs[~visible] == 0).all() and (pairs[visible] != 0).mean() > 0.9


def test_a_headline_prefers_values_that_are_wrong_by_more_than_rounding() -> None:
    def attend(q, k, v, *, ring, positions, causal):
        """Compute in float32 for all inputs, and give twice the right dk."""
        doubled = 2 * k - k.detach()
        out, lse = plain_ring.attend(
            ring, *(x.float() for x in (q, doubled, v)), causal=causal, positions=positions
        )
        return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))

    report = check(attend, quick=True, only=("forward", "dk"), isolate=False, ranks=(2,))
    assert report.failed == ["forward", "dk"] and "float64" in report.findings[1].evidence
    assert diagnosis.first(report.findings).startswith("dk is wrong")


def test_a_headline_names_an_argument_that_is_ignored() -> None:
    def attend(q, k, v, *, ring, positions, causal, window=None):
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    report = check(attend, quick=True, only=("window",), isolate=False, layouts=("zigzag",))
    assert diagnosis.first(report.findings).startswith("window, accepted and ignored: no result changes")


def test_only_findings_with_wrong_values_have_places() -> None:
    report = check(HALF_OF_DK, quick=True, only=("types", "dq", "dk"), isolate=False, ranks=(2, 3, 4))
    where = {each.name: each.where for each in report.findings}
    assert where["dq"] is None and where["types"] is None and where["dk"] is not None
    assert "dk is wrong on rank 0 of 2: token 0" in diagnosis.first(report.findings)
    assert "out, lse, dq and dv are right on every rank; dk is wrong on every rank but the last" in diagnosis.beside(report.findings)  # fmt: skip


def test_runs_whose_lengths_are_given_are_not_made_smaller() -> None:
    plain, claims = Run(3, 24, "contiguous", True), as_target(plain_ring.attend).claims()
    assert smaller_runs(plain, claims)
    for changes in ({"documents": (20, 4)}, {"pads": (5,)}, {"keys": 48}, {"dv": 8}, {"dropout": 0.5}):
        assert smaller_runs(Run(**{**plain.__dict__, **changes}), claims) == []


def test_smaller_runs_stay_within_the_claims() -> None:
    """Smaller runs keep to the claimed ranks, to whole zig-zag pieces if not ragged, and to all heads if they are split."""
    run = Run(4, 24, "zigzag", True, H=4, K=4)
    some = smaller_runs(run, as_target(plain_ring.attend, ranks=(2, 4), ragged=False).claims())
    assert {each.P for each in some} == {2} and all(each.S % 4 == 0 for each in some)
    split = smaller_runs(run, as_target(plain_ring.attend, split_heads=True).claims())
    assert {(each.P, each.H, each.K) for each in split} == {(1, 4, 4), (2, 4, 4)}
