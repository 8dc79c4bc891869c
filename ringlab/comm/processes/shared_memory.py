"""Windows: memory of each rank that all ranks of the machine can read, and signals between the ranks.

There are two kinds: shared memory between processes on the CPU, and torch's symmetric memory on GPUs. On GPUs
the reader's copy engine moves the data, so all multiprocessors remain free for the computation. For both
kinds, the module `symmetric` decides when to put, get and signal.
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

from ringlab.comm.processes.background import copy
from ringlab.comm.protocol import Bytes
from ringlab.errors import CommError

FULL, FREE = 0, 2
"""The channels of the signals "slot 0 is full" and "slot 0 has been read". A slot's number is added."""
_CHANNELS = 4
# The number of signals that gloo can distinguish on a channel. Only one is under way at a time.
_SIGNALS = 1 << 16
_WINDOWS = 1 << 12  # the number of windows whose messages gloo can distinguish by its signed 32-bit numbers


class Window(ABC):
    """`nbytes` of memory of each rank of `group`. All ranks open a window together, as window `number`.

    All calls are made on a lane, in order. A signal arrives only after all earlier puts and gets have taken
    effect. A channel can contain only one signal: the next signal is sent after the peer has waited for the
    last one.

    Signals are one-byte messages over gloo, so a rank that dies or never signals is detected as on the
    transport 'gloo'.
    """

    def __init__(self, nbytes: int, number: int, group: dist.ProcessGroup, timeout: float) -> None:
        self.nbytes, self.group, self.timeout = nbytes, group, timedelta(seconds=timeout)
        self._first = number % _WINDOWS * _SIGNALS * _CHANNELS
        self._counts: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        self._sent: dict[tuple[int, int], dist.Work] = {}

    @abstractmethod
    def view(self, owner: int, start: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of the memory of rank `owner`, from `start` on."""

    def put(self, rank: int, start: int, parts: list[Bytes]) -> None:
        """Write `parts` one after the other into this rank's own memory, from `start` on."""
        for part in filter(len, parts):
            copy(part, self.view(rank, start, len(part)))
            start += len(part)

    def get(self, owner: int, start: int, parts: list[Bytes]) -> None:
        """Fill `parts` one after the other from the memory of `owner`, from `start` on."""
        for part in filter(len, parts):
            copy(self.view(owner, start, len(part)), part)
            start += len(part)

    def signal(self, peer: int, channel: int) -> None:
        """Send `peer` a signal on `channel`."""
        self.settle(peer, channel)
        note, number = torch.zeros(1, dtype=torch.uint8), self._number("sent", peer, channel)
        work = dist.isend(note, group=self.group, group_dst=peer, tag=number)
        assert work is not None
        self._sent[peer, channel] = work  # gloo drops a message if its work object is deleted

    def wait(self, peer: int, channel: int) -> None:
        """Wait for the signal of `peer` on `channel`. Raises: RuntimeError if it does not arrive in time."""
        note, number = torch.zeros(1, dtype=torch.uint8), self._number("received", peer, channel)
        work = dist.irecv(note, group=self.group, group_src=peer, tag=number)
        assert work is not None
        work.wait(self.timeout)

    def settle(self, peer: int, channel: int) -> None:
        """Wait until `peer` has waited for the last signal on `channel`."""
        last = self._sent.pop((peer, channel), None)
        if last is not None:
            last.wait(self.timeout)

    def _number(self, way: str, peer: int, channel: int) -> int:
        self._counts[way, peer, channel] += 1
        return self._first + self._counts[way, peer, channel] % _SIGNALS * _CHANNELS + channel


class SharedMemory(Window):
    """Memory that processes share, in files that are removed as soon as all ranks have opened them."""

    def __init__(self, nbytes: int, number: int, group: dist.ProcessGroup, timeout: float) -> None:
        super().__init__(nbytes, number, group, timeout)
        with _file_of(nbytes) as file:
            names: list[str] = [""] * dist.get_world_size(group)
            dist.all_gather_object(names, file.name, group=group)
            self._memory = [_mapped(Path(name)) for name in names]
            dist.all_reduce(torch.zeros(1), group=group)  # a barrier

    def view(self, owner: int, start: int, nbytes: int) -> Tensor:
        return self._memory[owner][start : start + nbytes]


class SymmetricMemory(Window):
    """torch's symmetric memory, for GPUs that can read each other's memory.

    Each signal and each wait is made twice: on the lane's stream and on its thread. The thread signals last
    and waits first, so a kernel waits only for kernels that have been launched already, never for another
    rank's host.
    """

    def __init__(self, nbytes: int, number: int, group: dist.ProcessGroup, timeout: float) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        super().__init__(nbytes, number, group, timeout)
        device = torch.device("cuda", torch.cuda.current_device())
        # Makes torch allocate a new block instead of a pooled one, so that its signals start at zero.
        name = group.group_name
        # torch finds the group by its name. Up to 2.10 it had to be enabled first; 2.11 deprecates that
        # (github.com/pytorch/pytorch/pull/172163).
        self._memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, name)
        self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        self._timeout_ms = int(timeout * 1000)

    def view(self, owner: int, start: int, nbytes: int) -> Tensor:
        return self._handle.get_buffer(owner, (nbytes,), torch.uint8, start)

    def signal(self, peer: int, channel: int) -> None:
        self._handle.put_signal(peer, channel, self._timeout_ms)
        super().signal(peer, channel)

    def wait(self, peer: int, channel: int) -> None:
        super().wait(peer, channel)
        self._handle.wait_signal(peer, channel, self._timeout_ms)


def _file_of(nbytes: int) -> IO[bytes]:
    """Return a file that only this user can open, in memory if there is room. Closing the file removes it."""
    folders = ["/dev/shm"] if os.path.isdir("/dev/shm") else []
    for folder in [*folders, tempfile.gettempdir()]:
        file = tempfile.NamedTemporaryFile(prefix="ringlab-", dir=folder)  # noqa: SIM115 (the caller closes it)
        try:
            if hasattr(os, "posix_fallocate"):  # writing to a page without room would kill the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
            return file
        except OSError as error:
            file.close()
            problem = str(error)
    needed = f"{nbytes} bytes of shared memory or temporary files for each rank"
    raise CommError(needed, problem, "use transport='gloo'")


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
