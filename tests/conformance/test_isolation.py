"""A target that hangs, crashes or returns nonsense is reported as such, and the suite continues."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.isolation import Isolated
from ringlab.conformance.run.loading import TargetSpec
from ringlab.conformance.run.run import Run
from ringlab.conformance.suite import check
from tests.conformance.reports import evidence

HERE = "tests.conformance.bad_targets"


LIMIT = 20.0
"""Seconds for one run. On a busy machine, a new process needs more than 6 to import what the next run uses."""


def found(name: str, *only: str, **options: object) -> Report:
    return check(f"{HERE}:{name}", quick=True, only=only, limit=LIMIT, **options)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (
            "hangs",
            "over the limit",
            "the limit of 20 s for one run (--limit) was reached; rank 0 is in hangs (bad_targets.py, line 46); rank 1 has not begun",
        ),
        ("crashes", "crashed", "exit status 3; its last words: …last words"),
        ("prints", "printed without end", "more than 4 MiB in one run"),
    ],
)
def test_a_run_that_never_ends_costs_itself_only(name: str, kind: str, says: str) -> None:
    """A run that never ends fails only its own check: the next check, on three ranks, passes."""
    report = found(name, "forward", "sloped logits")
    assert evidence(report, "forward").startswith(f"{kind}: ")
    assert says in evidence(report, "forward")
    assert "(P=2 " in evidence(report, "forward")
    assert report.failed == ["forward"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("both_receive", "hung", "rank 0 waits in both_receive (bad_targets.py"),
        ("receives_late", "over the limit", "; rank 1 waits in receives_late (bad_targets.py"),
        ("is_slow", "over the limit", "rank 0 is in is_slow (bad_targets.py"),
    ],
)
def test_only_a_target_whose_ranks_all_wait_for_each_other_hangs(name: str, kind: str, says: str) -> None:
    report = check(f"{HERE}:{name}", quick=True, only=("strided",), limit=4.0, ranks=(2,))
    told = evidence(report, "strided")
    assert told.startswith(f"{kind}: the limit of 4 s for one run (--limit) was reached; ") and says in told
    assert ("may only be slow" in told) == (kind != "hung")
    verb = "hangs" if kind == "hung" else "does not end within the limit"
    assert report.sentences[0].startswith(f"The target {verb}")


@pytest.mark.parametrize(("transport", "goes_on"), [("virtual", True), ("gloo", False)])
def test_a_launch_of_processes_is_ended_if_nobody_waits_for_the_rest(transport: str, goes_on: bool) -> None:
    """A launch of processes is ended if its results are no longer wanted; virtual ranks continue."""
    runs = [Run(2, 8, "contiguous", False, H=1, K=1, seed=seed) for seed in range(3)]
    with Isolated(TargetSpec("ringlab.plain_ring:attend", transport), 30.0) as source:
        made = iter(source.made(runs))
        assert next(made).run == runs[0]
        child = source._child
        assert child is not None
        made.close()  # type: ignore[attr-defined]
        assert child.alive is goes_on
        assert [ran.run for ran in source.made(runs[1:])] == runs[1:]


@pytest.mark.thorough
def test_a_target_that_always_hangs_costs_three_limits_and_no_more() -> None:
    """After three runs that hang (two on one rank, one on two), all other checks fail without a run."""
    report = check(f"{HERE}:hangs_always", quick=True, limit=1.0)
    assert report.runs == 3
    assert not [each.name for each in report.findings if each.ok and each.applies and each.name != "loads"]
    told = evidence(report, "sloped logits")
    assert told.startswith(
        "not run: other runs reached the limit: 3 runs, P = 1, 2; over the limit: the limit of 1 s for one run (--limit) was reached"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("returns_text", "wrong result: a tensor, or a tuple that begins with one, is needed; got a str"),
        ("returns_nothing", "got None"),
        ("returns_one_token", "wrong result: out has shape (2, 2, 1, 16), needed (2, 2, 48, 16)"),
        ("returns_no_gradient", "out has no gradient"),
        ("needs_a_package", "a package is missing: No module named 'a_package_that_is_not_there'"),
        pytest.param("leaves", "SystemExit", marks=pytest.mark.thorough),
        pytest.param(
            "interrupts",
            "raised: KeyboardInterrupt without a text, raised by bad_targets.py, line ",
            marks=pytest.mark.thorough,
        ),
        ("asserts", "raised: AssertionError without a text, raised by bad_targets.py, line "),
        ("claims_a_wrong_layout", "positions that give each of 48 tokens to one of 1 ranks"),
    ],
)
def test_nonsense_is_named(name: str, says: str) -> None:
    report = check(
        f"{HERE}:{name}",
        quick=True,
        only=("dq",),
        limit=LIMIT,
        isolate=name in ("leaves", "interrupts"),
        ranks=(1, 2),
    )
    assert report.failed == ["dq"]
    assert says in evidence(report, "dq")


def test_another_dtype_is_named() -> None:
    report = check(f"{HERE}:returns_float64", quick=True, only=("types",), isolate=False, backward=False)
    assert "out is torch.float64 for inputs of torch.float32" in evidence(report, "types")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (
            "tests.conformance.no_such_module:ring",
            "needed: a module called tests.conformance.no_such_module; got: no no_such_module in tests.conformance",
        ),
        (f"{HERE}:no_such_function", "something called 'no_such_function'"),
        (f"{HERE}:needs_an_argument", "none for sauce, which is no argument of a plain call"),
        (f"{HERE}:NO_FUNCTION", "a function, or a ringlab.conformance.Target"),
        (f"{HERE}:claims_no_schedule", "schedule= one of ring, any"),
    ],
)
def test_what_cannot_be_imported_is_said_and_nothing_is_run(reference: str, says: str) -> None:
    report = check(reference, quick=True, only=("dq",), limit=LIMIT)
    assert says in evidence(report, "loads")
    assert report.failed == ["loads", "dq"]
    assert report.runs == 0


@pytest.mark.thorough
def test_an_import_without_end_hits_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "import_hangs.py").write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ringlab.conformance.run.isolation.START_SECONDS", 20.0)
    report = check("import_hangs:ring", quick=True, only=("dq",), limit=1.0)
    assert evidence(report, "loads").startswith("over the limit: the limit of 11 s for its import")


@pytest.mark.thorough
def test_while_the_machine_stands_still_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standstill of the machine is not taken for a hang; the clock jumps by 15 minutes now and then."""
    looks = itertools.count()
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 900.0 * (next(looks) // 50), sleep=time.sleep
    )
    for module in ("ringlab.comm.processes.children", "ringlab.conformance.run.isolation"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr("ringlab.conformance.run.isolation.START_SECONDS", 600.0)
    report = check("ringlab.plain_ring:attend", quick=True, only=("dq", "strided"), limit=30.0)
    assert report.failed == [] and next(looks) > 50
