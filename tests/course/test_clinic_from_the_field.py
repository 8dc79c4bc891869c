"""The four patients from the field have the faults in their charts, and the checks in the charts find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.conformance.kinds.step import check_step
from ringlab.conformance.kinds.step_cases import Case
from ringlab_course.catalogue import LESSONS
from ringlab_course.clinic import field, packed_row
from ringlab_course.clinic.edits import edited, program_of
from ringlab_course.clinic.field import FIELD, examine
from ringlab_course.clinic.suite import KillMatrix
from tests.course.submissions_of import CHECKOUT

MENDS = {
    "alder": (
        ("torch.bucketize(torch.arange(len(each)), bounds // P, right=True)", "(each[:, None] >= bounds).sum(-1)"),
    ),
    "beech": (
        ("        total = torch.logaddexp2(", "        block_lse = block_lse / math.log(2.0)\n        total = torch.logaddexp2("),
    ),
    "maple": (("torch.arange(k.shape[-2])", "positions[origin]"),),
    "spruce": (("next_labels(labels[:, own])", "F.pad(labels, (0, 1), value=IGNORE)[:, own + 1]"),),
}  # fmt: skip
"""For each patient: a change that mends it in another way than by undoing its edit."""
HALF_MENDS = {
    "alder": (("bounds // P, ", "bounds // P * P, "),),
    "beech": (("torch.logaddexp2(", "torch.logaddexp("),),
    "maple": (("torch.arange(k.shape[-2])", "own[:1] + torch.arange(k.shape[-2])"),),
    "spruce": (("next_labels(labels[:, own])", "labels[:, own].roll(-1, dims=1)"),),
}
"""For each patient: a change that looks like a mend."""
DOCUMENTS = (5, 1, 7, 3)


@cache
def matrix() -> KillMatrix:
    return field.kill_matrix(FIELD.values())


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 4))
def test_the_sound_loss_is_the_oracles_for_any_documents_on_any_ranks(documents: list[int], P: int) -> None:
    case = Case(P, sum(documents), 1, documents=tuple(documents))
    if max(documents) > 1:  # a document of one token has no label
        assert examine(packed_row.loss, case).well, str(examine(packed_row.loss, case))


def test_the_sound_loss_passes_every_check_that_the_clinic_asks_of_a_loss() -> None:
    report = check_step(packed_row.loss, only=field.CHECKS, ranks=(2, 3))
    assert report.ok and all(finding.applies for finding in report.findings)


@pytest.mark.parametrize("name", FIELD)
def test_a_patient_is_ill_of_the_smallest_batch_and_well_if_one_thing_that_matters_changes(name: str) -> None:
    each = FIELD[name]
    assert not (found := examine(each.program, each.case)).well and not found.stopped
    assert examine(packed_row.loss, each.case).well
    for change in each.matters.values():
        assert examine(each.program, replace(each.case, **change)).well
    for case in smaller(each.case):
        assert examine(each.program, case).well, str(case)


def smaller(case: Case) -> Iterator[Case]:
    """Yield all batches that have a label, and fewer tokens or fewer ranks without more of the other."""
    for P in range(1, case.P + 1):
        for S in range(2, case.S + 1):
            for documents in compositions(S):
                if (P, S) != (case.P, case.S) and max(documents) > 1:
                    yield Case(P, S, 1, documents=documents)


def compositions(S: int) -> Iterator[tuple[int, ...]]:
    if not S:
        yield ()
    for first in range(1, S + 1):
        yield from ((first, *rest) for rest in compositions(S - first))


@pytest.mark.parametrize("name", FIELD)
def test_the_check_of_the_chart_finds_the_patient_and_no_mended_one(name: str) -> None:
    each = FIELD[name]
    assert matrix().finds(name, each.check)
    for changes, well in ((MENDS[name], True), (HALF_MENDS[name], False)):
        changed = program_of(edited(each.source, changes), name, f"mended, {well}", packed_row)
        report = check_step(changed, only=[each.check], ranks=(2,))
        assert report.ok is well, str(report)
        assert well is all(examine(changed, Case(P, 16, 1, documents=DOCUMENTS)).well for P in (1, 2, 4))


def test_every_chart_names_a_thread_that_is_recorded_as_found_by_its_check_and_lessons_of_the_course() -> (
    None
):
    reports = (CHECKOUT / "docs" / "field-reports.md").read_text(encoding="utf-8").splitlines()
    for name, each in FIELD.items():
        (row,) = (row for row in reports if f"({each.url})" in row)
        assert ("`values` of `--kind merge`" if name == "beech" else f"`{each.check}`") in row
        assert (
            each.chart.endswith(f" {' and '.join(each.lessons)}") and f"made after {each.url};" in each.chart
        )
        assert set(each.lessons) <= {lesson.id for lesson in LESSONS}
