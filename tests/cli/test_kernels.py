"""`ringlab kernels` and `ringlab tune` print lists for programs and tables for people, with right statuses."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringlab.bench import tune as bench_tune
from ringlab.bench.tune import FINALISTS
from ringlab.blocks.triton import configs, offline
from ringlab.blocks.triton.candidates import Slot
from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.offline import TENSOR_CORE, Compiled, Job, shipped_jobs
from ringlab.cli import app

PROMISED = {"kernel", "arch", "config", "registers", "spill_bytes", "shared_bytes", "tensor_core"}


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def scripted(spills: int = 0):
    """Return a stand-in for the compiler whose forward step spills `spills` bytes."""

    def compile_all(jobs: list[Job], processes: int = 2, on_done=None) -> list[Compiled]:
        found = []
        for job in jobs:
            spill = spills if job.kernel == "forward_step" else 0
            found.append(Compiled(job, 200, spill, 1000, TENSOR_CORE[job.arch], 8))
            if on_done:
                on_done(found[-1])
        return found

    return compile_all


def test_offline_prints_one_list_with_a_row_per_configuration(monkeypatch) -> None:
    """The list has a row for each shipped job: 81 plain ones, and those of steps, windows, odd head dims and scores."""
    monkeypatch.setattr(offline, "compile_all", scripted())
    status, out, _ = call("kernels", "--offline", "--json")
    rows = json.loads(out)
    assert (
        status == 0 and isinstance(rows, list) and len(rows) == len(shipped_jobs()) == 81 + 36 + 18 + 45 + 54
    )
    assert all(PROMISED <= row.keys() and row["broken"] == [] for row in rows)
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90", "sm_100"}


def test_a_broken_budget_is_told_and_the_status_is_1(monkeypatch) -> None:
    monkeypatch.setattr(offline, "compile_all", scripted(spills=12))
    chosen = ("--arch", "sm_90", "--kernel", "forward_step")
    status, out, _ = call("kernels", "--offline", *chosen)
    assert status == 1 and "12 bytes spilled by a thread" in out and "wgmma" in out
    status, out, _ = call("kernels", "--offline", *chosen, "--json")
    broken = [row for row in json.loads(out) if row["broken"]]
    assert status == 1 and {row["config"]["block_m"] for row in broken}
    steps_of_a_ring, windows, sets_of_score_rules, between = 4, 1, 3, 5
    of_a_row = steps_of_a_ring + windows + sets_of_score_rules
    assert len(broken) == 2 * of_a_row + between, "for each of two head dims"


def test_one_architecture_and_one_kernel_can_be_chosen(monkeypatch) -> None:
    monkeypatch.setattr(offline, "compile_all", scripted())
    _, out, _ = call("kernels", "--offline", "--arch", "sm_80", "--kernel", "backward_dq", "--json")
    assert {(row["arch"], row["kernel"]) for row in json.loads(out)} == {("sm_80", "backward_dq")}


def test_recording_changes_nothing_but_the_numbers(monkeypatch, tmp_path: Path) -> None:
    for arch in configs.ARCHITECTURES:
        (tmp_path / f"{arch}.toml").write_bytes((configs.TABLES / f"{arch}.toml").read_bytes())
    monkeypatch.setattr(configs, "TABLES", tmp_path)
    monkeypatch.setattr(offline, "compile_all", scripted())
    assert call("kernels", "--offline", "--record", "--json")[0] == 0
    for arch in configs.COMPILED:
        rows = configs.read(tmp_path / f"{arch}.toml")
        assert {row.compiled for row in rows} == {(200, 0, 1000)}
        assert [row.config for row in rows] == [row.config for row in configs.table(arch)]
        assert [row.reason for row in rows] == [row.reason for row in configs.table(arch)]
    assert call("kernels", "--record")[0] == 2


def test_without_offline_the_tables_are_listed_with_their_reasons() -> None:
    status, out, _ = call("kernels", "--json")
    rows = json.loads(out)
    assert status == 0 and all(row["reason"] for row in rows)
    assert {row["arch"] for row in rows} == set(configs.ARCHITECTURES)
    status, out, _ = call("kernels", "--arch", "sm_90")
    assert status == 0 and "reason" in out and "forward_step" in out


def test_without_triton_the_command_says_where_it_exists(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, out, err = call("kernels", "--offline", "--json")
    assert status == 1 and json.loads(out)["error"]["remedy"] and "Linux" in err


@pytest.mark.parametrize(
    "wrong",
    [("kernels", "--arch", "sm_91"), ("kernels", "--offline", "--arch", "interpreter"), ("kernels", "--kernel", "fwd")],
)  # fmt: skip
def test_an_unknown_name_is_a_wrong_call(wrong: tuple[str, ...]) -> None:
    status, _, err = call(*wrong)
    assert status == 2 and "not among" in " ".join(err.replace("│", " ").split())


def test_tuning_without_a_gpu_says_so_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = call("tune", "--json")
    told = json.loads(out)
    assert (
        status == 1 and told["ok"] is False and "GPU" in told["error"]["needed"] and told["error"]["remedy"]
    )
    assert "remedy" in err
    assert call("tune", "--head-dim", "96")[0] == 2


def test_the_short_form_says_how_much_it_compiles_and_compiles_that(monkeypatch, tmp_path: Path) -> None:
    """`ringlab tune --short` makes as many compilations as it announces, for three rows, and runs at most 13 for each."""
    compiled, raced = [], []

    class Gpu:
        def __init__(self, tokens: int, heads: int) -> None:
            pass

        def race(self, slot: Slot, configs: Sequence[Config], rounds: int) -> dict[Config, float]:
            raced.append((slot.kernel, slot.head_dim, slot.dtype, len(configs)))
            return dict.fromkeys(configs, 1.0)

    def compile_all(jobs: list[Job], processes: int = 2) -> list[Compiled]:
        compiled.append((len(jobs), processes))
        return scripted()(jobs)

    monkeypatch.setattr(bench_tune, "Gpu", Gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(offline, "compile_all", compile_all)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    table, result = tmp_path / "table.toml", tmp_path / "result.json"
    status, out, err = call("tune", "--short", "--json", "--table", str(table), "--output", str(result))
    assert status == 0 and len(json.loads(out)["rows"]) == 3
    assert json.loads(result.read_text()) == json.loads(out) and configs.read(table)
    *rows, whole_table = compiled
    assert {processes for _, processes in compiled} == {16}
    told = " ".join(err.split())
    assert f"{sum(count for count, _ in rows)} compilations for 3 rows, 16 at a time" in told
    assert f"then {whole_table[0]} compilations for the table" in told
    first = [race for race in raced if race[-1] > FINALISTS]
    assert {race[:3] for race in first} == {(kernel, 128, "16-bit") for kernel in configs.KERNELS}
    most = int(told.split("; then ")[1].split()[0])
    assert all(count in (12, 13) for *_, count in first) and sum(count for *_, count in first) <= most == 39
