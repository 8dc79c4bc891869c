"""`ringlab train` trains as `train` does, resumes on other ranks, runs under torchrun, and explains errors."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from ringlab import VirtualCluster
from ringlab.cli import app
from ringlab.cli import train as train_command
from ringlab.cli.train import Request
from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.nn import ModelConfig, Recipe, train
from tests.nn.curves import bound, steps_of

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = [
    "--tokens", "48", "--batch", "4", "--width", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1",
    "--hidden", "32", "--steps", "8", "--warmup", "2", "--clip", "0.5", "--save-every", "3",
]  # fmt: skip
RECIPE = Recipe(
    ModelConfig(width=16, layers=1, heads=2, kv_heads=1, hidden=32), S=48, batch=4, steps=8, warmup=2,
    learning_rate=3e-3, decay="cosine", clip=0.5, save_every=3,
)  # fmt: skip


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def trained(*arguments: object) -> dict[str, Any]:
    status, out, err = call(*arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def within_the_bound(losses: list[float], recipe: Recipe = RECIPE) -> bool:
    exact = [step.loss for step in steps_of(replace(recipe, precision="float64"))]
    assert len(losses) == len(exact)
    return all(abs(a - b) <= bound(recipe) * b for a, b in zip(losses, exact, strict=True))


def test_it_trains_as_train_does_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    status, out, err = call(*SMALL, "--folder", folder)
    losses = train(None, RECIPE)
    assert status == 0 and "8 of 8" in out and f"{losses[0]:.3f} → {losses[-1]:.3f} nats per byte" in out
    assert "step 8 of 8" in err
    assert [line["loss"] for line in logged(folder)] == losses
    assert [line["learning_rate"] for line in logged(folder)] == [RECIPE.rate(step) for step in range(8)]
    assert all(line["norm"] > 0 and line["seconds"] > 0 for line in logged(folder))
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{n:08d}" for n in (3, 6, 8)]


def test_without_matplotlib_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command.importlib.util, "find_spec", lambda name: None)
    found = trained(*SMALL, "--steps", 2, "--folder", tmp_path)
    assert "figure" not in found["files"] and not (tmp_path / "loss.png").exists()
    assert len(logged(tmp_path)) == 2


def test_what_the_help_calls_the_default_is_it() -> None:
    request = Request({}, {}, None, Path(), False, None, None, None, "cpu")
    recipe = request.recipe(None)
    names = {"tokens": "S"}
    checked = 0
    for parameter in inspect.signature(train_command.train, eval_str=True).parameters.values():
        said = re.search(r"(\S+) by default", get_args(parameter.annotation)[1].help)
        if said and said[1] != "steps":
            name = names.get(parameter.name, parameter.name)
            value = getattr(recipe, name) if hasattr(recipe, name) else getattr(recipe.model, name)
            assert str(value) == said[1], name
            checked += 1
    assert checked == 19 and recipe.warmup == recipe.steps // 10


def test_it_goes_on_on_other_ranks_with_the_checkpoints_recipe(tmp_path: Path) -> None:
    first = trained(*SMALL, "--ranks", 2, "--folder", tmp_path, "--until", 4)
    assert (first["steps"], first["of"], first["resumed_from"]) == (4, 8, None)
    # as if the process had been killed while it wrote line 6
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(json.dumps({"number": 5, "loss": 99.0}) + '\n{"number": 6, "lo')
    second = trained(
        "--resume", "--ranks", 3, "--layout", "contiguous", "--micro-batches", 2, "--folder", tmp_path
    )
    assert (second["steps"], second["resumed_from"], second["ranks"]) == (8, 4, 3)
    assert [line["number"] for line in logged(tmp_path)] == list(range(1, 9))
    assert [line["loss"] for line in logged(tmp_path)] == second["losses"]
    assert second["losses"][:4] == first["losses"] and within_the_bound(second["losses"])
    done = trained("--resume", "--folder", tmp_path)
    assert done["losses"] == second["losses"] and done["resumed_from"] == 8


def test_resume_in_an_empty_folder_begins_so_that_a_job_can_be_restarted_by_one_command(
    tmp_path: Path,
) -> None:
    assert trained(*SMALL, "--steps", 2, "--resume", "--folder", tmp_path)["resumed_from"] is None


def test_a_file_is_learnt_and_a_window_needs_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "abc.txt").write_bytes(b"abcd" * 100)
    found = trained(*SMALL, "--text", tmp_path / "abc.txt", "--window", 8, "--folder", tmp_path / "run",
                    "--precision", "bfloat16", "--learning-rate", 0.02)  # fmt: skip
    assert found["text"].startswith("abc.txt, 400 bytes") and found["ranks"] == 1
    assert found["last_loss"] < 0.8 * found["first_loss"]
    status, _, err = call("--resume", "--folder", tmp_path / "run")
    assert status == 1 and "--text with that file" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", 3], "a width that the heads divide"),
        (["--tokens", 10**7], "a longer text, or shorter sequences"),
        (["--text", "nowhere.txt"], "a text at nowhere.txt"),
        (["--micro-batches", 3], "a divisor of the batch"),
        (["--ranks", 2, "--dp", 4], "dp × cp × tp = 2 ranks"),
        (
            ["--ranks", 2, "--tp", 2, "--kv-heads", 2],
            "processes of torch.distributed, because tp > 1",
        ),
        (["--dp", 2], "--ranks 2, or torchrun --nproc-per-node=2 -m ringlab train --dp 2"),
        (["--tp", 2, "--dp", 2], "remedy: torchrun --nproc-per-node=4 -m ringlab train --dp 2 --tp 2"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--learning-rate", 1e6, "--clip", 1e30, "--steps", 8], "a gradient with a finite norm"),
    ],
    ids=str,
)
def test_a_wrong_call_is_told(arguments: list[object], said: str, tmp_path: Path) -> None:
    status, out, err = call(*SMALL, "--folder", tmp_path / "run", *arguments)
    assert status == 1 and said in err and not out


@pytest.mark.parametrize("asked", [1, 3])
def test_other_ranks_than_torchrun_started_are_refused_on_every_rank(asked: int, tmp_path: Path) -> None:
    request = Request({}, {}, None, tmp_path, False, None, None, None, "cpu", ranks=asked)

    def program(ring: Ring) -> bool:
        with pytest.raises(TrainingError, match="--ranks 2, the number of torchrun's processes"):
            request.run(ring)
        return True

    assert VirtualCluster(2).run(program).results == [True, True]


def test_a_folder_in_use_and_another_model_are_refused(tmp_path: Path) -> None:
    trained(*SMALL, "--steps", 2, "--folder", tmp_path)
    for arguments, said in (
        (SMALL, "--resume to go on, or another --folder"),
        (["--resume", "--width", 32], "model.width=16, now 32"),
        (["--resume", "--steps", 4], "steps=2, now 4"),  # the learning rate depends on the number of steps
        (["--resume", "--clip", 2.0], "clip=0.5, now 2.0"),
    ):
        status, _, err = call(*arguments, "--folder", tmp_path)
        assert status == 1 and said in err, err


# torchrun.


def under_torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
               "-m", "ringlab", "train", *map(str, arguments), "--json"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as agent:
        try:
            out, err = agent.communicate(timeout=300)
        finally:
            agent.terminate()  # torchrun then ends its ranks; if killed, it would leave them running
    return subprocess.CompletedProcess(command, agent.returncode, out, err)


@pytest.mark.thorough
def test_torchrun_goes_on_with_a_run_of_other_ranks(tmp_path: Path) -> None:
    """A run of two virtual ranks is continued by three processes that torchrun starts."""
    first = trained(*SMALL, "--ranks", 2, "--folder", tmp_path, "--until", 4)
    done = under_torchrun(3, "--resume", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["resumed_from"], found["steps"]) == (3, 4, 8)
    assert found["losses"][:4] == first["losses"] and within_the_bound(found["losses"])
    assert [line["loss"] for line in logged(tmp_path)] == found["losses"]


@pytest.mark.parametrize(("rank", "told"), [(0, True), (1, False)])
def test_of_the_ranks_that_torchrun_started_one_tells_an_error(
    rank: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Request) -> dict[str, Any]:
        raise TrainingError(f"another recipe than of {request.ranks} ranks")

    monkeypatch.setattr(train_command, "_under_torchrun", refuse)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", str(rank))
    status, out, err = call(*SMALL, "--ranks", 3)
    assert status == 1 and not out and ("another recipe than of 3 ranks" in err) is told
