"""Notebooks from before the course had a package of its own still open, check and grade; each old name is noted once."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import v4

from ringlab import moved
from ringlab.checkout import find_checkout
from ringlab_course.builder import sources
from ringlab_course.checking.loading import load_exercise
from ringlab_course.cli.grade_notebooks import _tell_outcome
from ringlab_course.gradebook.pool import Job, Outcome
from ringlab_course.judge.judge import GradeReport, grade
from tests.course.judge.small_contract import EXERCISE
from tests.course.judge.small_contract import notebook as small_notebook

OLD = {
    "ringlab_course.notebook.visit": "ringlab.course.clinic.visit",
    "ringlab_course.notebook.capstone": "ringlab.course.capstone",
    "ringlab_course.figures": "ringlab.viz",
    "ringlab.comm.wrappers.faulty": "ringlab.comm.faulty",
    "ringlab_course": "ringlab.course",
}
"""What notebooks import today, and what they imported before."""
LINES = (
    "from ringlab.bench import lanes",
    "from ringlab.comm.faulty import Fault",
    "from ringlab.comm.strict import Strict",
    "from ringlab.comm.virtual import Costs",
    "from ringlab.cost import network",
    "from ringlab.cost.overlap import block_s, hop_s, least_tokens_hidden",
    "from ringlab.course import builder, check, compare, corpus, hint, needs_extra, needs_triton, predict, progress",
    "from ringlab.course.capstone import beside, conform",
    "from ringlab.course.clinic import suite",
    "from ringlab.course.clinic.bedside import attend, block_backward, nothing_seen, receive, scores_of, sees, send",
    "from ringlab.course.clinic.patients import BACKWARD, FAULTS, PATIENTS, SOUND",
    "from ringlab.course.clinic.suite import CHECKS",
    "from ringlab.course.clinic.visit import commit, examine, open_helpers, open_source, report, ward",
    "from ringlab.course.faults import Faults",
    "from ringlab.course.in_process import run_virtual",
    "from ringlab.lab import l1, preflight, result, start",
    "from ringlab.viz import courier_frames, courier_view, decision_map, error_curves, error_runs, kernel_access",
    "from ringlab.viz import kill_matrix, load_mosaic, loss_curves, memory_ledger, online_softmax, overlap_view",
    "from ringlab.viz import ring_frames, ring_step, ring_view, side_by_side, tile_scan",
    "from ringlab.viz.course_ring import course_ring",
    "from ringlab.viz.error_runs import DTYPES, FAULTS, PROBES",
    "from ringlab.viz.memory_ledger import GB, Layer, kv_cache_bytes, readable",
    "from ringlab.viz.papers import paper_map",
)
"""The imports of lessons and exercises whose names have changed since."""
WITH_JAX = (
    "from ringlab.course.mesh.blocks import attend, attend_backward, identity, merge",
    "from ringlab.course.mesh.examine import examine",
)
OF_OTHER_CODE = (
    "from ringlab.bench.four_ranks import FourRanks",
    "from ringlab.comm.clocked import ClockedCluster",
    "from ringlab.comm.outcome import Outcome",
    "from ringlab.comm.recording import Form, Forms, Log, Recording",
    "from ringlab.comm.timeline import Messages, Program, Timeline",
    "from ringlab.comm.virtual import VirtualCluster",
    "from ringlab.course.answers import compare_with",
    "from ringlab.course.contract import Check, Crashed, Exercise, Failure, Misconception, NotWritten, Stage",
    "from ringlab.course.extras import needs_extra",
    "from ringlab.course.growth import Growth",
    "from ringlab.course.kernels import needs_triton",
    "from ringlab.course.predictions import predict",
    "from ringlab.course.reports import CheckReport, run_stage",
    "from ringlab.course.sources import targets",
    "from ringlab.course.subject import Subject",
    "from ringlab.nn.feed_forward import FeedForward",
    "from ringlab.nn.rotary import rotate",
    "from ringlab.schedules.trade import to_heads",
)
"""Imports that no notebook had, but code of one's own may have."""
SAID = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for line in json.loads(sys.argv[1]):
        exec(line)
