"""Quantities with units are read exactly, written so that they are read back exactly, or refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost import units
from ringlab.cost.units import duration, quantity, short_count, tokens, written
from ringlab.errors import CostError

dimensions = st.sampled_from(sorted(units.UNITS))


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("2.25 PFLOP/s", "FLOP/s", 2.25e15),
        ("80 GiB", "bytes", 80 * 2**30),
        ("80 Gb", "bytes", 10e9),
        ("400 Gb/s", "bytes/s", 50e9),
        ("5 us", "seconds", 5e-6),
        ("5 µs", "seconds", 5e-6),  # micro sign
        ("5 μs", "seconds", 5e-6),  # Greek mu
        ("0.3 ms", "seconds", 3e-4),
        ("65.5 %", "percent", 0.655),
        ("  7  B ", "bytes", 7.0),
    ],
)
def test_reading(text: str, dimension: str, value: float) -> None:
    assert quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1M", 10**6),
        ("1Mi", 2**20),
        ("128Ki", 131072),
        ("0.5M", 500_000),
        ("2 tokens", 2),
        (1024, 1024),
    ],
)
def test_tokens(text: str | int, value: int) -> None:
    assert tokens(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1T B", "1m", "1e30", True, None, "1" * 100, "٣"])
def test_tokens_refused(text: object) -> None:
    with pytest.raises(CostError, match="tokens"):
        tokens(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "dimension", "told"),
    [
        (450, "bytes/s", "bare int"),
        (True, "bytes", "bare bool"),
        ("450", "bytes/s", "add the unit"),
        ("80 GB", "bytes/s", "unit of bytes; here bytes/s are due"),
        ("5 US", "seconds", "mind the case"),
        ("5 gb/s", "bytes/s", "mind the case: .*GB/s or Gb/s|Gb/s or GB/s"),
        ("5 parsecs", "seconds", "units: s"),
        ("", "bytes", "80 GB"),
        ("nan s", "seconds", "5 us"),
        ("1e31 B", "bytes", "10\\^30"),
        ("9" * 10_000 + " B", "bytes", "80 GB"),
        (None, "bytes", "80 GB"),
    ],
)
def test_refused(text: object, dimension: str, told: str) -> None:
    with pytest.raises(CostError, match=told) as raised:
        quantity(text, dimension)
    assert len(str(raised.value)) < 600


@given(value=st.floats(0, 1e29, allow_subnormal=True), dimension=dimensions)
def test_what_is_written_is_read_back_exactly(value: float, dimension: str) -> None:
    text = written(value, dimension)
    assert quantity(text, dimension) == value
    assert text.isascii()


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (450e9, "bytes/s", "450 GB/s"),
        (5e-6, "seconds", "5 us"),
        (0.655, "percent", "65.5 %"),
        (1500.0, "bytes", "1.5 kB"),
        (90.0, "seconds", "90 s"),
    ],
)
def test_written_as_people_write(value: float, dimension: str, text: str) -> None:
    assert written(value, dimension) == text


@given(st.text(max_size=40), dimensions)
def test_any_text_is_read_or_refused(text: str, dimension: str) -> None:
    with contextlib.suppress(CostError):
        assert isinstance(quantity(text, dimension), float)


def test_counts_read_back_as_they_were_and_times_read_well() -> None:
    for n in (1, 999, 1000, 1024, 131072, 131073, 10**6, 2**20, 486_000, 10**9):
        assert tokens(short_count(n)) == n
    assert (short_count(10**6), short_count(131072)) == ("1M", "128Ki")
    assert (duration(332.4), duration(90000), duration(0.0123)) == ("332 s", "25 hours", "12.3 ms")
