"""Every shipped configuration of every kernel, compiled for three architectures without a GPU: the budgets hold."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringlab.blocks.triton import TritonBlock, configs, steps
from ringlab.blocks.triton.configs import COMPILED, KERNELS, Config, table
from ringlab.blocks.triton.offline import Compiled, Job, compile_all, jobs_of, shipped_jobs

pytestmark = pytest.mark.needs_triton

CHECKOUT = Path(__file__).resolve().parents[2]
CONSUMER_SHARED_LIMIT = 99 * 1024  # of 8.6, 8.9 and 12.0, which use sm_80's rows


@pytest.fixture(scope="module")
def shipped() -> dict[Job, Compiled]:
    """What the command says: it is the same code, in a process that CI could run by itself."""
    code = "import sys; from ringlab.cli import main; sys.argv = ['ringlab', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", code, "kernels", "--offline", "--json"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=os.environ)
    assert done.returncode in (0, 1), done.stderr
    jobs, found = shipped_jobs(), {}
    for job, row in zip(jobs, json.loads(done.stdout), strict=True):
        assert (row["kernel"], row["arch"], row["head_dim"]) == (job.kernel, job.arch, job.head_dim)
        numbers = {name: row[name] for name in ("registers", "spill_bytes", "shared_bytes", "tensor_core")}
        more = {name: row[name] for name in ("tensor_core_count", "tensor_memory_columns")}
        error = row["broken"][0] if row["broken"] and not row["registers"] else ""
        found[job] = Compiled(job, **numbers, **more, error=error)
    return found


def test_every_row_of_every_table_was_compiled(shipped: dict[Job, Compiled]) -> None:
    assert {(job.arch, job.kernel) for job in shipped} == {(arch, k) for arch in COMPILED for k in KERNELS}
    assert {job for arch in COMPILED for job in jobs_of(arch, table(arch))} <= shipped.keys()
    assert all(found.registers > 0 for found in shipped.values())


@pytest.mark.parametrize("arch", COMPILED)
def test_the_budgets_hold(shipped: dict[Job, Compiled], arch: str) -> None:
    broken = {f"{job.kernel} {job.step} D={job.head_dim} {job.dtype} {job.config}": found.broken()
              for job, found in shipped.items() if job.arch == arch and found.broken()}  # fmt: skip
    assert broken == {}


def test_no_spills_in_forward_and_dq_at_64_and_128(shipped: dict[Job, Compiled]) -> None:
    """Said once more without the checker that the command uses."""
    asked = [found for job, found in shipped.items() if job.kernel in ("forward_step", "backward_dq")
             and job.head_dim in (64, 128) and job.dtype == "bfloat16"]  # fmt: skip
    assert len(asked) == 48, "2 kernels, 2 head dims, 3 architectures, 4 kinds of step"
    assert all(found.spill_bytes == 0 for found in asked)


def test_sm_90_uses_wgmma_and_all_use_tensor_cores_for_16_bits(shipped: dict[Job, Compiled]) -> None:
    for job, found in shipped.items():
        if job.dtype == "bfloat16":
            assert found.tensor_core_count > 0
            assert found.tensor_core == {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}[job.arch]
        elif job.config.precision == "tf32x3":
            assert found.tensor_core_count > 0


def test_consumer_gpus_can_run_the_rows_of_sm_80(shipped: dict[Job, Compiled]) -> None:
    rows = [found.shared_bytes for job, found in shipped.items() if job.arch == "sm_80"]
    assert max(rows) <= CONSUMER_SHARED_LIMIT


@pytest.mark.parametrize("arch", COMPILED)
def test_the_numbers_beside_the_rows_are_those_of_the_compiler(
    shipped: dict[Job, Compiled], arch: str
) -> None:
    recorded, here = (
        configs.compiler_of(configs.TABLES / f"{arch}.toml"),
        importlib.metadata.version("triton"),
    )
    if recorded != here:  # it allocates otherwise; the budgets above are what counts there
        pytest.skip(
            f"the numbers are those of Triton {recorded}, here is {here}: pip install triton=={recorded}"
        )
    stale = []
    for row, job in zip(table(arch), jobs_of(arch, table(arch)), strict=True):
        found = shipped[job]
        if row.compiled != (found.registers, found.spill_bytes, found.shared_bytes):
            stale.append(f"{job.kernel} D={job.head_dim} {job.config}: {row.compiled} in the table")
    assert stale == [], "kernels have changed: ringlab kernels --offline --record"


@pytest.mark.parametrize("arch", COMPILED)
def test_the_numbers_are_those_of_the_locked_version(arch: str) -> None:
    """So that the test above is not skipped where the locked versions are installed."""
    locked = f"triton=={configs.compiler_of(configs.TABLES / f'{arch}.toml')};"
    assert locked in (CHECKOUT / "requirements.lock").read_text(encoding="utf-8")


def test_a_row_that_spills_breaks_the_budget_of_the_real_kernels() -> None:
    spills = Config(block_m=128, block_n=128, num_warps=8, num_stages=2)
    large = Config(block_m=128, block_n=128, num_warps=8, num_stages=4)
    jobs = [Job("forward_step", "sm_80", 128, "bfloat16", config) for config in (spills, large)]
    spilling, too_large = compile_all(jobs)
    assert any("spilled by a thread" in sentence for sentence in spilling.broken())
    assert any("shared memory, sm_80 has 166,912" in sentence for sentence in too_large.broken())


Launch = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """What the launcher passes to the kernels, forward and backward, noted down instead of run."""
    noted: list[Launch] = []

    def launch(self, kernel, programs, heads, arguments, **constants) -> None:
        noted.append((kernel, arguments, constants))

    monkeypatch.setattr(steps.Launcher, "launch", launch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, dout = (torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    k, v = (torch.zeros(2, 2, 32, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    state = torch.zeros(2, 4, 32, device=device)
    block = TritonBlock()
    block.forward(q, k, v, causal=True, scale=0.125)
    block.backward(dout, q, k, v, q, state, state, causal=True, scale=0.125)
    return noted


def test_what_is_compiled_is_what_is_launched(launches: list[Launch]) -> None:
    """A parameter that offline compilation takes for another type would be compiled to another kernel."""
    from ringlab.blocks.triton.signatures import source

    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    assert [kernel for kernel, _, _ in launches] == list(KERNELS)
    for kernel, arguments, constants in launches:
        compiled = source(Job(kernel, "sm_90", 64, "bfloat16", Config(64, 64, 4, 2)))
        passed = [
            names[x.dtype] if isinstance(x, torch.Tensor) else {int: "i32", float: "fp32"}[type(x)]
            for x in arguments
        ]
        assert list(compiled.types.values()) == passed
        assert set(compiled.constants) == {*constants, "BLOCK_M", "BLOCK_N", "PRECISION"}
        for name in ("HEAD_DIM", "BLOCK_D"):
            assert compiled.constants[name] == constants[name]
        by_name = dict(zip(compiled.types, arguments, strict=True))
        for name in compiled.aligned:
            value = by_name[name]
            assert (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0, name
