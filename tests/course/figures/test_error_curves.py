from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.viz.style import png
from ringlab_course.figures import error_curves, rounding
from ringlab_course.figures.error_curves import (
    DTYPES,
    FAULTS,
    PROBES,
    ROUNDED,
    Program,
    curves,
    describe,
    errors,
    figure,
    inputs,
    panel,
    run,
    truth,
)
from ringlab_course.figures.labels import apart

RANKS = (1, 2, 8, 32)


@given(st.floats(-(2.0**15), 2.0**15, allow_subnormal=False).filter(lambda x: abs(x) > 1e-4))
@settings(max_examples=30, deadline=None)
def test_the_bits_of_a_number_stand_for_what_is_kept_of_it(value: float) -> None:
    for each in rounding.FORMATS:
        digits = each.bits(value)
        sign, power, fraction = digits[0], digits[1 : 1 + each.exponent], digits[1 + each.exponent :]
        assert len(fraction) == each.fraction
        size = (1 + int(fraction, 2) / 2**each.fraction) * 2.0 ** (
            int(power, 2) - 2 ** (each.exponent - 1) + 1
        )
        assert each.kept(value) == (-size if sign == "1" else size)
        assert abs(each.kept(value) - value) <= torch.finfo(each.dtype).eps / 2 * abs(value)


def test_the_grey_lines_are_the_numbers_of_bfloat16() -> None:
    assert rounding.BFLOAT16.numbers(254, 261).tolist() == [254, 255, 256, 258, 260]
    assert rounding.BFLOAT16.numbers(-1.01, -0.99).tolist() == [-1.0078125, -1, -0.99609375, -0.9921875]


def test_a_sum_that_stands_still_is_drawn_beside_the_exact_one_and_told_in_words() -> None:
    one = rounding.Steps("sum", "additions", "sum", [255.0, 256.0, 257.0], [255.0, 256.0, 256.0], first=3)
    (ax,) = rounding.steps([one]).axes
    exact, kept = ax.lines
    assert exact.get_ydata().tolist() == one.exact and kept.get_ydata().tolist() == one.rounded
    assert exact.get_xdata().tolist() == [3, 4, 5]
    assert "ends at 257, the one kept in bfloat16 at 256" in rounding.describe_steps([one])


def test_the_picture_of_bits_has_every_bit_and_what_it_stands_for() -> None:
    (ax,) = rounding.bits(100.4).axes
    shown = [text.get_text() for text in ax.texts]
    assert sum(text in "01" for text in shown) == 32 + 16 + 16 == len(ax.patches)
    assert {"100.4000015", "100.375", "100.5"} <= set(shown)
    assert "keeps 100.5" in rounding.describe_bits(100.4)
    assert png(rounding.bits(100.4)) != png(rounding.bits(3.0))


