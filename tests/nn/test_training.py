"""The loss curve is the same wherever the sequence lies: a short run here, 200 steps in the committed figure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.bench.loss_curves import ALONE, RECIPE, RINGS, curves, differences
from ringlab.errors import BackendError, DeviceError, LayoutError, MaskError, TrainingError
from ringlab.nn import Degrees, Recipe, train
from ringlab.nn import training as module
from ringlab.nn.text import library

FIGURE = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/nn/loss-curves.json").read_text(encoding="utf-8")
)
ALIKE = 1e-5  # relative, in float32: the goal
SHORT = replace(RECIPE, steps=12)


def test_the_committed_curves_are_alike_and_fall() -> None:
    found = FIGURE["curves"]
    assert found.keys() == {ALONE, *RINGS} and FIGURE["recipe"] == asdict(RECIPE)
    assert all(len(curve) == 200 for curve in found.values())
    assert differences(found) == FIGURE["largest_relative_difference"]
    assert all(difference <= ALIKE for difference in differences(found).values())
    assert abs(found[ALONE][0] - math.log(256)) < 0.2  # all bytes almost alike at first
    assert sum(found[ALONE][-10:]) / 10 < 3.2


def test_curves_are_alike_here() -> None:
    found = curves(SHORT)
    assert all(difference <= ALIKE for difference in differences(found).values()), differences(found)
    if FIGURE["text"]["sha256"] == library().digest:  # of this Python
        assert differences({ALONE: FIGURE["curves"][ALONE][:12], "here": found[ALONE]})["here"] <= ALIKE


def test_a_wrong_reduction_leaves_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: without the sum over ranks each model goes its own way."""
    monkeypatch.setattr(module, "sum_gradients", lambda *args: None)
    assert all(difference > 100 * ALIKE for difference in differences(curves(SHORT)).values())


def test_a_window_goes_over_the_ring_as_over_one_rank() -> None:
    windowed = replace(SHORT, steps=3, window=20)
    one, four = (VirtualCluster(P, memory=False).run(train, windowed).results[0] for P in (1, 4))
    assert differences({ALONE: one, "ring": four})["ring"] <= ALIKE
    assert differences({ALONE: train(None, replace(SHORT, steps=3)), "window": one})["window"] > 10 * ALIKE


def test_sequences_over_rings_beside_each_other_are_one_batch() -> None:
    """dp 2 × cp 2 on virtual ranks; test_mesh has it on processes, where FSDP shards the model."""
    short = replace(SHORT, steps=4)
    [one, *others] = VirtualCluster(4, memory=False).run(train, short, None, Degrees(dp=2, cp=2)).results
    assert all(curve == one for curve in others)
    alone = train(None, short)
    assert differences({ALONE: alone, "grid": one})["grid"] <= ALIKE
    assert train(None, short, None, Degrees()) == alone


def test_recipes_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="contiguous, striped, zigzag"):
        Recipe(layout="spiral")
    with pytest.raises(TrainingError, match="steps= at least 1"):
        Recipe(steps=0)
    with pytest.raises(TrainingError, match="S= at least 1, an integer"):
        Recipe(S=3.5)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="learning_rate= at least 0 and finite"):
        Recipe(learning_rate=float("nan"))
    with pytest.raises(TrainingError, match="learning_rate= at least 0 and finite"):
        Recipe(learning_rate="fast")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="a schedule among"):
        Recipe(schedule="spiral")
    with pytest.raises(BackendError, match="a block among .*triton or auto"):
        Recipe(block="flash")
    with pytest.raises(MaskError, match="window="):
        Recipe(window=0)
    with pytest.raises(TrainingError, match="a Recipe first"):
        train(SHORT, None)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="a ModelConfig"):
        train(None, SHORT.model)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="a ring, for a window"):
        train(None, replace(SHORT, window=8))
    with pytest.raises(DeviceError, match="cpu or cuda"):
        train(None, SHORT, device="gpu")


def test_a_gpu_that_is_not_there_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="a GPU, for device='cuda'"):
        VirtualCluster(2).run(train, SHORT, None, None, None, "cuda")
    with pytest.raises(DeviceError, match="a GPU, for device="):
        train(None, SHORT, device=torch.device("cuda", 0))  # type: ignore[arg-type]
