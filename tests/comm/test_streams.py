"""The stream of each launch, and the order in which launches wait for each other; no GPU is needed.

A stand-in for torch.cuda records which launch waits for which other launch, and nothing is computed. The
tests show only that a GPU would get the right commands in the right order, not that the GPU obeys them.
"""

from __future__ import annotations

import pickle
import threading
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.background import Lane
from ringlab.comm.processes.carriers import PointToPoint
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


def test_nccl_has_a_stream_that_the_computation_waits_for_by_event(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = SimpleNamespace(wait=lambda: cuda.launch("wait for NCCL"))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: cuda.launch("NCCL begins") or [work])
    carrier = PointToPoint(None)
    ops = [SimpleNamespace(tensor=FakeTensor(cuda, name)) for name in ("sent", "received")]
    for _ in range(2):
        cuda.launch("earlier kernels, which may use the buffers")
        move = carrier._on_stream(ops, carrier._lines[None])
        cuda.launch("the block that is here")
        stall = stall_of([torch.zeros(1), ops[0].tensor])
        assert stall is not None
        move.wait(1.0)
        stall.until([move.event])
        cuda.launch("the block that came")
        first, *_ = log = list(cuda.log)
        cuda.log.clear()
        assert first == "compute: earlier kernels, which may use the buffers"
        assert log[1:] == [
            "stream 1 waits for all on compute",
            "stream 1: NCCL begins",
            "stream 1: wait for NCCL",
            "sent is in use on stream 1",
            "received is in use on stream 1",
            "stream 1 reaches event 6",
            "compute: the block that is here",
            "compute reaches event 8",
            "compute waits for event 6 of stream 1",
            "compute reaches event 10",
            "compute: the block that came",
        ]


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
    """A stand-in for torch's symmetric memory on one rank. It finds a group by name, as torch does from 2.11 on.

    asked: whether a group must be enabled first, as torch 2.10 asks for it.
    Source: PyTorch's pull request 172163, and its release notes of 2.11.
    """

    asked = False
    enabled: ClassVar[set[str]] = set()

    @staticmethod
    def empty_strided_p2p(
        size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: Any, group: str
    ) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    @classmethod
    def set_group_info(cls, name: str, *_: Any) -> None:
        cls.enabled.add(name)

    @classmethod
    def rendezvous(cls, memory: Tensor, name: str) -> SimpleNamespace:
        if cls.asked and name not in cls.enabled:
            raise RuntimeError(f"get_group_info: no group info associated with the group name {name}")
        assert dist.distributed_c10d._resolve_process_group(name).size() == 1
        return SimpleNamespace(get_buffer=lambda owner, size, dtype, start: memory[start : start + size[0]])


@pytest.mark.filterwarnings("error")  # torch warns of each use of enable_symm_mem_for_group
@pytest.mark.parametrize("asked", [False, True], ids=["torch 2.11 and later", "torch 2.10"])
def test_a_group_need_not_be_enabled_for_symmetric_memory(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window opens on a group that nobody enabled, from torch 2.11 on, which ringlab asks for."""
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", FakeSymmetricMemory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(FakeSymmetricMemory, "asked", asked)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.new_group(backend="gloo")
        if asked:
            with pytest.raises(RuntimeError, match="no group info"):
                SymmetricMemory(8, 0, group, 1.0)
            return
        window = SymmetricMemory(8, 0, group, 1.0)
        window.put(0, 2, [torch.arange(3, dtype=torch.uint8)])
        assert window.view(0, 0, 8).tolist() == [0, 0, 0, 1, 2, 0, 0, 0] and not FakeSymmetricMemory.enabled
    finally:
        dist.destroy_process_group()


def test_ringlab_asks_for_a_torch_whose_groups_need_not_be_enabled() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert "torch>=2.11" in project["dependencies"]


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
