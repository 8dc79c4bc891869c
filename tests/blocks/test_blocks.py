"""Choosing a block backend, its refusals, empty tiles, and traps of torch's own operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringlab import oracle
from ringlab.blocks import available, get_block, known
from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import Naive
from ringlab.blocks.native import Native
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.errors import BackendError
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


@pytest.mark.parametrize(("D", "dtype"), [(8, torch.float32), (300, torch.bfloat16), (8, torch.float64)])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
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


@each_block
@pytest.mark.parametrize(("n_rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_tiles(block: Block, n_rows: int, keys: int) -> None:
    """No keys is the identity of merge; no rows gives nothing, and gradients of zero."""
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
    """lse −inf in one row: its weights are 0, not NaN. Native is never given one: a token sees itself."""
    q, k, v, dout = tensors(Shape(1, 2, 1, 3, 5, 4), 0)
    out, lse = (torch.from_numpy(x) for x in oracle.attention(q, k, v, scale=1.0))
    lse[:, :, 1], out[:, :, 1] = -math.inf, 0.0
    rows = BackwardRows(dout, q, out, lse, (dout * out).sum(-1))
    dq, dk, dv = block.backward(rows, k, v, causal=False, scale=1.0)
    assert (dq[:, :, 1] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("tile", [1, 2, 5, 7, 64])
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


@pytest.mark.parametrize("keys", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_native_knows_a_row_without_a_finite_score(keys: int, score: float) -> None:
    """torch's CPU operator says out 0 and lse 0 there, as if one key of score 0 and value 0 had been seen."""
    q, k, v = torch.ones(1, 1, 2, 8), torch.ones(1, 1, keys, 8), torch.ones(1, 1, keys, 8)
    q[0, 0, 1, 0] = score
    partial = Native().forward(q, k, v, causal=False, scale=1.0)
    assert partial.lse[0, 0, 0].item() == pytest.approx(8 + math.log(keys), rel=1e-6)
    if math.isnan(score):
        assert partial.out[0, 0, 1].isnan().all()
    else:
        assert (partial.out[0, 0, 1] == 0).all() and partial.lse[0, 0, 1] == -math.inf


@each_block
@pytest.mark.parametrize("causal", [True, False])
def test_inputs_whose_head_dim_is_not_dense(block: Block, causal: bool) -> None:
    """A transposed tensor, as x.mT gives: torch's operators would read its last axis wrongly."""
    q, k, v, dout = tensors(Shape(1, 4, 2, 9, 9, 8), 0, torch.float32)
    results = []
    for change in (lambda x: x, lambda x: x.mT.contiguous().mT):
        a, b, c, d = map(change, (q, k, v, dout))
        partial = block.forward(a, b, c, causal=causal, scale=0.3)
        out = change(partial.out)
        delta = (d * out).sum(-1)
        rows = BackwardRows(d, a, out, partial.lse, delta)
        gradients = block.backward(rows, b, c, causal=causal, scale=0.3)
        results.append((partial.out, partial.lse, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@each_block
def test_strided_inputs(block: Block) -> None:
    """Shards cut out of (B, L, H, D) storage are not contiguous."""
    q, k, v, _ = tensors(Shape(1, 4, 2, 9, 9, 8), 0, torch.float32)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    one, other = (block.forward(*x, causal=True, scale=0.3) for x in ((q, k, v), strided))
    torch.testing.assert_close(one.out, other.out)
    torch.testing.assert_close(one.lse, other.lse)
