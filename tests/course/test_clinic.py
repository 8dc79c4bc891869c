"""The clinic's patients have the faults in their charts, sound rings pass, learners' charts are tested."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringlab.errors import CourseError
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.reports import run_in_process
from ringlab_course.clinic.case import Case, examine
from ringlab_course.clinic.patients import FORWARD, PATIENTS, SOUND
from ringlab_course.exercises.e16_bug_clinic import charts as e16_charts
from ringlab_course.exercises.e16_bug_clinic import mend as e16_mend
from ringlab_course.exercises.e16_bug_clinic.charts import KEY, curing, expect_smallest
from ringlab_course.exercises.e16_bug_clinic.contract import EXERCISE
from ringlab_course.judge.judge import grade
from ringlab_course.notebook import committed, visit
from tests.course.judge.small_contract import notebook

pytestmark = pytest.mark.thorough

STRIPED, SINGLE, THREE = (2, 2, "striped"), (2, 1), (3, 1)
SMALLEST = {
    "ash": (STRIPED, {"layout", "causal"}),
    "birch": (THREE, set()),
    "cedar": (STRIPED, {"layout", "causal"}),
    "elm": (SINGLE, set()),
    "fir": ((2, 1, "contiguous", False), {"causal"}),
    "hazel": (THREE, set()),
    "larch": (SINGLE, {"dtype"}),
    "oak": (SINGLE, set()),
    "rowan": (SINGLE, set()),
    "willow": (((1, 2)), {"dtype"}),
    "yew": (SINGLE, set()),
}
"""For each patient: the smallest case in which it is ill, and the properties of the case that matter."""
SYMPTOMS = {
    "birch": {"out"},
    "cedar": {"out", "lse"},
    "elm": set(),
    "fir": {"out", "lse"},
    "hazel": {"dk", "dv"},
    "larch": {"dq"},
    "oak": {"dq", "dk", "dv"},
    "rowan": {"dv"},
    "willow": {"dq"},
}
"""For each patient: the results that are wrong, but finite, on three ranks."""


@pytest.mark.parametrize("name", PATIENTS)
def test_every_patient_is_ill_of_the_smallest_case_and_gets_well_by_what_matters_alone(name: str) -> None:
    size, matters = SMALLEST[name]
    case = Case(*size)
    assert not examine(PATIENTS[name], case).well
    expect_smallest(name, case)
    assert curing(name, case) == matters


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_patient_shows_its_symptoms_and_no_others(name: str) -> None:
    found = examine(PATIENTS[name], Case(3, 4, "striped"))
    ill = {result for result, each in found.errors.items() if not each.ok}
    assert ill == SYMPTOMS[name]
    assert all(np.isfinite(each.error) for each in found.errors.values())
    assert (found.sent > found.needed) == (name == "elm")


def test_nothing_that_a_notebook_prints_of_a_patient_tells_its_fault() -> None:
    for name, each in PATIENTS.items():
        shown = f"{each!r} {each.complaint} {examine(each, Case(2, 2))}"
        if name in KEY:
            assert KEY[name] not in shown and "program" not in repr(each)


CHART = {"fault": "deadlock", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"case": {"ranks": 3, "tokens": 2, "layout": "striped"}}, "a smaller one"),
        ({"case": {"ranks": 2, "tokens": 2}}, "is well on this case"),
        ({"matters": []}, "Something matters that the chart leaves out"),
        ({"check": "bytes"}, "does not find this patient"),
        ({"fault": "something is wrong"}, "is not in FAULTS"),
    ],
)
def test_a_diagnosis_is_committed_only_if_all_that_it_says_holds(
    capsys: pytest.CaptureFixture[str], change: dict[str, object], told: str
) -> None:
    visit.commit("ash", CHART | change)
    assert "Not committed" in (said := capsys.readouterr().out) and told in said
    with pytest.raises(CourseError):
        visit.open_source("ash")


def test_a_diagnosis_may_change_until_the_source_is_open_and_is_final_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    visit.commit("ash", CHART | {"fault": "lost sum"})
    visit.commit("ash", CHART)
    capsys.readouterr()
    visit.open_source("ash")
    assert "def ash(ring, q, k, v, positions, causal=True):" in capsys.readouterr().out
    visit.commit("ash", CHART | {"found": "blind rows"})  # the same diagnosis with a finding from the source
    visit.open_source("ash")
    for change in ({"fault": "blind rows"}, {"check": "blind rows"}):
        with pytest.raises(CourseError, match=r"“deadlock”[\s\S]*final once the source was seen"):
            visit.commit("ash", CHART | change)
    committed._HERE.clear()  # as in a new process, which reads the progress file
    with pytest.raises(CourseError):
        visit.commit("ash", CHART | {"fault": "blind rows"})


NO_CHARTS = (None, 3, {}, CHART | {"matters": "layout"}, CHART | {"matters": ["P"]}, CHART | {"fault": ["lost sum"]}, CHART | {"found": "a bug"},
             CHART | {"matters": [["layout"]]}, CHART | {"matters": np.zeros(2)}, CHART | {"found": np.zeros(2)},
             CHART | {"case": {"ranks": np.zeros(2), "tokens": [1]}}, CHART | {"case": {"ranks": 2, "tokens": 1, "layout": np.zeros(2)}})  # fmt: skip


@pytest.mark.parametrize("answer", NO_CHARTS)
def test_what_is_no_chart_fails_without_a_crash(answer: object) -> None:
    with pytest.raises(Failure):
        e16_charts.read("ash", answer)


SOUND_CHART = {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]}  # fmt: skip
ANOTHER_NAME = SOUND_CHART | {"fault": "blind rows"}


OWN = PATIENTS["elm"].source


@pytest.mark.parametrize(
    ("chart", "earned"),
    [
        (None, 0),
        (SOUND_CHART | {"matters": []}, 0),
        (ANOTHER_NAME, 2),
        (ANOTHER_NAME | {"found": "masks by rank"}, 4),
        (SOUND_CHART, 4),
    ],
)
def test_a_right_ring_earns_what_the_diagnosis_of_its_patient_is_worth(
    chart: dict[str, object] | None, earned: int
) -> None:
    stage = next(stage for stage in e16_mend.STAGES if stage.id == "16.cedar")
    answers = {"cedar": SOUND[FORWARD].program, "chart": lambda name: chart}
    assert run_in_process(stage, answers, tier="all", seed=5).earned == earned


def test_no_visible_check_gives_the_name_of_a_fault_away() -> None:
    stages = (e16_charts.STAGE, e16_mend.STAGES[2])
    right, wrong = (
        [
            run_in_process(
                stage, {"cedar": SOUND[FORWARD].program, "chart": lambda name, c=c: c}, seed=5
            ).checks
            for stage in stages
        ]
        for c in (SOUND_CHART, ANOTHER_NAME)
    )
    told = [[(c.id, c.ok, c.message) for part in parts for c in part] for parts in (right, wrong)]
    assert told[0] == told[1]


def test_the_source_that_is_shown_is_the_program_that_runs() -> None:
    for each in (*PATIENTS.values(), *SOUND.values()):
        assert inspect.getsource(each.program) == each.source
        assert max(map(len, each.source.splitlines())) <= 115 and "\n\n\n" not in each.source


CELL = """
from functools import wraps
import torch
import ringlab_course.judge.worker as worker
from ringlab_course.clinic.bedside import attend, nothing_seen, sees
def chart(name):
    _forward
    return {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []}
