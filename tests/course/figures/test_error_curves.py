from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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

pytestmark = pytest.mark.thorough

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


@given(st.integers(0, 1000), st.sampled_from(PROBES), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_blocks_folded_in_float32_are_attention(seed: int, probe: str, P: int) -> None:
    """The error is at most twice that of plain float32 attention, or the error that rounding the scores may
    cause.

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
    for rounded in ROUNDED:  # one block is never merged, so there is no state to round
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


def test_words_have_no_digits_of_what_every_machine_rounds_for_itself() -> None:
    words = error_curves.describe_faults((1, 4), {"x": {"plain": (2e-3, 0.3), "repeat": (0.0, 5.4e-7)}})
    assert words.endswith("x: plain 2e-03 to 3e-01, repeat nothing to rounding.")


def test_the_lines_of_the_figures_are_the_errors() -> None:
    one = panel("plain", "bf16", RANKS, (0,))
    (ax,) = figure([one]).axes
    assert [tuple(line.get_ydata()) for line in ax.lines] == [one.errors[rounded] for rounded in ROUNDED]
    assert f"lse in bf16 {one.errors['lse'][0]:.0e} to {one.errors['lse'][-1]:.0e}" in describe([one])
    faults = ("bf16 accumulator", "sound")
    (ax,) = error_curves.shapes("plain", faults).axes
    for line, fault in zip(ax.lines, faults, strict=True):
        assert tuple(line.get_ydata()) == error_curves.mean_errors(fault, "plain")
    last = error_curves.mean_errors("sound", "plain")[-1]
    assert error_curves.describe_shapes("plain", faults).endswith(f"to {last:.1e}.")
