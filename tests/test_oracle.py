"""The oracle gives known numbers for inputs of every kind, refuses wrong ones, and needs little memory."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ringlab import oracle
from ringlab.errors import DtypeError, ShapeError


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape)


def test_the_softmax_of_a_known_row() -> None:
    """The scores 0.707, 0, 0.707, 0 have the softmax weights 0.335, 0.165, 0.335, 0.165."""
    scores = np.array([0.707, 0.0, 0.707, 0.0])
    out, lse = oracle.attention(
        np.ones((1, 1, 1, 4)), np.diag(scores)[None, None], np.eye(4)[None, None], scale=1.0
    )
    assert np.round(out.ravel(), 3).tolist() == [0.335, 0.165, 0.335, 0.165]
    assert lse.item() == pytest.approx(math.log(np.exp(scores).sum()), rel=1e-15)


def test_scale_defaults_to_one_over_root_d() -> None:
    q, k, v = draw(1, 2, 3, 9), draw(1, 2, 4, 9), draw(1, 2, 4, 9)
    for one, other in zip(oracle.attention(q, k, v), oracle.attention(q, k, v, scale=1 / 3), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_torch_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    tensors = [torch.from_numpy(draw(1, 2, 3, 4)).to(dtype).requires_grad_() for _ in range(4)]
    arrays = [t.detach().double().numpy() for t in tensors]
    results = (*oracle.attention(*tensors[:3], causal=True), *oracle.gradients(*tensors, causal=True))
    expected = (*oracle.attention(*arrays[:3], causal=True), *oracle.gradients(*arrays, causal=True))
    for result, truth in zip(results, expected, strict=True):
        assert result.dtype == np.float64
        assert np.array_equal(result, truth)


def test_masks_of_every_broadcastable_shape() -> None:
    q, k = draw(2, 4, 3, 8), draw(2, 2, 5, 8)
    for shape in ((3, 5), (1, 5), (3, 1), (2, 1, 3, 5), (1, 4, 1, 5), ()):
        mask = np.random.default_rng(0).random(shape) < 0.7
        whole = np.broadcast_to(mask, (2, 4, 3, 5))
        for given in (mask, torch.as_tensor(mask)):
            one, other = (oracle.attention(q, k, k, mask=m, causal=True) for m in (given, whole))
            assert np.array_equal(one.out, other.out)


def test_no_keys() -> None:
    q, k = draw(1, 2, 3, 4), np.zeros((1, 2, 0, 4))
    out, lse = oracle.attention(q, k, k, causal=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    dq, dk, dv = oracle.gradients(q, k, k, q)
    assert (dq == 0).all() and dk.shape == dv.shape == k.shape


def test_no_queries_and_no_batch() -> None:
    k = draw(1, 2, 3, 4)
    assert oracle.attention(np.zeros((1, 4, 0, 4)), k, k).out.shape == (1, 4, 0, 4)
    assert (oracle.gradients(np.zeros((1, 4, 0, 4)), k, k, np.zeros((1, 4, 0, 4))).dk == 0).all()
    empty = np.zeros((0, 2, 3, 4))
    assert oracle.attention(empty, empty, empty).lse.shape == (0, 2, 3)


def test_blind_rows_and_infinities_warn_of_nothing() -> None:
    q = draw(1, 1, 4, 4)
    bad = q.copy()
    bad[0, 0, 1] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oracle.attention(q, q, q, mask=np.zeros((4, 4), bool))
        oracle.gradients(q, q, q, q, mask=np.zeros((4, 4), bool))
        oracle.gradients(bad, bad, bad, q, causal=True)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "4 axes"),
        (((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 3, 4)), "v in the shape of k"),
        (((1, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)), "same batch"),
        (((1, 2, 3, 4), (1, 2, 3, 8), (1, 2, 3, 8)), "same batch"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "divisible"),
        (((1, 2, 3, 4), (1, 0, 3, 4), (1, 0, 3, 4)), "divisible"),
    ],
)
def test_wrong_shapes(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    q, k, v = (np.ones(shape) for shape in shapes)
    for call in (lambda: oracle.attention(q, k, v), lambda: oracle.gradients(q, k, v, q)):
        with pytest.raises(ShapeError, match=words):
            call()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mask": np.ones((4, 4), bool)}, ShapeError, "broadcasts"),
        ({"mask": np.ones((3, 3))}, DtypeError, "boolean"),
        ({"dout": np.ones((1, 2, 3, 5))}, ShapeError, "dout in the shape of out"),
        ({"sinks": np.ones(3)}, ShapeError, "sinks of shape"),
        ({"dlse": np.ones((1, 2, 4))}, ShapeError, "dlse in the shape of lse"),
    ],
)
def test_other_wrong_arguments(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(kind, match=words):
        oracle.gradients(x, x, x, **{"dout": x, **options})


def test_tiles_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = draw(1, 2, 50, 8), draw(1, 1, 50, 8)
    whole = (*oracle.attention(q, k, k, causal=True), *oracle.gradients(q, k, k, q, causal=True))
    monkeypatch.setattr(oracle, "TILE_ELEMENTS", 7 * 50)
    tiled = (*oracle.attention(q, k, k, causal=True), *oracle.gradients(q, k, k, q, causal=True))
    for one, other in zip(whole, tiled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-14)


def test_memory_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak stays below 17 MB, half the size of one head's 2,048 × 2,048 scores."""
    monkeypatch.setattr(oracle, "TILE_ELEMENTS", 2**18)
    q = draw(1, 1, 2048, 8)
    tracemalloc.start()
    oracle.gradients(q, q, q, q, causal=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 8 * oracle.TILE_ELEMENTS


def test_torch_is_not_imported() -> None:
    code = "import sys, ringlab.oracle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sink_is_a_key_without_a_value() -> None:
    """Each head's logit is the score of one more key, whose value is 0: q and k get a dim for it, v a row."""
    (q, k, v, dout), sinks = (draw(2, 4, 3, 5), draw(2, 2, 6, 5), draw(2, 2, 6, 3), draw(2, 4, 3, 3)), draw(4)
    scale = 5**-0.5
    found = (*oracle.attention(q, k, v, sinks=sinks), *oracle.gradients(q, k, v, dout, sinks=sinks))
    for head in range(4):
        longer_q = np.concatenate([q[:, [head]], np.ones((2, 1, 3, 1))], -1)
        kv = slice(head // 2, head // 2 + 1)
        longer_k = np.concatenate([k[:, kv], np.zeros((2, 1, 6, 1))], -1)
        sink = np.concatenate([np.zeros((2, 1, 1, 5)), np.full((2, 1, 1, 1), sinks[head] / scale)], -1)
        keys = np.concatenate([longer_k, sink], 2)
        values = np.concatenate([v[:, kv], np.zeros((2, 1, 1, 3))], 2)
        out, lse = oracle.attention(longer_q, keys, values, scale=scale)
        dq, _, _ = oracle.gradients(longer_q, keys, values, dout[:, [head]], scale=scale)
        np.testing.assert_allclose(found[0][:, [head]], out, rtol=1e-13)
        np.testing.assert_allclose(found[1][:, [head]], lse, rtol=1e-13)
        np.testing.assert_allclose(found[2][:, [head]], dq[..., :5], rtol=1e-12, atol=1e-14)


def test_gradients_with_sinks_are_slopes() -> None:
    tensors, sinks = [draw(1, 2, 3, 4), draw(1, 1, 5, 4), draw(1, 1, 5, 2), draw(1, 2, 3, 2)], draw(2)
    *inputs, dout = tensors

    def loss(*qkv: np.ndarray) -> float:
        return float((oracle.attention(*qkv, causal=True, sinks=sinks).out * dout).sum())

    found = oracle.gradients(*tensors, causal=True, sinks=sinks)
    for index, gradient in enumerate(found):
        for place in np.ndindex(*gradient.shape):
            moved = [[x.copy() for x in inputs] for _ in range(2)]
            moved[0][index][place] += 1e-6
            moved[1][index][place] -= 1e-6
            assert gradient[place] == pytest.approx((loss(*moved[0]) - loss(*moved[1])) / 2e-6, abs=1e-8)


def test_a_sink_far_below_all_scores_changes_nothing_and_alone_it_is_the_lse() -> None:
    q, k = draw(1, 2, 3, 4), draw(1, 2, 5, 4)
    low = np.full(2, -1e30)
    for one, other in zip(oracle.attention(q, k, k, sinks=low), oracle.attention(q, k, k), strict=True):
        assert np.array_equal(one, other)
    out, lse = oracle.attention(q, k, k, mask=np.zeros((3, 5), bool), sinks=np.array([1.5, -2.0]))
    assert (out == 0).all() and (lse == np.array([1.5, -2.0])[:, None]).all()
