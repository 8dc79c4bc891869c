"""A machine's transports are known, and an error about a transport that it lacks names another one.

The parent of a launch gets every event while the ranks run, once, in order, and complete.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringlab import connect, launch
from ringlab.comm.processes import connect as connecting
from ringlab.comm.processes.connect import BACKENDS, TRANSPORTS, available, check
from ringlab.comm.processes.failure_board import Told, Watch, events_path
from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.comm.wrappers.faulty import Fault
from ringlab.errors import BackendError, RankFailedError


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool = True, peers: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)


def test_every_transport_has_a_process_group() -> None:
    assert set(available()) == set(TRANSPORTS) == set(BACKENDS)


@pytest.mark.parametrize(
    ("gpus", "missing"),
    [(0, {"nccl", "symmetric", "shared-gpu"}), (1, {"nccl", "symmetric"}), (2, set()), (8, set())],
)
def test_what_is_available(monkeypatch: pytest.MonkeyPatch, gpus: int, missing: set[str]) -> None:
    machine(monkeypatch, gpus)
    found = available()
    assert {name for name, reason in found.items() if reason} == missing
    for reason in filter(None, found.values()):
        assert reason.startswith("needs a GPU")
        assert f"found {gpus} GPU" in reason
        assert "transport='gloo'" in reason


@pytest.mark.parametrize(
    ("name", "settings", "got", "remedy"),
    [
        ("nccl", {"gpus": 0}, "0 GPUs", "use transport='gloo' with tensors on the CPU"),
        ("nccl", {"gpus": 1}, "1 GPU", "use transport='shared-gpu', or transport='gloo'"),
        ("nccl", {"gpus": 4, "nccl": False}, f"torch {torch.__version__}", "use transport='gloo'"),
        ("symmetric", {"gpus": 1}, "1 GPU", "use transport='shared-gpu', or transport='gloo'"),
        ("symmetric", {"gpus": 4, "peers": False}, "GPU 0 cannot access GPU 1", "use transport='nccl'"),
        ("smoke signals", {"gpus": 4}, "'smoke signals'", ""),
    ],
)
def test_what_cannot_run_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict, got: str, remedy: str
) -> None:
    machine(monkeypatch, **settings)
    for refuse in (lambda: check(name, 2), lambda: launch(print, 2, transport=name)):
        with pytest.raises(BackendError) as caught:
            refuse()
        assert caught.value.got.startswith(got)
        assert caught.value.remedy.startswith(remedy)
        assert name in str(caught.value)


def test_a_torch_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    with pytest.raises(BackendError, match="torch 2.11 or later, with symmetric memory") as caught:
        check("symmetric", 2)
    assert caught.value.remedy == "use transport='nccl'"


def test_without_any_gpu_the_cpu_takes_the_place_of_those_that_need_no_wire() -> None:
    if torch.cuda.device_count() == 0:
        check("symmetric", 4)
        check("shared-gpu", 4)
    assert connecting.lack("gloo", 100) is None


def test_symmetric_memory_is_that_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BackendError, match="all ranks on one machine") as caught, connect("symmetric"):
        pass
    assert (caught.value.got, caught.value.remedy) == ("2 of 4 ranks here", "use transport='nccl'")
    with pytest.raises(BackendError, match="one of the transports"), connect(transport="smoke"):
        pass


class OnTheGpu:
    """A stall whose duration is stored on the GPU, so that code that reads the duration waits for the GPU."""

    def __float__(self) -> float:
        raise AssertionError("read while the run goes on")

    def __reduce__(self) -> tuple[object, ...]:
        raise AssertionError("sent to another process")


@given(cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_events_are_read_whole_wherever_the_file_ends_just_now(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    events = [Compute(0, f"attend {n}", float(n), n + 0.5) for n in range(12)]
    content = b"".join(map(pickle.dumps, events))
    seen: list[int] = []
    watch = Watch(folder, 1, lambda trace: seen.append(len(trace.events)))
    for end in [*sorted(cuts), len(content)]:
        events_path(folder, 0).write_bytes(content[:end])
        watch.look_now()
    assert watch.trace.events == events
    assert seen == sorted(set(seen)) and seen[-1] == len(events)  # each call has at least one new event


def test_a_stall_on_a_gpu_is_not_read_and_a_report_carries_a_plain_list(tmp_path: Path) -> None:
    told = Told(events_path(tmp_path, 0))
    event = Exchange(0, 0, "kv", 1, 1, 8, 8, ((2,),), 0.0, 1.0, 1.5, OnTheGpu())
    told.append(event)
    watch = Watch(tmp_path, 1, lambda trace: None)
    watch.look_now()
    assert told[0] is event and watch.trace.events[0].exposed == 0.5
    told[:] = [Compute(0, "attend 0", 0.0, 1.0)]
    again = pickle.loads(cloudpickle.dumps(told))
    assert type(again) is list and again == told


def _waits_to_be_seen(ring, sign: str) -> int:  # type: ignore[no-untyped-def]
    """Run in two parts, the second of which waits until the parent has seen an event of the first."""
    ring.compute("first", lambda: None)
    while not Path(sign).exists():
        time.sleep(0.01)
    ring.compute("second", lambda: None)
    return ring.rank


def test_the_parent_sees_events_while_the_ranks_run_and_in_the_end_all_of_them(tmp_path: Path) -> None:
    sign, told = tmp_path / "seen", list[int]()

    def watch(trace: Trace) -> None:
        told.append(len(trace.events))
        if {event.rank for event in trace.computes()} == {0, 1}:
            sign.touch()

    run = launch(_waits_to_be_seen, 2, str(sign), watch=watch)
    assert run.results == [0, 1]
    assert told == sorted(told) and told[0] < told[-1] == len(run.trace.events) == 4


def _one_dies(ring) -> None:  # type: ignore[no-untyped-def]
    import torch

    ring.compute("first", lambda: None)
    ring.shift(torch.zeros(1))


def test_of_a_rank_that_dies_all_is_told_that_it_did_before() -> None:
    traces: list[Trace] = []
    with pytest.raises(RankFailedError):
        launch(_one_dies, 2, faults=[Fault("kill", rank=1, exchange=0)], watch=traces.append)
    assert [event.label for event in traces[-1].computes(1)] == ["first"]
