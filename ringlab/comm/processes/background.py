"""Transfers that run in the background, one after the other, on a separate thread (and stream, on a GPU)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch

from ringlab.comm.processes.wire_format import Move
from ringlab.comm.protocol import AnyTensor, Bytes, Tensors
from ringlab.errors import MismatchError

_PATIENCE = 2.0  # seconds for which `close` waits for a background thread to end


class Lane:
    """Does jobs in the order in which they were submitted, on a separate thread.

    On a GPU a job begins when the kernels launched before it have finished, and its copies run on a separate
    stream. If a job fails with an error other than MismatchError, this rank and its peer may no longer be at
    the same message, so every later job fails with the same error.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Job, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._stream: torch.cuda.Stream | None = None
        self._broken: BaseException | None = None

    def submit(self, function: Callable[[], None], tensors: Tensors) -> Move:
        """Queue `function`, which reads and writes `tensors`, and return the move to wait for."""
        job = _Job()
        on_gpu = [t for t in tensors if t.is_cuda]
        if on_gpu:  # the current stream belongs to the program's thread, whose kernels the job must wait for
            device = on_gpu[0].device
            if self._stream is None:
                # The stream has high priority, so that its short kernels do not wait behind queued
                # computations.
                self._stream = torch.cuda.Stream(device, priority=-1)
            job.ready = torch.cuda.current_stream(device).record_event()
            for tensor in on_gpu:
                tensor.record_stream(self._stream)
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((job, function))
        return job

    def close(self) -> None:
        """End the thread, unless it waits for a transfer that never arrives."""
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, function = task
            del task
            self._do(job, function)
            # Delete this first, because it refers to tensors, and a caller may count live tensors when the
            # job is done.
            del function
            job.over.set()
            del job

    def _do(self, job: _Job, function: Callable[[], None]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            with torch.no_grad():
                self._launch(job, function)
        except BaseException as error:
            job.error = error
            if not isinstance(error, MismatchError):
                self._broken = error

    def _launch(self, job: _Job, function: Callable[[], None]) -> None:
        if self._stream is None:
            function()
            return
        with torch.cuda.stream(self._stream):
            if job.ready is not None:
                self._stream.wait_event(job.ready)
            function()
            job.event = self._stream.record_event()


class _Job(Move):
    def __init__(self) -> None:
        self.ready: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def wait(self, timeout: float) -> None:
        """Wait until the job is done or, on a GPU, until all its work has been launched.

        Raises: the job's own error; RuntimeError after `timeout` seconds.
        """
        if not self.over.wait(timeout):
            raise RuntimeError(f"timed out after {timeout:g} s")
        if self.error is not None:
            raise self.error


def as_bytes(tensor: AnyTensor) -> Bytes:
    """Return the memory of a contiguous tensor as an array of bytes."""
    if not tensor.numel():  # NumPy's empty arrays have stride 0, so they cannot be viewed as bytes
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


def copy(source: Bytes, into: Bytes) -> None:
    """Copy bytes.

    On the CPU only this thread copies, because torch's threads would take the program's cores.
    """
    if source.device.type == into.device.type == "cpu":
        np.copyto(into.numpy(), source.numpy())
    else:
        into.copy_(source, non_blocking=True)
