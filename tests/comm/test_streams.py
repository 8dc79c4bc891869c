"""A GPU would get each launch on the right stream, and launches would wait for the right other launches.

A stand-in for torch.cuda records which launch waits for which other launch, and nothing is computed. The
tests show only that a GPU would get the right commands in the right order, not that the GPU obeys them.
"""

from __future__ import annotations

import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.background import Lane
from ringlab.comm.processes.shared_memory import SymmetricMemory
from ringlab.comm.trace import Exchange, Trace
from ringlab.comm.virtual.streams import RankStreams, Stall, stall_of


class FakeCuda:
    """A stand-in for torch.cuda: streams are names, and `log` has a line for each launch and each record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.compute = FakeStream(self, "compute")
        self._current = threading.local()
        self._made = 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @property
    def current(self) -> FakeStream:
        return getattr(self._current, "stream", self.compute)

    def launch(self, what: str) -> None:
        self.log.append(f"{self.current.name}: {what}")

    def _stream(self, device=None, priority: int = 0) -> FakeStream:
        self._made += 1
        return FakeStream(self, f"stream {self._made}")

    @contextmanager
    def _on(self, stream: FakeStream):
        before, self._current.stream = self.current, stream
        yield
        self._current.stream = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for all on {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.where}")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.cuda)
        event.record(self)
        return event


class FakeEvent:
    where = "nothing"
    reached = False

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.where = f"event {len(self.cuda.log)} of {stream.name}"
        self.cuda.log.append(f"{stream.name} reaches event {len(self.cuda.log)}")

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.reached, "torch would raise, because nothing waited for the event"
        return 1500.0


class FakeTensor:
    """A stand-in for a CUDA tensor, with the few attributes that the order of launches depends on."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} is in use on {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_lane_begins_after_what_was_launched_before_and_ends_in_an_event(cuda: FakeCuda) -> None:
    lane = Lane("test")
    tensor = FakeTensor(cuda, "tensor")
    move = lane.submit(lambda: cuda.launch("copy"), [tensor])
    move.wait(60.0)
    assert cuda.log == [
        "compute reaches event 0",
        "tensor is in use on stream 1",
        "stream 1 waits for event 0 of compute",
        "stream 1: copy",
        "stream 1 reaches event 4",
    ]
    assert move.event.where == "event 4 of stream 1"
    lane.submit(lambda: cuda.launch("no tensors, same stream"), []).wait(60.0)
    assert cuda.log[5] == "stream 1: no tensors, same stream"
    lane.close()


def test_the_real_symmetric_memory_takes_these_arguments() -> None:
    """The real symmetric memory accepts the arguments: without a GPU it refuses only the device."""
    from torch._C._distributed_c10d import _SymmetricMemory

    for name, words in {
        "get_buffer": ("rank", "sizes: Tuple[int, ...]", "dtype", "storage_offset"),
        "put_signal": ("dst_rank", "channel", "timeout_ms"),
        "wait_signal": ("src_rank", "channel", "timeout_ms"),
    }.items():
        signature = getattr(_SymmetricMemory, name).__doc__
        places = [signature.index(word) for word in words]
        assert places == sorted(places), signature
    with pytest.raises(RuntimeError) as caught:
        _SymmetricMemory.rendezvous(torch.zeros(3), "no such group")
    assert not isinstance(caught.value, TypeError)
    if not torch.cuda.is_available():
        device = torch.device("cuda", 0)
        with pytest.raises(RuntimeError, match="does not support device type cuda"):
            _SymmetricMemory.empty_strided_p2p((4,), (1,), torch.uint8, device, "g")


class FakeSymmetricMemory:
    """A stand-in for torch's symmetric memory on one rank. It finds a group by name, as torch does from 2.11 on."""

    @staticmethod
    def empty_strided_p2p(
        size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: Any, group: str
    ) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    @classmethod
    def rendezvous(cls, memory: Tensor, name: str) -> SimpleNamespace:
        assert dist.distributed_c10d._resolve_process_group(name).size() == 1
        return SimpleNamespace(get_buffer=lambda owner, size, dtype, start: memory[start : start + size[0]])


@pytest.mark.filterwarnings("error")  # torch warns of each use of enable_symm_mem_for_group
def test_a_group_need_not_be_enabled_for_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", FakeSymmetricMemory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        window = SymmetricMemory(8, 0, dist.new_group(backend="gloo"), 1.0)
        window.put(0, 2, [torch.arange(3, dtype=torch.uint8)])
        assert window.view(0, 0, 8).tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
    finally:
        dist.destroy_process_group()


def test_virtual_ranks_meet_on_their_streams(cuda: FakeCuda) -> None:
    streams = RankStreams(2)
    with streams.of(1):
        cuda.launch("computation of rank 1")
    with streams.of(0), streams.meeting(0, 1, FakeTensor(cuda, "block")):
        cuda.launch("copy")
    cuda.launch("computation of the caller")
    streams.join()
    assert cuda.log == [
        "stream 1 waits for all on compute",
        "stream 2 waits for all on compute",
        "stream 2: computation of rank 1",
        "stream 2 waits for all on stream 1",
        "stream 2: copy",
        "stream 1 waits for all on stream 2",
        "block is in use on stream 1",
        "block is in use on stream 2",
        "compute: computation of the caller",
        "compute waits for all on stream 1",
        "compute waits for all on stream 2",
    ]


def test_without_a_gpu_streams_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    streams = RankStreams(3)
    with streams.of(2), streams.meeting(0, 1, torch.zeros(3)):
        pass
    streams.join()
    assert stall_of([torch.zeros(3)]) is None


def test_the_stall_of_a_gpu_is_what_counts_as_exposed_and_travels_as_a_number(cuda: FakeCuda) -> None:
    stall = Stall(torch.device("cuda", 0))
    stall.until([])
    [event] = [e for e in (stall._after,) if not e.reached]
    assert not event.reached, "the event is not read until somebody asks for the time"
    shift = Exchange(0, 0, "kv 0", 1, 1, 8, 8, ((2,),), posted=0.0, waited=1.0, done=9.0, stall=stall)
    trace = Trace(1, [shift])
    assert trace.exposed(0) == shift.exposed == 1.5
    assert pickle.loads(pickle.dumps(shift)).stall == 1.5
