"""Block backends are chosen and refused rightly, and compute empty tiles and rows that see no key.

The tables of launch configurations are complete and explained, and survive being written and read.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringlab import oracle
from ringlab.blocks import available, get_block, known
from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import Naive
from ringlab.blocks.native import Native
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.blocks.triton import TritonBlock, configs
from ringlab.blocks.triton.candidates import candidates, least_shared_bytes, slots
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
from ringlab.scores import ScoreRules
from tests.laws.draw import Shape, tensors

BLOCKS = tuple(get_block(name, torch.zeros(1, 1, 1, 1)) for name in available())
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)


def test_blocks_by_name() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert set(available()) >= {"naive", "blockwise", "native"}
    for name in available():
        assert get_block(name, q).name == name
    assert get_block("auto", q).name == "native"
    mine = Blockwise(tile=3)
    assert get_block(mine, q) is mine


def test_unknown_and_unfit_blocks() -> None:
    with pytest.raises(BackendError, match="naive, blockwise, native"):
        get_block("fast", torch.zeros(1, 1, 1, 8))
    with pytest.raises(BackendError, match="cpu and cuda, not on meta"):
        get_block("native", torch.zeros(1, 1, 1, 8, device="meta"))


@pytest.mark.parametrize("name", [*known(), "auto"])
def test_the_remedy_for_a_dtype_that_no_block_computes_is_no_block(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        get_block(name, torch.zeros(1, 1, 1, 8).to(torch.float8_e4m3fn))
    assert caught.value.remedy == (
        "no block computes torch.float8_e4m3fn: convert q, k and v with .to(torch.bfloat16)"
    )


@pytest.mark.parametrize(("D", "dtype"), [(300, torch.bfloat16), (8, torch.float64)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_remedy_that_names_a_block_names_one_that_computes_it(
    D: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, D, device=device, dtype=dtype)
        for name in ("native", "triton"):
            try:
                get_block(name, q)
            except BackendError as error:
                assert error.remedy.startswith("use block='")
                assert get_block(error.remedy.split("'")[1], q).supports(q) is None


@pytest.mark.parametrize(
    ("capability", "chosen"), [((7, 0), "blockwise"), ((7, 5), "blockwise"), ((8, 0), "native")]
)
def test_auto_on_a_gpu_takes_native_where_torchs_operators_run(
    capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native is chosen only from capability 8.0 on: V100 and T4 are too old for torch's flash attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.float16)
    assert get_block("auto", q).name == chosen
    if chosen != "native":
        major, minor = capability
        with pytest.raises(BackendError, match=rf"capability 8\.0 or more, got {major}\.{minor}") as caught:
            get_block("native", q)
        assert "block='blockwise'" in caught.value.remedy


@each_block
@pytest.mark.parametrize(("n_rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_tiles(block: Block, n_rows: int, keys: int) -> None:
    """With no keys the result is the identity of merge; with no rows it is empty. Gradients are zero."""
    q, k, v, dout = tensors(Shape(1, 4, 2, n_rows, keys, 8), 0, torch.float32)
    partial = block.forward(q, k, v, causal=False, scale=1.0)
    assert partial.out.shape == q.shape and (partial.out == 0).all()
    assert (partial.lse == -math.inf).all()
    delta = torch.zeros(q.shape[:-1])
    rows = BackwardRows(dout, q, partial.out, partial.lse, delta)
    gradients = block.backward(rows, k, v, causal=False, scale=1.0)
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("block", [Naive(), Blockwise(), Blockwise(tile=2)], ids=lambda block: block.name)
def test_a_row_that_saw_nothing_gives_no_gradient(block: Block) -> None:
    """A row with lse −inf has weights of 0, not NaN. Native gets no such row: a token sees itself."""
    q, k, v, dout = tensors(Shape(1, 2, 1, 3, 5, 4), 0)
    out, lse = (torch.from_numpy(x) for x in oracle.attention(q, k, v, scale=1.0))
    lse[:, :, 1], out[:, :, 1] = -math.inf, 0.0
    rows = BackwardRows(dout, q, out, lse, (dout * out).sum(-1))
    dq, dk, dv = block.backward(rows, k, v, causal=False, scale=1.0)
    assert (dq[:, :, 1] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("tile", [1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_the_tile_size_of_blockwise_changes_nothing(tile: int, causal: bool) -> None:
    q, k, v, dout = tensors(Shape(2, 4, 2, 13, 11, 8), 0)
    results = []
    for block in (Blockwise(tile), Naive()):
        partial = block.forward(q, k, v, causal=causal, scale=0.3)
        delta = (dout * partial.out).sum(-1)
        rows = BackwardRows(dout, q, partial.out, partial.lse, delta)
        gradients = block.backward(rows, k, v, causal=causal, scale=0.3)
        results.append((partial.out, partial.lse, *gradients))
    for tiled, whole in zip(*results, strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("keys", [1, 7, 8])
@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_native_knows_a_row_without_a_finite_score(keys: int, score: float) -> None:
    """For a row without a finite score native gives lse −inf, where torch's CPU operator gives lse 0."""
    q, k, v = torch.ones(1, 1, 2, 8), torch.ones(1, 1, keys, 8), torch.ones(1, 1, keys, 8)
    q[0, 0, 1, 0] = score
    partial = Native().forward(q, k, v, causal=False, scale=1.0)
    assert partial.lse[0, 0, 0].item() == pytest.approx(8 + math.log(keys), rel=1e-6)
    if math.isnan(score):
        assert partial.out[0, 0, 1].isnan().all()
    else:
        assert (partial.out[0, 0, 1] == 0).all() and partial.lse[0, 0, 1] == -math.inf


