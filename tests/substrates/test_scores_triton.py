"""Soft caps and dropout in the Triton kernels: the same table, a whole ring step in one launch, all new memory NaN."""

from __future__ import annotations

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.blocks.protocol import BackwardRows
from ringlab.blocks.triton.steps import Launcher
from ringlab.conformance.cases import Case
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.scores import ScoreRules
from tests.blocks.compiled import small_tiles
from tests.blocks.kernel_checks import poisoned
from tests.philox import factors
from tests.substrates.test_scores import KINDS, beyond, on_virtual_ranks, program

pytestmark = pytest.mark.needs_triton

# Small tiles, so that few tokens have several programs; the interpreter takes milliseconds for each.
JOBS = [
    (Case("zigzag", 2, 97, 1, 16, "float32", "causal"), "ring", "both"),
    (Case("token-fold", 3, 33, 1, 24, "float32", "documents"), "ring", "dropout"),
    (Case("striped", 2, 64, 2, 16, "bfloat16", "causal"), "allgather", "softcap"),
    (Case("chunk-5-folded", 2, 64, 1, 40, "float32", "prefix"), "allgather", "dropout"),
    (Case("zigzag", 2, 64, 2, 16, "float32", "documents"), "ulysses", "both"),
    (Case("contiguous", 4, 64, 2, 16, "bfloat16", "full"), "hybrid", "dropout"),
    (Case("zigzag", 4, 64, 1, 16, "float32", "documents-both"), "double-ring", "both"),
    (Case("contiguous", 2, 64, 1, 16, "float32", "window"), "ring", "both"),  # tile by tile
    (Case("chunk-3", 8, 3, 1, 16, "float32", "causal"), "ring", "both"),  # ranks without a token
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_virtual_ranks(job: tuple[Case, str, str]) -> None:
    case, schedule, kind = job
    with poisoned():
        results = on_virtual_ranks(case, small_tiles(), schedule, kind)
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert not beyond(case, kind, results)


def test_every_schedule_and_kind_is_met() -> None:
    assert {kind for _, _, kind in JOBS} == set(KINDS)
    assert {schedule for _, schedule, _ in JOBS} == {"ring", "allgather", "ulysses", "hybrid", "double-ring"}


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many launches as without: of each kernel one for each rank and block of which something is visible."""
    case, launched = Case("zigzag", 2, 33, 1, 16, "float32", "causal"), []
    launch = Launcher.launch

    def counted(self: Launcher, kernel: str, *arguments: object, **constants: object) -> None:
        launched.append((kernel, constants["SOFTCAP"], constants["DROPOUT"]))
        launch(self, kernel, *arguments, **constants)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "launch", counted)
    VirtualCluster(case.P, memory=False).run(program, case, "triton", "ring", "both")
    kernels = "forward_step", "backward_dq", "backward_dkv"
    assert sorted(launched) == sorted((kernel, True, True) for kernel in kernels for _ in range(4))


@pytest.mark.parametrize("rate", [1e-11, 0.999])
def test_a_rate_that_drops_nothing_or_nearly_all(rate: float) -> None:
    """Below 2^-33 no word is small enough to be dropped, in any block."""
    q, k, v, dout = torch.randn(4, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    drawn = factors(1, 1, 20, rate, 3)
    rules = ScoreRules(dropout=rate, seed=3).of_tile(*[torch.arange(20).numpy()] * 2)
    block = small_tiles()
    with poisoned():
        part = block.forward(q, k, v, causal=False, scale=0.25, rules=rules)
        delta = (dout * part.out).sum(-1)
        rows = BackwardRows(dout, q, part.out, part.lse, delta)
        gradients = block.backward(rows, k, v, causal=False, scale=0.25, rules=rules)
    true = truth(q, k, v, dout, scale=0.25, factors=drawn)
    allowed = bounds(q, k, v, dout, scale=0.25, factors=drawn, true=true)
    found = errors(Results(part.out, part.lse, *gradients), true)
    assert all(found[name] <= allowed[name] for name in NAMES), (found, allowed)
