"""Hostile Triton kernels earn no points, and a right kernel graded after them earns all."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.reports import run_stage
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.hostile.kernels import COMMON, CONDEMNED, SUBMISSIONS
from tests.course.judge.hostile.small import own
from tests.course.judge.small_contract import HINTS, mine, turn

pytestmark = [pytest.mark.needs_bwrap, pytest.mark.needs_triton]
SECONDS = 3.0
LATE_S = 20.0
"""The seconds after its deadline in which a busy machine must end a submission that never ends."""


def _reads_once(subject, rng) -> None:
    x = torch.from_numpy(rng.standard_normal(6).astype(np.float32))
    recorded = subject.record(x)
    compare_with(recorded.answer, 2 * x, bound=1e-6)
    loads = [a.offsets for a in recorded.accesses if a.kind == "load" and a.argument.startswith("x_ptr")]
    if sorted(np.concatenate([[], *loads])) != list(range(6)):
        raise Failure("Read every element once.")


STAGE = Stage(
    id="90.kernel", function="double", title="double", hints=HINTS, kind="kernel",
    checks=(Check("reads", 5, "visible", "values, each read once", _reads_once),),
)  # fmt: skip
RIGHT = COMMON + "def double(x): return copied(x, 2.0)\n"


@pytest.fixture(scope="module")
def handed_in():
    """Yield one session with all submissions under different names, because Triton's interpreter starts slowly."""
    first, sources = turn(), [*SUBMISSIONS.values(), RIGHT]
    cells = [own(source, number) for number, source in enumerate(sources)]
    functions = [f"double_{number}" for number in range(len(sources))]
    with Session(cells, functions, torch=True, kernels=True, total_seconds=900) as session:
        yield session
    assert not mine(first)


def earned(session: Session, number: int, seconds: float) -> int:
    """Clear the session's record of losses and attacks, and return the points that the submission earns."""
    session.losses, session.condemned, session.seconds = 0, "", 60
    session.workers(1)
    session.seconds = seconds
    stage = replace(STAGE, function=f"double_{number}")
    report = run_stage(stage, SandboxedSubject(session, stage.function), "all", seed=3)
    assert not any(check.broken for check in report.checks)
    return 0 if session.condemned else report.earned


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_hostile_kernels_earn_nothing(handed_in, name) -> None:
    endless = "loops" in name or "without end" in name
    handed_in.losses, handed_in.condemned, handed_in.seconds = 0, "", 60
    handed_in.workers(1)
    begin, number = time.monotonic(), list(SUBMISSIONS).index(name)
    assert earned(handed_in, number, SECONDS if endless else 60) == 0
    assert not endless or time.monotonic() - begin < SECONDS + LATE_S
    assert bool(handed_in.condemned) == (name in CONDEMNED)


def test_after_all_of_them_a_right_kernel_earns_everything(handed_in) -> None:
    for worker in list(handed_in.workers(1)):
        handed_in.discard(worker)  # a hostile kernel may have replaced its interpreter
    assert earned(handed_in, len(SUBMISSIONS), 60) == STAGE.points
