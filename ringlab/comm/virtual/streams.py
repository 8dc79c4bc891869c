"""CUDA streams: a stream for each virtual rank, and the time for which computations wait for a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ringlab.comm.protocol import AnyTensor, Tensors

_NOTHING = nullcontext()


class Stall:
    """The time for which computations on a GPU's current stream wait for messages.

    `float(stall)` waits for the GPU and returns seconds. Pickling converts the stall to a float first.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._before = torch.cuda.Event(enable_timing=True)
        self._after = torch.cuda.Event(enable_timing=True)
        self._before.record(self._stream)

    def until(self, events: Sequence[torch.cuda.Event]) -> None:
        """Make all work launched from now on wait for `events`. The host does not wait."""
        for event in events:
            self._stream.wait_event(event)
        self._after.record(self._stream)

    def __float__(self) -> float:
        self._after.synchronize()
        return self._before.elapsed_time(self._after) / 1000

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float]]:
        return float, (float(self),)


def stall_of(tensors: Tensors) -> Stall | None:
    """Return a stall that begins now if any of `tensors` is on a GPU, or else None."""
    return next((Stall(t.device) for t in tensors if t.is_cuda), None)


class RankStreams:
    """A stream of the current GPU for each virtual rank, or no streams if no GPU is in use yet.

    The streams begin after all work that the calling thread has launched. `join` makes that thread wait for
    the streams.
    """

    def __init__(self, world_size: int) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if torch.cuda.is_initialized():
            self._caller = torch.cuda.current_stream()
            self._streams = [torch.cuda.Stream() for _ in range(world_size)]
            for stream in self._streams:
                stream.wait_stream(self._caller)

    def of(self, rank: int) -> Any:
        """Return a context manager in which this thread launches work on the stream of `rank`."""
        return torch.cuda.stream(self._streams[rank]) if self._streams else _NOTHING

    def meeting(self, sender: int, receiver: int, *tensors: AnyTensor) -> Any:
        """Return a context manager in which `tensors` can be handed from one rank to the other.

        Kernels launched inside run after all work that the two ranks have launched, and before any work that
        one of them launches later.
        """
        on_gpu = self._streams and any(t.is_cuda for t in tensors)
        return self._handing_over(sender, receiver, tensors) if on_gpu else _NOTHING

    @contextmanager
    def _handing_over(self, sender: int, receiver: int, tensors: Sequence[Tensor]) -> Iterator[None]:
        one, other = self._streams[sender], self._streams[receiver]
        other.wait_stream(one)
        with torch.cuda.stream(other):
            yield
        one.wait_stream(other)
        for tensor in tensors:  # the rank that frees a tensor may differ from the rank that made it
            tensor.record_stream(one)
            tensor.record_stream(other)

    def join(self) -> None:
        """Make all work that the constructor's thread launches from now on wait for all ranks."""
        for stream in self._streams:
            self._caller.wait_stream(stream)
