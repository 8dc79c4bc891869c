"""The transports over torch.distributed, which share their headers, errors and order of messages.

A carrier for each kind of device moves the tensors: by sends and receives of gloo or NCCL, by gloo's
all-to-all for ranks that share a GPU, or by windows into each other's memory.

Every message starts with a header (see `wire_format`), so a wrong tag, shape or dtype raises a MismatchError
on the receiver. The sender, and every rank that waits for the sender or the receiver, gets a PeerDiedError
that names the MismatchError as the root cause. Two limits remain. If the program swaps the contents of two
messages of the same tag, dtypes and shapes, this is not detected. On NCCL a mismatch may be found after the
GPU transfer has begun. Then the error is raised, but the GPU stays busy until the process group is closed.

A send is a rendezvous, as in the virtual cluster: it completes once its receiver has posted the receive. The
collectives are those of the base class: they call `exchange` and add in rank order, so their results have
the same bits as on the virtual cluster.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ringlab.comm.processes.carriers import Carrier, PointToPoint
from ringlab.comm.processes.failure_board import FINISHED, Board
from ringlab.comm.processes.wire_format import Expected, Label, Message, Traffic
from ringlab.comm.protocol import Comm, Tensors, Work
from ringlab.comm.virtual.streams import Stall, stall_of
from ringlab.comm.virtual.waiting import where
from ringlab.errors import (
    BackendError,
    CommError,
    DeviceError,
    PeerDiedError,
    TransportTimeout,
    UnreceivedError,
)
from ringlab.torch_modes import outside_modes

_LINGER = 1.0  # seconds for which a finished rank keeps its connections open for other ranks
_GONE = ("onnection", "roken pipe", "pair closure")  # parts of gloo's errors about a peer that has ended
_uses: dict[str, Iterator[int]] = defaultdict(itertools.count)


class DistributedComm(Comm):
    """This process's end of the torch.distributed process group `group`. None means the default group.

    Every rank of the group must make one. A wait of more than `timeout` seconds is an error. Peers are
    numbered within the group. `note` is called with a line about each action of this rank; `doing` is the
    last line. If `group` does not carry CPU tensors, pass as `headers` a group of the same processes that does.
    `close` also closes that group.

    Raises: BackendError if neither group carries CPU tensors. Headers are CPU tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        board: Board | None = None,
        start: float | None = None,
        note: Callable[[str], None] | None = None,
        carriers: Mapping[str, Carrier] | None = None,
        headers: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self.board = board or Board(_store_of(group))
        self._start = time.perf_counter() if start is None else start
        self._told = note or (lambda line: None)
        self.doing = ""
        self._headers = headers
        self._traffic = Traffic(self.rank, headers or group)
        limit = timedelta(seconds=timeout)
        self._carriers = carriers_of(group, limit) if carriers is None else carriers
        self._count = 0
        self._pending: dict[int, _DistributedWork] = {}  # gloo drops a message if its work object is deleted
        if "cpu" not in self._carriers:
            got = str(dist.get_backend_config(group))
            raise BackendError("a group that also carries CPU tensors", got, _REMEDY)

    def _note(self, line: str) -> None:
        self.doing = line
        self._told(line)

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        """Return the work of sending to rank `to` and receiving from rank `source`, both posted at once.

        Raises: WorldSizeError if a peer is not a rank; DeviceError if no carrier supports the tensors;
        PeerDiedError or another CommError if the exchange cannot be posted.
        """
        return self._post(send, to, receive, source, tag)

    def relay(
        self,
        *,
        hops: int,
        send: Tensors,
        to: int,
        receive: Tensors,
        source: int,
        tag: str = "",
    ) -> Work:
        """Return the work of relaying a block that has made `hops` hops. Raises: as `exchange`."""
        return self._post(send, to, receive, source, tag, hops)

    def _post(
        self,
        send: Tensors,
        to: int | None,
        receive: Tensors,
        source: int | None,
        tag: str,
        hops: int | None = None,
    ) -> Work:
        if send:
            where(to, self, "to")
        if receive:
            where(source, self, "source")
        label = Label(self.rank, self._count, tag, to if send else None, source if receive else None)
        label.check(self.world_size)
        carrier = self._carrier_of((*send, *receive))
        carrier.check(label)
        self._count += 1
        self._note(f"posted {label}")
        try:
            with outside_modes():  # a memory meter must not count the transport's own tensors
                message, expected = self._traffic.post(label, send, receive)
                if hops is not None and carrier.relays and message and expected and not message.local:
                    carrier.relay(message, expected, hops)
                else:
                    carrier.start(message, expected)
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
        """Record `error` on the board as this rank's failure, unless another rank has already failed."""
        self.board.fail(self.rank, error)

    def finish(self) -> None:
        """Record that this rank's program has ended, and wait briefly for the other programs to end.

        Raises: UnreceivedError if an exchange was posted but never waited for.
        """
        if self._pending:
            label = next(iter(self._pending.values())).label
            error = UnreceivedError(
                "a wait for every posted exchange before the program ends",
                f"{label}, which was posted but not waited for ({len(self._pending)} such exchanges in all)",
                "call .wait() on what post() or exchange() returns",
            )
            self.fail(error)
            raise error
        for carrier in self._carriers.values():
            carrier.finish()
        self._note(FINISHED)
        self.board.end(self.rank)
        self.board.linger(list(range(self.world_size)), _LINGER)

    def close(self) -> None:
        """End the background threads, and close the groups that this transport opened.

        The process group itself must be closed by the code that opened it.
        """
        for carrier in self._carriers.values():
            carrier.close()
        if self._headers in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self._headers)

    def _carrier_of(self, tensors: Sequence[Tensor]) -> Carrier:
        kinds = {t.device.type for t in tensors} or {"cpu"}
        if len(kinds) > 1:
            raise DeviceError("all tensors of an exchange on one kind of device", ", ".join(sorted(kinds)))
        [kind] = kinds
        if kind not in self._carriers:
            raise DeviceError(
                f"tensors on a device that this transport carries ({', '.join(self._carriers)})",
                f"a tensor on {kind}",
                _REMEDY if kind == "cuda" else "move the tensors to the CPU",
            )
        return self._carriers[kind]

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
        self.tensors: tuple[Tensor, ...] = (
            *(message.tensors if message else ()),
            *(expected.tensors if expected else ()),
        )
        self.done = False

    def wait(self) -> tuple[Tensor, ...]:
        if not self.done:
            self.comm._note(f"waiting for {self.label}")
            peer = self.label.source
            stall = stall_of(self.tensors)
            try:
                with outside_modes():
                    if self.expected is not None:
                        self.expected.wait(self.comm.timeout)
                    peer = self.label.to
                    if self.message is not None:
                        self.message.wait(self.comm.timeout)
                    self._arrive(stall)
            except CommError as error:
                self.comm.fail(error)
                raise
            except RuntimeError as error:
                raise self.comm._translated(error, self.label, peer) from error
            finally:
                self.comm._pending.pop(self.label.number, None)
            self.done, self.tensors, self.message, self.expected = True, (), None, None
            self.comm._note(f"completed {self.label}")
        return self.buffers

    def _arrive(self, stall: Stall | None) -> None:
        """Make computations on a GPU wait for the transfer, and complete the buffers."""
        halves = [half for half in (self.message, self.expected) if half is not None]
        if stall is not None:
            stall.until([move.event for half in halves for move in half.moves if move.event is not None])
            self.stall = stall
        if self.expected is not None:
            self.expected.unpack()


_REMEDY = (
    "transport='nccl' or 'symmetric' with a GPU for each rank, 'shared-gpu' where ranks share one; "
    "for a group of your own, init_process_group('cpu:gloo,cuda:nccl')"
)


def carriers_of(group: dist.ProcessGroup | None, limit: timedelta) -> dict[str, Carrier]:
    """Return a carrier for each kind of device whose tensors `group` can send and receive by gloo or NCCL.

    torch also lists gloo for GPUs, but gloo's sends and receives support only tensors on the CPU.
    limit: the time that a message may take over a communicator that the carrier opens.
    """
    carrier = PointToPoint(group, limit)
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    fitting = {"cpu": "gloo", "cuda": "nccl"}
    return {kind: carrier for kind, backend in backends.items() if fitting.get(kind) == backend}


def _store_of(group: dist.ProcessGroup | None) -> dist.Store | None:
    """Return a part of the group's key-value store that no other use of the group reads or writes."""
    name = "the default group" if group is None else group.group_name
    try:
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for this function
    except (AttributeError, RuntimeError):
        return None
    return dist.PrefixStore(f"ringlab/{name}/{next(_uses[name])}", store)
