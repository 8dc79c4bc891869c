"""Data, context and tensor parallelism together equal one process; degrees that do not factor are refused."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from tests.nn.curves import bound, steps_of
from tests.nn.ways import equal, four_on_meshes

pytestmark = pytest.mark.thorough

CONFIG = ModelConfig(vocabulary=40, width=16, layers=2, heads=4, kv_heads=2, hidden=32, qk_norm=True)
TOKENS = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(0))
EPSILON = torch.finfo(torch.float32).eps


def alone(dtype: torch.dtype, tokens: Tensor = TOKENS) -> dict[str, object]:
    model = Transformer(CONFIG, seed=1).to(dtype)
    labels = next_tokens(tokens)
    loss = loss_share(model(tokens), labels, valid_tokens(labels))
    loss.backward()
    return {"loss": loss.item(), **{name: p.grad for name, p in model.named_parameters()}}


def plainest_errors() -> dict[str, float]:
    """Return the largest float32 errors of one process over several inputs."""
    largest: dict[str, float] = {}
    for seed in range(6):
        tokens = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(seed))
        true, plain = alone(torch.float64, tokens), alone(torch.float32, tokens)
        for name in true.keys() - {"loss"}:
            error = relative_error(plain[name], true[name].numpy())
            largest[name] = max(error, largest.get(name, 0.0))
    return largest


DEGREES = (Degrees(dp=2, cp=2), Degrees(cp=2, tp=2))


RECIPE = Recipe(CONFIG, S=24, batch=2, steps=8, warmup=2, decay="cosine", clip=0.5)
LEARNER = replace(RECIPE, model=replace(CONFIG, vocabulary=256, tied=False))


@dataclass(frozen=True)
class Processes:
    """The results of four processes, and the folder of their checkpoints."""

    results: list[tuple[list[dict[str, Any]], list[float], list[list[float]]]]
    folder: Path


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    folder = tmp_path_factory.mktemp("checkpoints")
    args = CONFIG, TOKENS, DEGREES, LEARNER, str(folder)
    return Processes(launch(four_on_meshes, 4, *args, memory=False).results, folder)


def test_a_step_on_a_mesh_is_that_of_one_process(four: Processes) -> None:
    true, plain = alone(torch.float64), plainest_errors()
    parameters = sum(p.numel() for p in Transformer(CONFIG).parameters())
    for of_rank, *_ in four.results:
        for degrees, result in zip(DEGREES, of_rank, strict=True):
            assert abs(result["loss"] - true["loss"]) <= 8 * EPSILON * true["loss"]
            assert result["held"] <= parameters * 1.6 / degrees.ranks + 64, "parameters are not sharded"
            assert result.keys() == true.keys() | {"held", "norms", "refused"}
            for name in true.keys() - {"loss"}:
                allowed = FACTOR * plain[name] + 4 * EPSILON
                assert relative_error(result[name], true[name].numpy()) <= allowed, f"{name}, {degrees}"


def test_the_norm_is_the_whole_gradients_on_every_rank_of_a_mesh(four: Processes) -> None:
    """All ranks have the norm of the whole gradient; a norm of the rank's own part would differ."""
    gradients = [x.double().flatten() for name, x in alone(torch.float64).items() if name != "loss"]
    norm = float(torch.cat(gradients).norm())
    for place, degrees in enumerate(DEGREES):
        norms = [of_rank[place]["norms"] for of_rank, *_ in four.results]
        assert len({found["norm"] for found in norms}) == 1, f"{degrees}: not the same bits"
        assert norms[0]["norm"] == pytest.approx(norm, rel=1e-5)
        assert norms[0]["clipped"] == pytest.approx(0.5 * norm, rel=1e-5)
        assert all(abs(found["own"] - norm) > 0.02 * norm for found in norms), f"{degrees}: the mutant lives"


def test_functions_for_whole_models_refuse_sharded_ones(four: Processes) -> None:
    needs = (
        "the ring of all ranks that hold shards",
        "parameters that every rank holds whole",
        "holds whole",
    )
    for of_rank, *_ in four.results:
        for result in of_rank:
            assert len(result["refused"]) >= 2
            assert all(need in said for need, said in zip(needs, result["refused"], strict=False))


def test_bfloat16_on_a_mesh_trains_as_on_one_process(four: Processes) -> None:
    """The curves of FSDP and tensor parallelism in bfloat16 are within one process's bound of the float64 curve."""
    recipe = replace(LEARNER, precision="bfloat16")
    exact = [step.loss for step in steps_of(replace(recipe, precision="float64"))]
    for *_, curves in four.results:
        for curve in curves:
            assert curve == four.results[0][2][curves.index(curve)]
            differences = [abs(one - true) / true for one, true in zip(curve, exact, strict=True)]
            assert max(differences) <= bound(recipe), (max(differences), bound(recipe))


def test_shards_of_processes_are_read_by_others_and_by_one(four: Processes, tmp_path: Path) -> None:
    """Checkpoints of four processes on two meshes can be continued by one process and by virtual ranks."""
    folder = shutil.copytree(four.folder, tmp_path / "copy")
    whole = train(None, LEARNER)
    assert all(equal(curve, whole[:4]) for _, curve, _ in four.results)
    assert equal(train(None, LEARNER, folder, until=6), whole[:6])
    assert equal(VirtualCluster(2, memory=False).run(train, LEARNER, folder).results[0], whole)


@pytest.mark.parametrize(
    ("degrees", "recipe", "kind", "said"),
    [
        (Degrees(dp=3, cp=2), replace(RECIPE, batch=3), WorldSizeError, "dp × cp × tp = 2 ranks"),
        (Degrees(tp=3), RECIPE, WorldSizeError, "tp that divides 2"),
        (Degrees(tp=2), replace(RECIPE, model=replace(CONFIG, kv_heads=1)), ShapeError, "kv_heads that tp=2 divides"),
        (Degrees(dp=2), replace(RECIPE, batch=3), TrainingError, "a batch divisible by dp=2"),
        (Degrees(tp=2), RECIPE, BackendError, "virtual ranks, which are threads"),
    ],
)  # fmt: skip
def test_what_does_not_factor_is_refused_by_name(degrees, recipe, kind, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind, match=said):
        VirtualCluster(2).run(train, recipe, None, degrees)


def test_one_rank_with_another_recipe_is_named_by_all() -> None:
    def program(ring) -> str:  # type: ignore[no-untyped-def]
        recipe = LEARNER if ring.rank else replace(LEARNER, learning_rate=2e-3)
        with pytest.raises(AgreementError, match="(?s)rank 0: .*rank 1: ") as caught:
            train(ring, recipe)
        return str(caught.value)

    assert all("Python" in said for said in VirtualCluster(2).run(program).results)


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(WorldSizeError, match="at least 1"):
        Degrees(dp=0)
