from __future__ import annotations

import numpy as np
import pytest

from ringlab.viz.style import png
from ringlab_course.figures import memory_ledger
from ringlab_course.figures.memory_ledger import GB, Layer, first_out, kv_cache_bytes, readable


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


def test_doubling_S_quadruples_the_scores_and_the_flops_only() -> None:
    layer = Layer()
    small, large = layer.ledger(1024), layer.ledger(2048)
    growth = {name: large[name] / small[name] for name in small}
    assert growth == {"q": 2, "k and v": 2, "scores": 4, "weights": 4, "out": 2}
    assert layer.flops(2048) == 4 * layer.flops(1024)


def test_flops_are_two_products_of_multiply_adds() -> None:
    layer = Layer(heads=1, kv_heads=1, head_dim=4)
    assert layer.flops(4) == 2 * (2 * 4 * 4 * 4)  # a worked example: 64 multiply-adds for each product


@pytest.mark.parametrize("memory", [1, 64, 10**6, 80 * GB])
def test_the_largest_sequence_fits_and_the_next_does_not(memory: int) -> None:
    layer = Layer(heads=1, kv_heads=1, itemsize=1)
    S = layer.largest_sequence(memory)
    assert layer.ledger(S)["scores"] <= memory < layer.ledger(S + 1)["scores"]


def test_scores_run_out_first_and_grouped_heads_do_not_help() -> None:
    for kv_heads in (1, 8, 32):
        assert first_out(Layer(kv_heads=kv_heads), 80 * GB)[0] == "scores"
    assert (
        Layer(kv_heads=1).largest_sequence(80 * GB) == Layer(kv_heads=32).largest_sequence(80 * GB) == 35_355
    )


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


def test_the_words_of_the_figure_give_its_numbers() -> None:
    words = memory_ledger.describe(131_072)
    assert "scores 1.1 TB" in words
    assert "S = 35,355" in words


def test_the_bars_of_the_figure_are_the_ledger() -> None:
    figure = memory_ledger.ledger_figure(4096)
    widths = [bar.get_width() for bar in figure.axes[1].patches]
    assert widths == list(Layer().ledger(4096).values())
    assert png(figure).startswith(b"\x89PNG")


def test_the_sliders_change_the_picture_and_its_words() -> None:
    box = memory_ledger.explorer()
    (S, heads), dtype, picture = box.children[0].children, box.children[1], box.children[2]
    before = picture.value
    S.value, heads.value, dtype.value = 2**14, 8, "float8"
    assert picture.value != before
    assert memory_ledger.describe(2**14, Layer(heads=8, itemsize=1)) in picture.value


def test_without_a_person_the_ledger_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    memory_ledger.explore()
    assert capsys.readouterr().out.strip() == memory_ledger.describe()
