"""The decision map's regions are the cost room's seconds and bytes, its line the ring's threshold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.hardware import hardware
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import least_tokens_hidden
from ringlab.errors import CostError
from ringlab_course.figures import decision_map
from ringlab_course.figures.decision_rules import (
    ALLGATHER,
    HIDDEN,
    HYBRID,
    NOTHING,
    RING,
    ULYSSES,
    Question,
    grid,
    question,
)
from tests.viz.test_style import illegible

MHA, MQA = Attention(H=32, K=32, causal=False), Attention(H=8, K=1)
QUESTIONS = st.builds(
    Question,
    st.builds(
        Attention,
        H=st.just(32),
        K=st.sampled_from([1, 4, 32]),
        D=st.sampled_from([64, 128]),
        dtype=st.sampled_from(["bfloat16", "float32"]),
        causal=st.booleans(),
    ),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([1e12, 1e15]),
    st.sampled_from([0.0, 1e-5]),
    st.just(80e9),
    st.booleans(),
)
POINTS = st.tuples(st.integers(32, 2**20), st.floats(1e8, 2e12))


def seconds(asked: Question, c: int, B: float) -> dict[int, float]:
    """Return what each schedule exposes, by formulas of the test's own."""
    a, P, e = asked.sizes, asked.P, element_bytes(asked.sizes.dtype)
    block = 4 * a.H * a.D * c * c / asked.F / (2 if a.causal else 1)
    kv = 2 * a.K * a.D * e * c / B
    found = {
        RING: (P - 1) * max(0.0, asked.latency_s + kv - block),
        ALLGATHER: 2 * asked.latency_s + (P - 1) * kv,
    }
    if a.H % P == 0:
        q, k = a.H // P, max(1, a.K // P)
        found[ULYSSES] = (P - 1) * c * a.D * e * (2 * q + 2 * k) / B + 2 * asked.latency_s
    degrees = [U for U in range(2, P) if P % U == 0 and a.H % U == 0 and (a.K % U == 0 or U % a.K == 0)]
    if asked.hybrids and degrees:
        found[HYBRID] = min(hybrid_seconds(asked, c, B, U, block) for U in in_memory(asked, c, degrees))
    return found


