"""The memory of a rank's tensors: live bytes, their peak, and the largest single tensor."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.comm.protocol import AnyTensor


@dataclass(frozen=True)
class MemoryReport:
    """The bytes of the tensors that one rank's program made.

    peak_bytes: the most bytes that were live at once; largest_bytes: the largest single allocation; live_bytes: the
    bytes still live at the end. Tensors handed to the program and scratch space inside an operator are not counted.
    """

    rank: int
    peak_bytes: int
    largest_bytes: int
    live_bytes: int


class MemoryMeter:
    """Counts the tensors that operators return while one of its `watch()` contexts is open.

    A context watches one thread. Several threads may watch for the same meter, as when another thread works on a rank's
    behalf.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        # Worker threads and other ranks' hand-overs update these counts, and a weakref callback may run at any time.
        self._lock = threading.RLock()
        self._storages: dict[int, tuple[weakref.ref[Any] | None, int]] = {}

    def watch(self) -> TorchDispatchMode:
        """Return a context manager inside which this thread's tensors are counted."""
        return Watch(self)

    def report(self) -> MemoryReport:
        """Return the figures so far."""
        return MemoryReport(self.rank, self.peak_bytes, self.largest_bytes, self.live_bytes)

    def ignore(self, tensor: AnyTensor) -> None:
        """Leave the memory of `tensor` out if the meter does not know it yet: this rank did not make it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._remember(storage, 0)

    def counted(self, tensor: AnyTensor) -> int:
        """Return the bytes that are counted for the memory of `tensor`."""
        return self._storages.get(tensor.untyped_storage()._cdata, (None, 0))[1]

    def trade(self, gone: AnyTensor, come: AnyTensor, nbytes: int) -> None:
        """Count `nbytes` for the memory of `come`, which another rank made, in place of that of `gone`."""
        # Both at once: a computation of this rank may be under way, and its peak is to be exact.
        with self._lock:
            self.live_bytes -= self.counted(gone)
            self._storages.pop(gone.untyped_storage()._cdata, None)
            self._remember(come.untyped_storage(), nbytes)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._remember(storage, storage.nbytes())

    def _remember(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata

        def forget(reference: Any) -> None:
            # The key may stand for a newer storage by now, or for none.
            with self._lock:
                if self._storages.get(key, (None, 0))[0] is reference:
                    del self._storages[key]
                    self.live_bytes -= nbytes

        with self._lock:
            self._storages[key] = weakref.ref(storage, forget), nbytes
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.largest_bytes = max(self.largest_bytes, nbytes)


class Watch(TorchDispatchMode):
    """Shows a meter what the operators of this thread return."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, and triton with it, to keep it away from here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:  # views and in-place results of inputs are no new memory
            if isinstance(argument, torch.Tensor):
                self.meter.ignore(argument)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.meter._count(value)
        return result
