"""The four patients from the field have the faults in their charts, and the checks in the charts find them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.kinds.step import check_step
from ringlab.conformance.kinds.step_cases import Case, result
from ringlab.layout import get_layout
from ringlab_course.catalogue import LESSONS
from ringlab_course.clinic import field, packed_row
from ringlab_course.clinic.edits import edited, program_of
from ringlab_course.clinic.field import FIELD, examine
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.notebook import visit
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
FAULTY = {
    "alder": "bounds // P",
    "beech": "torch.logaddexp2(lse, block_lse)",
    "maple": "rotated(k, torch.arange(k.shape[-2]))",
    "spruce": "next_labels(labels[:, own])",
}
"""For each patient: words of a line with the fault."""
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


def test_the_sound_loss_sends_its_keys_and_values_in_one_hop_less_than_there_are_ranks() -> None:
    P, S = 3, 14
    case = Case(P, S, 1)
    outcome = VirtualCluster(P).run(lambda ring: result(packed_row.loss, case, ring, ring.rank, 0).loss)
    lengths = [len(each) for each in packed_row.shards(S, P)]
    for rank in range(P):
        sent = [each.bytes_sent for each in outcome.trace.exchanges(rank) if each.tag == "shift"]
        token = 2 * packed_row.HEADS * packed_row.D * 8
        assert sent == [token * lengths[(rank - step) % P] for step in range(P - 1)]


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


def test_one_document_shows_three_patients_and_lengths_that_do_not_divide_show_the_fourth() -> None:
    found = {name: matrix().found_by(name) for name in FIELD}
    assert found["alder"] == ["ragged", "odd documents"]
    assert "loss" in found["beech"] and found["beech"] == found["maple"] == found["spruce"]
    one, packed = Case(2, 16, 1), Case(4, 16, 1, documents=DOCUMENTS)
    ill = [{name for name in FIELD if not examine(FIELD[name].program, case).well} for case in (one, packed)]
    assert ill == [{"beech", "maple", "spruce"}, set(FIELD)]


def test_every_patient_is_the_sound_program_but_for_the_lines_on_its_chart() -> None:
    for name, each in FIELD.items():
        assert inspect.getsource(each.program) == each.source
        assert max(map(len, each.source.splitlines())) <= 110
        fault, *lines, _ = each.chart.splitlines()
        assert fault == f"{name}: {each.fault}" and FAULTY[name] in " ".join(lines)
        assert len(lines) <= 2 and not any(line.strip() in field.SOUND for line in lines)


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


def test_the_ward_shows_their_complaints_and_not_their_faults(capsys: pytest.CaptureFixture[str]) -> None:
    visit.ward(*FIELD)
    shown = " ".join(capsys.readouterr().out.split())
    for each in FIELD.values():
        assert f"{each.name}, returns loss “{each.complaint}”" in shown and each.fault not in shown


def test_a_run_that_does_not_end_is_not_well_and_says_why() -> None:
    def stops(ring: Ring, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel")

    found = examine(stops, Case(2, 4, 1))
    assert not found.well and "no kernel" in str(found)
    assert "well" in str(examine(packed_row.loss, Case(2, 4, 1)))
    assert "nan for" in str(examine(FIELD["spruce"].program, FIELD["spruce"].case))


def all_losses(ring: Ring) -> list[float]:
    """Return the loss of the sound program and of each patient on a packed row."""
    case = Case(ring.world_size, 16, 1, documents=DOCUMENTS)
    programs = (packed_row.loss, *(each.program for each in FIELD.values()))
    return [result(program, case, ring, ring.rank, 0).loss for program in programs]


def test_processes_compute_the_losses_that_virtual_ranks_do() -> None:
    virtual = VirtualCluster(2).run(all_losses).results
    assert launch(all_losses, 2).results == virtual
    assert virtual[0] == virtual[1] and not np.isclose(virtual[0][1:], virtual[0][0], rtol=1e-4).all()
    assert get_layout("zigzag", 16, 2).length(0) == 8
