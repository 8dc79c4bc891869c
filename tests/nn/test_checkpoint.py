"""Training continues from a checkpoint on any world size, and a crash leaves the last complete checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringlab import VirtualCluster
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import RinglabError, TrainingError
from ringlab.nn import ModelConfig, Recipe, checkpoint, train
from ringlab.nn.text import Text
from tests.nn.ways import equal

CONFIG = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, hidden=32)
RECIPE = Recipe(CONFIG, S=48, batch=2, steps=9, save_every=3)


def virtual(P: int, recipe: Recipe, folder: Path | None = None) -> list[float]:
    curve: list[float] = VirtualCluster(P, memory=False).run(train, recipe, folder).results[0]
    return curve


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return train(None, RECIPE)


def test_two_then_four_then_one_continue_the_curve(tmp_path: Path, uninterrupted: list[float]) -> None:
    virtual(2, replace(RECIPE, steps=3, layout="contiguous"), tmp_path)
    virtual(4, replace(RECIPE, steps=6), tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000006"
    assert equal(train(None, RECIPE, tmp_path), uninterrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "step-00000003", "step-00000006", "step-00000009",
    ]  # fmt: skip


def test_on_the_same_ranks_the_curve_continues_bit_for_bit(tmp_path: Path) -> None:
    virtual(2, replace(RECIPE, steps=4), tmp_path)
    assert virtual(2, RECIPE, tmp_path) == virtual(2, RECIPE)


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = train(None, RECIPE, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert train(None, RECIPE, tmp_path) == first and sorted(tmp_path.rglob("*")) == before


class PowerCutError(Exception):
    """Stands for the machine losing power."""


@pytest.mark.parametrize(
    "at",
    ["torch.distributed.checkpoint.save", "ringlab.nn.checkpoint._write", "ringlab.nn.checkpoint.os.replace"],
)
def test_a_crash_while_saving_leaves_the_one_before(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[float]
) -> None:
    train(None, replace(RECIPE, steps=3), tmp_path)
    whole = checkpoint.latest(tmp_path)

    def cut(*args: object, **kwargs: object) -> None:
        raise PowerCutError

    with monkeypatch.context() as patch:
        patch.setattr(at, cut)
        with pytest.raises(PowerCutError):
            train(None, RECIPE, tmp_path)
    assert checkpoint.latest(tmp_path) == whole
    assert equal(train(None, RECIPE, tmp_path), uninterrupted)
    assert not list(tmp_path.glob(".*"))


def test_after_a_rank_has_died_training_goes_on(tmp_path: Path, uninterrupted: list[float]) -> None:
    """Training continues from step 3 on four ranks after rank 1 of two was killed in step 5."""
    outcome = VirtualCluster(2, memory=False).run(train, replace(RECIPE, steps=4))
    before = len(list(outcome.trace.exchanges(1)))
    dying = VirtualCluster(2, memory=False, faults=[Fault("kill", 1, before + 1)])
    with pytest.raises(RinglabError, match="killed"):
        dying.run(train, RECIPE, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"
    assert equal(virtual(4, RECIPE, tmp_path), uninterrupted)


def test_another_recipe_or_text_is_refused(tmp_path: Path) -> None:
    train(None, replace(RECIPE, steps=3), tmp_path)
    with pytest.raises(TrainingError, match="learning_rate=0.001, now 0.1"):
        train(None, replace(RECIPE, learning_rate=0.1), tmp_path)
    with pytest.raises(TrainingError, match=r"got: model.width=16, now 32\n"):
        train(None, replace(RECIPE, model=replace(CONFIG, width=32)), tmp_path)
    with pytest.raises(TrainingError, match="text #"):
        train(None, RECIPE, tmp_path, text=Text("abc", b"abc" * 100))
    with pytest.raises(TrainingError, match="3 steps done already, now steps=2"):
        train(None, replace(RECIPE, steps=2), tmp_path)


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(TrainingError, match="a folder for checkpoints"):
        train(None, RECIPE, tmp_path / "runs")


def test_a_checkpoint_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    train(None, replace(RECIPE, steps=6), tmp_path)
    (tmp_path / "latest").write_text("step-00000042")
    with pytest.raises(TrainingError, match="write one of step-00000003, step-00000006"):
        train(None, RECIPE, tmp_path)
    for told in (b"../step-00000006", b"\xff\xfe", b""):
        (tmp_path / "latest").write_bytes(told)
        with pytest.raises(TrainingError, match="not the name of a checkpoint"):
            train(None, RECIPE, tmp_path)
    (tmp_path / "latest").write_text("step-00000003")
    (tmp_path / "step-00000003" / ".metadata").unlink()
    with pytest.raises(TrainingError, match="step-00000003, which `latest` names"):
        train(None, RECIPE, tmp_path)
    (tmp_path / "step-00000006" / "progress.json").write_text(json.dumps({"stop": 6}))
    (tmp_path / "latest").write_text("step-00000006")
    with pytest.raises(TrainingError, match=r"progress\.json"):
        train(None, RECIPE, tmp_path)