"""
SOUND_RING = SOUND[FORWARD].source.replace("def forward", "def _forward")
MENDED = OWN.replace("if ring.world_size > 1", "if step < ring.world_size - 1")
FIRST, CALLED = "    out, lse = nothing_seen(q)\n", "(ring, q, k, v, positions, causal)\n"
UNCHANGED = {
    "its own ring under a decorator": f"""
def mended(function):
    @wraps(function)
    def other(*arguments, **keywords): return _forward(*arguments, **keywords)
    return other
@mended
{OWN}""",
    "a first line that calls what it finds": OWN.replace(
        FIRST, f"    return globals()['_forward']{CALLED}{FIRST}"
    ),
    "a first line that reads a text": OWN.replace(FIRST, f"    return eval('_forward'){CALLED}{FIRST}"),
    "another reader of texts": f"""
LINES = {[line.strip() for line in OWN.splitlines()[2:]]}
worker.statements_of = worker.sources = lambda *_: LINES
def elm{CALLED[:-1]}:
    worker
    return _forward{CALLED}""",
}


@pytest.mark.needs_bwrap
@pytest.mark.parametrize(("name", "earned"), [("mended", 4), *((name, 0) for name in UNCHANGED)])
def test_the_judge_runs_what_it_has_read(tmp_path: Path, name: str, earned: int) -> None:
    stage = next(stage for stage in e16_mend.STAGES if stage.id == "16.elm")
    code = CELL + SOUND_RING + UNCHANGED.get(name, MENDED)
    report = grade(notebook(tmp_path, code, grade=stage.id), replace(EXERCISE, stages=(stage,)), seed=5)
    assert (report.earned, report.reason) == (earned, "")


RING_IN_A_LINE = """if ring.world_size:
    o, l = nothing_seen(q)
    return [(o, l, k, v) for s in range(ring.world_size) for o, l in [attend(q, k, v, sees(positions, ring.rank, ring.origin(s), causal), o, l)] for k, v in [ring.shift(k, v, length=len(positions[ring.origin(s + 1)]))]][-1][:2]
