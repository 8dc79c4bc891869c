"""Every shipped configuration of every kernel, compiled for three architectures, is within its budgets."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringlab.blocks.protocol import BackwardRows
from ringlab.blocks.triton import TritonBlock, configs, steps
from ringlab.blocks.triton.configs import COMPILED, KERNELS, Config, choose, table
from ringlab.blocks.triton.offline import (
    BETWEEN,
    SCORES,
    Compiled,
    Job,
    clean_environment,
    compile_all,
    jobs_of,
)
from ringlab.scores import PLAIN_RULES, ScoreRules
from tests.blocks import kernel_variants
from tests.blocks.compiled import FILE, as_compiled, compile_now, known, made_from
from tests.blocks.kernel_variants import VARIANTS

pytestmark = [pytest.mark.thorough, pytest.mark.needs_triton]

CHECKOUT = Path(__file__).resolve().parents[2]
CONSUMER_SHARED_LIMIT = 99 * 1024  # limit of capabilities 8.6, 8.9 and 12.0, which use the rows of sm_80


@pytest.fixture(scope="module")
def shipped() -> dict[Job, Compiled]:
    """Return all compiled kernels: from the file if its sources and Triton are these, else compiled now."""
    return as_compiled(known() or compile_now())


def test_a_sample_compiles_to_what_the_file_says(shipped: dict[Job, Compiled]) -> None:
    """One kernel for each architecture, compiled now, gives the numbers that the file records."""
    sample = [
        next(job for job in shipped if (job.arch, job.kernel, job.dtype) == (arch, kernel, "bfloat16"))
        for arch, kernel in zip(COMPILED, KERNELS, strict=True)
    ]
    for job, found in zip(sample, compile_all(sample), strict=True):
        assert found == shipped[job]


def test_latent_attention_keeps_to_the_budgets() -> None:
    """Kernels with 192 dims of q and k and 128 of v, as in DeepSeek-V3, are within the budgets."""
    jobs = [
        Job(kernel, arch, 192, "bfloat16", choose(kernel, arch, 192, "bfloat16"), value_dim=128)
        for arch, kernel in zip(COMPILED, KERNELS, strict=True)
    ]
    for found in compile_all(jobs):
        assert found.broken() == () and found.spill_bytes == 0, found


def test_the_file_is_of_these_kernels() -> None:
    """The file was made from the present sources; `python -m tests.blocks.compiled` makes it again."""
    made = json.loads(FILE.read_text(encoding="utf-8"))["made_from"]
    assert made["sources"] == made_from()["sources"]


def test_every_row_of_every_table_was_compiled(shipped: dict[Job, Compiled]) -> None:
    assert {(job.arch, job.kernel) for job in shipped} == {(arch, k) for arch in COMPILED for k in KERNELS}
    assert {job for arch in COMPILED for job in jobs_of(arch, table(arch))} <= shipped.keys()
    assert all(found.registers > 0 for found in shipped.values())


@pytest.mark.parametrize("arch", COMPILED)
def test_the_budgets_hold(shipped: dict[Job, Compiled], arch: str) -> None:
    broken = {f"{job.kernel} {job.step} D={job.head_dim} {job.dtype} {job.config}": found.broken()
              for job, found in shipped.items() if job.arch == arch and found.broken()}  # fmt: skip
    assert broken == {}


def test_softcaps_and_dropout_are_compiled_everywhere(shipped: dict[Job, Compiled]) -> None:
    """Every kernel is compiled for every architecture with soft caps and dropout, and none spills registers."""
    scored = [job for job in shipped if job.scores]
    assert {(job.arch, job.kernel, job.head_dim, job.scores) for job in scored} == set(
        itertools.product(COMPILED, KERNELS, (64, 128), ("softcap", "dropout", "softcap dropout"))
    )
    assert not any(shipped[job].spill_bytes for job in scored)


def test_windows_are_compiled_everywhere(shipped: dict[Job, Compiled]) -> None:
    """Every kernel is compiled for every architecture with windows, and none spills registers."""
    windows = [job for job in shipped if job.window]
    assert {(job.arch, job.kernel, job.head_dim) for job in windows} == set(
        itertools.product(COMPILED, KERNELS, (64, 128))
    )
    assert not any(shipped[job].spill_bytes for job in windows)


def test_head_dims_between_the_rows_load_16_bytes_at_once(shipped: dict[Job, Compiled]) -> None:
    """All kernels are compiled for multiples of 8 that have no row, without loads of 2 bytes and without spills."""
    between = {job: found for job, found in shipped.items() if job.head_dim in BETWEEN}
    assert {(job.arch, job.kernel, job.head_dim) for job in between} == set(
        itertools.product(COMPILED, KERNELS, BETWEEN)
    )
    assert not any(found.narrow_loads for job, found in shipped.items() if job.dtype == "bfloat16")
    assert not any(found.spill_bytes for found in between.values())


def test_strides_without_their_factor_break_the_budgets() -> None:
    """If the compiler does not know the factor of the strides, it loads 2 bytes at a time, and spills."""
    config = choose("forward_step", "sm_90", 72, "bfloat16")
    job = Job("forward_step", "sm_90", 72, "bfloat16", config, sources="tests.blocks.undeclared_strides")
    (found,) = compile_all([job])
    assert [sentence.split(maxsplit=1)[1] for sentence in found.broken()] == [
        "bytes spilled by a thread, none are allowed here",
        "loads of 2 bytes, where 16 bytes can be loaded at once",
    ]


@pytest.mark.parametrize("head_dim", [20, 33])
def test_other_head_dims_compile(head_dim: int) -> None:
    """A head dim that 8 does not divide has narrower loads, which divide a row: 8 bytes for 20, and 2 bytes for 33."""
    config = choose("forward_step", "sm_80", head_dim, "bfloat16")
    (found,) = compile_all([Job("forward_step", "sm_80", head_dim, "bfloat16", config)])
    assert not found.error and (found.narrow_loads == 0) == (head_dim == 20)


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
    if recorded != here:  # another Triton may allocate registers differently
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
    """The locked Triton is the one that made the numbers, so the test above runs with the locked versions."""
    locked = f"triton=={configs.compiler_of(configs.TABLES / f'{arch}.toml')}"
    assert locked in (CHECKOUT / "requirements.lock").read_text(encoding="utf-8").splitlines()


def test_a_row_that_spills_breaks_the_budget_of_the_real_kernels() -> None:
    spills = Config(block_m=128, block_n=128, num_warps=8, num_stages=2)
    large = Config(block_m=128, block_n=128, num_warps=8, num_stages=4)
    jobs = [Job("forward_step", "sm_80", 128, "bfloat16", config) for config in (spills, large)]
    spilling, too_large = compile_all(jobs)
    assert any("spilled by a thread" in sentence for sentence in spilling.broken())
    assert any("shared memory, sm_80 has 166,912" in sentence for sentence in too_large.broken())


Launch = tuple[str, tuple[Any, ...], dict[str, Any]]


def launches(scores: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the arguments that the launcher passes to the kernels, without running the kernels."""
    noted: list[Launch] = []

    def launch(self, kernel, config, programs, heads, arguments, **constants) -> None:
        noted.append((kernel, arguments, constants))

    monkeypatch.setattr(steps.Launcher, "launch", launch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, dout = (torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    k, v = (torch.zeros(2, 2, 32, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    state = torch.zeros(2, 4, 32, device=device)
    of = ScoreRules(
        softcap=30.0 if "softcap" in scores else None,
        dropout=0.1 if "dropout" in scores else 0.0,
        seed=2**64 - 1,
    )
    rules = of.of_tile(np.arange(32), np.arange(32)) if scores else PLAIN_RULES
    block = TritonBlock()
    block.forward(q, k, v, causal=True, scale=0.125, rules=rules)
    rows = BackwardRows(dout, q, q, state, state)
    block.backward(rows, k, v, causal=True, scale=0.125, rules=rules)
    return noted


@pytest.mark.parametrize("scores", [(), ("softcap",), ("dropout",), ("softcap", "dropout")], ids=" and ".join)
def test_what_is_compiled_is_what_is_launched(
    scores: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline compilation gives each parameter the type of the launch, since types select the kernel."""
    from ringlab.blocks.triton.compiling import source

    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    launched = launches(frozenset(scores), monkeypatch)
    assert [kernel for kernel, _, _ in launched] == list(KERNELS)
    for kernel, arguments, constants in launched:
        compiled = source(Job(kernel, "sm_90", 64, "bfloat16", Config(64, 64, 4, 2), scores=" ".join(scores)))
        for name in SCORES:
            assert constants[name.upper()] is compiled.constants[name.upper()] is (name in scores)
        assert constants["WINDOW"] is compiled.constants["WINDOW"] is False
        passed = [
            names[x.dtype] if isinstance(x, torch.Tensor) else {int: "i32", float: "fp32"}[type(x)]
            for x in arguments
        ]
        assert list(compiled.types.values()) == passed
        assert set(compiled.constants) == {*constants, "BLOCK_M", "BLOCK_N", "PRECISION"}
        for name in ("HEAD_DIM", "VALUE_DIM", "BLOCK_D", "BLOCK_V"):
            assert compiled.constants[name] == constants[name]
        by_name = dict(zip(compiled.types, arguments, strict=True))
        for name in compiled.aligned:
            value = by_name[name]
            assert (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0, name


def test_the_variants_are_of_these_kernels() -> None:
    """The file of variants was made from these texts; `python -m tests.blocks.kernel_variants` makes it again."""
    file = json.loads(kernel_variants.RESULTS.read_text(encoding="utf-8"))
    assert file["made_from"]["sources"] == {name: kernel_variants.digest(name) for name in VARIANTS}
    assert [tuple(each[name] for name in ("variant", "arch", "kernel", "head_dim", "config")) for each in file["rows"]] == [
        (variant, job.arch, job.kernel, job.head_dim, str(job.config))
        for variant in VARIANTS
        for job in kernel_variants.jobs(variant)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "kernel"), [("Gluon", "forward_step"), ("tensor descriptors", "backward_dkv")]
)
def test_a_variant_compiles_to_what_the_file_says(variant: str, kernel: str, tmp_path: Path) -> None:
    """One kernel of a variant, compiled now in a new process, has the figures of the file."""
    file = json.loads(kernel_variants.RESULTS.read_text(encoding="utf-8"))
    if file["made_from"]["triton"] != importlib.metadata.version("triton"):
        pytest.skip(f"the figures are of Triton {file['made_from']['triton']}")
    job = next(job for job in kernel_variants.jobs(variant) if job.kernel == kernel)
    code = f"from tests.blocks.kernel_variants import *; print(json.dumps(row({variant!r}, jobs({variant!r})[{kernel_variants.jobs(variant).index(job)}])))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        env=clean_environment(str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) in file["rows"]
