"""Controls change a picture together with its words; without a live notebook, still pictures or text are shown."""

from __future__ import annotations

from typing import Any

import pytest

from ringlab import contiguous
from ringlab.conformance.report.findings import Finding
from ringlab.viz.frontend import FRAMES
from ringlab.viz.lanes import Span
from ringlab_course.catalogue import PAPERS
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.figures import (
    course_ring,
    decision_map,
    kill_matrix,
    load_mosaic,
    loss_curves,
    memory_ledger,
    overlap_view,
    papers,
    profiler_lanes,
)
from tests.viz.test_keyboard import faults

pytestmark = pytest.mark.thorough

pytest.importorskip("ipywidgets")

CASES = {"a": {"one": [2.0, 1.0], "a": [2.0, 1.0]}, "b": {"one": [2.0, 1.0], "b": [2.0, 1.5]}}
RUNS = {"one": [Span(rank, "compute", "a", 0.0, 0.004) for rank in (0, 1)]}


def finding(ok: bool | None) -> Finding:
    return Finding("x", "asks", ok is not False, f"saw {ok} < 1", 0.0, ok is not None)


MATRIX = KillMatrix(
    ("ash", "elm"),
    ("masks", "dq", "bytes"),
    {
        "ash": {"masks": finding(False), "dq": finding(None), "bytes": finding(True)},
        "elm": {"masks": finding(True), "dq": finding(None), "bytes": finding(False)},
    },
)


class Moved:
    """A picture and all states that it has shown, to test that each control leads to a new state."""

    def __init__(self, picture: Any) -> None:
        self.picture, self.seen = picture, [picture.value]

    def shows(self, part: str) -> bool:
        self.seen.append(self.picture.value)
        return len(set(self.seen)) == len(self.seen) and part in self.picture.value


def test_every_control_moves_the_overlap_and_a_machine_sets_both_rates() -> None:
    *rows, picture = overlap_view.player().children[:5]
    (machine, chosen), (flops, bandwidth), (tokens, ranks), (group, causal) = (row.children for row in rows)
    moved = Moved(picture)
    tokens.value = 4096
    assert moved.shows("4,096 tokens on each of 4 ranks")
    machine.value = "H100, InfiniBand NDR"
    assert moved.shows("") and (flops.value, bandwidth.value) == overlap_view.presets()[machine.value]
    assert machine.value == chosen.value
    flops.value = 1e14
    assert moved.shows("") and machine.value == chosen.value == overlap_view.OWN
    bandwidth.value = 1e10
    assert moved.shows("100 TFLOP/s, 10 GB/s")
    ranks.value = 6
    assert moved.shows("each of 6 ranks")
    group.value = 8
    assert moved.shows("32 query and 4 key/value heads")
    causal.value = True
    assert moved.shows("causal and balanced")


def test_keys_move_over_the_kill_matrix_and_the_evidence_follows() -> None:
    player = kill_matrix.player(MATRIX)
    patient, check, picture = player.children
    assert faults(player) == []
    assert "ash × masks: the check finds it" in picture.value
    patient.value, check.value = 1, 2
    assert "elm × bytes: the check finds it" in picture.value
    check.value = 1
    assert "elm × dq: the check does not apply" in picture.value


STILL = {
    "profile": (lambda: profiler_lanes.play(RUNS), profiler_lanes.describe(RUNS)),
    "map": (lambda: decision_map.play(), "8 × H100 at"),
    "overlap": (lambda: overlap_view.play(), "1,024 tokens on each of 4 ranks"),
    "ring of lessons": (lambda: course_ring.course_ring("03"), "Tiled attention"),
}


@pytest.mark.parametrize("name", STILL)
def test_without_a_person_the_still_picture_is_shown_with_its_words(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda *a, **keywords: shown.append(keywords))
    play, words = STILL[name]
    play()
    assert words in shown[0]["metadata"]["image/png"]["alt"]


def test_the_map_of_the_papers_is_folded_and_has_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    papers.paper_map()
    assert shown[0]["text/html"].startswith("<details><summary>")
    assert shown[0]["text/plain"].startswith(f"Map of {len(PAPERS)} papers")


TOLD = {
    "ledger": (memory_ledger.explore, memory_ledger.describe()),
    "losses": (lambda: loss_curves.play(CASES), "b leaves it in step 2."),
    "kill matrix": (lambda: kill_matrix.play(MATRIX), "is below"),
}


@pytest.mark.parametrize("name", TOLD)
def test_without_a_person_some_say_all_in_text(capsys: pytest.CaptureFixture[str], name: str) -> None:
    play, words = TOLD[name]
    play()
    assert words in capsys.readouterr().out


def test_without_a_person_all_pictures_are_recorded_for_the_site(recorded: list[dict[str, Any]]) -> None:
    load_mosaic.play(contiguous(32, 4))
    (output,) = recorded
    assert output["text/plain"] and len(output[FRAMES]["pictures"]) == 4
