"""The accelerator under a benchmark: its clock, its caches and its memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.deterministic
from torch import Tensor

from ringlab.errors import DeviceError

NEEDED = "an NVIDIA GPU"
REMEDY = "on a machine with one, run `make gpu`"
FLUSHES = 8
"""Passes over a buffer of twice the L2 before each timed run: the GPU is busy while Python prepares the launch."""


def no_cuda() -> str | None:
    """Return why nothing can run on a GPU here, None if it can; tests and `ringlab doctor` say the same."""
    found = _without_cuda()
    return f"needs {NEEDED}: {found}; {REMEDY}" if found else None


def _without_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no GPU with a driver for CUDA {torch.version.cuda}"


def fill_with_nan(tensor: Tensor) -> None:
    """Set every bit of the memory of `tensor`, which is NaN in every float format."""
    every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    every_byte.set_(tensor.untyped_storage()).fill_(0xFF)


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """In this block every tensor that torch makes without filling it is full of NaN, on every thread.

    torch does so as part of its deterministic mode, so operators may choose other algorithms meanwhile.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = filling
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)


class Device(Protocol):
    """What a benchmark asks of the machine it runs on; tests put a scripted one in its place."""

    name: str
    """As torch knows it: "cuda"."""

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return how long the device is busy from the first to the last operation of `run`."""
        ...

    def settle(self) -> None:
        """Forget the caches, and give the device work enough that the next launch is not waited for."""
        ...

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        """Write NaN over `outputs`; when they are freed, the next outputs are likely to lie there."""
        ...

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Return the most bytes that were allocated during `run`, beyond what was before it."""
        ...


class Cuda:
    """The current CUDA device, timed by its own events."""

    name = "cuda"

    def __init__(self) -> None:
        if found := _without_cuda():
            cpu = "`ringlab bench emulate` and `ringlab bench processes` measure the same ring on a CPU"
            raise DeviceError(NEEDED, found, f"{REMEDY}; {cpu}")
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.empty(2 * max(l2, 64 * 2**20), dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = run()  # kept until the end: freeing is no part of the work
        end.record()
        end.synchronize()
        del kept
        return begin.elapsed_time(end) / 1000

    def settle(self) -> None:
        torch.cuda.synchronize()
        for _ in range(FLUSHES):
            self._buffer.zero_()

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        torch.cuda.synchronize()
        for output in outputs:
            fill_with_nan(output)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