@each_block
def test_inputs_whose_head_dim_is_not_dense(block: Block) -> None:
    """Transposed tensors such as x.mT give right results, though torch would misread the last axis."""
    q, k, v, dout = tensors(Shape(1, 4, 2, 9, 9, 8), 0, torch.float32)
    results = []
    for change in (lambda x: x, lambda x: x.mT.contiguous().mT):
        a, b, c, d = map(change, (q, k, v, dout))
        partial = block.forward(a, b, c, causal=True, scale=0.3)
        out = change(partial.out)
        delta = (d * out).sum(-1)
        rows = BackwardRows(d, a, out, partial.lse, delta)
        gradients = block.backward(rows, b, c, causal=True, scale=0.3)
        results.append((partial.out, partial.lse, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_head_dim_and_dtype_has_a_row(arch: str) -> None:
    for kernel, head_dim, dtype, precision in product(KERNELS, range(1, 257, 5), DTYPES, ("ieee", "tf32x3")):
        row = choose_row(kernel, arch, head_dim, dtype, precision)
        assert row.head_dim >= head_dim and row.kernel == kernel
        assert row.config.precision == (precision if dtype == torch.float32 else "ieee")


def test_kernels_are_launched_with_the_row_of_their_score_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, frozenset[str]]] = []

    def watched(kernel: str, arch: str, head_dim: int, dtype: Any, precision: str, scores: Any) -> Config:
        asked.append((kernel, frozenset(scores)))
        return choose(kernel, arch, head_dim, dtype, precision, scores)

    monkeypatch.setattr("ringlab.blocks.triton.block.choose", watched)
    q, k, v, dout = tensors(Shape(1, 2, 1, 16, 16, 16), 0, torch.float32)
    rules = ScoreRules(softcap=3.0).of_tile(np.arange(16), np.arange(16))
    block = TritonBlock()
    found = block.forward(q, k, v, causal=True, scale=0.3, rules=rules)
    rows = BackwardRows(dout, q, found.out, found.lse, (dout * found.out).sum(-1))
    block.backward(rows, k, v, causal=True, scale=0.3, rules=rules)
    assert set(asked) == {(kernel, frozenset({"softcap"})) for kernel in KERNELS}


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


@pytest.mark.parametrize("arch", COMPILED)
def test_a_written_table_reads_back_the_same(arch: str, tmp_path: Path) -> None:
    path, row = (
        tmp_path / "table.toml",
        Row("backward_dq", 64, "16-bit", Config(64, 64, 4, 2), 'a "quote", a \\ and 3 µs', (255, 8, 99)),
    )
    rows = [row, *(each for each in table(arch) if each.serves != row.serves)]
    path.write_text(configs.render(arch, "3.7.1", rows), encoding="utf-8")
    assert (
        sorted(map(str, configs.read(path))) == sorted(map(str, rows))
        and configs.compiler_of(path) == "3.7.1"
    )


def test_candidates_are_many_and_fit_by_the_least_that_they_need() -> None:
    for slot, arch in product(slots(), COMPILED):
        listed = candidates(slot, arch)
        assert len(listed) == len(set(listed)) >= 20, (slot, arch)
        assert all(least_shared_bytes(slot, config) <= SHARED_LIMIT[arch] for config in listed)
