"""What lateness costs: never less than nothing, never more than was earned, never less for more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook.policy import Late, lateness_s, parse_due, parse_late, utc

amounts = st.floats(0, 100)
policies = st.builds(
    Late,
    amount=amounts,
    amount_is_share=st.booleans(),
    unit_s=st.sampled_from([60.0, 3600.0, 86400.0]),
    most=st.one_of(st.just(math.inf), amounts),
    most_is_share=st.booleans(),
    grace_s=st.floats(0, 1e5),
)
seconds = st.floats(0, 1e7)
scores = st.floats(0, 1).flatmap(
    lambda share: st.floats(1, 100).map(lambda maximum: (share * maximum, maximum))
)


def broken_laws(late: Late, first_s: float, second_s: float, earned: float, maximum: float) -> list[str]:
    """Return the laws of penalties that `late` breaks."""
    sooner, later = sorted((first_s, second_s))
    cost = {at: late.penalty(at, earned, maximum) for at in (0.0, late.grace_s, sooner, later)}
    laws = {
        "on time costs nothing": cost[0.0] == 0,
        "grace costs nothing": cost[late.grace_s] == 0,
        "never below zero": min(cost.values()) >= 0,
        "never more than was earned": max(cost.values()) <= earned,
        "later costs no less": cost[sooner] <= cost[later],
        "never more than the most": max(cost.values()) <= late.most * (maximum if late.most_is_share else 1),
    }
    return [law for law, holds in laws.items() if not holds]


@given(policies, seconds, seconds, scores)
def test_the_laws_of_penalties(late: Late, first_s: float, second_s: float, score) -> None:
    assert broken_laws(late, first_s, second_s, *score) == []


@dataclass(frozen=True)
class Unbounded(Late):
    """Mutant: takes off more than was earned."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return self.amount * math.ceil(late_s / self.unit_s)


@dataclass(frozen=True)
class RewardsTheEarly(Late):
    """Mutant: the time before the grace ends counts against the penalty, which falls below zero."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return min(earned, self.amount * (late_s - self.grace_s) / self.unit_s)


@dataclass(frozen=True)
class Wraps(Late):
    """Mutant: forgets whole days."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return min(earned, self.amount * (late_s % 86400 > self.grace_s))


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (Unbounded, "never more than was earned"),
        (RewardsTheEarly, "never below zero"),
        (Wraps, "later costs no less"),
    ],
)
def test_wrong_penalties_break_a_law(mutant: type[Late], law: str) -> None:
    assert law in broken_laws(mutant(amount=3, unit_s=3600, grace_s=600), 700, 2 * 86400 + 1, 5, 10)


@pytest.mark.parametrize(
    ("text", "late_s", "penalty"),
    [
        ("", 1e9, 0),
        ("10%/day", 1, 2),
        ("10%/day", 86400, 2),
        ("10%/day", 86401, 4),
        ("10%/day,max 50%", 30 * 86400, 10),
        ("10% per day, maximum: 5 points", 30 * 86400, 5),
        ("2 points/hour", 3601, 4),
        ("2 points/hour", 1e9, 15),
        ("0.5 pts/min, grace 15 min", 900, 0),
        ("0.5 pts/min, grace 15 min", 901, 8),
        ("1 Point/Week", 1, 1),
    ],
)
def test_policies_in_words(text: str, late_s: float, penalty: float) -> None:
    assert parse_late(text).penalty(late_s, earned=15, maximum=20) == penalty


@pytest.mark.parametrize(
    "text",
    [
        "10%",
        "max 50%",
        "grace 1 h",
        "-10%/day",
        "10%/month",
        "10%/day, 5%/hour",
        "1e9%/day",
        "free",
        "10%/day; rm",
    ],
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
        ("2026-10-25T02:30 Europe/Berlin", "2026-10-25T01:30:00.000000+00:00"),  # there twice: the later one
        (
            "2026-03-29T02:30 Europe/Berlin",
            "2026-03-29T01:30:00.000000+00:00",
        ),  # not there: the later reading
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


def test_lateness_needs_a_deadline_and_a_time() -> None:
    due = "2026-11-30T23:59:00.000000+00:00"
    assert lateness_s("2026-12-01T00:59:00.000000+01:00", due) == 0
    assert lateness_s("2026-12-01T00:00:30.500000+00:00", due) == 90.5
    assert lateness_s(None, due) == lateness_s(due, "") == 0
