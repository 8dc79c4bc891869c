"""Compilation without a GPU gives correct figures, and recognises a kernel that exceeds a budget."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import replace

import pytest

from ringlab.blocks.triton import offline
from ringlab.blocks.triton.configs import COMPILED, Config
from ringlab.blocks.triton.offline import Compiled, Job, compile_all
from ringlab.errors import BackendError

pytestmark = [pytest.mark.thorough, pytest.mark.needs_triton]

TOYS = "tests.blocks.access_kernels"
FITS = Config(block_m=128, block_n=64, num_warps=4, num_stages=2)


def toy(
    arch: str = "sm_90", head_dim: int = 64, dtype: str = "bfloat16", config: Config = FITS, **more
) -> Job:
    return Job(
        **({"kernel": "forward_step", "sources": TOYS} | more),
        arch=arch,
        head_dim=head_dim,
        dtype=dtype,
        config=config,
    )


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    """Return toy kernels that fit, and mutants that each break one budget or crash the compiler."""
    jobs = {arch: toy(arch) for arch in COMPILED}
    jobs["too large"] = toy(head_dim=256, config=Config(128, 128, 8, 4))
    jobs["spills"] = toy(head_dim=128, config=Config(128, 128, 4, 1))
    jobs["wrong"] = toy(kernel="wrong")
    jobs["crashes"] = toy(kernel="crashes")
    jobs["after the crash"] = toy(head_dim=32)
    jobs["no matrix instructions"] = toy(dtype="float32", config=Config(16, 16, 4, 1))
    jobs["tf32x3"] = toy("sm_80", 32, "float32", Config(32, 32, 4, 1, "tf32x3"))
    # There is one process, so the job after the crash needs a new one.
    return dict(zip(jobs, compile_all(list(jobs.values()), processes=1), strict=True))


@pytest.mark.parametrize("arch", COMPILED)
def test_a_kernel_that_fits_keeps_every_budget(compiled: dict[str, Compiled], arch: str) -> None:
    found = compiled[arch]
    assert found.broken() == ()
    assert found.tensor_core == {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}[arch]
    assert found.tensor_core_count > 0 and found.spill_bytes == 0
    assert 0 < found.registers <= 255
    # K and V, two stages, 64 keys of 64 bf16 numbers; wgmma and tcgen05 also read Q from shared memory.
    assert found.shared_bytes >= 2 * 2 * 64 * 64 * 2
    assert (found.tensor_memory_columns > 0) == (arch == "sm_100")


def test_too_much_shared_memory_is_reported_though_the_compiler_accepts_it(
    compiled: dict[str, Compiled],
) -> None:
    found = compiled["too large"]
    assert found.error == "" and found.shared_bytes > 227 * 1024
    assert any("shared memory, sm_90 has 232,448" in sentence for sentence in found.broken())


def test_a_spill_is_reported(compiled: dict[str, Compiled]) -> None:
    found = compiled["spills"]
    assert found.spill_bytes > 0 and found.registers == 255
    assert [sentence for sentence in found.broken() if "spilled" in sentence]


def test_a_kernel_that_does_not_compile_is_a_result_with_the_reason(compiled: dict[str, Compiled]) -> None:
    assert "no_such_function" in compiled["wrong"].broken()[0]


def test_a_compiler_that_dies_is_a_result_and_the_next_job_gets_a_new_one(
    compiled: dict[str, Compiled],
) -> None:
    assert compiled["crashes"].broken() == ("does not compile: the compiler's process ended with status 7",)
    assert compiled["after the crash"].broken() == ()


def test_matrix_instructions_are_asked_of_16_bits_and_of_tf32x3_only(compiled: dict[str, Compiled]) -> None:
    scalar = compiled["no matrix instructions"]
    assert scalar.tensor_core == "" and scalar.tensor_core_count == 0 and scalar.broken() == ()
    assert compiled["tf32x3"].tensor_core == "mma.sync" and compiled["tf32x3"].broken() == ()
    narrow = replace(scalar, job=replace(scalar.job, dtype="float16"))
    assert narrow.broken() == ("matrix instructions: none, should be wgmma",)
    tf32x3 = replace(scalar, job=replace(scalar.job, config=replace(FITS, precision="tf32x3")))
    assert len(tf32x3.broken()) == 1


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"kernel": "backward_dq"}, False),
        ({"head_dim": 128}, False),
        ({"kernel": "backward_dkv"}, True),
        ({"head_dim": 256}, True),
        ({"dtype": "float32"}, True),
    ],
)
def test_where_spills_are_allowed(change: dict[str, object], kept: bool) -> None:
    job = replace(toy(), **change)
    found = Compiled(
        job, registers=255, spill_bytes=4, shared_bytes=1, tensor_core="wgmma", tensor_core_count=1
    )
    assert (found.broken() == ()) is kept


def test_the_limits_of_the_architectures() -> None:
    assert offline.SHARED_LIMIT == {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
    at_limit = Compiled(toy(), 1, 0, 232_448, "wgmma", 1)
    assert at_limit.broken() == () and replace(at_limit, shared_bytes=232_449).broken()
    sm_100 = Compiled(toy("sm_100"), 1, 0, 1, "tcgen05", 1, tensor_memory_columns=512)
    assert sm_100.broken() == () and replace(sm_100, tensor_memory_columns=1024).broken()


def test_without_triton_the_error_says_where_it_exists(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(BackendError, match="Darwin") as raised:
        compile_all([toy()])
    assert "Linux" in raised.value.remedy
