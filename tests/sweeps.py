"""The part of the tests that CI runs on one commit: those of `make test`, and a third of all others.

`pytest --sweep-part N` runs part N. `.ci/run` passes the number of commits as N, so one commit always gets
the same tests, and runs on three successive commits cover all that tests/thorough.py lists. `make test` runs
part 0. Without the option, as in `make test-all` and in the nightly workflow, all tests run. The tests that
`ALWAYS` lists run on every commit: those about hostile code, the rules for contributors and generated files.

A sweep is one long test of many cases, such as hundreds of wrong answers, the mutants, or the rows of the
case table. Each sweep is divided into parts of its own. Its key is the beginning of a test's name, as pytest
prints it, up to the bracket that contains the case; its value is the number of runs that cover all cases.
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
    """Return the tests that this part leaves to other parts.

    The part of a test depends on its name, not on its place in a list. By place, cases in a regular order
    would put the same kinds into the same parts, and a new entry would move all entries after it.
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
