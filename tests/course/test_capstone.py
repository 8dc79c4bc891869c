"""Exercise 21: the suite tests a learner's ring on every transport, and the judge grades it."""

from __future__ import annotations

import numpy as np
import pytest

from ringlab.conformance.run.run import Run
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.exercises.e21_capstone.ring import hidden_tiles
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
LOOKS_FIRST = {
    "torch.ones_like(here, dtype=torch.bool)": "here <= mine[rows].max() if causal else torch.ones_like(here, dtype=torch.bool)",
    ".nan_to_num()": "",
}


@pytest.mark.parametrize("products", [{}, BY_HAND], ids=["matrices", "by hand"])
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


@pytest.mark.needs_bwrap
def test_the_solution_earns_everything_in_the_judges_workers() -> None:
    report = grade(CHECKOUT / "solutions" / "21_capstone.ipynb", seed=5, patience=4, total_timeout=900)
    assert report.ok, [
        (c.id, c.message, c.counterexample) for s in report.stages for c in s.checks if not c.ok
    ]
    assert report.earned == report.points and not report.reason


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
