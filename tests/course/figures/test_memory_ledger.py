"""The memory ledger counts the bytes of real arrays, and the bars of its picture show these counts."""

from __future__ import annotations

import numpy as np
import pytest

from ringlab_course.figures.memory_ledger import GB, Layer, kv_cache_bytes, readable

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("layer", [Layer(), Layer(heads=6, kv_heads=3, head_dim=5, itemsize=4, batch=2)])
@pytest.mark.parametrize("S", [1, 7, 64])
def test_the_ledger_counts_the_bytes_of_real_arrays(layer: Layer, S: int) -> None:
    dtype = np.dtype(f"f{layer.itemsize}")
    q = np.zeros((layer.batch, layer.heads, S, layer.head_dim), dtype)
    k = np.zeros((layer.batch, layer.kv_heads, S, layer.head_dim), dtype)
    scores = q @ np.repeat(k, layer.heads // layer.kv_heads, 1).swapaxes(-1, -2)
    assert layer.ledger(S) == {
        "q": q.nbytes,
        "k and v": 2 * k.nbytes,
        "scores": scores.nbytes,
        "weights": scores.nbytes,
        "out": q.nbytes,
    }


def test_flops_are_two_products_of_multiply_adds() -> None:
    layer = Layer(heads=1, kv_heads=1, head_dim=4)
    assert layer.flops(4) == 2 * (2 * 4 * 4 * 4)  # worked by hand: 64 multiply-adds in each product


@pytest.mark.parametrize(
    "layer", [Layer(heads=1, kv_heads=1, itemsize=1), Layer(), Layer(kv_heads=32, batch=3)]
)
@pytest.mark.parametrize("memory", [1, 64, 10**6, 80 * GB])
def test_the_largest_sequence_fits_and_the_next_does_not(memory: int, layer: Layer) -> None:
    S = layer.largest_sequence(memory)
    assert sum(layer.ledger(S).values()) <= memory < sum(layer.ledger(S + 1).values())


def test_scores_and_weights_fill_the_device_and_grouped_heads_hardly_help() -> None:
    S = Layer().largest_sequence(80 * GB)
    books = Layer().ledger(S)
    assert S == 24_920 and books["scores"] + books["weights"] > 0.99 * 80 * GB
    assert Layer(kv_heads=32).largest_sequence(80 * GB) > 0.99 * S


def test_naive_attention_cannot_exceed_D_over_itemsize_flop_per_byte() -> None:
    layer = Layer()
    intensity = [layer.flops(S) / layer.traffic(S) for S in (2**10, 2**14, 2**20)]
    assert intensity == sorted(intensity)
    assert intensity[-1] < layer.head_dim / layer.itemsize


def test_the_key_value_cache_of_a_70B_model_at_a_million_tokens() -> None:
    assert kv_cache_bytes(1_000_000, layers=80, kv_heads=8, head_dim=128) == 327_680_000_000


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1.1e12, "1.1 TB"), (2e18, "2,000 PB")],
)
def test_readable_bytes(count: float, text: str) -> None:
    assert readable(count) == text
