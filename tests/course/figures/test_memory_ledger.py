"""The overlap picture is a simulation's timeline, and its threshold the cost room's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.hardware import hardware
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.errors import CostError
from ringlab.viz.gantt_chart import time_unit
from ringlab.viz.style import png
from ringlab_course.figures import memory_ledger, overlap_view
from ringlab_course.figures.memory_ledger import GB, Layer, kv_cache_bytes, readable
from ringlab_course.figures.overlap_view import MHA, overlap, presets
from ringlab_course.figures.papers import MACHINES
from tests.viz.test_style import illegible


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


def test_the_scores_are_as_large_as_q_where_S_is_D() -> None:
    for layer in (Layer(), Layer(heads=8, head_dim=64, itemsize=4)):
        books = layer.ledger(layer.head_dim)
        assert books["scores"] == books["q"] == books["weights"]


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
    assert "does not fit into a device of 80 GB; the largest S that fits is 24,920." in words


def test_the_bars_of_the_figure_are_the_ledger() -> None:
    figure = memory_ledger.ledger_figure(4096)
    widths = [bar.get_width() for bar in figure.axes[1].patches]
    assert widths == list(Layer().ledger(4096).values())
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("S", [16, 4096, 2**24])
@pytest.mark.parametrize("layer", [Layer(), Layer(heads=128, itemsize=4), Layer(heads=8, itemsize=1)])
def test_every_word_of_the_ledger_can_be_read(S: int, layer: Layer) -> None:
    assert illegible(memory_ledger.ledger_figure(S, layer)) == []


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


A100 = 312e12, 300e9
RATES = st.tuples(st.sampled_from([64, 1024, 20_000]), st.floats(1e12, 1e15), st.floats(1e9, 1e12))
SIZES = st.sampled_from(
    [MHA, replace(MHA, K=4), replace(MHA, causal=True), replace(MHA, dtype="float32", H=64)]
)


def bars(ax, kind: str) -> list[tuple[float, float]]:
    """Return (start, end) on the axis of the bars of a kind."""
    found = [bar for bar in ax.patches if bar.get_gid() == kind]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in found]


@given(RATES, st.integers(2, 6), SIZES)
def test_a_simulated_ring_is_blocks_and_the_hops_that_stand_out(rates, P, sizes) -> None:
    """No mask: makespan = P blocks + (P − 1) exposed parts; causal: the first block is an eighth or less longer."""
    c, F, B = rates
    seen = overlap(c, F, B, P, sizes)
    block, hop = block_s(sizes, c, F), hop_s(sizes, c, B)
    expected = max(0.0, hop - block) * (P - 1) + P * block
    assert seen.makespan_s == pytest.approx(expected, rel=0.02 if sizes.causal else 1e-9)
    assert seen.threshold == least_tokens_hidden(F, B, sizes) and seen.hidden == (hop <= block * (1 + 1e-12))


@pytest.mark.parametrize("c", [256, 4096])
@pytest.mark.parametrize("sizes", [MHA, replace(MHA, K=8, causal=True)])
def test_the_bars_are_the_trace_of_rank_0(c: int, sizes: Attention) -> None:
    seen = overlap(c, *A100, 4, sizes)
    ax = overlap_view.figure(c, *A100, 4, sizes).axes[0]
    scale, unit = time_unit(seen.makespan_s)
    assert ax.get_xlabel() == f"time ({unit})"
    for kind, events in (
        ("block", [(e.start, e.end) for e in seen.trace.computes(0)]),
        ("exposed", [(e.waited, e.done) for e in seen.trace.exchanges(0) if e.exposed]),
        ("hop", [(e.posted, e.posted + seen.hop_s) for e in seen.trace.exchanges(0)]),
    ):
        flat = [x for span in bars(ax, kind) for x in span]
        assert flat == pytest.approx([x / scale for span in events for x in span]), kind


@pytest.mark.parametrize("sizes", [MHA, replace(MHA, K=8)])
def test_a_hop_that_stands_out_ends_when_the_trace_says(sizes: Attention) -> None:
    seen = overlap(64, *A100, 4, sizes)
    for event in seen.trace.exchanges(0):
        assert event.posted + seen.hop_s == pytest.approx(event.done)


def test_the_line_stands_at_the_threshold_and_the_curves_cross_there() -> None:
    figure = overlap_view.figure(512, *A100)
    ax = figure.axes[1]
    block, hop, line = ax.lines[:3]
    at = least_tokens_hidden(*A100, MHA)
    assert tuple(line.get_xdata()) == (at, at) and at == pytest.approx(1040)
    signs = [h > b for b, h in zip(block.get_ydata(), hop.get_ydata(), strict=True)]
    crossing = [x for x, longer in zip(hop.get_xdata(), signs, strict=True) if longer][-1]
    assert crossing <= 1040 <= crossing * 1.2
    assert "threshold: 1,040 tokens" in [t.get_text() for t in ax.texts]
    dots = {tuple(line.get_xydata()[0]) for line in ax.lines[3:]}
    assert dots == {(512, block_s(MHA, 512, 312e12)), (512, hop_s(MHA, 512, 300e9))}


def test_the_title_names_the_machine_if_it_is_a_known_one() -> None:
    known, own = (
        overlap_view.figure(512, *rates).axes[0].get_title("left") for rates in (A100, (312e12, 1e11))
    )
    assert known.startswith("A100, NVLink 3, 312 TFLOP/s, 300 GB/s one way\nExposed")
    assert own.startswith("312 TFLOP/s, 100 GB/s one way\n")


def test_published_thresholds() -> None:
    """A100, bf16: 1,040 by NVLink at 300 GB/s each way, 24,960 at 12.5 GB/s; GQA and causal shift them."""
    assert overlap(64, *A100).threshold == pytest.approx(1040)
    assert overlap(64, 312e12, 12.5e9).threshold == pytest.approx(24_960)
    assert overlap(64, *A100, 4, replace(MHA, K=8)).threshold == pytest.approx(260)
    assert overlap(64, *A100, 4, replace(MHA, causal=True)).threshold == pytest.approx(2080)


def test_a_unit_wrong_by_a_thousand_is_another_picture() -> None:
    right, wrong = (overlap_view.figure(1024, 312e12, rate).axes[1] for rate in (300e9, 300e6))
    assert right.lines[2].get_xdata()[0] * 1000 == pytest.approx(wrong.lines[2].get_xdata()[0])


def test_presets_are_the_hardware_table() -> None:
    known = presets()
    a100 = hardware("a100")
    assert known["A100, NVLink 3"] == (a100.peak("bfloat16"), a100.inside.bytes_per_s)
    assert known["A100, InfiniBand HDR"] == (a100.peak("bfloat16"), a100.between.bytes_per_s)
    assert len(known) == 2 * len(MACHINES) and any(name.startswith("TPU") for name in known)


@pytest.mark.parametrize(
    ("c", "F", "B", "P"),
    [(64, 1e16, 1e7, 8), (2**20, 1e10, 3e12, 2), (1024, *A100, 4), (1040, *A100, 16), (16, 1e10, 3e12, 16)],
)
def test_every_word_can_be_read(c, F, B, P) -> None:
    assert illegible(overlap_view.figure(c, F, B, P)) == []


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_read(name: str) -> None:
    assert illegible(overlap_view.figure(1024, *presets()[name])) == []


def test_the_words_carry_the_verdict() -> None:
    words = overlap_view.describe(512, *A100)
    for part in ("512 tokens on each of 4 ranks", "312 TFLOP/s, 300 GB/s one way", "Exposed: a hop takes 2.03 × a block",
                 "44% of the time is waiting", "from 1,040 tokens per rank"):  # fmt: skip
        assert part in words, words
    assert "Hidden: a hop takes 0.25 × a block" in overlap_view.describe(4096, *A100)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ((512, *A100, 1), "2 to 16 ranks"),
        ((3, *A100, 4), "tokens per rank"),
        ((512.5, *A100, 4), "tokens per rank"),
        ((513, *A100, 4, replace(MHA, causal=True)), "even"),
        ((512, 0.0, 300e9), "> 0"),
        ((512, 312e12, -1.0), "> 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, needed) -> None:
    with pytest.raises(CostError, match=needed):
        overlap_view.figure(*arguments)
    with pytest.raises(CostError, match="a machine among"):
        overlap_view.play(preset="a100")


def test_every_control_changes_the_picture_and_a_machine_sets_both_rates() -> None:
    pytest.importorskip("ipywidgets")
    box = overlap_view.player()
    (machine, chosen), (flops, bandwidth), (tokens, ranks), (group, causal) = (
        row.children for row in box.children[:4]
    )
    picture = box.children[4]
    seen = [picture.value]

    def changed() -> bool:
        seen.append(picture.value)
        return len(set(seen)) == len(seen)

    tokens.value = 4096
    assert changed() and "4,096 tokens on each of 4 ranks" in picture.value
    machine.value = "H100, InfiniBand NDR"
    assert changed() and (flops.value, bandwidth.value) == presets()["H100, InfiniBand NDR"]
    assert machine.value == chosen.value == "H100, InfiniBand NDR"
    flops.value = 1e14
    assert changed() and machine.value == chosen.value == overlap_view.OWN
    bandwidth.value = 1e10
    assert changed() and "100 TFLOP/s, 10 GB/s" in picture.value
    ranks.value = 6
    assert changed() and "each of 6 ranks" in picture.value
    group.value = 8
    assert changed() and "32 query and 4 key/value heads" in picture.value
    causal.value = True
    assert changed() and "causal and balanced" in picture.value


def test_the_tokens_on_offer_can_all_be_drawn() -> None:
    for c in overlap_view.TOKENS:
        assert overlap(c, *A100, 8, replace(MHA, causal=True)).c == c
    assert 1024 in overlap_view.TOKENS and 2**20 in overlap_view.TOKENS


def test_without_a_person_the_still_picture_is_shown(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(overlap_view, "show", lambda figure, alt: shown.append((figure, alt)))
    overlap_view.play()
    assert len(shown[0][0].axes) == 2 and "1,024 tokens on each of 4 ranks" in shown[0][1]
