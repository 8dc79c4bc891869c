"""The transport over torch.distributed: gloo on CPUs, NCCL on GPUs, by the same code.

Every message starts with a header (see `wire`), so a wrong tag, shape or dtype becomes a
MismatchError on the receiver; the sender, and whoever waits for either, gets a PeerDiedError that
names that error as the root cause. What cannot be detected: two messages of the same tag, dtypes
and shapes whose contents were swapped by the program, and, on NCCL, a mismatch whose GPU transfer
has begun: the error is raised, but the GPU stays busy until the process group is closed.

A send is a rendezvous, as in the virtual cluster: it completes once its receiver has posted the
receive. Collectives are those of the base class: they go over `exchange`, fold in rank order, and
give the same bits as the virtual cluster.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringlab.comm.board import Board, common_start
from ringlab.comm.journal import FINISHED
from ringlab.comm.parts import Expected, Label, Message, Traffic
from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.waiting import where
from ringlab.errors import (
    BackendError,
    CommError,
    DeviceError,
    PeerDiedError,
    TransportTimeout,
    UnreceivedError,
    WorldSizeError,
)

_LINGER = 1.0  # seconds a finished rank keeps its connections open for the others
_LAST_WORDS = 2.0  # seconds a failed rank stays, so that the others can say what they saw
_GONE = ("onnection", "roken pipe", "pair closure")  # parts of what gloo says of a peer that is gone
_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # headers and control travel on the CPU
_uses: dict[str, Iterator[int]] = defaultdict(itertools.count)


class DistributedComm(Comm):
    """This process's end of a torch.distributed process group, the default group if None.

    Make one on every rank of the group. A wait longer than `timeout` seconds is an error. Peers are
    numbered within the group. `note` is called with what this rank is doing, for people who watch.

    Raises: BackendError if the group cannot carry CPU tensors (headers travel as such).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        board: Board | None = None,
        start: float | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self.board = board or Board(_store_of(group))
        self._start = time.perf_counter() if start is None else start
        self._note = note or (lambda line: None)
        self._traffic = Traffic(self.rank, group)
        self._backends = _backends_of(group)
        self._count = 0
        self._pending: dict[int, _DistributedWork] = {}  # gloo forgets a message whose work is dropped
        if "cpu" not in self._backends:
            raise BackendError("a group that carries CPU tensors too", f"{self._backends}", _NCCL_REMEDY)

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        if send:
            where(to, self, "to")
        if receive:
            where(source, self, "source")
        label = Label(self.rank, self._count, tag, to if send else None, source if receive else None)
        label.check(self.world_size)
        self._check_devices((*send, *receive))
        self._count += 1
        self._note(f"posted {label}")
        try:
            with _disable_current_modes():  # a memory meter shall not count the transport's own tensors
                message, expected = self._traffic.post(label, send, receive)
        except RuntimeError as error:
            if not any(word in str(error) for word in _GONE):
                raise CommError(f"to post {label}", str(error).split("\n")[0]) from error
            raise self._translated(error, label, label.to if send else label.source) from error
        work = _DistributedWork(self, label, message, expected, tuple(receive))
        self._pending[label.number] = work
        return work

    def now(self) -> float:
        return time.perf_counter() - self._start

    def fail(self, error: BaseException) -> None:
        """Write `error` on the board as this rank's failure, if no rank failed before."""
        first_line = str(error).split("\n")[0]
        self.board.record(self.rank, f"{type(error).__name__}: {first_line}")

    def finish(self) -> None:
        """Say that this rank's program has ended, and give the others a moment to end as well.

        Raises: UnreceivedError if an exchange was posted and never waited for.
        """
        if self._pending:
            label = next(iter(self._pending.values())).label
            error = UnreceivedError(
                "every posted exchange waited for before the program ends",
                f"{label} was posted and not waited for ({len(self._pending)} such in all)",
                "call .wait() on what post() or exchange() returns",
            )
            self.fail(error)
            raise error
        self._note(FINISHED)
        self.board.end(self.rank)
        self.board.linger(list(range(self.world_size)), _LINGER)

    def _check_devices(self, tensors: Sequence[Tensor]) -> None:
        for device in {t.device for t in tensors}:
            backend = self._backends.get(device.type)
            if backend is None or (backend == "gloo" and device.type != "cpu"):
                raise DeviceError(
                    f"tensors on a device that this process group carries ({self._backends})",
                    f"a tensor on {device}",
                    _NCCL_REMEDY if device.type == "cuda" else "move the tensors to the CPU",
                )

    def _translated(self, error: RuntimeError, label: Label, peer: int | None) -> CommError:
        text, waits = str(error), label.waits(peer)
        if "imed out" in text or "timeout" in text:
            translated: CommError = TransportTimeout(
                waits,
                f"nothing within {self.timeout:g} s; rank {peer} is alive, busy or waiting elsewhere",
                f"see what rank {peer} does, or raise the timeout",
            )
        else:
            translated = self._peer_died(waits, peer)
        self.fail(translated)
        return translated

    def _peer_died(self, waits: str, peer: int | None) -> PeerDiedError:
        failure = None if peer is None else self.board.why_gone(peer)
        if failure is None and peer is not None and self.board.ended([peer]):
            got = f"rank {peer} ended its program without it"
            return PeerDiedError(
                waits, got, f"compare the number of exchanges of ranks {self.rank} and {peer}"
            )
        if failure is None and peer is not None:
            failure = self.board.record(peer, "its connection closed and it left no reason (killed?)")
        return PeerDiedError(waits, str(failure), "mend that first; this error only follows from it")


