"""On a GPU the conformance suite passes ringlab's ring and finds a wrong one; results stay on the GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cloudpickle", reason="needs cloudpickle: pip install cloudpickle")

from ringlab.conformance import self_targets
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import Target

CHECKS = ("types", "forward", "lse", "dq", "dk", "dv", "masks", "grouped heads", "ragged", "bytes", "gather")


def on_the_gpu(target: Target, *only: str, **claims: object) -> dict[str, str]:
    """Return the evidence of each failed check, for few dtypes and ranks."""
    report = check(target, quick=True, only=only, device="cuda", isolate=False, ranks=(1, 2, 3, 4), **claims)
    return {each.name: each.evidence for each in report.findings if not each.ok}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtypes", [("bfloat16",), ("float16",), ("float32",)], ids=str)
def test_our_ring_passes(dtypes: tuple[str, ...]) -> None:
    assert on_the_gpu(self_targets.ring, *CHECKS, dtypes=dtypes) == {}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", ["no_scale", "mask_in_local_indices", "swaps_dk_and_dv", "one_hop_too_many"])
def test_a_wrong_ring_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    assert set(on_the_gpu(mutant.target(), mutant.found_by)) == {mutant.found_by}


@pytest.mark.needs_cuda
def test_results_on_the_cpu_are_told() -> None:
    def elsewhere(ring, q, k, v, *, causal, positions):  # type: ignore[no-untyped-def]
        from ringlab.plain_ring import attend

        out, lse = attend(ring, q, k, v, causal=causal, positions=positions)
        return out.cpu(), lse

    told = on_the_gpu(Target(elsewhere, backward=False).completed(), "types")
    assert "out is on cpu for inputs on cuda:0" in told["types"]
