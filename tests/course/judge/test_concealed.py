"""A report contains nothing that the submission has learned from a hidden probe, however the submission tries."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ringlab_course.checking.contract import TIERS, Check, Exercise
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.reports import not_written, run_stage
from ringlab_course.judge import judge
from ringlab_course.judge.judge import grade, joined
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.session import SandboxedSubject
from tests.course.judge.small_contract import DOUBLE, notebook

pytestmark = pytest.mark.needs_bwrap
BOUNDS = Bounds(memory_bytes=1 << 29)
CHECKS = ("first", "hidden", "stress", "last")


def _secret(subject, rng) -> None:
    x = np.full((2, 2), rng.integers(10**9, 10**10))
    if not np.array_equal(subject.call(x), 2 * x):
        raise Failure("It is not twice the argument.", f"for {x}")


def _open(subject, rng) -> None:
    x = rng.standard_normal(3)
    answer = subject.call(x)
    if not np.array_equal(answer, 2 * x):
        raise Failure("It is not twice the argument.", f"for {x} it is {answer}")


CHECKED = tuple(
    Check(name, 1, tier, name, _secret if tier == "held-out" else _open)
    for name, tier in zip(CHECKS, ("visible", "held-out", "stress", "visible"), strict=True)
)
STAGE = replace(DOUBLE, checks=CHECKED)
TWO = Exercise("90", "90_two", "two", (STAGE, replace(STAGE, id="90.triple", function="triple")))

TELLERS = {
    "raises in later calls": """
def double(x):
    remember(x)
    raise ValueError(f"seen {SEEN}")
""",
    "answers wrongly later": """
def double(x):
    remember(x)
    return np.array(SEEN[:1] * 3) if x.ndim == 1 and SEEN else 2 * x
""",
    "leaves it in a file": """
def double(x):
    remember(x)
    raise ValueError(open("/tmp/seen").read() if os.path.exists("/tmp/seen") else "")
""",
    "says it is not written": """
def double(x):
    remember(x)
    if SEEN: raise NotImplementedError(str(SEEN))
    return 2 * x
""",
    "writes frames named after it": """
def double(x):
    remember(x)
    if SEEN: write_everywhere(Frame(str(SEEN[0]), {}))
    return 2 * x
""",
    "dies, and tells the next worker's notes": """
def double(x):
    remember(x)
    if SEEN: raise type(str(SEEN[0]), (Exception,), {})(SEEN)
    return 2 * x
""",
}  # fmt: skip
REMEMBERS = """
import os
from ringlab_course.checking.protocol import Frame, pack
import numpy as np
SEEN = []
def remember(x):
    if x.ndim == 2:
        SEEN.append(int(x[0, 0]))
        open("/tmp/seen", "w").write(str(SEEN))
def write_everywhere(frame):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"".join(bytes(part) for part in pack(frame)))
        except OSError:
            pass
def triple(x):
    return double(x)
"""


def secrets(seed: int) -> list[str]:
    found: list[str] = []

    class Spy:
        def call(self, x):
            found.append(str(x[0, 0]))
            return 2 * x

    run_stage(STAGE, Spy(), "held-out", seed)
    return found


def told(tmp_path, teller: str):
    path = notebook(tmp_path, REMEMBERS, TELLERS[teller])
    return grade(path, TWO, seed=5, bounds=BOUNDS, timeout=60)  # a timed-out worker would reveal nothing


@pytest.mark.parametrize("teller", TELLERS)
def test_no_hidden_probe_is_told(tmp_path, teller) -> None:
    report = told(tmp_path, teller)
    written = json.dumps(report.as_dict())
    assert not [secret for secret in secrets(5) if secret in written]
    assert [check.id for stage in report.stages for check in stage.checks] == [*CHECKS, *CHECKS]


def _one_after_the_other(exercise, session, submission, seed):
    """A mutant of the judge that runs hidden checks between others, in the order of the contract."""
    reports = []
    for stage in exercise.stages:
        report = run_stage(stage, SandboxedSubject(session, stage.function), "all", seed)
        checks = [replace(c, counterexample="") if c.tier == "held-out" else c for c in report.checks]
        reports.append(replace(report, checks=tuple(checks)))
    return tuple(reports)


@pytest.mark.parametrize(
    "teller", ["raises in later calls","leaves it in a file",]
)  # fmt: skip
def test_a_judge_that_mixes_hidden_checks_with_others_tells_them(tmp_path, monkeypatch, teller) -> None:
    monkeypatch.setattr(judge, "_graded", _one_after_the_other)
    reports = []
    for _ in range(3):  # repeated, because on a busy machine a worker may end before it reveals anything
        reports.append(json.dumps(told(tmp_path, teller).as_dict()))
        if any(secret in reports[-1] for secret in secrets(5)):
            return
    pytest.fail("nothing was told: " + "\n".join(reports))


def test_the_parts_of_a_report_are_joined_in_the_contracts_order() -> None:
    class Doubles:
        def call(self, x):
            return x + x

    parts = [run_stage(STAGE, Doubles(), tier, 1) for tier in TIERS]
    whole = joined(STAGE, parts)
    assert [check.id for check in whole.checks] == list(CHECKS) and whole.ok
    parts[-1] = not_written(STAGE, Failure("not written"), "held-out")
    missing = joined(STAGE, parts)
    assert missing.status == "not written" and missing.earned == 0 and len(missing.checks) == 4
