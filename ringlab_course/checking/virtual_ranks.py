"""A learner's ring program on the virtual cluster of this process, with the faults that the judge can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome, Trace
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.comm.wrappers.strict import Strict
from ringlab_course.checking.faults import Bereft, Ended, Faults, Killed, Mortal


def run_virtual(world_size: int, program: Callable[[Ring], Any], faults: Faults | None = None) -> Outcome:
    """Return the outcome of `program(ring)` on every rank, with the rules of exchange held up.

    Once a rank was killed, the result of each rank that broke off is an `Ended`.
    Raises: what the virtual cluster raises, unless a rank was killed; NotImplementedError always.
    """
    faults = faults or Faults()
    run = _Run(program, faults)
    cluster = VirtualCluster(world_size, faults=faults.plan(world_size), costs=faults.costs())
    try:
        return cluster.run(run.rank)
    except Exception:
        if not run.killed or any(ended == Ended(NotImplementedError.__name__) for ended in run.ends.values()):
            raise
        return Outcome([run.ends[rank] for rank in range(world_size)], Trace(world_size), [])


class _Run:
    """What became of each rank: its result, or why it has none."""

    def __init__(self, program: Callable[[Ring], Any], faults: Faults) -> None:
        self.program, self.faults = program, faults
        self.ends: dict[int, Any] = {}
        self.killed = False

    def rank(self, ring: Ring) -> Any:
        comm: Comm = ring.comm
        kill, timeout, final = self.faults.kill, self.faults.timeout, self.faults.final
        if kill and kill[0] == ring.rank:
            comm = Mortal(comm, kill[1])
        elif final or timeout:
            comm = Bereft(comm, timeout[1] if timeout and timeout[0] == ring.rank else None, final)
        try:
            self.ends[ring.rank] = self.program(Ring(Strict(comm)))
            if isinstance(comm, Mortal):
                comm.require_life()
        except Killed:
            self.killed, self.ends[ring.rank] = True, Ended(Killed.__name__)
            raise
        except Exception as error:
            self.ends[ring.rank] = _ended(error)
            raise
        return self.ends[ring.rank]


class Elements(TorchDispatchMode):
    """Counts the elements that torch's operators write on this thread; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see ringlab.comm.memory

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
