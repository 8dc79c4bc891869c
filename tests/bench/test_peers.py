"""A published package is reported as wrong if a row of its results is missing, not finite or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringlab.bench import contest
from ringlab.bench import peers as bench
from ringlab.bench.contest import Sampled
from ringlab.bench.emulate import Work
from ringlab.bench.peers import OURS, PEERS, bench_peers
from ringlab.bench.reference import reference, sample
from ringlab.cli import app
from ringlab.errors import BackendError

pytestmark = pytest.mark.thorough

WORK = Work(H=2, S=64, D=16)


@pytest.mark.slow
def test_ringlab_is_right_and_torchs_ring_beside_it(tmp_path: Path) -> None:
    written = tmp_path / "made" / "peers.json"
    words = (
        "bench peers --tokens 64 --heads 2 --head-dim 16 --ranks 2 --rounds 2 --peers torch-context-parallel"
    )
    done = CliRunner().invoke(app, [*words.split(), "--output", str(written)])
    assert done.exit_code == 0, done.output
    measured = json.loads(written.read_text())
    assert measured["ok"] and measured["not_run"] == {"2": {}}
    assert [case["pass"] for case in measured["cases"]] == ["forward", "forward_backward"]
    for case in measured["cases"]:
        assert set(case["contenders"]) == {OURS, "torch-context-parallel"}
        assert f"fastest that is right: {case['fastest_correct']}" in done.output
        for found in case["contenders"].values():
            assert found["correct"] and len(found["times_s"]) == 2 and found["median_s"] > 0
            assert f"{found['ratio']:.2f} times ringlab's  right" in done.output
        assert case["contenders"][OURS]["ratio"] == 1.0
    assert set(measured["cases"][1]["contenders"][OURS]["errors"]) == {"out", "dq", "dk", "dv"}
    assert measured["about"]["torch-context-parallel"].startswith(f"torch {torch.__version__}, kernel: ")


def sampled(wrong: float = 0.0, finite: bool = True) -> tuple[dict[str, Any], Any]:
    """Return a package's report from two ranks. One row of its dv is wrong by the factor 1 + `wrong`."""
    inputs = bench._inputs(WORK, "float32")
    expected = reference(inputs, True, sample(WORK.S, torch.Generator().manual_seed(1)))
    rows = {name: x.clone() for name, x in expected.true.items() if name != "lse"}
    rows["dv"][1, 3] *= 1.0 + wrong
    halves = torch.arange(len(expected.tokens)).chunk(2)
    parts = [
        Sampled(half.tolist(), {name: x[:, half] for name, x in rows.items()}, finite or number == 0)
        for number, half in enumerate(halves)
    ]
    return {
        "them": contest.errors_of(parts, expected),
        OURS: contest.errors_of(parts, expected),
    }, expected


def case(found: dict[str, Any], expected: Any, of: str = "forward_backward") -> dict[str, Any]:
    return contest.case(2, of, found, expected, {OURS: (2.0, 2.0, 2.0), "them": (1.0, 3.0, 9.0)}, OURS)


def test_one_wrong_row_is_enough_and_its_error_is_told() -> None:
    found, expected = sampled()
    of = case(found, expected)
    assert of["contenders"]["them"]["correct"] and of["contenders"]["them"]["ratio"] == 1.5
    assert of["fastest_correct"] == OURS and of["contenders"]["them"]["median_s"] == 3.0
    found, expected = sampled(wrong=0.01)
    of = case(found, expected)
    assert not of["contenders"]["them"]["correct"] and of["fastest_correct"] is None
    them = of["contenders"]["them"]
    assert them["row_errors"]["dv"] == pytest.approx(0.01, rel=0.01)
    assert them["bounds"]["dv"] < them["errors"]["dv"] <= them["row_errors"]["dv"]
    forward = case(found, expected, "forward")
    assert forward["contenders"]["them"]["correct"] and set(forward["contenders"]["them"]["errors"]) == {
        "out"
    }


def test_a_rank_whose_results_are_not_finite_is_wrong() -> None:
    found, expected = sampled(finite=False)
    assert not case(found, expected)["contenders"]["them"]["correct"]


def test_a_row_that_no_rank_gave_is_wrong() -> None:
    _, expected = sampled()
    part = Sampled([0], {n: x[:, :1] for n, x in expected.true.items() if n != "lse"}, True)
    found = {"them": contest.errors_of([part], expected), OURS: sampled()[0][OURS]}
    of = case(found, expected)
    assert not of["contenders"]["them"]["correct"] and of["contenders"][OURS]["correct"]


def test_a_peer_that_needs_a_gpu_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in (bench._obstacle("torch-context-parallel-public", 2, "float32") or "")


@pytest.mark.parametrize(
    ("ranks", "names", "dtype"),
    [
        ((1,), PEERS, "float32"),
        ((3,), PEERS, "float32"),
        ((2,), ("nobody",), "float32"),
        ((2,), PEERS, "int8"),
    ],
)
def test_what_cannot_be_measured_is_refused(ranks: Any, names: Any, dtype: str) -> None:
    with pytest.raises(BackendError):
        bench_peers(WORK, ranks, 1, names, dtype)
    assert CliRunner().invoke(app, ["bench", "peers", "--ranks", "two"]).exit_code == 2
