"""A stand-in for NCCL, its communicators and CUDA's streams, for ranks that are threads; no GPU is needed.

Tensors are on the CPU and claim to be on a GPU, except tensors of bytes, such as headers. Computations run at
once. A message is read from the sender's buffer as late as NCCL may read it, and fills the receiver's buffer
only when the receiver's computations wait for it; until then the buffer holds NaN. So a program that breaks a
rule of streams gets a wrong result or a BrokenRule every time.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ringlab
from ringlab.comm.processes import carriers
from ringlab.comm.processes.carriers import PointToPoint
from ringlab.comm.processes.distributed import DistributedComm
from ringlab.comm.processes.failure_board import Board
from ringlab.comm.ring import Ring

PACKAGE = str(Path(ringlab.__file__).parent)
PATIENCE = 60.0
"""Seconds for which a rank waits for another rank."""
Message = tuple["Group", int, int, int]
"""A message's communicator, sender, receiver, and number among the messages between these two."""


class BrokenRule(Exception):
    """The program used a stream, a communicator or a buffer as NCCL does not allow."""


class Group(dist.ProcessGroup):
    """A communicator. way: the name of the way that opened it. ranks: its ranks, numbered as in the whole."""

    def __init__(self, way: str, ranks: tuple[int, ...]) -> None:
        super().__init__(0, len(ranks))
        self.way, self.ranks = way, ranks

    def __repr__(self) -> str:
        return f"{self.way} {self.ranks}"


class Op(dist.P2POp):
    """A send or a receive that need not belong to a group of torch.distributed."""

    def __new__(cls, *_: Any, **__: Any) -> Op:
        return object.__new__(cls)

    def __init__(self, op: Any, tensor: Tensor, group: Group, group_peer: int, tag: int) -> None:
        self.op, self.tensor, self.group, self.group_peer, self.tag = op, tensor, group, group_peer, tag


@dataclass(eq=False)
class Stream:
    """A stream of one rank. `batches` were launched on it; `ready` is false until it waits for computations."""

    rank: int
    nccl: Nccl
    computes: bool = False
    ready: bool = False
    batches: list[Batch] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.ready |= other.computes

    def wait_event(self, event: Event) -> None:
        if self.computes and event.stream is not None:
            for batch in event.stream.batches[: event.count]:
                self.nccl.arrive(batch)

    def record_event(self) -> Event:
        event = Event(self.nccl)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.nccl.synchronized.append("stream")


@dataclass(eq=False)
class Event:
    nccl: Nccl
    stream: Stream | None = None
    count: int = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.batches)

    def synchronize(self) -> None:
        self.nccl.synchronized.append("event")


@dataclass(eq=False)
class Batch:
    """The sends and receives of one exchange, in the order of a rank's launches."""

    rank: int
    group: Group
    stream: Stream
    sends: dict[Message, Tensor]
    receives: dict[Message, Tensor]
    versions: list[int]
    done: bool = False


