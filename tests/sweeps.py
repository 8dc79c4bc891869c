"""The part of the tests that CI makes on one commit: what `make test` runs, and of the rest a third.

`pytest --sweep-part N` makes part N; `.ci/run` gives the number of commits, so one commit always gets the same tests, and runs on three
successive commits make all that tests/thorough.py lists. `make test` makes part 0. Without the option, as in `make test-all` and in the
workflow for every night, the tests are whole. What `ALWAYS` lists runs on every commit: tests about hostile code, the rules of the house
and generated files.

A sweep is one long test of many cases: a wrong answer of hundreds, a mutant, a row of the case table. It has parts of its own.
Its key is the beginning of a test's name, as pytest prints it, up to the bracket in which its cases stand; its value is the number
of runs that make it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from tests.thorough import entry_of

THIRDS = 3
ALWAYS = (
    "tests/course/gradebook/test_hostile_class.py",
    "tests/course/judge/",
    "tests/course/test_builder.py",
    "tests/floors/",
    "tests/fuzz/",
    "tests/packaging/test_docs.py",
    "tests/packaging/test_drift.py",
)

SWEEPS = {
    "tests/blocks/test_kernel_mutants.py::test_a_mutant_dies[": 2,
    "tests/browser/test_lesson.py::test_no_answer_is_seen_before_its_prediction[": 3,
    "tests/conformance/test_mutants.py::test_a_mutant_is_found[": 3,
    "tests/conformance/test_styles.py::test_a_style_passes[": 2,
    "tests/cost/test_simulate.py::test_its_messages_are_those_of_a_run_with_data[": 3,
    "tests/course/test_submissions.py::test_a_right_submission_passes_every_tier[": 3,
    "tests/course/test_submissions.py::test_a_wrong_submission_falls_to_the_check_that_it_names[": 9,
    "tests/course/test_submissions.py::test_other_right_submissions_pass_the_visible_tier[": 7,
    "tests/course/test_unearned.py::test_no_input_of_one_grading_comes_again_in_another[": 3,
    "tests/course/test_unearned.py::test_the_code_of_the_lesson_earns_less_than_half[": 2,
    "tests/hf/test_every_family.py::test_every_family[": 3,
    "tests/site/test_accessible.py::test_a_page_can_be_listened_to[": 4,
    "tests/substrates/test_case_table.py::test_virtual_ranks[": 4,
    "tests/substrates/test_case_table_triton.py::test_virtual_ranks[": 2,
    "tests/substrates/test_plain_ring.py::test_virtual_ranks[": 3,
}


def left_to_other_parts(nodeids: Sequence[str], part: int) -> set[str]:
    """Return those of the tests that this part leaves to others.

    Names decide, and not places in a list: cases in a regular order would put the same kinds into the same parts, and a new entry would
    move those after it.
    """
    left: set[str] = set()
    for nodeid in nodeids:
        turn, entry = part, entry_of(nodeid)
        if entry is not None and not nodeid.startswith(ALWAYS):
            if not _is_mine(entry, THIRDS, part):
                left.add(nodeid)
            turn = part // THIRDS
        sweep = next((start for start in SWEEPS if nodeid.startswith(start)), None)
        if sweep is not None and not _is_mine(nodeid, SWEEPS[sweep], turn):
            left.add(nodeid)
    return left


def _is_mine(name: str, parts: int, part: int) -> bool:
    return crc32(name.encode()) % parts == part % parts
