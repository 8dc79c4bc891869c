"""Meters for one rank's messages, memory and computation during one pass, on Comm or torch.distributed.

A wrapper counts messages over ringlab's Comm. torch's dispatched operators show messages over
torch.distributed and all matrix products. At the same operators, a rank can be made to die or stall, and
receive buffers are filled with NaN until their message arrives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

from jaxtyping import Shaped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ringlab.comm.memory import MemoryMeter
from ringlab.comm.protocol import CONTROL, Comm, Work
from ringlab.comm.virtual.threads import entered_modes
from ringlab.conformance.run.run import Meter
from ringlab.torch_modes import outside_modes

T = TypeVar("T")


_NUMBERS = 2
"""The most integers for each rank in an uncounted message: the numbers of its queries and of its keys."""


_HEADER, _PART = 1024, 64
"""An uncounted message before the first data of a pass has fewer bytes than _HEADER, and than a block of K and
V divided by _PART. Ranks may compare shapes and dtypes by such messages."""


_SENDS = ("send", "isend")


_RECEIVES = ("recv_", "recv_any_source_")


_QUIET = ("barrier", "monitored_barrier_")


class PassMeter:
    """Measures one pass of one rank; every thread that works for the pass enters `watch()`.

    queries: the sums of the rank's q and of its scaled q, which identify a message with q in any order of axes.
    block: the bytes of a block of K and V, which limit the size of a header; if it is 0, all messages are data.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_send: Callable[[], None],
        strict: bool,
        queries: tuple[float, ...] = (),
        block: int = 0,
    ) -> None:
        self.queries, self.sends_queries = queries, False
        self.rank, self.world_size = rank, world_size
        self.on_send, self.strict = on_send, strict
        self.memory = MemoryMeter(rank)
        self.sent = self.exchanges = self.flops = 0
        self.sizes = 0, 0
        self.header, self.headers = min(_HEADER, block // _PART), 0
        self.peers: set[int] = set()
        self.collectives: set[str] = set()
        self._here = threading.local()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count this thread's work inside the context; nested contexts count only once."""
        if getattr(self._here, "active", False):
            yield
            return
        self._here.active = True
        try:
            with ExitStack() as stack:
                stack.enter_context(self.memory.watch())
                # A virtual rank's computation runs in the modes of its program, which may include this one.
                if not any(isinstance(mode, _Operators) and mode.meter is self for mode in entered_modes()):
                    stack.enter_context(_Operators(self))
                yield
        finally:
            self._here.active = False

    def message(self, tensors: Sequence[Shaped[Tensor, "..."]], to: int | None) -> None:
        """Count a message to rank `to`, unless it only tells how many tokens the ranks hold, or is a header."""
        if not tensors or self.tells_lengths(tensors) or self.is_header(tensors):
            return
        size = sum(tensor.nbytes for tensor in tensors)
        self.sent += size
        self.sizes = min(size, self.sizes[0] or size), max(size, self.sizes[1])
        self.exchanges += 1
        self.sends_queries |= any(map(self._is_q, tensors))
        if to is not None:
            self.peers.add(to)

    def _is_q(self, x: Tensor) -> bool:
        if not self.queries or not x.is_floating_point():
            return False
        with outside_modes():
            found = float(x.detach().double().sum())
        return any(math.isclose(found, each, rel_tol=1e-9) for each in self.queries)

    def tells_lengths(self, tensors: Sequence[Shaped[Tensor, "..."]]) -> bool:
        """Return whether the tensors are only a few integers per rank.

        Ranks with unequal shards need such messages to tell each other their numbers of tokens.
        """
        whole = not any(x.is_floating_point() or x.is_complex() for x in tensors)
        return whole and sum(x.numel() for x in tensors) <= _NUMBERS * self.world_size

    def is_header(self, tensors: Sequence[Shaped[Tensor, "..."]]) -> bool:
        """Return whether the tensors are a header: a short message before any data.

        A pass has at most two headers for each rank. A gather of one header from each rank takes P − 1 hops,
        and a gather of Python objects is two collectives.
        """
        short = sum(tensor.nbytes for tensor in tensors) < self.header
        if self.exchanges or not short or self.headers >= 2 * self.world_size:
            return False
        self.headers += 1
        return True

    def report(self) -> Meter:
        """Return the figures so far."""
        return Meter(
            self.sent, self.exchanges, tuple(sorted(self.peers)), self.memory.peak_bytes,
            self.memory.largest_bytes, self.flops, tuple(sorted(self.collectives)), self.sends_queries,
            self.sizes,
        )  # fmt: skip


class UnwrittenIsNaN(TorchDispatchMode):
    """Fills new tensors whose values are undefined with NaN, so that no result depends on what memory held."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and fill what it leaves undefined."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _UNWRITTEN and result.is_floating_point():
            result.fill_(float("nan"))
        return result


_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class _Operators(TorchDispatchMode):
    def __init__(self, meter: PassMeter) -> None:
        super().__init__()
        self.meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the reason is given in ringlab.comm.memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._distributed(func.overloadpacket.__name__, args)
        result = func(*args, **kwargs)
        self.meter.flops += _flops(func, args, kwargs, result)
        return result

    def _distributed(self, name: str, args: Any) -> None:
        meter = self.meter
        if name in _QUIET:
            return
        if name in _RECEIVES:
            if meter.strict:
                for tensor in _tensors(args[0]):
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
            return
        meter.on_send()
        if name in _SENDS:
            meter.message(_tensors(args[0]), int(args[2]))
            return
        if name == "alltoall_base_" and self._hop(args):
            return
        # A collective is counted as if this rank sent its tensors, or a share of them, to each other rank
        # once.
        brought = _tensors(args[1] if len(args) > 1 and _tensors(args[1]) else args[0])
        if meter.tells_lengths(brought) or meter.is_header(brought):
            return
        share = meter.world_size if name.startswith(("alltoall", "reduce_scatter", "_reduce_scatter")) else 1
        meter.collectives.add(name)
        meter.exchanges += 1
        meter.sent += sum(t.nbytes for t in brought) * (meter.world_size - 1) // share

    def _hop(self, args: Any) -> bool:
        """Count an all-to-all that sends to at most one other rank as a shift; return whether it is one."""
        sent, splits = args[1], list(args[4]) if len(args) > 4 and args[4] else []
        if len(splits) != self.meter.world_size:
            return False
        to = [rank for rank, rows in enumerate(splits) if rows and rank != self.meter.rank]
        if len(to) == 1:
            self.meter.message([sent[: splits[to[0]]]], to[0])
        return len(to) <= 1


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a matrix product or an attention operator, or 0 for other operators.

    Under a causal mask, the whole square is counted.
    """
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    name = packet.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        q, k = args[0], args[1]
        return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        q, k = args[1], args[2]
        return 10 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
    return 0


class Metered(Comm):
    """A `comm` whose messages are counted, and whose computations are watched, by the current meter."""

    def __init__(self, comm: Comm) -> None:
        self.inner = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.meter: PassMeter | None = None

    def _count(self, send: Sequence[Tensor], to: int | None, tag: str) -> None:
        if self.meter is not None and not tag.startswith(CONTROL):
            self.meter.message(send, to)

    def exchange(
        self,
        *,
        send: Sequence[Shaped[Tensor, "..."]] = (),
        to: int | None = None,
        receive: Sequence[Shaped[Tensor, "..."]] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self._count(send, to, tag)
        return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)

    def hand_over(
        self,
        *,
        send: Sequence[Shaped[Tensor, "..."]],
        to: int,
        receive: Sequence[Shaped[Tensor, "..."]],
        source: int,
        tag: str = "",
    ) -> Work:
        self._count(send, to, tag)
        return self.inner.hand_over(send=send, to=to, receive=receive, source=source, tag=tag)

    def relay(
        self,
        *,
        hops: int,
        send: Sequence[Shaped[Tensor, "..."]],
        to: int,
        receive: Sequence[Shaped[Tensor, "..."]],
        source: int,
        tag: str = "",
    ) -> Work:
        self._count(send, to, tag)
        return self.inner.relay(hops=hops, send=send, to=to, receive=receive, source=source, tag=tag)

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        meter = self.meter
        if meter is None:
            return self.inner.compute(label, function, *args, **kwargs)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> T:
            with meter.watch():
                return function(*args, **kwargs)

        watched.thread_safe = getattr(function, "thread_safe", False)  # type: ignore[attr-defined]
        return self.inner.compute(label, watched, *args, **kwargs)

    def now(self) -> float:
        return self.inner.now()

    def record_choice(self, asked: str, chosen: str) -> None:
        self.inner.record_choice(asked, chosen)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)
