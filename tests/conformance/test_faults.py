"""When a neighbour dies, a target must report an error: one that hangs or returns a result fails."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from ringlab import ring_attention
from ringlab.comm.processes.launch import ProcessesFailedError
from ringlab.conformance.checks.faults import FAULT_CHECKS
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.run import Ran, RankResult, Run, Trouble
from ringlab.conformance.run.troubles import stopped_in
from ringlab.conformance.suite import check, check_source
from ringlab.conformance.target.claims import Claims, as_target
from tests.conformance.reports import evidence

NEIGHBOURS, DISTRIBUTED = "tests.conformance.bad_targets", "tests.conformance.bad_targets"


LIMIT = 15.0


def on_neighbours(name: str, *only: str, isolate: bool = True, limit: float = LIMIT) -> Report:
    return check(f"{NEIGHBOURS}:{name}", quick=False, only=only, limit=limit, isolate=isolate)


@pytest.mark.parametrize("name", ["zeros_instead", "nothing_instead", "text_instead"])
def test_whatever_is_returned_without_the_dead_rank_is_a_result(name: str) -> None:
    """A ring that hides the error of a dead rank is found, whether it returns zeros, None or text."""
    report = on_neighbours(name, "rank dies", isolate=False)
    assert report.failed == ["rank dies"]
    assert re.search("rank [02] returns a result all the same", evidence(report, "rank dies"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "waits_instead",
            "the others never end: over the limit: the limit of 15 s for one run (--limit) was reached",
        ),
        ("prints_instead", "the others never end: printed without end: more than 4 MiB in one run"),
    ],
)
def test_who_never_ends_without_the_dead_rank_is_told_the_limit(name: str, says: str) -> None:
    report = on_neighbours(name, "rank dies", "strided")
    assert says in evidence(report, "rank dies")
    assert report.failed == ["rank dies"]  # the suite also made the other check, which passed


@pytest.mark.thorough
def test_who_ends_its_process_without_the_dead_rank_returns_no_result() -> None:
    report = on_neighbours("ends_instead", "rank dies")
    assert report.failed == []
    assert "exit status 7" in evidence(report, "rank dies")


def test_who_sends_nothing_cannot_die_while_sending() -> None:
    report = on_neighbours("sends_nothing", "rank dies", "dies in backward", isolate=False)
    assert {each.name: each.applies for each in report.findings} == {
        "loads": True,
        "rank dies": False,
        "dies in backward": False,
    }
    assert report.failed == []


def test_a_single_message_is_one_at_which_a_rank_can_die() -> None:
    report = on_neighbours("sends_once", "rank dies", isolate=False)
    assert report.failed == []
    assert report.findings[-1].applies and "RankKilled" in evidence(report, "rank dies")


def test_a_signal_is_named() -> None:
    report = on_neighbours("segfaults", "strided", limit=120.0)
    assert "crashed: the process ended with signal SIGSEGV" in evidence(report, "strided")


@pytest.mark.thorough
def test_a_process_that_a_target_left_behind_is_ended() -> None:
    report = on_neighbours("leaves_a_process", "strided")
    found = re.search(r"left behind: (\d+)\.", evidence(report, "strided"))
    assert found is not None, evidence(report, "strided")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not _alive(int(found[1])):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {found[1]} is still there")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not told.strip().startswith("Z")  # a zombie: ended, but its parent has not read its status


@pytest.mark.thorough
@pytest.mark.slow
def test_each_trouble_of_one_process_among_others_is_named_and_the_next_check_is_made() -> None:
    """Rank 1 hangs, crashes, prints, lacks a package and returns None in turn, and then passes a check."""
    says = {
        "types": "a package is missing: No module named 'a_package_that_is_not_there'",
        "grouped heads": "wrong result: a tensor, or a tuple that begins with one, is needed; got None",
        "large logits": "crashed: rank 1: its process ended with status 3",
        "scale": "printed without end: more than 4 MiB in one run",
        "strided": "over the limit: the limit of 8 s for one run (--limit) was reached; rank 0 waits in ",
    }
    report = check(
        f"{DISTRIBUTED}:attend",
        quick=True,
        only=(*says, "layouts"),
        limit=8.0,
        ranks=(2,),
        backward=False,
        schedule="any",
    )
    told = {finding.name: finding.evidence for finding in report.findings if not finding.ok}
    assert {name: says.get(name, "") in text for name, text in told.items()} == dict.fromkeys(says, True), (
        told
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_that_goes_on_without_the_dead_rank_is_found() -> None:
    """A process that would wait for a dead rank for ever is found, even though the launch would stop it."""
    report = check(
        f"{DISTRIBUTED}:waits_for_the_dead",
        only=("rank dies",),
        limit=30.0,
        ranks=(3,),
        backward=False,
        schedule="any",
    )
    assert report.failed == ["rank dies"]
    assert re.search(
        "rank [02] goes on until it is stopped, 5 s after the last error", evidence(report, "rank dies")
    )


@pytest.mark.parametrize(("busy", "failed"), [(1, []), (2, []), (3, ["rank dies"])])
def test_a_rank_that_goes_on_may_be_slow_twice(busy: int, failed: list[str]) -> None:
    """A rank may notice too late on a busy machine, so the runs are repeated and the last verdict counts."""

    class Source:
        made_so_far: ClassVar[list[Run]] = []

        def claims(self) -> Claims:
            return as_target(ring_attention, ranks=(3,)).claims()

        def skip(self, run: Run) -> None:
            pytest.fail("no run is left over")

        def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
            for run in runs:
                self.made_so_far.append(run)
                late = run.fault and self.made_so_far.count(run) <= busy
                trouble = Trouble("raised", "rank 1 is gone") if run.fault else None
                yield Ran(run, trouble=trouble, stopped=(0,) if late else ())

    Source.made_so_far.clear()
    (dies,) = (each for each in FAULT_CHECKS if each.name == "rank dies")
    report = check_source(Source(), [dies])
    assert report.failed == failed
    assert [bool(run.fault) for run in Source.made_so_far] == [False, True] * min(busy + 1, 1 + dies.rounds)


@pytest.mark.parametrize(("raised", "stopped"), [(True, ()), (False, (0,))])
def test_a_rank_that_waits_inside_the_backend_is_no_fault_where_another_raised(
    raised: bool, stopped: tuple[int, ...]
) -> None:
    errors = {0: "stopped by launch 5 s after a failure", 1: "killed by signal SIGKILL"}
    parts = [
        None,
        None,
        RankResult(trouble=Trouble("raised", "Connection reset by peer") if raised else None),
    ]
    assert stopped_in(ProcessesFailedError("all ranks", rank=1, errors=errors), parts) == stopped
