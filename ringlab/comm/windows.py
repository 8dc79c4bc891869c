"""Windows: memory of every rank of a machine that all its ranks can read, and signals between them.

Two kinds: shared memory between processes on the CPU, and torch's symmetric memory on GPUs, where
a read is a copy by the reader's copy engine, which takes no multiprocessor from the computation.
What is put, got and signalled when is up to `symmetric`, the same for both.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from ringlab.comm.lanes import copy
from ringlab.errors import BackendError, CommError

FULL, FREE = 0, 2
"""Channels of signals: a slot is full, or has been read; add the number of the slot."""
_CHANNELS = 4
_SIGNALS = 1 << 16  # that gloo can tell apart on one channel; one is under way
_WINDOWS = 1 << 12  # gloo's numbers are signed 32-bit
_SIGNAL_BYTES = 4  # that torch keeps per rank and channel


class Window(ABC):
    """`nbytes` of each rank. Opening one is collective.

    All calls happen on a lane, in the order of the calls there. A signal is seen after all that was
    put and got before it. A channel holds one signal: the next waits until the last was waited for.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def view(self, owner: int, start: int, nbytes: int) -> Tensor:
        """Return the bytes from `start` on of rank `owner`'s memory, as uint8."""

    @abstractmethod
    def signal(self, peer: int, channel: int) -> None:
        """Send `peer` a signal on `channel`."""

    @abstractmethod
    def wait(self, peer: int, channel: int) -> None:
        """Wait for the signal of `peer` on `channel`. Raises: RuntimeError when it does not come."""

    def settle(self, peer: int, channel: int) -> None:  # noqa: B027 (on a GPU signals need no host)
        """Return when the last signal to `peer` on `channel` is on its way for good."""

    def put(self, rank: int, start: int, parts: list[Tensor]) -> None:
        """Write `parts`, vectors of bytes, one after the other into this rank's own memory."""
        for part in parts:
            copy(part, self.view(rank, start, part.numel()))
            start += part.numel()

    def get(self, owner: int, start: int, parts: list[Tensor]) -> None:
        """Fill `parts` one after the other from the memory of `owner`."""
        for part in parts:
            copy(self.view(owner, start, part.numel()), part)
            start += part.numel()


class SharedMemory(Window):
    """Memory shared by processes of one machine; signals are one-byte messages over gloo.

    So a rank that dies, or never signals, is noticed as on the transport 'gloo'. No file is left
    behind: each is removed as soon as all ranks have opened it. `number` tells the windows of a
    group apart.
    """

    def __init__(self, nbytes: int, number: int, group: dist.ProcessGroup, timeout: float) -> None:
        super().__init__(nbytes)
        self.group, self.timeout = group, timedelta(seconds=timeout)
        with _file_of(max(nbytes, 1)) as file:
            names: list[str] = [""] * dist.get_world_size(group)
            dist.all_gather_object(names, file.name, group=group)
            self._memory = [_mapped(Path(name)) for name in names]
            dist.all_reduce(torch.zeros(1), group=group)  # a barrier: all have opened it
        self._sent: dict[tuple[int, int], dist.Work] = {}
        self._first = number % _WINDOWS * _SIGNALS * _CHANNELS
        self._counts: defaultdict[tuple[str, int, int], int] = defaultdict(int)

    def view(self, owner: int, start: int, nbytes: int) -> Tensor:
        return self._memory[owner][start : start + nbytes]

    def signal(self, peer: int, channel: int) -> None:
        self.settle(peer, channel)
        note = torch.zeros(1, dtype=torch.uint8)
        number = self._number("sent", peer, channel)
        work = dist.isend(note, group=self.group, group_dst=peer, tag=number)
        assert work is not None
        self._sent[peer, channel] = work  # gloo forgets a message whose work is dropped

    def wait(self, peer: int, channel: int) -> None:
        number = self._number("received", peer, channel)
        note = torch.zeros(1, dtype=torch.uint8)
        work = dist.irecv(note, group=self.group, group_src=peer, tag=number)
        assert work is not None
        work.wait(self.timeout)

    def settle(self, peer: int, channel: int) -> None:
        last = self._sent.pop((peer, channel), None)
        if last is not None:
            last.wait(self.timeout)

    def _number(self, way: str, peer: int, channel: int) -> int:
        self._counts[way, peer, channel] += 1
        return self._first + self._counts[way, peer, channel] % _SIGNALS * _CHANNELS + channel


class SymmetricMemory(Window):
    """torch's symmetric memory, of GPUs that can read each other's."""

    def __init__(self, nbytes: int, number: int, group: dist.ProcessGroup, timeout: float) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        super().__init__(nbytes)
        self._timeout_ms = int(timeout * 1000)
        need = _CHANNELS * dist.get_world_size(group) * _SIGNAL_BYTES
        if _SymmetricMemory.signal_pad_size < need:
            raise BackendError(
                f"{need} bytes for signals", f"{_SymmetricMemory.signal_pad_size}", "use 'nccl'"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        # Memory of its own, not of a pool: a block's signals are zero when it is new.
        self._memory = _SymmetricMemory.empty_strided_p2p(
            (nbytes,), (1,), torch.uint8, device, group.group_name
        )
        self._handle = _SymmetricMemory.rendezvous(self._memory, group.group_name)

    def view(self, owner: int, start: int, nbytes: int) -> Tensor:
        return self._handle.get_buffer(owner, (nbytes,), torch.uint8, start)

    def signal(self, peer: int, channel: int) -> None:
        self._handle.put_signal(peer, channel, self._timeout_ms)

    def wait(self, peer: int, channel: int) -> None:
        """Make the lane's stream wait; a signal that does not come within the timeout is a CUDA error."""
        self._handle.wait_signal(peer, channel, self._timeout_ms)


def _file_of(nbytes: int) -> IO[bytes]:
    """Return a file of this user alone, in memory where there is room; removed when it is closed."""
    folders = ["/dev/shm"] if os.path.isdir("/dev/shm") else []
    for folder in [*folders, tempfile.gettempdir()]:
        file = tempfile.NamedTemporaryFile(prefix="ringlab-", dir=folder)  # noqa: SIM115 (the caller closes it)
        try:
            if hasattr(os, "posix_fallocate"):  # a page that there is no room for would kill the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
            return file
        except OSError as error:
            file.close()
            problem = error
    raise CommError(
        f"{nbytes} bytes of shared memory or temporary files for each rank",
        str(problem),
        "use transport='gloo'",
    )


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