@given(st.integers(0, 1000), st.sampled_from(PROBES), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_blocks_folded_in_float32_are_attention(seed: int, probe: str, P: int) -> None:
    """Off by no more than twice the plainest float32 attention, or than what rounding the scores may do.

    Scores of size s are off by δ = eps·s, weights by 2δ of themselves, out by 2δ of the size of v; lse likewise.
    """
    q, k, v = inputs(probe, seed, rows=4, S=80, D=8)
    right = truth(q, k, v)
    plain = torch.softmax(q @ k.T * 8**-0.5, -1) @ v
    found = error_curves.relative_error(run(Program(torch.float32), q, k, v, P), right)
    scores = float((q.abs() @ k.abs().T).max()) * 8**-0.5
    share = float(v.square().mean().sqrt()) / float(np.sqrt((right**2).mean()))
    floor = 2 * torch.finfo(torch.float32).eps * max(4.0, scores) * share
    assert found <= max(2 * error_curves.relative_error(plain, right), floor)


def test_what_is_rounded_shows_as_the_lesson_says() -> None:
    one = panel("plain", "bf16", RANKS, (0,))
    assert max(one.errors["nothing"]) < 1.15 * min(one.errors["nothing"])
    assert one.growth("out") > 2 and one.growth("lse") > 2
    assert one.errors["lse"][-1] > one.errors["out"][-1] > 2 * one.errors["nothing"][-1]
    for rounded in ROUNDED:  # one block is merged with nothing: there is no state to round yet
        assert one.errors[rounded][0] == pytest.approx(one.errors["nothing"][0], rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float16_is_eight_times_as_exact_as_bfloat16_and_float32_not_rounded_at_all(dtype: str) -> None:
    one = panel("plain", dtype, (2, 32), (0,))
    eps = torch.finfo(DTYPES[dtype]).eps
    assert one.errors["nothing"][1] / eps == pytest.approx(0.2, rel=0.2) or dtype == "fp32"
    if dtype == "fp32":
        assert one.errors["lse"] == one.errors["out"] == one.errors["nothing"]


@pytest.mark.parametrize("seed", range(3))
def test_every_fault_leaves_its_own_mark(seed: int) -> None:
    found = {name: curves(name, RANKS, seed=seed, rows=16) for name in FAULTS}
    sound = found.pop("sound")
    assert all(value < 2e-3 for probe in PROBES for value in sound[probe])
    for name, curve in found.items():
        unlike = [
            not math.isfinite(bad) or bad > 1.25 * good
            for probe in PROBES
            for bad, good in zip(curve[probe], sound[probe], strict=True)
        ]
        assert any(unlike) != (name == "arrival order"), name
        assert (max(curve["repeat"]) > 0) == (name == "arrival order"), name


def test_a_result_that_is_not_finite_is_infinitely_wrong() -> None:
    x = torch.tensor([[1.0, math.nan]])
    assert error_curves.relative_error(x, np.ones((1, 2))) == math.inf
    assert errors(FAULTS["fp16 overflow"], "large", (2,), rows=8) == [math.inf]


def test_an_unknown_probe_is_named() -> None:
    with pytest.raises(ValueError, match="plain, large, sloped, not 'steep'"):
        inputs("steep", 0)


def test_the_lines_of_the_figure_are_the_errors() -> None:
    panels = [panel(probe, "bf16", RANKS, (0,)) for probe in PROBES]
    for ax, one in zip(figure(panels).axes, panels, strict=True):
        lines = [tuple(line.get_ydata()) for line in ax.lines]
        assert lines == [one.errors[rounded] for rounded in ROUNDED]
        low, high = ax.get_ylim()
        assert all(low < min(line) and max(line) < high for line in lines)
        whole = max(panel(one.probe, "fp32", RANKS).errors["nothing"])
        note = f"far below: all in fp32, {whole:.0e}"
        assert {"lse in bf16", "out in bf16", note} <= {
            text.get_text() for text in ax.texts
        } and whole < low / 10
        looks = {(line.get_color(), line.get_marker()) for line in ax.lines}
        assert len({colour for colour, _ in looks}) == len({mark for _, mark in looks}) == 3


@pytest.mark.parametrize("dtype", error_curves.RANGES)
def test_every_panel_has_room_for_its_lines(dtype: str) -> None:
    low, high = error_curves.RANGES[dtype]
    for probe in PROBES:
        one = panel(probe, dtype, RANKS, (0,))
        assert all(low < error < high for rounded in ROUNDED for error in one.errors[rounded])


def test_labels_keep_apart_and_in_order() -> None:
    heights = apart([1e-3, 1.1e-3, 1e-7])
    assert heights[1] / heights[0] == pytest.approx(2.6) and heights[2] == pytest.approx(1e-7)
    assert heights[0] * heights[1] == pytest.approx(1e-3 * 1.1e-3), "a crowd is centred on its values"
    assert apart([1e-3, 1e-2, 1e-1]) == pytest.approx([1e-3, 1e-2, 1e-1])


def test_the_words_say_what_the_lines_show() -> None:
    one = panel("plain", "bf16", RANKS, (0,))
    assert f"lse in bf16 {one.errors['lse'][0]:.0e} to {one.errors['lse'][-1]:.0e}" in describe([one])


def test_the_shapes_are_mean_errors_with_their_names_in_picture_and_words() -> None:
    faults = ("bf16 accumulator", "sound")
    (ax,) = error_curves.shapes("plain", faults).axes
    for line, fault in zip(ax.lines, faults, strict=True):
        runs = [errors(FAULTS[fault], "plain", seed=seed) for seed in error_curves.SEEDS]
        assert np.allclose(line.get_ydata(), np.mean(runs, axis=0))
    assert [text.get_text() for text in ax.texts] == list(faults)
    last = error_curves.mean_errors("sound", "plain")[-1]
    assert error_curves.describe_shapes("plain", faults).endswith(f"to {last:.1e}.")


@pytest.mark.parametrize("probe", ["plain", "large"])
def test_the_shapes_have_room_for_their_lines(probe: str) -> None:
    (ax,) = error_curves.shapes(probe, tuple(error_curves.SHAPES)).axes
    low, high = ax.get_ylim()
    assert all(low < min(line.get_ydata()) and max(line.get_ydata()) < high for line in ax.lines)


def test_the_gallery_has_a_panel_for_each_program_and_marks_what_is_not_finite() -> None:
    found = {name: curves(name, (1, 4), rows=8) for name in ("sound", "fp16 overflow")}
    good, bad = (ax for ax in error_curves.fault_figure((1, 4), found).axes if ax.get_visible())
    assert [ax.get_title("left") for ax in (good, bad)] == list(found)
    assert [text.get_text() for text in good.texts] == ["two runs: same bits"]
    assert "not finite" in {text.get_text() for text in bad.texts}
    words = error_curves.describe_faults((1, 4), found)
    assert "fp16 overflow: plain" in words and "large inf to inf" in words


def test_words_have_no_digits_of_what_every_machine_rounds_for_itself() -> None:
    words = error_curves.describe_faults((1, 4), {"x": {"plain": (2e-3, 0.3), "repeat": (0.0, 5.4e-7)}})
    assert words.endswith("x: plain 2e-03 to 3e-01, repeat nothing to rounding.")
