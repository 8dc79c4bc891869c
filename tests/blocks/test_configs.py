"""The tables of launch configurations: complete, explained, and the same after writing and reading."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from ringlab.blocks.triton import configs
from ringlab.blocks.triton.candidates import HEAD_DIMS, KINDS, candidates, least_shared_bytes, slots
from ringlab.blocks.triton.configs import (
    ARCHITECTURES,
    COMPILED,
    KERNELS,
    Config,
    Row,
    architecture,
    choose,
    choose_row,
    table,
)
from ringlab.blocks.triton.offline import SHARED_LIMIT
from ringlab.errors import BackendError, DtypeError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(("arch", "kernel"), list(product(ARCHITECTURES, KERNELS)))
def test_every_head_dim_and_dtype_has_a_row(arch: str, kernel: str) -> None:
    for head_dim, dtype, precision in product(range(1, 257), DTYPES, ("ieee", "tf32x3")):
        row = choose_row(kernel, arch, head_dim, dtype, precision)
        assert row.head_dim >= head_dim and row.kernel == kernel
        assert row.config.precision == (precision if dtype == torch.float32 else "ieee")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_row_can_be_launched_and_says_why(arch: str) -> None:
    for row in table(arch):
        config = row.config
        for size in (config.block_m, config.block_n, config.num_warps):
            assert size & (size - 1) == 0 and size > 0
        assert min(config.block_m, config.block_n) >= 16, "tl.dot takes no less"
        assert config.num_warps in (4, 8) and 1 <= config.num_stages <= 4
        assert len(row.reason) > 20


@pytest.mark.parametrize("arch", COMPILED)
def test_a_table_has_the_rows_that_tuning_fills_and_no_other(arch: str) -> None:
    keys = [(r.kernel, r.head_dim, r.dtype, r.config.precision) for r in table(arch)]
    assert sorted(keys) == sorted((s.kernel, s.head_dim, s.dtype, s.precision) for s in slots())
    assert len(set(keys)) == len(keys) == len(KERNELS) * len(KINDS) * len(HEAD_DIMS)


def test_the_smallest_row_that_is_large_enough_is_taken() -> None:
    dims = {
        d: choose_row("forward_step", "sm_90", d, torch.bfloat16).head_dim for d in (1, 40, 64, 65, 96, 192)
    }
    assert dims == {1: 64, 40: 64, 64: 64, 65: 128, 96: 128, 192: 256}


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(BackendError, match=r"(?s)head dim from 1 to 256.*257.*block='blockwise'"):
        choose("forward_step", "sm_90", 257, torch.bfloat16)
    with pytest.raises(BackendError, match="sm_90, sm_100, interpreter"):
        choose("forward_step", "sm_70", 64, torch.bfloat16)
    with pytest.raises(BackendError, match="backward_dq"):
        choose("forward", "sm_90", 64, torch.bfloat16)
    with pytest.raises(BackendError, match="tf32x3"):
        choose("forward_step", "sm_90", 64, torch.float32, "tf32")
    with pytest.raises(DtypeError, match=r"(?s)float64.*block='blockwise'"):
        choose("forward_step", "sm_90", 64, torch.float64)
    with pytest.raises(DtypeError, match=r"(?s)float8_e4m3fn.*convert"):
        choose("forward_step", "sm_90", 64, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 0), "sm_80")],
)  # fmt: skip
def test_which_table_a_gpu_uses(capability: tuple[int, int], arch: str) -> None:
    assert architecture(capability) == arch


def test_a_gpu_without_bfloat16_is_refused() -> None:
    with pytest.raises(BackendError, match=r"7\.5"):
        architecture((7, 5))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_written_table_reads_back_the_same(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(configs.render(arch, "3.7.1", table(arch)), encoding="utf-8")
    assert configs.read(path) == table(arch)
    assert configs.compiler_of(path) == "3.7.1"


def test_a_shipped_table_is_as_it_would_be_written() -> None:
    for arch in COMPILED:
        path = configs.TABLES / f"{arch}.toml"
        assert path.read_text(encoding="utf-8") == configs.render(
            arch, configs.compiler_of(path), configs.read(path)
        )


def test_any_reason_survives_writing(tmp_path: Path) -> None:
    row = Row(
        "backward_dq", 64, "16-bit", Config(64, 64, 4, 2), 'a "quote", a \\ and 128×64 → 3 µs', (255, 8, 99)
    )
    others = [Row(kernel, 64, "16-bit", Config(16, 16, 4, 1), "-") for kernel in KERNELS]
    (tmp_path / "t.toml").write_text(configs.render("sm_90", "3", [row, *others]), encoding="utf-8")
    assert row in configs.read(tmp_path / "t.toml")


def test_candidates_are_many_and_fit_by_the_least_that_they_need() -> None:
    for slot, arch in product(slots(), COMPILED):
        listed = candidates(slot, arch)
        assert len(listed) == len(set(listed)) >= 20, (slot, arch)
        assert all(least_shared_bytes(slot, config) <= SHARED_LIMIT[arch] for config in listed)
    wide = next(
        s for s in slots() if s.head_dim == 256 and s.dtype == "16-bit" and s.kernel == "forward_step"
    )
    too_large = Config(64, 128, 8, 3)
    assert (
        too_large in candidates(wide, "sm_90") or least_shared_bytes(wide, too_large) > SHARED_LIMIT["sm_90"]
    )
    assert too_large not in candidates(wide, "sm_80")


def test_every_shipped_row_is_among_its_candidates() -> None:
    for arch, slot in product(COMPILED, slots()):
        row = choose_row(slot.kernel, arch, slot.head_dim, slot.torch_dtype, slot.precision)
        assert row.config in candidates(slot, arch), row
