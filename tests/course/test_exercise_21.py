"""Exercise 21: the suite tests a learner's ring on every transport, and the judge grades it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.run.run import Run
from ringlab.errors import CourseError
from ringlab.layout import contiguous, striped, zigzag
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.exercises.e21_capstone import parts
from ringlab_course.exercises.e21_capstone.ring import _expect_less_work, hidden_tiles
from ringlab_course.exercises.e21_capstone.suite import (
    BACKWARD,
    FORWARD,
    Learners,
    claims,
    named,
)
from ringlab_course.judge import grade
from ringlab_course.notebook import capstone
from tests.course.submissions_of import CHECKOUT, namespace, solution_code, submission

pytestmark = pytest.mark.thorough


def learners(space: dict, names: tuple[str, ...]) -> Learners:
    stage = load_stage("21.forward" if names == FORWARD else "21.backward")
    return Learners(InProcessSubject(stage, space), names, claims(names))


@pytest.mark.parametrize(("S", "P"), [(16, 4), (17, 3), (3, 2), (2, 5), (29, 8)])
def test_the_layouts_of_the_contract_are_those_of_ringlab(S: int, P: int) -> None:
    for layout in (contiguous, striped, zigzag):
        owned = parts.owned(layout.__name__, S, P)
        assert [own.tolist() for own in owned] == [layout(S, P).positions(r).tolist() for r in range(P)]


def test_a_backward_is_given_the_true_forward_and_judged_by_itself() -> None:
    source = learners(solution_code("21"), BACKWARD)
    (ran,) = source.made([Run(2, 8, "zigzag", True, H=2, K=1, D=4, meter=True)])
    assert set(ran.arrays) == set(BACKWARD) and not ran.forward
    block = 2 * 4 * 4 * 4
    assert [meter.sent for meter in ran.backward] == [block + 2 * block] * 2
    assert all(meter.peers == (1 - rank,) and meter.peak > 0 for rank, meter in enumerate(ran.backward))
    assert source.failing(named("rounds", "bytes"), seed=0) is None


def test_faults_of_the_suite_are_faults_of_the_network() -> None:
    source = learners(solution_code("21"), FORWARD)
    run = Run(3, 24, "contiguous", False, H=2, K=1)
    died, short, late = source.made(
        [Run(**{**run.__dict__, "fault": f}) for f in ("dies", "wrong shape", "stalls")]
    )
    assert died.trouble is not None and "PeerDied" in died.trouble.text and died.returned == ()
    assert short.trouble is not None and short.returned == ()
    assert late.trouble is None and set(late.arrays) == set(FORWARD)


CLEANS = submission("21/wrong_forward_cleans_hidden_tiles").source
BY_HAND = {
    "q @ k[:, :, None].mT": "(q[..., :, None, :] * k[:, :, None, None]).sum(-1)",
    "torch.exp(scores - known[..., None]) @ v[:, :, None]": "(torch.exp(scores - known[..., None])[..., None] * v[:, :, None, None]).sum(-2)",
}
IN_NUMPY = {
    "q @ k[:, :, None].mT": "torch.from_numpy(q.numpy() @ k[:, :, None].mT.numpy())",
    "torch.exp(scores - known[..., None]) @ v[:, :, None]": "torch.from_numpy(torch.exp(scores - known[..., None]).numpy() @ v[:, :, None].numpy())",
}
LOOKS_FIRST = {
    "torch.ones_like(here, dtype=torch.bool)": "here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)",
    ".nan_to_num()": "",
}


@pytest.mark.parametrize("products", [{}, BY_HAND, IN_NUMPY], ids=["matrices", "by hand", "NumPy"])
def test_hidden_tiles_that_are_cleaned_away_are_found_in_the_notebook(products: dict[str, str]) -> None:
    """Hidden tiles that are computed and discarded are found, and the ring passes once it skips them."""

    def look(changes: dict[str, str]) -> None:
        source, space = CLEANS, {}
        for old, new in changes.items():
            assert old in source
            source = source.replace(old, new)
        exec(source, space)
        subject = InProcessSubject(load_stage("21.forward"), space)
        hidden_tiles(FORWARD)(subject, np.random.default_rng(0))

    with pytest.raises(Failure, match="the first rank sees one block"):
        look(products)
    look({**products, **LOOKS_FIRST})


def test_a_ring_that_computes_where_nobody_counts_is_left_to_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal small counts on all ranks, as if nobody counted products, do not fail a ring in the notebook."""
    counted = InProcessSubject.efforts
    monkeypatch.setattr(InProcessSubject, "efforts", lambda *a, **k: (counted(*a, **k)[0], [900.0] * a[1]))
    _expect_less_work(learners(solution_code("21"), FORWARD), seed=0)