class _DistributedWork(Work):
    def __init__(
        self,
        comm: DistributedComm,
        label: Label,
        message: Message | None,
        expected: Expected | None,
        buffers: tuple[Tensor, ...],
    ) -> None:
        self.comm, self.label, self.message, self.expected = comm, label, message, expected
        self.buffers = buffers
        self.done = False

    def wait(self) -> tuple[Tensor, ...]:
        if not self.done:
            self.comm._note(f"waiting for {self.label}")
            peer = self.label.source
            try:
                with _disable_current_modes():
                    if self.expected is not None:
                        self.expected.wait(self.comm.timeout)
                    peer = self.label.to
                    if self.message is not None:
                        self.message.wait(self.comm.timeout)
            except CommError as error:
                self.comm.fail(error)
                raise
            except RuntimeError as error:
                raise self.comm._translated(error, self.label, peer) from error
            finally:
                self.comm._pending.pop(self.label.number, None)
            self.done, self.message, self.expected = True, None, None
            self.comm._note(f"completed {self.label}")
        return self.buffers


_NCCL_REMEDY = "ringlab.connect(backend='nccl'), or init_process_group('cpu:gloo,cuda:nccl')"


@contextmanager
def connect(backend: str = "gloo", timeout: float = 60.0) -> Iterator[Ring]:
    """Give the ring of the processes that torchrun started; use it in a `with` statement.

    With backend "nccl" the CUDA device of this rank is set. The group is closed at the end.

    Raises: WorldSizeError outside torchrun; TransportTimeout if not all ranks come within `timeout`.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise WorldSizeError(
                "a process that torchrun started",
                f"no {name} in the environment",
                "torchrun --nproc-per-node 2 program.py, or ringlab.launch(program, 2)",
            )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A second group on the same keys would find the addresses of the first one.
    store = dist.PrefixStore(f"ringlab/connect/{next(_uses['connect'])}", _torchrun_store(timeout))
    open_group(backend, timeout, store, rank, world_size)
    comm = DistributedComm(None, timeout, start=shared_start(timeout))
    with closing(comm):
        yield Ring(comm)


@contextmanager
def closing(comm: DistributedComm) -> Iterator[None]:
    """Finish `comm` after the block, or tell the others of its error; then close the process group."""
    try:
        yield
        comm.finish()
    except BaseException as error:
        comm.fail(error)
        comm.board.end(comm.rank)
        raise
    finally:
        dist.destroy_process_group()
        if comm.board.first_failure() is not None:  # torchrun ends all ranks as soon as one has ended
            comm.board.linger(list(range(comm.world_size)), _LAST_WORDS)


@cache
def _torchrun_store(timeout: float) -> dist.Store:
    """Return the store that torchrun hosts; kept, for without torchrun's agent rank 0 hosts it."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except dist.DistError as error:
        raise _not_connected(error, timeout) from error
    return store


def _not_connected(error: Exception, timeout: float) -> TransportTimeout:
    first_line = str(error).split("\n")[0]
    return TransportTimeout(
        f"all ranks connected within {timeout:g} s", first_line, "start every rank, and see how it fares"
    )


def open_group(backend: str, timeout: float, store: dist.Store, rank: int, world_size: int) -> None:
    """Open the default process group over the addresses that ranks leave in `store`."""
    if backend not in _BACKENDS:
        raise BackendError(f"backend {' or '.join(map(repr, _BACKENDS))}", repr(backend))
    if dist.is_initialized():
        raise BackendError("no process group yet", "one is open", "use Ring(DistributedComm()) on it")
    if backend == "nccl":
        _choose_device()
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            _BACKENDS[backend], timeout=limit, store=store, rank=rank, world_size=world_size
        )
        if backend == "nccl":  # a group's first NCCL operation must have all ranks take part
            dist.all_reduce(torch.zeros(1, device="cuda"))
    except RuntimeError as error:  # gloo's own errors are plain ones
        raise _not_connected(error, timeout) from error


def _choose_device() -> None:
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise DeviceError(
            f"a GPU for each of this machine's ranks (local rank {local_rank} needs number {local_rank})",
            f"{count} GPUs",
            "start fewer ranks per machine, or use backend 'gloo'",
        )
    torch.cuda.set_device(local_rank)


def _store_of(group: dist.ProcessGroup | None) -> dist.Store | None:
    """Return the part of the group's key-value store that this use of the group has for itself."""
    name = "the default group" if group is None else group.group_name
    try:
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    except (AttributeError, RuntimeError):
        return None
    return dist.PrefixStore(f"ringlab/{name}/{next(_uses[name])}", store)


def shared_start(timeout: float) -> float:
    """Return the reading of time.perf_counter that all ranks of this machine call second 0."""
    store = dist.distributed_c10d._get_default_store()
    use = dist.PrefixStore(f"ringlab/start/{next(_uses['start'])}", store)
    return common_start(use, dist.get_rank(), socket.gethostname(), timeout)


def _backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each device type, from torch's form "cpu:gloo,cuda:nccl"."""
    entries = dist.get_backend_config(group).split(",")
    return dict(entry.split(":", 1) for entry in entries)
