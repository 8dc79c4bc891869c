"""Long sweeps, of which CI and `make test` make a part on every commit, and the next part on the next.

A key is the beginning of a test's name, as pytest prints it. Its value is the number of successive commits that make the whole
sweep. `pytest --sweep-part N` runs part N of each. `.ci/run` and `make test` give the number of commits, so one commit always gets
the same tests. Without the option, as in `make test-all` and in the nightly run, every sweep is whole.

A test belongs here if it is one of many of a kind: a wrong answer of hundreds, a mutant, a row of the case table. A test that is
the only one of its kind runs on every commit.
"""

from __future__ import annotations

from collections.abc import Sequence

SWEEPS = {
    "solutions/": 3,
    "tests/blocks/test_kernel_mutants.py::test_a_mutant": 4,
    "tests/browser/test_lesson.py::test_no_answer_is_seen": 4,
    "tests/conformance/test_mutants.py::test_a_mutant": 4,
    "tests/conformance/test_mutants.py::test_our_ring_passes_on_processes": 2,
    "tests/conformance/test_stepping.py::test_a_wrong_step": 4,
    "tests/conformance/test_styles.py::test_a_style": 4,
    "tests/cost/test_simulate.py::test_its_messages": 3,
    "tests/course/judge/test_hostile.py::test_hostile_submissions": 3,
    "tests/course/judge/test_hostile_rings.py::test_hostile_rings": 3,
    "tests/course/test_e06.py::test_the_judge_names": 3,
    "tests/course/test_exercise_07.py::test_the_judge_finds": 2,
    "tests/course/test_exercise_09.py::test_every_imitation": 3,
    "tests/course/test_exercise_09.py::test_the_judge_finds": 3,
    "tests/course/test_exercise_14.py::test_the_judge_finds": 2,
    "tests/course/test_exercise_15.py::test_the_judge_finds": 3,
    "tests/course/test_old_names.py::test_an_old_notebook": 3,
    "tests/course/test_submissions.py::test_a_right": 4,
    "tests/course/test_submissions.py::test_a_wrong": 6,
    "tests/course/test_submissions.py::test_other_right": 4,
    "tests/course/test_submissions.py::test_the_solution": 3,
    "tests/course/test_unearned.py::": 4,
    "tests/packaging/test_guide.py::test_a_program": 3,
    "tests/site/test_accessible.py::test_a_page": 12,
    "tests/substrates/test_case_table.py::test_virtual_ranks": 4,
    "tests/substrates/test_case_table_triton.py::": 4,
    "tests/substrates/test_plain_ring.py::test_virtual_ranks": 3,
    "tests/test_attention_non_finite.py::": 3,
}


def left_to_other_parts(nodeids: Sequence[str], part: int) -> set[str]:
    """Return those of the tests that other parts of their sweeps run. Cells of a notebook stay together."""
    left: set[str] = set()
    for start, parts in SWEEPS.items():
        swept = [nodeid for nodeid in nodeids if nodeid.startswith(start)]
        units = list(dict.fromkeys(_unit(nodeid) for nodeid in swept))
        mine = {unit for index, unit in enumerate(units) if index % parts == part % parts}
        left |= {nodeid for nodeid in swept if _unit(nodeid) not in mine}
    return left


def _unit(nodeid: str) -> str:
    file, _, _ = nodeid.partition("::")
    return file if file.endswith(".ipynb") else nodeid
