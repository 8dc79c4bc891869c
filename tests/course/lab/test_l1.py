"""Lab L1's clock of a GPU times the call alone, and keeps the GPU busy before it; the events are made up."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab_course.lab import l1
from ringlab_course.lab.report import report

PASS_S, CALL_S, POSTING_S = 0.001, 0.00003, 0.0002


class Machine:
    """A GPU with a queue and Python's clock beside it, in seconds.

    Overwriting the buffer takes PASS_S on the GPU. A call takes CALL_S there and POSTING_S of Python's time.
    """

    def __init__(self) -> None:
        self.host, self.free = 0.0, 0.0
        self.log: list[str] = []

    def queue(self, what: str, seconds: float, posting: float = 0.0) -> None:
        self.log.append(what)
        self.host += posting
        self.free = max(self.free, self.host) + seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class Event:
        made: ClassVar[Machine]

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            made.log.append("event")
            self.at = max(made.free, made.host)

        def synchronize(self) -> None:
            made.log.append("synchronize")
            made.host = max(made.host, made.free)

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    class Buffer:
        def zero_(self) -> None:
            made.queue("other", PASS_S)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: Event(True).synchronize())
    monkeypatch.setattr(l1.torch, "empty", lambda *_, **__: Buffer())
    monkeypatch.setattr(l1.time, "perf_counter", lambda: made.host)
    return made


def on_one_rank(program: Any) -> Any:
    return VirtualCluster(1, memory=False).run(program).results[0]


def test_the_clock_counts_the_gpus_seconds_of_a_call_and_not_pythons(machine: Machine) -> None:
    def program(ring: Ring) -> tuple[list[float], list[float]]:
        clock = l1.Queued(ring, torch.device("cuda"))
        posting: list[float] = []
        call = lambda: l1._run(lambda: machine.queue("call", CALL_S, POSTING_S), posting, None)  # noqa: E731
        return [clock.seconds(call) for _ in range(3)], posting

    seconds, posting = on_one_rank(program)
    assert seconds == pytest.approx([CALL_S] * 3)
    assert posting == pytest.approx([POSTING_S] * 3 * l1.Queued.CALLS)
    # After the first round the clock knows how long posting takes, and keeps the GPU busy for twice as long.
    last = machine.log[-(l1.Queued.CALLS + 3) :]
    assert last == ["event", *["call"] * l1.Queued.CALLS, "event", "synchronize"]
    before = machine.log[: -len(last)][::-1]
    assert before.index("synchronize") == 4 == before.count("other") - before[4:].count("other")


def test_without_other_work_it_would_count_pythons_seconds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant that queues no other work before its events counts the time that Python takes."""
    monkeypatch.setattr(l1.math, "ceil", lambda passes: 0)

    def program(ring: Ring) -> float:
        clock = l1.Queued(ring, torch.device("cuda"))
        return clock.seconds(lambda: machine.queue("call", CALL_S, POSTING_S))

    assert on_one_rank(program) > POSTING_S - CALL_S > 4 * CALL_S


def test_the_report_has_pythons_seconds_where_a_gpu_took_part() -> None:
    from pathlib import Path

    from ringlab_course.lab.result import load

    file = Path(__file__).parents[3] / "benchmarks/results/lab/l1-two-processes.json"
    found = load(file)
    assert "posted by Python" not in report({file: found})[0]
    for case in found["cases"]:
        case["host_s"] = 0.000171
    assert "expected" not in report({file: found})[0]
    found["machine"]["gpu"] = {"name": "NVIDIA H200"}
    page, _ = report({file: found})
    assert "posted by Python in" in page and "171 µs" in page
    assert "Beside what is expected of this GPU" in page and "NVLink 4, one way" in page