def hybrid_seconds(asked: Question, c: int, B: float, U: int, block: float) -> float:
    """Return what rows of U ranks expose: their trades, and hops beside U times a ring's work."""
    a, e = asked.sizes, element_bytes(asked.sizes.dtype)
    head, k = c * a.D * e / B, max(1, a.K // U)
    trades = (U - 1) * head * (2 * a.H // U + 2 * k) + 2 * asked.latency_s
    return trades + (asked.P // U - 1) * max(0.0, asked.latency_s + 2 * k * U * head - U * block)


def in_memory(asked: Question, c: int, degrees: list[int]) -> list[int]:
    """Return the rows that fit; all where none does."""
    a, e = asked.sizes, element_bytes(asked.sizes.dtype)
    head = c * a.D * e
    held = {U: head * (2 * a.H + 2 * a.K + 2 * a.H + 4 * U * max(1, a.K // U)) for U in degrees}
    return [U for U in degrees if held[U] <= asked.memory_bytes] or degrees


@given(QUESTIONS, POINTS)
def test_seconds_are_those_of_the_formulas(asked: Question, point) -> None:
    expected = seconds(asked, *point)
    assert set(asked.choices) == set(expected)
    for kind, value in expected.items():
        assert asked.exposed(kind, *point) == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(QUESTIONS, POINTS)
def test_the_best_is_the_least_exposed_of_those_that_fit(asked: Question, point) -> None:
    best, expected = asked.best(*point), seconds(asked, *point)
    fitting = {
        kind: s for kind, s in expected.items() if asked.needs_bytes(kind, point[0]) <= asked.memory_bytes
    }
    if best == NOTHING:
        assert not fitting
    elif best == HIDDEN:
        assert expected[RING] < 1e-12 and RING in fitting
    else:
        assert expected[best] <= min(fitting.values()) * (1 + 1e-9) and best in fitting


@given(QUESTIONS, st.floats(1e8, 2e12))
def test_a_ring_hides_from_the_threshold_on(asked: Question, B: float) -> None:
    at = asked.threshold(B)
    above, below = int(at * 1.01) + 1, int(at * 0.99)
    if 32 < below and above < asked.most_tokens[RING]:
        assert asked.best(above, B) == HIDDEN != asked.best(below, B)


def test_memory_of_the_ring_is_least_and_the_whole_sequence_is_not_held() -> None:
    asked = question(P=8)
    room = {kind: asked.most_tokens[kind] for kind in asked.choices}
    assert room[RING] > room[ULYSSES] > room[ALLGATHER]
    for kind, most in room.items():
        assert asked.needs_bytes(kind, most) <= asked.memory_bytes < asked.needs_bytes(kind, most + 1)


def test_rows_win_where_a_ring_of_them_hides() -> None:
    """Twice the work beside a hop: between half of the ring's threshold and all of it."""
    grouped = Attention(H=64, K=8)
    asked = question(grouped, "h100", 16, hybrids=True)
    at = asked.threshold(50e9)
    assert asked.best(int(0.6 * at), 50e9) == HYBRID and asked.best(int(1.01 * at) + 1, 50e9) == HIDDEN
    without = question(grouped, "h100", 16)
    assert HYBRID not in without.choices and without.best(int(0.6 * at), 50e9) == RING
    assert HYBRID not in question(grouped, "h100", 2, hybrids=True).choices
    words = decision_map.describe(grouped, "h100", 16, hybrids=True)
    assert "a hybrid exposes less on 42%" in words and "hybrid 1.1 million" in words
    assert illegible(decision_map.figure(grouped, "h100", 16, hybrids=True)) == []
    assert set(decision_map.WORDS) == set(decision_map.LOOKS)


def test_heads_that_cannot_be_shared_rule_Ulysses_out() -> None:
    asked = question(MHA, "a100", 64)
    assert ULYSSES not in asked.choices and "query heads" in asked.ulysses_refusal
    words = decision_map.describe(MHA, "a100", 64)
    assert "Ulysses cannot be used: it needs a Ulysses degree that divides the H=32 query heads" in words
    assert "cannot share these heads" in decision_map.figure(MHA, "a100", 64).axes[0].get_xlabel()
    assert ULYSSES in question(MHA, "a100", 32).choices


def test_numbers_of_tokens_have_three_digits() -> None:
    counts = (32, 1023, 1024, 1000 * 1024 - 600, 1000 * 1024, 1020 * 1024, 2**20, 10**7)
    told = ["32", "1023", "1k", "999k", "0.977M", "0.996M", "1M", "9.54M"]
    assert [decision_map._tokens(count) for count in counts] == told


def test_few_kv_heads_favour_the_all_gather_in_short_shards() -> None:
    asked = question(MQA, "tpu-v4", 8)
    assert asked.best(64, 45e9) == ALLGATHER
    assert question(MHA, "a100", 8).best(64, 25e9) == ULYSSES


def test_the_line_is_the_threshold_and_the_diamonds_are_the_machines_links() -> None:
    sizes, h100 = Attention(), hardware("h100")
    (ax,) = decision_map.figure(sizes, "h100", 8).axes
    rate = h100.peak("bfloat16") * h100.reached.attention_forward
    line = ax.lines[0]
    for at, B in zip(line.get_xdata(), line.get_ydata(), strict=True):
        assert at == least_tokens_hidden(rate, B, sizes, latency_s=h100.inside.latency_s)
    own = diamonds(ax)
    assert len(own) == 2
    for link in (h100.inside, h100.between):
        hides = least_tokens_hidden(rate, link.bytes_per_s, sizes, latency_s=link.latency_s)
        assert own[f"H100, {link.name}"] == (hides, link.bytes_per_s)


def test_the_legend_says_from_where_on_and_whose_latency() -> None:
    told = [text.get_text() for text in decision_map.figure().axes[0].get_legend().get_texts()]
    assert "right of it a ring hides all\nits hops, at 3.4 µs latency" in told
    assert "NVLink 4: from 991\ntokens per rank on" in told
    assert "InfiniBand NDR: from 6,647\ntokens per rank on,\nat 14 µs latency" in told


def diamonds(ax) -> dict[str, tuple[float, float]]:
    return {line.get_gid(): tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "D"}


def test_named_points_are_marked_beside_the_links_of_the_maps_latency() -> None:
    grouped, points = Attention(H=64, K=8), {"short": (2048, 50e9), "long": (65536, 50e9)}
    options = {"latency_s": hardware("h100").between.latency_s, "hybrids": True, "points": points}
    drawn = decision_map.figure(grouped, "h100", 16, **options)
    (ax,) = drawn.axes
    assert illegible(drawn) == []
    assert list(diamonds(ax)) == ["H100, InfiniBand NDR"]
    dots = [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "o"]
    assert dots == list(points.values())
    assert "nothing fits in 85.5 GB" in [text.get_text() for text in ax.get_legend().get_texts()]
    words = decision_map.describe(grouped, "h100", 16, **options)
    assert "Marked: short, 2,048 tokens per rank and 50 GB/s." in words


def test_the_regions_drawn_are_the_grid() -> None:
    tokens, rates, best = grid(question())
    ax = decision_map.figure().axes[0]
    areas = [c for c in ax.collections if hasattr(c, "levels")]
    there = [kind for kind in decision_map.LOOKS if (best == kind).any()]
    assert len(areas) == len(there) == 4
    for kind, area in zip(there, areas, strict=True):
        path = area.get_paths()[0]
        for row in range(2, len(rates) - 2, 11):
            for column in range(2, len(tokens) - 2, 11):
                around = best[row - 1 : row + 2, column - 1 : column + 2]
                if (around == around[1, 1]).all():  # away from edges
                    inside = path.contains_point((tokens[column], rates[row]))
                    assert inside == (best[row, column] == kind)


def test_names_stand_inside_their_regions() -> None:
    tokens, rates, best = grid(question())
    texts = {t.get_text(): t.get_position() for t in decision_map.figure().axes[0].texts}
    for kind, word in decision_map.WORDS.items():
        if word in texts:
            column = np.abs(np.log(tokens / texts[word][0])).argmin()
            row = np.abs(np.log(rates / texts[word][1])).argmin()
            assert best[row, column] == kind
    assert {"ring: hidden", "Ulysses exposes less"} <= set(texts)


@pytest.mark.parametrize(
    ("sizes", "machine", "P", "memory"),
    [
        (None, "h100", 8, None),
        (MHA, "a100", 64, None),
        (MQA, "tpu-v4", 8, None),
        (Attention(dtype="float8"), "b200", 16, 8e9),
        (Attention(H=128, K=8, D=256, dtype="float32"), "laptop", 2, 1e6),
    ],
)
def test_every_word_can_be_read(sizes, machine, P, memory) -> None:
    assert illegible(decision_map.figure(sizes, machine, P, memory_bytes=memory)) == []


@pytest.mark.parametrize(("sizes", "machine"), [(None, "h100"), (MHA, "a100"), (MQA, "tpu-v4")])
def test_each_diamond_stands_beside_its_name(sizes, machine) -> None:
    (ax,) = decision_map.figure(sizes, machine, 8).axes
    ax.figure.canvas.draw()
    beside = {t.get_text(): t.get_window_extent() for t in ax.texts if hasattr(t, "xyann")}
    assert len(beside) == 2
    for name, at in diamonds(ax).items():
        x, y = ax.transData.transform(at)
        box = beside[name.partition(", ")[2]]
        assert box.y0 < y < box.y1 and 0 < min(abs(box.x0 - x), abs(box.x1 - x)) < 20


def test_a_machine_of_ones_own_is_named() -> None:
    mine = replace(hardware("h100"), title="Mine", flops_per_s={"bfloat16": 1e13})
    ax = decision_map.figure(machine=mine).axes[0]
    assert {name.partition(", ")[0] for name in diamonds(ax)} == {"Mine"}
    assert "8 × Mine at 6.55 TFLOP/s" in ax.get_title(loc="left")


def test_the_words_carry_regions_room_and_machines() -> None:
    words = decision_map.describe()
    for part in ("8 × H100 at 648 TFLOP/s", "32 query, 8 K/V heads of 128", "latency 3.4 µs", "ring: hidden on",
                 "Most tokens per rank in 85.5 GB: ring 3.48 million", "H100, NVLink 4 991"):  # fmt: skip
        assert part in words, words


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({"P": 1}, "P >= 2"),
        ({"P": 2.5}, "P >= 2"),
        ({"machine": "h1000"}, "known hardware"),
        ({"sizes": Attention(dtype="float8"), "machine": "a100"}, "computes in"),
        ({"latency_s": -1.0}, "latency_s >= 0"),
        ({"memory_bytes": 0.0}, "memory_bytes > 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, needed) -> None:
    with pytest.raises(CostError, match=needed):
        decision_map.figure(**arguments)


def test_every_control_changes_the_map() -> None:
    pytest.importorskip("ipywidgets")
    box = decision_map.player()
    (which, ranks), (heads, kv_heads, dim), (dtype, causal) = (row.children for row in box.children[:3])
    picture = box.children[3]
    seen = [picture.value]

    def changed(part: str) -> bool:
        seen.append(picture.value)
        return len(set(seen)) == len(seen) and part in picture.value

    dtype.value = "float8"
    assert changed("float8")
    which.value = "tpu-v4"  # has no float8
    assert changed("TPU v4") and dtype.value == "bfloat16" and list(dtype.options) == ["bfloat16"]
    ranks.value = 16
    assert changed("16 × TPU v4 at")
    kv_heads.value = 32
    assert changed("32 query, 32 K/V")
    heads.value = 8
    assert changed("8 query, 8 K/V heads") and kv_heads.value == 8
    dim.value = 64
    assert changed("heads of 64")
    causal.value = False
    assert changed("no mask")


def test_without_a_person_the_still_map_is_shown(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(decision_map, "show", lambda figure, alt: shown.append((figure, alt)))
    decision_map.play()
    assert "8 × H100 at" in shown[0][1]