class Nccl:
    """The communicators of all ranks, and the record of their use: `launched[rank]` in order of launch.

    bound: whether the default process group is bound to a device, so that torch opens communicators by
    splitting the communicator of all ranks.
    """

    def __init__(self, world_size: int, bound: bool = False) -> None:
        self.bound = bound
        self.world = Group("common", tuple(range(world_size)))
        self.launched: list[list[Batch]] = [[] for _ in self.world.ranks]
        self.opened: Counter[Group] = Counter()
        self.begun: set[tuple[Group, int]] = {(self.world, rank) for rank in self.world.ranks}
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self.synchronized: list[str] = []
        self._here, self._meeting = threading.local(), threading.Condition()
        self._mail: dict[tuple[int, int, int], list[Tensor]] = {}
        self._sent: dict[Message, tuple[Tensor, Tensor]] = {}
        self._taken: dict[Message, Tensor] = {}
        self._wanted: set[Message] = set()
        self._counts: Counter[tuple[Group, int, int, bool]] = Counter()
        self._recorded: dict[Stream, set[int]] = {}

    @property
    def rank(self) -> int:
        return self._here.rank

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the result of `program(ring, *args)` on each rank. Raises: the first error of a rank."""
        results: list[Any] = [None] * len(self.world.ranks)
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._here.rank, self._here.stream = rank, Stream(rank, self, computes=True)
            try:
                carrier = PointToPoint(self.world)
                comm = DistributedComm(self.world, PATIENCE, board=Board(None), carriers={"cpu": carrier})
                with _Reads(self):
                    results[rank] = program(Ring(comm), *args, **kwargs)
            except BaseException as error:
                with self._meeting:
                    errors.append(error)
                    self._meeting.notify_all()

        self._errors = errors
        with self._instead():
            ranks = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in self.world.ranks]
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join(2 * PATIENCE)
        if errors:
            raise next((error for error in errors if isinstance(error, BrokenRule)), errors[0])
        return results

    def arrive(self, batch: Batch) -> None:
        """Deliver the messages of a batch when a rank's computations wait for it; check that its tensors are untouched."""
        if batch.done:
            return
        batch.done = True
        for key, tensor in batch.sends.items():
            self._take(key)
            if not _same(tensor, self._sent[key][1]):
                raise BrokenRule(f"{key}: a sent tensor was written before the wait")
        if [tensor._version for tensor in batch.sends.values()] != batch.versions:
            raise BrokenRule("a sent tensor was written before the wait")
        for key, tensor in batch.receives.items():
            self._take(key)
            if not _same(tensor, _poisoned(tensor)):
                raise BrokenRule(f"{key}: a receive buffer was written before the wait")
            tensor.copy_(self._taken[key])
        kept = self._recorded.get(batch.stream, set())
        for tensor in (*batch.sends.values(), *batch.receives.values()):
            if tensor.untyped_storage()._cdata not in kept:
                raise BrokenRule("a tensor may be freed and used again while it is in flight")

    def _take(self, key: Message) -> None:
        """Read a message from the sender's buffer, once both ranks have launched their halves."""
        with self._meeting:
            self._until(lambda: key in self._sent and key in self._wanted, f"both halves of {key}")
            if key not in self._taken:
                tensor, before = self._sent[key]
                if not _same(tensor, before):
                    raise BrokenRule(f"{key}: a sent tensor was written before the wait")
                self._taken[key] = tensor.detach().clone()

    def _until(self, met: Callable[[], bool], what: str) -> None:
        if not self._meeting.wait_for(lambda: met() or bool(self._errors), PATIENCE):
            raise BrokenRule(f"{what} never met")
        if not met():
            raise RuntimeError("Connection closed: another rank has failed")

    def _batch(self, ops: list[Any]) -> list[Any]:
        if self._here.stream.computes:
            return [self._post(op) for op in ops]
        return [self._launch(ops)]

    def _post(self, op: Any) -> Any:
        """Return the work of a message between hosts. As in gloo, it completes once both ends have posted it."""
        there = op.group.ranks[op.group_peer]
        ends = (self.rank, there) if op.op is dist.isend else (there, self.rank)
        with self._meeting:
            box = self._mail.setdefault((*ends, op.tag), [None, None])  # type: ignore[list-item]
            if box[op.op is dist.irecv] is not None:  # the number is used again
                box = self._mail[(*ends, op.tag)] = [None, None]  # type: ignore[list-item]
            box[op.op is dist.irecv] = op.tensor
            self._meeting.notify_all()

        def wait(timeout: timedelta) -> None:
            with self._meeting:
                self._until(lambda: None not in box, "a header")
                box[1].copy_(box[0])

        return SimpleNamespace(wait=wait)

    def _launch(self, ops: list[Any]) -> Any:
        stream, group = self._here.stream, ops[0].group
        if not stream.ready:
            raise BrokenRule("a message began before the computations that were launched before it")
        if (group, self.rank) not in self.begun:
            raise BrokenRule("only some ranks take part in the first operation of a communicator")
        stream.ready = False
        sends, receives = {}, {}
        for op in ops:
            there = group.ranks[op.group_peer]
            ends = (self.rank, there) if op.op is dist.isend else (there, self.rank)
            if there == self.rank:
                raise BrokenRule("a message to the rank itself")
            counted = group, *ends, op.op is dist.isend
            key = group, *ends, self._counts[counted]
            self._counts[counted] += 1
            (sends if op.op is dist.isend else receives)[key] = op.tensor
        batch = Batch(self.rank, group, stream, sends, receives, [t._version for t in sends.values()])
        stream.batches.append(batch)
        self.launched[self.rank].append(batch)
        for tensor in receives.values():
            tensor.copy_(_poisoned(tensor))
        with self._meeting:
            self._sent.update({key: (tensor, tensor.detach().clone()) for key, tensor in sends.items()})
            self._wanted.update(receives)
            self._meeting.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def _open(self, ranks: list[int], **options: Any) -> Group:
        if options["backend"] != "nccl" or options["pg_options"] != "high priority":
            raise BrokenRule(f"a communicator with {options}")
        if not options["use_local_synchronization"] and len(ranks) < len(self.world.ranks):
            raise BrokenRule("a group that only some ranks open")
        if self.bound and len(ranks) < len(self.world.ranks):
            raise BrokenRule("only some ranks split the communicator of all ranks")
        way = options["group_desc"].removeprefix("ringlab: ")
        with self._meeting:
            group = self._groups.setdefault((way, tuple(ranks)), Group(way, tuple(ranks)))
            self.opened[group] += 1
        return group

    def _first(self, tensor: Tensor, group: Group) -> None:
        self.begun.add((group, self.rank))

    def _record(self, tensor: Tensor, stream: Stream) -> None:
        self._recorded.setdefault(stream, set()).add(tensor.untyped_storage()._cdata)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self._here.stream, stream
        yield
        self._here.stream = before

    @contextmanager
    def _instead(self) -> Iterator[None]:
        """Replace torch.cuda and torch.distributed, and make CPU tensors claim to be on a GPU."""
        world = SimpleNamespace(pg_map={}, default_pg=None)
        default = lambda: SimpleNamespace(bound_device_id="cuda:0" if self.bound else None)  # noqa: E731
        changes: list[tuple[Any, dict[str, Any]]] = [
            (torch.Tensor, {"is_cuda": property(lambda t: t.dtype != torch.uint8), "record_stream": self._record}),
            (torch.cuda, {
                "Stream": lambda device=None, priority=0: Stream(self.rank, self),
                "Event": lambda enable_timing=False: Event(self),
                "current_stream": lambda device=None: self._here.stream,
                "stream": self._on,
                "synchronize": lambda device=None: self.synchronized.append("device"),
            }),
            (dist, {
                "P2POp": Op, "batch_isend_irecv": self._batch, "new_group": self._open, "all_reduce": self._first,
                "get_rank": lambda group=None: self.rank,
                "get_world_size": lambda group=None: len((group or self.world).ranks),
                "get_global_rank": lambda group, rank: group.ranks[rank],
            }),
            (dist.distributed_c10d, {"_world": world, "_get_default_group": default}),
            (carriers, {"high_priority": lambda limit=None: "high priority"}),
        ]  # fmt: skip
        changes[0][1]["record_stream"] = lambda tensor, stream: self._record(tensor, stream)
        patches = [
            mock.patch.object(owner, name, value, create=True)
            for owner, named in changes
            for name, value in named.items()
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()


class _Reads(TorchDispatchMode):
    """Records the operators that would make a host wait until a GPU has computed a value."""

    WAIT = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")

    def __init__(self, nccl: Nccl) -> None:
        super().__init__()
        self.nccl = nccl

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch would import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in self.WAIT and any(
            x.is_cuda for x in args if isinstance(x, Tensor)
        ):
            here = next(f for f in reversed(traceback.extract_stack()) if f.filename.startswith(PACKAGE))
            of_block = Path(here.filename).parent.name == "blocks"  # a block runs its code for CPUs here
            if not of_block:
                self.nccl.synchronized.append(f"result of {func.name()} in {here.name}")
        return func(*args, **(kwargs or {}))


def _poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().nan_to_num(nan=7e7), other.detach().nan_to_num(nan=7e7))


def stuck(launched: Iterable[Iterable[Batch]], one_queue: bool) -> bool:
    """Return whether batches wait for each other without end.

    one_queue: whether a GPU begins a rank's batches in the order of their launches, as with
    CUDA_DEVICE_MAX_CONNECTIONS=1. Otherwise only the batches of one communicator run in order.
    """
    queues: dict[tuple[int, Group | None], deque[Batch]] = {}
    for batches in launched:
        for batch in batches:
            place = batch.rank, None if one_queue else batch.group
            queues.setdefault(place, deque()).append(batch)
    while any(queues.values()):
        first = [queue[0] for queue in queues.values() if queue]
        sent = {key for batch in first for key in batch.sends}
        received = {key for batch in first for key in batch.receives}
        over = [
            queue
            for queue in queues.values()
            if queue and set(queue[0].sends) <= received and set(queue[0].receives) <= sent
        ]
        if not over:
            return True
        for queue in over:
            queue.popleft()
    return False
