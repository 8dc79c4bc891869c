"""Long sweeps, of which CI makes a part on every commit, and the next part on the next.

A key is the beginning of a test's name, as pytest prints it. Its value is the number of successive commits that make the whole
sweep. `pytest --sweep-part N` runs part N of each; `.ci/run` gives the number of commits, so one commit always gets the same
tests. Without the option, as in `make test`, in `make test-all` and in the workflow for every night, a sweep is whole.

A test belongs here if it is one of many of a kind: a wrong answer of hundreds, a mutant, a row of the case table. So a key ends with
the bracket in which its cases stand; only notebooks are swept by file. A test that is the only one of its kind runs on every
commit, and so does whatever is about hostile code.
"""

from __future__ import annotations

from collections.abc import Sequence

SWEEPS = {
    "solutions/": 3,
    "tests/blocks/test_kernel_mutants.py::test_a_mutant_dies[": 6,
    "tests/browser/test_lesson.py::test_no_answer_is_seen_before_its_prediction[": 7,
    "tests/conformance/test_mutants.py::test_a_mutant_is_found[": 6,
    "tests/conformance/test_mutants.py::test_our_ring_passes_on_processes[": 2,
    "tests/conformance/test_stepping.py::test_a_wrong_step_is_found[": 4,
    "tests/conformance/test_styles.py::test_a_style_passes[": 4,
    "tests/cost/test_simulate.py::test_its_messages_are_those_of_a_run_with_data[": 3,
    "tests/cost/test_simulate.py::test_its_messages_under_a_window_are_those_of_a_run_with_data[": 3,
    "tests/course/test_e06.py::test_the_judge_names_what_the_notebook_names[": 3,
    "tests/course/test_exercise_07.py::test_the_judge_finds_in_the_sandbox_what_the_notebook_finds[": 2,
    "tests/course/test_exercise_09.py::test_every_imitation_differs_from_the_truth_and_from_every_other[": 3,
    "tests/course/test_exercise_09.py::test_the_judge_finds_in_the_sandbox_what_the_notebook_finds[": 3,
    "tests/course/test_exercise_14.py::test_the_judge_finds_in_the_sandbox_what_the_notebook_finds[": 2,
    "tests/course/test_exercise_15.py::test_the_judge_finds_in_the_sandbox_what_the_notebook_finds[": 3,
    "tests/course/test_old_names.py::test_an_old_notebook_is_graded[": 3,
    "tests/course/test_submissions.py::test_a_right_submission_passes_every_tier[": 7,
    "tests/course/test_submissions.py::test_a_wrong_submission_falls_to_the_check_that_it_names[": 9,
    "tests/course/test_submissions.py::test_other_right_submissions_pass_the_visible_tier[": 7,
    "tests/course/test_unearned.py::test_no_input_of_one_grading_comes_again_in_another[": 7,
    "tests/course/test_unearned.py::test_the_code_of_the_lesson_earns_less_than_half[": 4,
    "tests/packaging/test_guide.py::test_a_program_prints_what_stands_below_it[": 3,
    "tests/site/test_accessible.py::test_a_page_can_be_listened_to[": 12,
    "tests/substrates/test_case_table.py::test_virtual_ranks[": 4,
    "tests/substrates/test_case_table_triton.py::test_several_programs_and_tiles[": 4,
    "tests/substrates/test_case_table_triton.py::test_virtual_ranks[": 4,
    "tests/substrates/test_case_table_triton.py::test_virtual_ranks_with_score_rules[": 4,
    "tests/substrates/test_plain_ring.py::test_virtual_ranks[": 3,
    "tests/test_attention_non_finite.py::test_a_query_reaches_its_own_row[": 3,
    "tests/test_attention_non_finite.py::test_what_a_window_or_a_document_hides_stays_hidden[": 3,
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
