"""Data, context and tensor parallelism together are one process; degrees that do not factor are refused by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, launch
from ringlab.conformance.tolerance import FACTOR, relative_error
from ringlab.errors import (
    AgreementError,
    BackendError,
    ShapeError,
    TrainingError,
    WorldSizeError,
)
from ringlab.nn import Degrees, ModelConfig, Recipe, Transformer, train
from ringlab.nn.loss import loss_share, next_tokens, valid_tokens
from tests.nn.ways import equal, four_on_meshes

CONFIG = ModelConfig(vocabulary=40, width=16, layers=2, heads=4, kv_heads=2, hidden=32, qk_norm=True)
TOKENS = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(0))
EPSILON = torch.finfo(torch.float32).eps


def alone(dtype: torch.dtype) -> dict[str, object]:
    model = Transformer(CONFIG, seed=1).to(dtype)
    labels = next_tokens(TOKENS)
    loss = loss_share(model(TOKENS), labels, valid_tokens(labels))
    loss.backward()
    return {"loss": loss.item(), **{name: p.grad for name, p in model.named_parameters()}}


DEGREES = (Degrees(dp=2, cp=2), Degrees(cp=2, tp=2))


RECIPE = Recipe(CONFIG, S=24, batch=2, steps=8)
LEARNER = replace(RECIPE, model=replace(CONFIG, vocabulary=256, tied=False))


@dataclass(frozen=True)
class Processes:
    """What four of them found, and where their checkpoints lie."""

    results: list[tuple[list[dict[str, Any]], list[float]]]
    folder: Path


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    folder = tmp_path_factory.mktemp("checkpoints")
    args = CONFIG, TOKENS, DEGREES, LEARNER, str(folder)
    return Processes(launch(four_on_meshes, 4, *args, memory=False).results, folder)


def test_a_step_on_a_mesh_is_that_of_one_process(four: Processes) -> None:
    true, plain = alone(torch.float64), alone(torch.float32)
    parameters = sum(p.numel() for p in Transformer(CONFIG).parameters())
    for of_rank, _ in four.results:
        for degrees, result in zip(DEGREES, of_rank, strict=True):
            assert abs(result["loss"] - true["loss"]) <= 8 * EPSILON * true["loss"]
            assert result["held"] <= parameters * 1.6 / degrees.ranks + 64, "parameters are not sharded"
            assert result.keys() == true.keys() | {"held"}
            for name in true.keys() - {"loss"}:
                best = true[name].numpy()
                allowed = FACTOR * relative_error(plain[name], best) + 4 * EPSILON
                assert relative_error(result[name], best) <= allowed, f"{name}, {degrees}"


def test_shards_of_processes_are_read_by_others_and_by_one(four: Processes, tmp_path: Path) -> None:
    """FSDP over dp 2 × cp 2 wrote, cp 2 × tp 2 went on in other pieces; now one process does, then virtual ranks."""
    folder = shutil.copytree(four.folder, tmp_path / "copy")
    whole = train(None, LEARNER)
    assert all(equal(curve, whole[:4]) for _, curve in four.results)
    assert equal(train(None, replace(LEARNER, steps=6), folder), whole[:6])
    assert equal(VirtualCluster(2, memory=False).run(train, LEARNER, folder).results[0], whole)


@pytest.mark.parametrize(
    ("degrees", "recipe", "kind", "said"),
    [
        (Degrees(dp=3, cp=2), replace(RECIPE, batch=3), WorldSizeError, "dp × cp × tp = 2 ranks"),
        (Degrees(tp=3), RECIPE, WorldSizeError, "tp that divides 2"),
        (Degrees(tp=2), replace(RECIPE, model=replace(CONFIG, kv_heads=1)), ShapeError, "kv_heads that tp=2 divides"),
        (Degrees(dp=2), replace(RECIPE, batch=3), TrainingError, "a batch that dp=2 divides"),
        (Degrees(tp=2), RECIPE, BackendError, "virtual ranks are threads"),
    ],
)  # fmt: skip
def test_what_does_not_factor_is_refused_by_name(degrees, recipe, kind, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind, match=said):
        VirtualCluster(2).run(train, recipe, None, degrees)


def test_one_rank_with_another_recipe_is_named_by_all() -> None:
    def program(ring) -> str:  # type: ignore[no-untyped-def]
        recipe = RECIPE if ring.rank else Recipe(CONFIG, S=24, batch=2, steps=1, learning_rate=2e-3)
        with pytest.raises(AgreementError, match="(?s)rank 0: .*rank 1: ") as caught:
            train(ring, recipe)
        return str(caught.value)

    assert all("Python" in said for said in VirtualCluster(2).run(program).results)


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(WorldSizeError, match="at least 1"):
        Degrees(dp=0)
