"""A stand-in for torch.cuda that writes down what waits for what; no work is done.

It cannot show that a GPU does as told, only that it is told the right things in the right order.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch


class FakeCuda:
    """Streams are names; `log` has a line for everything that is launched or recorded."""

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
        assert other.reached, "it was not waited for, so torch would raise"
        return 1500.0


class FakeTensor:
    """As much of a CUDA tensor as ordering needs."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} is in use on {stream.name}")