@pytest.mark.needs_bwrap
def test_the_solution_earns_everything_in_the_judges_workers() -> None:
    report = grade(CHECKOUT / "solutions" / "21_capstone.ipynb", seed=5, patience=4, total_timeout=900)
    assert report.ok, [
        (c.id, c.message, c.counterexample) for s in report.stages for c in s.checks if not c.ok
    ]
    assert report.earned == report.points and not report.reason


def test_a_missing_function_is_named() -> None:
    with pytest.raises(CourseError, match="no merge"):
        capstone.target({name: print for name in capstone.FUNCTIONS if name != "merge"})


def test_the_whole_of_the_learners_functions_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    report = capstone.conform(
        solution_code("21"), only=("masks", "aliasing", "work"), isolate=False, ranks=(1, 2, 3, 4)
    )
    assert report.ok and "4 of 4 checks hold" in capsys.readouterr().out


def test_a_wrong_function_is_told_with_the_smallest_counterexample(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = namespace(submission("21/wrong_forward_local_mask"))
    space = {**solution_code("21"), "ring_forward": wrong["ring_forward"]}
    assert not capstone.conform(space, only=("masks",), isolate=False).ok
    told = capsys.readouterr().out
    assert "✗ masks" in told and "smallest counterexample" in told


def a_report(**checks: tuple[bool, bool]) -> dict:
    findings = [Finding(name, "asks", ok, "seen", 0.0, applies) for name, (ok, applies) in checks.items()]
    return Report("pkg:f", "ring", "gloo", True, 0, 30.0, findings).as_dict()


def test_committed_reports_are_found_however_they_are_kept(tmp_path) -> None:
    folder = tmp_path / "benchmarks" / "results" / "conformance"
    folder.mkdir(parents=True)
    first = {
        **a_report(masks=(True, True), dq=(False, True), lse=(True, False)),
        "package": "first",
        "version": "1.2",
    }
    (folder / "peers.json").write_text(
        json.dumps({"date": "today", "reports": {"a": first, "b": a_report(dq=(True, True))}})
    )
    (folder / "seeds.json").write_text(
        json.dumps({"tier": "quick", "sweeps": [{"target": "x", "seeds": 50}]})
    )
    (folder / "broken.json").write_text("{")
    columns = capstone.known_reports(tmp_path)
    assert [column.name for column in columns] == ["first 1.2", "pkg:f"]
    assert [columns[0].mark(check) for check in ("masks", "dq", "lse", "work")] == ["✓", "✗", "–", ""]


def test_without_committed_reports_the_table_says_so(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    capstone.beside(known=capstone.known_reports(tmp_path))
    told = capsys.readouterr().out
    assert "No committed reports" in told and "check" not in told.splitlines()[0].split()[:1]


def test_shares_that_are_right_but_not_ascending_are_told_so() -> None:
    """The message about shares that do not ascend does not call an owner wrong, because every owner is right."""
    from ringlab_course.checking.failures import Failure

    def owned(layout: str, S: int, P: int) -> list[torch.Tensor]:
        return [torch.tensor(part).flip(0) for part in parts.owned(layout, S, P)]

    stage = load_stage("21.owned")
    for check in stage.checks:
        with pytest.raises(Failure, match="not in ascending order"):
            check.run(InProcessSubject(stage, {"owned": owned}), np.random.default_rng(3))
