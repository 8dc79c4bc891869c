"""The loss curve does not depend on the layout, and is the same on one process, virtual ranks and processes.

A batch depends only on its number, so a checkpoint needs no other position in the data.
"""

from __future__ import annotations

import heapq
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, launch
from ringlab.errors import BackendError, DeviceError, LayoutError, MaskError, TrainingError
from ringlab.nn import Degrees, Recipe, text, train
from tools.loss_curves import ALONE, RECIPE, curves, differences

ALIKE = 1e-5  # the relative difference that is allowed in float32
SHORT = replace(RECIPE, steps=12)


def test_curves_are_alike_here() -> None:
    found = curves(SHORT)
    assert all(difference <= ALIKE for difference in differences(found).values()), differences(found)


def test_a_window_goes_over_the_ring_as_over_one_rank() -> None:
    windowed = replace(SHORT, steps=3, window=20)
    one, four = (VirtualCluster(P, memory=False).run(train, windowed).results[0] for P in (1, 4))
    assert differences({ALONE: one, "ring": four})["ring"] <= ALIKE
    assert differences({ALONE: train(None, replace(SHORT, steps=3)), "window": one})["window"] > 10 * ALIKE


def test_sequences_over_rings_beside_each_other_are_one_batch() -> None:
    """Two rings of two sequences train as one batch; test_mesh tests the same on processes."""
    short = replace(SHORT, steps=4)
    [one, *others] = VirtualCluster(4, memory=False).run(train, short, None, Degrees(dp=2, cp=2)).results
    assert all(curve == one for curve in others)
    alone = train(None, short)
    assert differences({ALONE: alone, "grid": one})["grid"] <= ALIKE
    assert train(None, short, None, Degrees()) == alone


def test_recipes_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="contiguous, striped, zigzag"):
        Recipe(layout="no-such-layout")
    with pytest.raises(TrainingError, match="steps= at least 1"):
        Recipe(steps=0)
    with pytest.raises(TrainingError, match="S= at least 1, an integer"):
        Recipe(S=3.5)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="learning_rate= at least 0 and finite"):
        Recipe(learning_rate=float("nan"))
    with pytest.raises(TrainingError, match="learning_rate= at least 0 and finite"):
        Recipe(learning_rate="fast")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="one of the schedules"):
        Recipe(schedule="no-such-schedule")
    with pytest.raises(BackendError, match="one of the blocks .*triton.* or auto"):
        Recipe(block="no-such-block")
    with pytest.raises(MaskError, match="window="):
        Recipe(window=0)
    with pytest.raises(TrainingError, match="a Recipe as the first argument"):
        train(SHORT, None)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="a ModelConfig"):
        train(None, SHORT.model)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="a ring, because the recipe has a window"):
        train(None, replace(SHORT, window=8))
    with pytest.raises(DeviceError, match="cpu or cuda"):
        train(None, SHORT, device="gpu")


def test_a_gpu_that_is_not_there_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="a GPU, for device='cuda'"):
        VirtualCluster(2).run(train, SHORT, None, None, None, "cuda")
    with pytest.raises(DeviceError, match="a GPU, for device="):
        train(None, SHORT, device=torch.device("cuda", 0))  # type: ignore[arg-type]


def test_the_text_is_the_library_and_names_its_python() -> None:
    library = text.library()
    assert Path(heapq.__file__).read_bytes() in library.content
    assert platform.python_version() in library.name and len(library) > 200_000
    assert len(library.digest) == 12


def test_batches_are_stretches_of_the_text_and_depend_on_number_and_seed_alone() -> None:
    library = text.library()
    batch = text.batch(library, S=64, rows=3, number=5)
    assert batch.shape == (3, 64) and batch.dtype == torch.int64
    assert all(bytes(row.tolist()) in library.content for row in batch)
    assert torch.equal(batch, text.batch(library, 64, 3, 5))
    for other in (text.batch(library, 64, 3, 6), text.batch(library, 64, 3, 5, seed=1)):
        assert not torch.equal(batch, other)


def test_a_text_too_short_is_refused() -> None:
    assert text.batch(text.Text("abc", b"abc"), 3, 1, 0).tolist() == [[97, 98, 99]]
    with pytest.raises(TrainingError, match="of 1 to 3 bytes"):
        text.batch(text.Text("abc", b"abc"), 4, 1, 0)


def test_a_python_without_its_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(TrainingError, match=r"no argparse\.py, bisect\.py"):
        text.library.__wrapped__()


GUIDE = (Path(__file__).parents[2] / "docs/guide/training.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"```python\n(from ringlab import VirtualCluster\n.*?)```", GUIDE, re.DOTALL)


@pytest.mark.thorough
def test_the_example_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "steps=5" in EXAMPLE and '`launch(train, 4, recipe, "runs/first")`' in GUIDE
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(EXAMPLE.replace("steps=5", "steps=4"), names)
    alone, virtual, train, recipe = (names[name] for name in ("alone", "virtual", "train", "recipe"))
    processes = launch(train, 4, recipe, "runs/first").results[0]
    assert virtual == processes, "virtual ranks and processes differ"
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(virtual, alone, strict=True))
    assert (tmp_path / "runs/first/latest").read_text() == "step-00000004"