print(json.dumps([str(each.message) for each in caught if each.category is FutureWarning]))
"""


def said_by(lines: tuple[str, ...]) -> list[str]:
    """Return the warnings of a fresh process that runs `lines`."""
    run = [sys.executable, "-c", SAID, json.dumps(lines)]
    return json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_every_import_of_an_old_notebook_works_and_says_what_to_write() -> None:
    said = said_by(LINES)
    assert len(said) == len(set(said)) and set(said) <= set(moved.notices(moved.MOVED))
    for name in (
        "ringlab.course",
        "ringlab.course.clinic.visit",
        "ringlab.comm.faulty",
        "ringlab.viz.error_runs",
    ):
        assert f"{name} is now {moved.MOVED[name]}: write that; the old name goes in 0.3." in said
    assert not [line for line in said if "clinic.bedside" in line], "it moved along with ringlab.course"
    written = (line.split(": ")[0].split(" is now ")[1] for line in said)
    assert all(importlib.util.find_spec(name) for name in written)


def test_imports_of_other_code_work_too() -> None:
    said = said_by(OF_OTHER_CODE)
    assert len(said) == len(set(said)) and set(said) <= set(moved.notices(moved.MOVED))
    assert len(said) >= len(OF_OTHER_CODE) - 2, (
        "ringlab.comm.clocked and ringlab.comm.virtual are packages now"
    )


@pytest.mark.parametrize(
    ("line", "was", "now"),
    [
        (
            "import ringlab.course.contracts.e05",
            "ringlab.course.contracts",
            "ringlab.course is now ringlab_course",
        ),
        (
            "import ringlab.course.clinic.nowhere",
            "ringlab.course.clinic.nowhere",
            "ringlab.course is now ringlab_course",
        ),
        ("from ringlab.lab import everyone", "ringlab.lab.everyone", "ringlab.lab is now ringlab_course.lab"),
    ],
)
def test_an_old_name_without_a_new_one_is_refused_by_the_name_that_was_written(
    line: str, was: str, now: str
) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", line], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert (
        last
        == f"ModuleNotFoundError: No module named '{was}': {now}, and docs/architecture.md lists its modules"
    )


@pytest.mark.needs_jax
def test_the_mesh_is_found_under_its_old_name() -> None:
    assert said_by(WITH_JAX) == [
        "ringlab.course is now ringlab_course: write that; the old name goes in 0.3."
    ]


def test_todays_names_warn_of_nothing() -> None:
    new = {old: today for today, old in OLD.items()}
    lines = ["from ringlab_course import check, corpus", "from ringlab_course.figures import error_curves"]
    assert said_by((*lines, *(f"import {name}" for name in new.values()))) == []


@pytest.mark.parametrize("old", moved.MOVED)
def test_an_old_name_leads_to_a_module_and_is_none_itself(old: str) -> None:
    place = find_checkout().joinpath(*old.split("."))
    assert importlib.util.find_spec(moved.MOVED[old]) and not place.with_suffix(".py").exists()


def test_nothing_is_loaded_a_second_time() -> None:
    lines = (
        "import ringlab.course.checking.failures as old",
        "import ringlab_course.checking.failures as new",
        "assert old.Failure is new.Failure",
    )
    assert len(said_by(lines)) == 1


def old_notebook(exercise: str) -> nbformat.NotebookNode:
    """Return the solution of `exercise` with the imports of before."""
    root = find_checkout()
    (target,) = sources.targets(root, (f"solutions/{exercise}",))
    made = sources.prepare(target, root)
    for cell in made.cells:
        for today, old in OLD.items():
            cell.source = cell.source.replace(today, old)
        assert cell.cell_type != "code" or "ringlab_course" not in cell.source
    return made


@pytest.mark.parametrize(("exercise", "stage"), [("05", "05.step"), ("16", "16.chart")])
def test_an_old_notebook_is_checked_in_jupyter(tmp_path: Path, exercise: str, stage: str) -> None:
    old = old_notebook(exercise)
    code = [cell for cell in old.cells if cell.cell_type == "code"]
    graded = next(cell for cell in code if cell.metadata.get("grade") == stage)
    cells = [v4.new_code_cell(text) for text in (code[0].source, graded.source, f'check("{stage}")')]
    notebook = v4.new_notebook(cells=cells)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(output) for cell in notebook.cells for output in cell.outputs]
    warned = [output.count("FutureWarning") for output in shown]
    assert sum(warned) == len(moved.notices(_imported(code[0].source)))
    assert "ringlab.course is now ringlab_course: write that" in "".join(shown)
    assert "✓" in shown[-1] and "✗" not in shown[-1]


def _imported(source: str) -> set[str]:
    """The modules that the lines of an import cell name, and the packages that they lie in."""
    modules = [line.split()[1] for line in source.splitlines() if line.startswith(("from ", "import "))]
    return {".".join(name.split(".")[: end + 1]) for name in modules for end in range(name.count(".") + 1)}


@pytest.mark.needs_bwrap
@pytest.mark.parametrize(
    ("exercise", "notes"),
    [
        ("11", ()),
        ("16", ("ringlab.course",)),
        pytest.param("17", ("ringlab.course",), marks=pytest.mark.needs_jax),
        ("21", ()),
    ],
)
def test_an_old_notebook_is_graded(tmp_path: Path, exercise: str, notes: tuple[str, ...]) -> None:
    path, contract = tmp_path / "old.ipynb", load_exercise(exercise)
    nbformat.write(old_notebook(exercise), path)
    one_check_each = tuple(replace(stage, checks=stage.checks[:1]) for stage in contract.stages)
    report = grade(path, replace(contract, stages=one_check_each))
    assert report.ok and report.earned == report.points > 0
    assert list(report.notes) == moved.notices(notes), "of what the functions use"


USES_OLD_NAMES = """
from ringlab.comm.faulty import Fault
from ringlab.course import check, corpus
from ringlab.course.clinic.visit import commit
KEPT = (Fault, check, corpus, commit)
def double(x):
    KEPT
    return 2 * x
"""


@pytest.mark.needs_bwrap
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_worker_notes_each_old_name_once(tmp_path: Path, unsafe: bool) -> None:
    report = grade(small_notebook(tmp_path, USES_OLD_NAMES), EXERCISE, unsafe=unsafe)
    names = ("ringlab.comm.faulty", "ringlab.course", "ringlab.course.clinic.visit")
    assert report.ok and list(report.notes) == moved.notices(names)


def test_grading_tells_them_and_no_other_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (notice,) = moved.notices(("ringlab.course",))
    report = GradeReport("old.ipynb", "05", (), 0, notes=(notice, "ringlab.course is now owned"))
    _tell_outcome(Job(0, tmp_path / "old.ipynb", "05", "", None), Outcome(0, report.as_dict()), None)
    said = capsys.readouterr().err
    assert said.count(notice) == 1 and "old.ipynb: ringlab.course is now ringlab_course" in said
    assert "owned" not in said
