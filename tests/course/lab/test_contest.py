"""The contest checks the result of every call, and gives no two calls the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import VirtualCluster
from ringlab.bench.contest import WARM_UP, Turned
from ringlab.errors import LabError
from ringlab_course.lab import l2, l3
from tests.course.lab import entrants

CPU = torch.device("cpu")


def contest(name: str, rounds: int = 2) -> list[dict[str, Any]]:
    """Return rank 0's results of the contest with this entrant on two virtual ranks."""
    entrants.CALLS.clear()
    entrants._Remembered.kept.clear()
    settings = l3.L3(f"tests.course.lab.entrants:{name}", S=32, H=2, D=8, rounds=rounds)
    return VirtualCluster(2).run(lambda ring: list(l3.cases(ring, settings, CPU))).results[0]


def correct(found: list[dict[str, Any]]) -> dict[tuple[str, str], bool]:
    return {
        (each["case"], each["pass"]): next(
            one["correct"] for name, one in each["contenders"].items() if name != l3.OURS
        )
        for each in found
    }


def test_an_entrant_that_is_right_is_right_in_every_call() -> None:
    found = contest("right")
    assert all(correct(found).values()) and len(correct(found)) == 4
    for each in found:
        assert each["contenders"][l3.OURS]["correct"]
        if each["case"] == "contest":  # one first call, two to warm up, and two rounds
            assert {one["calls_looked_at"] for one in each["contenders"].values()} == {5}


@pytest.mark.parametrize("cheat", ["first_call_only", "one_call_wrong", "remembers", "no_gradient_no_work"])
def test_who_is_wrong_in_a_call_that_is_timed_is_wrong(cheat: str) -> None:
    found = correct(contest(cheat))
    assert not (found["contest", "forward"] and found["contest", "forward_backward"]), cheat


def test_a_result_that_computes_later_is_refused() -> None:
    with pytest.raises(LabError, match="out of .* as a torch.Tensor that is computed"):
        contest("computes_later")


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ leaves[2]
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


@given(seed=st.integers(0, 2**31), H=st.integers(1, 3), S=st.integers(1, 5), D=st.integers(1, 4))
def test_turned_inputs_have_turned_results(seed: int, H: int, S: int, D: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = [torch.randn(1, H, S, D, generator=generator) for _ in range(4)]
    turned = Turned.drawn(H, D, generator)
    after = turned.inputs(*before)
    assert all(
        sorted(x.abs().flatten()) == sorted(y.abs().flatten()) for x, y in zip(before, after, strict=True)
    )
    true, found = results(*before), results(*after)
    for name, x in found.items():
        torch.testing.assert_close(turned.back(name, x[0]), true[name][0], rtol=1e-5, atol=1e-6)


def test_an_entrant_whose_module_ends_the_program_is_refused_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is a LabError, after which the other entrants still have their turn."""
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LabError, match="SystemExit"):
        l3.L3("leaves:ring", S=32).check(2)


def test_ranks_that_a_measurement_leaves_out_hear_of_every_call() -> None:
    """A rank that is left out gets a message for every call, so that it does not take a long measurement for a hang."""
    settings = l2.L2(S=32, c=16, H=1, D=8, ranks=(2,), layouts=("zigzag",), rounds=3)
    outcome = VirtualCluster(3).run(lambda ring: list(l2.cases(ring, settings, CPU)))
    assert [len(found) for found in outcome.results] == [4, 4, 0]
    calls = 2 * (3 + WARM_UP) * len(("zigzag", l2.PERFECT))  # two passes
    heard = [
        each
        for each in outcome.trace.exchanges(rank=2, control=True)
        if each.source == 0 and each.tag == l2.TURN
    ]
    assert len(heard) == 2 * (calls + 1)  # strong and weak scaling; one more message ends each
