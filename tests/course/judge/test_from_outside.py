"""Exercises under the judge: what only a judge can see who is the network, and who reads memory from outside."""

from __future__ import annotations

import pytest

from ringlab_course.checking.loading import load_stage
from ringlab_course.checking.reports import run_stage
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.submissions_of import submission

pytestmark = pytest.mark.needs_bwrap


def failing(stage_id: str, cells: str) -> dict[str, str | None]:
    """Return the checks of a stage that the judge finds failing, with the mistake that each names."""
    stage = load_stage(stage_id)
    names = [stage.function, *stage.helpers]
    with Session([cells], names, torch=True, seconds=120, total_seconds=1200) as session:
        report = run_stage(stage, SandboxedSubject(session, stage.function), "all", seed=5)
    assert not any(check.broken for check in report.checks)
    return {check.id: check.misconception for check in report.checks if not check.ok}


def source(name: str) -> str:
    return submission(name).source


def test_a_rank_that_keeps_the_whole_sequence_is_seen_from_outside() -> None:
    """It fetches every block from its neighbour, as a ring does, and lets none of them go."""
    kept = source("05/wrong_forward_keeps_every_block")
    assert failing("05.forward", kept) == {"memory": "keeps_every_block"}


def test_memory_that_grows_with_the_square_is_read_from_outside() -> None:
    """Half of all tiles are kept, beside what is linear: an exponent between one and two."""
    kept = source("03/wrong_autograd_saves_every_tile")
    assert failing("03.backward", kept)["memory"] == "materialises"


def test_what_is_changed_while_it_travels_is_seen_where_posts_are_late() -> None:
    """Through .data nothing is noted, and a judge that takes messages at once would hand on what was right."""
    scaled = source("06/wrong_overlap_writes_what_is_sent").replace("k.mul_(", "k.data.mul_(")
    assert failing("06.overlap", scaled) == {"any_network": "writes_what_is_sent"}
