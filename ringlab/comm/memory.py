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

    peak_bytes: the most bytes that were live at the same time. largest_bytes: the largest single allocation.
    live_bytes: the bytes that are still live at the end. Tensors that were passed to the program, and scratch
    memory inside an operator, are not counted.
    """

    rank: int
    peak_bytes: int
    largest_bytes: int
    live_bytes: int


class MemoryMeter:
    """Counts the tensors that operators return while one of its `watch()` contexts is open.

    A context watches one thread. Several threads may watch for the same meter, for example if another thread
    works for the rank.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        # A lock is needed, because worker threads and other ranks that hand over tensors change these counts,
        # and a weakref callback may run at any time.
        self._lock = threading.RLock()
        self._storages: dict[int, tuple[weakref.ref[Any] | None, int]] = {}

    def watch(self) -> TorchDispatchMode:
        """Return a context manager inside which this thread's tensors are counted."""
        return Watch(self)

    def report(self) -> MemoryReport:
        """Return the numbers of bytes so far."""
        return MemoryReport(self.rank, self.peak_bytes, self.largest_bytes, self.live_bytes)

    def ignore(self, tensor: AnyTensor) -> None:
        """Do not count the memory of `tensor`, unless it is counted already. Other code has made the tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._remember(storage, 0)

    def counted(self, tensor: AnyTensor) -> int:
        """Return the bytes that are counted for the memory of `tensor`."""
        return self._storages.get(tensor.untyped_storage()._cdata, (None, 0))[1]

    def trade(self, gone: AnyTensor, come: AnyTensor, nbytes: int) -> None:
        """Stop counting the memory of `gone`, and count `nbytes` for `come`, which another rank made."""
        # Both changes are made under one lock, so that the peak is exact even if this rank computes
        # meanwhile.
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
            # By now the key may belong to a newer storage, or to no storage.
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
    """Reports the tensors that operators of this thread return to a meter."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch would import its compiler, and triton, in order to skip this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:  # views of inputs and in-place results are not new memory
            if isinstance(argument, torch.Tensor):
                self.meter.ignore(argument)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.meter._count(value)
        return result
