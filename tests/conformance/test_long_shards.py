"""In runs with the longest shards only some rows are compared, and a target may refuse such shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlab import plain_ring
from ringlab.conformance.checks.check import Plan
from ringlab.conformance.checks.measuring import expected, measure
from ringlab.conformance.checks.values import _longer
from ringlab.conformance.run.run import SOME_ROWS, Run, inputs, some_rows
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.conformance.target.claims import Target, as_target
from ringlab.conformance.tolerance import truth
from tests.conformance.reports import quick


@pytest.mark.parametrize("causal", [False, True])
def test_the_results_of_some_rows_are_those_of_the_whole_sequence(causal: bool) -> None:
    run = Run(2, 700, "contiguous", causal, H=1, K=1, D=8, dout=SOME_ROWS)
    whole, rows = truth(*inputs(run), causal=causal), some_rows(run)
    true, _ = expected(run.plain)
    assert 50 < len(rows) < 150 and {0, 349, 350, 699} <= {*rows}
    for name in ("out", "lse"):
        np.testing.assert_allclose(getattr(true, name)[:, :, rows], getattr(whole, name)[:, :, rows])
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(true, name), getattr(whole, name), atol=1e-14)
    ran = on_virtual_ranks(as_target(plain_ring.attend), run)
    assert all(each.ok for each in measure(ran))
    ran.arrays["out"][:, :, 699] += 0.01
    assert [each.name for each in measure(ran) if not each.ok] == ["out"]


@pytest.mark.parametrize("ragged", [False, True])
def test_no_small_number_of_chunks_divides_the_longest_shards(ragged: bool) -> None:
    plan = Plan(as_target(plain_ring.attend, ragged=ragged).claims(), quick=False, seed=0)
    for run in _longer(plan):
        shard = run.S // run.P
        assert shard > 8_192 and all(shard % chunks for chunks in range(3, 64))
        assert run.S % (2 * run.P) == 0 or ragged


@pytest.mark.thorough
@pytest.mark.parametrize(("error", "refused"), [(ValueError, True), (IndexError, False)])
def test_a_target_may_refuse_the_longest_shards(error: type[Exception], refused: bool) -> None:
    """An error that is no refusal, such as an index beyond a table, fails."""

    def attend(ring: Any, q: Any, k: Any, v: Any, *, causal: bool, positions: Any) -> Any:
        if k.shape[2] > 4_096:
            raise error("no more than 4,096 keys on a rank")
        return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)

    (_, finding) = quick(Target(attend, backward=False), only=("long shards",)).findings
    assert finding.ok == refused and "not asked: " * refused + f"raised: {error.__name__}" in finding.evidence
