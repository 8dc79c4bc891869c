"""Exponents of memory growth are right for known growth, and never too large for inexact readings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.checking.growth import GRAIN, Growth, keeps_every_block, measured

SIZES = (512, 1024, 2048)


MIB = 1 << 20
MUCH = 1 << 40


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_exponent_of_a_power_is_its_own(order):
    growth = Growth(SIZES, tuple(3 * MIB * (s // 512) ** order for s in SIZES))
    assert growth.exponent == pytest.approx(order, abs=1e-9)
    assert not growth.faster_than(order, MUCH)


@given(
    order=st.sampled_from([0, 1, 2]),
    constant=st.floats(0, 64 * MIB),
    factor=st.floats(0, 64 * MIB),
    off=st.lists(st.floats(-GRAIN, GRAIN), min_size=3, max_size=3),
)
def test_no_reading_within_its_error_makes_a_right_program_wrong(order, constant, factor, off):
    peaks = [constant + factor * (s / 512) ** order + e for s, e in zip(SIZES, off, strict=True)]
    assert Growth(SIZES, tuple(max(0, int(p)) for p in peaks)).at_least <= order + 1e-3


@pytest.mark.parametrize("order", [0, 1])
def test_one_factor_of_the_size_too_many_is_found_from_a_few_mebibytes_on(order):
    rng = np.random.default_rng(order)
    for _ in range(200):
        off = rng.uniform(-GRAIN, GRAIN, 3)
        peaks = [3 * MIB * (s / 512) ** (order + 1) + e for s, e in zip(SIZES, off, strict=True)]
        assert Growth(SIZES, tuple(map(int, peaks))).faster_than(order, MUCH), peaks


def test_memory_without_need_at_small_sizes_hides_no_growth():
    padded = Growth(SIZES, (64 * MIB, 64 * MIB, 64 * MIB))
    assert not padded.faster_than(1, MUCH), "the exponent alone does not show it"
    assert padded.faster_than(1, 64 * MIB) and not padded.faster_than(1, 128 * MIB)


def test_memory_without_need_on_few_ranks_hides_no_blocks():
    assert not keeps_every_block((5 * MIB, 6 * MIB), 10, MIB)
    assert keeps_every_block((5 * MIB, 6 * MIB + 1), 10, MIB)
    assert not keeps_every_block((5 * MIB, 7 * MIB), 10, MIB, spare=2)
    assert keeps_every_block((64 * MIB, 12 * MIB), 10, MIB), (
        "it holds memory for 12 blocks, and receives only 9"
    )


def test_what_was_added_by_chance_is_read_again_and_what_was_not_stays():
    readings = iter([4 * MIB, 4 * MIB, 64 * MIB, 4 * MIB, 4 * MIB, 4 * MIB])
    assert measured(SIZES, lambda size: next(readings), 0, MUCH).peaks == (4 * MIB,) * 3
    calls = []

    def quadratic(size):
        calls.append(size)
        return 3 * MIB * (size // 512) ** 2

    assert measured(SIZES, quadratic, 1, MUCH).faster_than(1, MUCH) and calls == [*SIZES, *SIZES]
    calls.clear()
    assert not measured(SIZES, quadratic, 2, MUCH).faster_than(2, MUCH) and calls == [*SIZES]
