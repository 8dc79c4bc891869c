"""The same case table for the Triton block, with NaN in all new memory, which shows unwritten rows.

With soft caps and dropout, a ring step of the Triton kernels is still one launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.blocks.triton.steps import Launcher
from ringlab.conformance.cases import Case, attend, covering, join
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.scores import ScoreRules
from tests.blocks.compiled import small_tiles
from tests.philox import factors
from tests.substrates.test_case_table import beyond, program

pytestmark = [pytest.mark.thorough, pytest.mark.needs_triton]

CASES = [case for case in covering() if case.dtype != "float64"]


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    """Let torch.empty return NaN during a test, so that unwritten numbers are noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def on_virtual_ranks(case: Case, block: str | Block, schedule: str = "ring") -> Results:
    outcome = VirtualCluster(case.P, memory=False).run(attend, case, block, schedule)
    return join(case, outcome.results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_virtual_ranks(case: Case) -> None:
    results = on_virtual_ranks(case, "triton")
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == torch.float32
    assert beyond(case, results) == {}


def test_both_schedules_and_two_runs_give_the_same_bits() -> None:
    """Two runs add in the same order, and both schedules have the same bits in the forward."""
    case = Case("zigzag", 2, 131, 2, 40, "float32", "causal", Dv=24)
    ring, again, gathered = (
        on_virtual_ranks(case, small_tiles(), schedule) for schedule in ("ring", "ring", "allgather")
    )
    for name, one, other in zip(NAMES, ring, again, strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(ring.out, gathered.out) and torch.equal(ring.lse, gathered.lse)
    assert beyond(case, gathered) == {}


@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_a_step_is_one_launch(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is one launch of each kernel for each rank and visible block, under all masks and rules."""
    case, launched = Case("zigzag", 2, 33, 1, 16, "float32", mask), []
    launch, windows = Launcher.launch, []

    def counted(self: Launcher, kernel: str, *arguments: object, **constants: object) -> None:
        launched.append((kernel, constants["SOFTCAP"], constants["DROPOUT"]))
        windows.append(constants["WINDOW"])
        launch(self, kernel, *arguments, **constants)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "launch", counted)
    VirtualCluster(case.P, memory=False).run(program, case, "triton", "ring", "both")
    kernels = "forward_step", "backward_dq", "backward_dkv"
    assert sorted(launched) == sorted((kernel, True, True) for kernel in kernels for _ in range(4))
    assert any(windows) == (mask == "window"), "only a window's left edge takes a kernel of its own"


@pytest.mark.parametrize("rate", [1e-11, 0.999])
def test_a_rate_that_drops_nothing_or_nearly_all(rate: float) -> None:
    """A rate below 2^-33 drops no pair in any block, and the results for a rate close to 1 are right, too."""
    q, k, v, dout = torch.randn(4, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    drawn = factors(1, 1, 20, rate, 3)
    rules = ScoreRules(dropout=rate, seed=3).of_tile(*[torch.arange(20).numpy()] * 2)
    block = small_tiles()
    part = block.forward(q, k, v, causal=False, scale=0.25, rules=rules)
    delta = (dout * part.out).sum(-1)
    rows = BackwardRows(dout, q, part.out, part.lse, delta)
    gradients = block.backward(rows, k, v, causal=False, scale=0.25, rules=rules)
    true = truth(q, k, v, dout, scale=0.25, factors=drawn)
    allowed = bounds(q, k, v, dout, scale=0.25, factors=drawn, true=true)
    found = errors(Results(part.out, part.lse, *gradients), true)
    assert all(found[name] <= allowed[name] for name in NAMES), (found, allowed)
