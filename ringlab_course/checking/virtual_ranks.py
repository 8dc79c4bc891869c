"""Run a learner's ring program on a virtual cluster in this process, with the same faults as in the judge."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.comm.protocol import Comm, Work, Wrapper
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome, Trace
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.wrappers.strict import Strict
from ringlab.errors import CommError
from ringlab_course.checking.faults import Bereft, Ended, Faults, Killed, Mortal
from ringlab_course.checking.ring_rules import COMPUTING, KEPT, in_a_thread, misuse, require_messages

T = TypeVar("T")


def run_virtual(
    world_size: int, program: Callable[[Ring], Any], faults: Faults | None = None, *, memory: bool = True
) -> Outcome:
    """Return the outcome of `program(ring)` on every rank; the rules of exchange are enforced.

    `memory` says whether the bytes of each rank's tensors are counted, which takes most of the time of a small run.
    If a rank was killed, the result of each rank that failed is an `Ended`.
    Raises: the errors of the virtual cluster, unless a rank was killed; NotImplementedError in any case.
    """
    faults = faults or Faults()
    run = _Run(program, faults)
    cluster = VirtualCluster(world_size, memory=memory, faults=faults.plan(world_size), costs=faults.costs())
    try:
        return cluster.run(run.rank)
    except Exception:
        if not run.killed or any(ended == Ended(NotImplementedError.__name__) for ended in run.ends.values()):
            raise
        return Outcome([run.ends[rank] for rank in range(world_size)], Trace(world_size), [])
    finally:
        run.over = True


class _Run:
    """The state of one run: the result of each rank, or the reason why the rank has none."""

    def __init__(self, program: Callable[[Ring], Any], faults: Faults) -> None:
        self.program, self.faults = program, faults
        self.ends: dict[int, Any] = {}
        self.threads: dict[int, int] = {}
        self.misuse: dict[int, CommError] = {}
        self.killed = self.over = False

    def rank(self, ring: Ring) -> Any:
        self.threads[ring.rank] = threading.get_ident()
        comm: Comm = _Ruled(ring.comm, self)
        kill, timeout, final = self.faults.kill, self.faults.timeout, self.faults.final
        if kill and kill[0] == ring.rank:
            comm = Mortal(comm, kill[1])
        elif final or timeout:
            comm = Bereft(comm, timeout[1] if timeout and timeout[0] == ring.rank else None, final)
        try:
            self.ends[ring.rank] = self.program(Ring(Strict(comm)))
            if isinstance(comm, Mortal):
                comm.require_life()
            if ring.rank in self.misuse:  # raise an error that was lost in a thread of the program
                raise self.misuse[ring.rank]
        except Killed:
            self.killed, self.ends[ring.rank] = True, Ended(Killed.__name__)
            raise
        except Exception as error:
            self.ends[ring.rank] = _ended(error)
            raise
        return self.ends[ring.rank]


class _Ruled(Wrapper):
    """A `comm` with the judge's rules: only the program may exchange, and only tensors that can be sent."""

    def __init__(self, comm: Comm, run: _Run) -> None:
        super().__init__(comm)
        self._run, self._thread, self._computing = run, threading.get_ident(), 0

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        self.require_program("exchange")
        require_messages(send)
        require_messages(receive)
        return _RuledWork(
            self, self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)
        )

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if threading.get_ident() != self._thread and not self._run.over:
            return function(*args, **kwargs)  # inside another computation: not recorded separately
        self.require_program("compute")

        @functools.wraps(function)  # keeps a `thread_safe` mark of the function
        def computing(*args: Any, **kwargs: Any) -> T:
            self._computing = threading.get_ident()
            try:
                return function(*args, **kwargs)
            finally:
                self._computing = 0

        return self.inner.compute(label, computing, *args, **kwargs)

    def require_program(self, what: str) -> None:
        """Check that this call comes from the program's own thread and from outside of a computation.

        Raises: CommError. The run keeps the error too, because an error in another thread may be lost.
        """
        here = threading.get_ident()
        if self._run.over:
            got, remedy = KEPT
        elif here == self._computing:
            got, remedy = COMPUTING
        elif here != self._thread and here in self._run.threads.values():
            got, remedy = f"a call of rank {self.rank}'s ring by another rank", KEPT[1]
        elif here != self._thread:
            got, remedy = in_a_thread()
        else:
            return
        error = self._run.misuse.setdefault(self.rank, misuse(what, self.rank, got, remedy))
        raise error


class _RuledWork(Work):
    def __init__(self, comm: _Ruled, inner: Work) -> None:
        self._comm, self._inner = comm, inner

    def wait(self) -> tuple[Tensor, ...]:
        self._comm.require_program("wait")
        return self._inner.wait()


class Elements(TorchDispatchMode):
    """Counts the elements that torch's operators write on this thread; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the reason is given in ringlab.comm.memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            parts = result if isinstance(result, (tuple, list)) else (result,)
            self.count += sum(part.numel() for part in parts if isinstance(part, Tensor))
        return result


def _ended(error: Exception) -> Ended:
    if isinstance(error, NotImplementedError):
        return Ended(NotImplementedError.__name__)
    return Ended(type(error).__name__, str(error))