"""


@pytest.mark.parametrize("name", ["ash", "fir"])
def test_a_whole_ring_above_the_patient_is_no_mend_of_it(name: str) -> None:
    """If a whole ring above the patient's lines keeps them from running, it is not accepted as a mend."""
    patient = PATIENTS[name]
    (function,) = ast.parse(patient.source).body
    function.body[:0] = ast.parse(RING_IN_A_LINE).body
    assert "nodes more" in e16_mend._another_program(ast.unparse(function), patient)
    assert e16_mend._another_program(patient.source, patient) == ""


STRANGE = {
    "_forward": "_forward",
    "eval('1')": "eval",
    "ring.__class__": ".__class__",
    "import os": "import os",
    "from os import path": "from os import",
    "lambda: 0": "lambda",
    "global attend": "global attend",
    "class C: pass": "a class or a decorator",
    "ring.tag = 0": ".tag =",
}
"""For each statement that a mend adds: the part of the statement that the judge refuses."""


def _not_read(text: str) -> str:
    return e16_mend._another_program(text, PATIENTS["elm"])


@pytest.mark.parametrize("statement", STRANGE)
def test_a_mend_is_refused_for_each_name_and_statement_that_reaches_further(statement: str) -> None:
    """The text is refused before it runs, so no rule relies on an error that the program would raise."""
    told = _not_read(OWN.replace(FIRST, f"    {statement}\n{FIRST}"))
    assert STRANGE[statement] in told.partition("used, and not known to the patient: ")[2].split(", ")
    assert _not_read(OWN.replace(FIRST, f"    len(positions)\n{FIRST}")) == ""


def test_a_decorator_is_refused_although_its_name_is_known() -> None:
    """`sees` is a helper that a mend may call, so only the rule against decorators refuses this text."""
    assert _not_read(f"@sees\n{OWN}") == "it is decorated: sees"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (OWN.partition(FIRST)[2], "    return out, lse\n", "of its 7 lines are gone, at most 3"),
        (FIRST, "    q\n" * 7 + FIRST, "7 are new, at most 6"),
        (FIRST, f"    '{'q' * 700}'\n{FIRST}", "the new ones have 702 characters, at most 690"),
    ],
    ids=["lost", "new", "length"],
)
def test_a_mend_is_refused_for_its_lines_alone(old: str, new: str, told: str) -> None:
    """A text that breaks one limit of lines and no other rule is refused."""
    assert told in _not_read(OWN.replace(old, new))
