"""Calibration makes a hardware description from measured times, and compares its predictions with runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.bench.calibrate import FEW, Measured, _predicted, as_hardware, compare
from ringlab.cli import app
from ringlab.cost.block_time import tile_scores
from ringlab.cost.hardware import hardware, write_hardware
from ringlab.cost.sizes import Attention
from ringlab.plan import Tile

pytestmark = pytest.mark.thorough

SIZES = Attention(1, 4, 2, 64, "float32")
LAUNCH, SCORE, ROW = 2e-5, 4e-9, 3e-8
LATENCY, RATE = 1e-4, 1e9


def made_up(factor: float = 1.0, kernel_tile: int | None = None) -> Measured:
    """Return the measurements of a machine whose tiles and messages take the times of simple formulas."""
    kernel = None if kernel_tile is None else (kernel_tile, kernel_tile)
    tiles = {
        (of, rows, keys): times * (LAUNCH + 4 * rows * (keys * SCORE + ROW))
        for of, times in (("forward", 1.0), ("backward", 2.5))
        for rows in (256, 1024)
        for keys in (256, 512, 1024)
    }
    causal = {
        (of, rows): times
        * (LAUNCH + 4 * (tile_scores(Tile(0, rows, 0, rows, True), kernel) * SCORE + rows * ROW))
        for of, times in (("forward", 1.0), ("backward", 2.5))
        for rows in (256, 1024)
    }
    links = {nbytes: LATENCY + nbytes / RATE for nbytes in (1 << 12, 1 << 20, 1 << 24)}
    runs = {("forward", 2048): 1.0, ("forward_backward", 2048): 1.0}
    # This is less than the time of the tiles, so the fitted time per step is 0.
    short = {"forward": 0.0, "forward_backward": 0.0}
    exact = Measured(SIZES, 2, 3, tiles, links, runs, causal, short, 3e10, 8e9)
    cases = compare(exact, as_hardware(exact, "exact"))
    return replace(exact, runs={(c["pass"], c["tokens"]): factor * c["predicted_s"] for c in cases})


@pytest.mark.parametrize(("kernel_tile", "scores"), [(None, 1024 * 1025 // 2), (512, 3 * 512**2)])
def test_the_prediction_is_that_of_the_ring_by_hand(kernel_tile: int | None, scores: int) -> None:
    """The prediction equals a count by hand: a rank has one triangle of 1,024 rows, then half a block."""
    measured = made_up(kernel_tile=kernel_tile)
    forward = compare(measured, as_hardware(measured, "exact"))[0]
    assert (forward["pass"], forward["tokens"]) == ("forward", 2048)

    def tile(rows: int, keys: int) -> float:
        return LAUNCH + 4 * rows * (keys * SCORE + ROW)

    first = LAUNCH + 4 * (scores * SCORE + 1024 * ROW)
    by_rank = (first + tile(512, 1024), first + tile(1024, 512))
    assert forward["predicted_s"] == pytest.approx(max(by_rank), rel=1e-6)


def test_steps_take_what_a_short_ring_takes_beside_its_tiles() -> None:
    """Besides its tiles, a step takes about 1 ms forward and 3 ms backward, minus the hidden message time."""
    bare = made_up()
    of_tiles = {
        of: _predicted(bare, as_hardware(bare, "bare"), of, FEW) for of in ("forward", "forward_backward")
    }
    measured = replace(
        bare,
        short={
            "forward": of_tiles["forward"] + 2e-3,
            "forward_backward": of_tiles["forward_backward"] + 8e-3,
        },
    )
    found = as_hardware(measured, "slow steps")
    steps = [block.per_step_s for block in found.block_times]
    assert steps == pytest.approx([1e-3, 3e-3], rel=0.06)
    before, after = (
        [case["predicted_s"] for case in compare(bare, each)] for each in (as_hardware(bare, "bare"), found)
    )
    assert [late - early for early, late in zip(before, after, strict=True)] == pytest.approx(
        [2 * steps[0], 2 * sum(steps)]
    )
    for of, seconds in measured.short.items():
        assert _predicted(measured, found, of, FEW) == pytest.approx(seconds)


def test_a_hardware_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("precious")
    done = CliRunner().invoke(app, ["calibrate", "--hardware", str(tmp_path / "mine.toml")])
    assert done.exit_code == 1
    assert "--replace" in done.output
    assert (tmp_path / "mine.toml").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--name", "a:b"], "hardware with a name"),
        (["--dtype", "float8"], "float32 or bfloat16"),
        (["--hardware", "/proc/no/x.toml"], "a file that can be written"),
        (["--output", "/proc/x.json"], "a file that can be written"),
        (["--ranks", "1"], "at least 2 processes"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    words: list[str], needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: object, **__: object) -> None:
        raise AssertionError("measured before the input was checked")

    monkeypatch.setattr("ringlab.bench.calibrate.launch", launched)
    file = tmp_path / "mine.toml"
    write_hardware(file, hardware("h100"))
    done = CliRunner().invoke(app, ["calibrate", "--json", "--replace", "--hardware", str(file), *words])
    assert done.exit_code == 1, done.exception
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "CostError" and needed in error["needed"]
    assert hardware(file) == hardware("h100") and [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.slow
def test_two_processes_are_measured_and_predicted(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    options = ["--heads", "1", "--head-dim", "16", "--tokens", "128,200", "--rounds", "5", "--json"]
    done = CliRunner().invoke(app, ["calibrate", "--hardware", str(file), *options])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [(c["pass"], c["tokens"]) for c in report["cases"]] == [
        (of, S) for S in (128, 200) for of in ("forward", "forward_backward")
    ]
    assert all(c["measured_s"] > 0 and c["predicted_s"] > 0 for c in report["cases"])
    assert report["worst_relative_error"] == max(abs(c["relative_error"]) for c in report["cases"])
    found = hardware(file)
    assert found.ranks_per_node == 2
    assert {block.pass_ for block in found.block_times} == {"forward", "backward"}
    assert found.inside.bytes_per_s > 0
