"""A penalty for lateness is never negative, never above the points earned, and never lower for a longer delay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook.policy import Late, parse_due, parse_late, utc

shares = st.floats(0, 1)
seconds = st.floats(0, 1e7)


@given(st.builds(Late, shares, shares), seconds, seconds, shares, st.floats(1, 100))
def test_the_laws_of_penalties(
    late: Late, first_s: float, second_s: float, share: float, maximum: float
) -> None:
    sooner, later = (late.penalty(at, share * maximum, maximum) for at in sorted((first_s, second_s)))
    assert late.penalty(0.0, share * maximum, maximum) == 0
    assert 0 <= sooner <= later <= min(share, late.most) * maximum


@pytest.mark.parametrize(
    ("text", "late_s", "penalty"),
    [
        ("", 1e9, 0),
        ("10%/day", 0, 0),
        ("10%/day", 1, 2),
        ("10%/day", 86400, 2),
    ],
)
def test_policies_in_words(text: str, late_s: float, penalty: float) -> None:
    assert parse_late(text).penalty(late_s, earned=15, maximum=20) == penalty


@pytest.mark.parametrize(
    "text", ["10%", "max 50%", "-10%/day", "10%/month", "10%/day, 5%/day", "1e9%/day", "free", "10%/day; rm"]
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(CourseError, match=r"10%/day"):
        parse_late(text)


@pytest.mark.parametrize(
    ("text", "in_utc"),
    [
        ("2026-11-30T23:59Z", "2026-11-30T23:59:00.000000+00:00"),
        ("2026-11-30 23:59:30+01:00", "2026-11-30T22:59:30.000000+00:00"),
        ("2026-11-30T23:59 Europe/Berlin", "2026-11-30T22:59:00.000000+00:00"),
        ("2026-07-30 23:59 America/Los_Angeles", "2026-07-31T06:59:00.000000+00:00"),
        # this time occurs twice; the later one counts
        ("2026-10-25T02:30 Europe/Berlin", "2026-10-25T01:30:00.000000+00:00"),
        (
            "2026-03-29T02:30 Europe/Berlin",
            "2026-03-29T01:30:00.000000+00:00",
        ),  # the clock change skips this time; the later reading of it counts
    ],
)
def test_deadlines_have_a_zone(text: str, in_utc: str) -> None:
    assert utc(parse_due(text)) == in_utc


@pytest.mark.parametrize(
    "text",
    ["2026-11-30T23:59", "2026-11-30", "tomorrow", "", "2026-11-30T23:59Z Europe/Berlin", "2026-11-30T23:59 ../../etc/passwd",
     "2026-11-30T23:59 Nowhere/Land", "2026-13-30T23:59Z", "2026-11-30T25:59Z"],
)  # fmt: skip
def test_what_is_no_deadline_is_refused(text: str) -> None:
    with pytest.raises(CourseError, match="zone"):
        parse_due(text)
