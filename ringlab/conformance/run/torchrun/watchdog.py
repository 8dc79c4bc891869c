"""A rank's watchdog in torchrun's process; it watches the rank's child, and ends it when a run goes wrong."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist

from ringlab.comm.processes.children import GRACE
from ringlab.comm.processes.devices import device_of
from ringlab.comm.processes.launch import environment
from ringlab.conformance.run.folder import leave, rank_path
from ringlab.conformance.run.isolation import START_SECONDS, ChildProcess
from ringlab.conformance.run.loading import TargetSpec
from ringlab.conformance.run.run import ENDLESS, RankResult, Trouble
from ringlab.conformance.run.stacks import Standing, standing
from ringlab.conformance.run.torchrun.rank import Seat
from ringlab.conformance.run.torchrun.rendezvous import Order, Rendezvous, World
from ringlab.errors import BackendError

STOPPED = "stopped"
"""The kind of trouble of a rank that was still waiting when other ranks had failed."""
_POLL = 0.02
_LOOK = 0.2  # seconds between two checks for failures of other ranks


class Watchdog:
    """Manages this rank's child process, makes its part of each run in it, and writes the result to the rendezvous."""

    def __init__(self, world: World, rendezvous: Rendezvous, spec: TargetSpec, limit: float) -> None:
        self.world, self.rendezvous, self.limit = world, rendezvous, limit
        rendezvous.put(f"lack/{world.rank}", _lack(world, spec.device))
        self.spec = spec
        self.child: _RankChild | None = None
        self.generation = 0

    def make(self, order: Order) -> None:
        """Make this rank's part of a run, if it has one."""
        if order.generation != self.generation:
            self.close()
            self.generation = order.generation
        rank, failed = self.world.rank, f"failed/{order.number}"
        if rank >= order.run.P:
            return
        child = self.child = self.child or self._new(order)
        part = child.part(order, lambda: self.rendezvous.count(failed))
        place = 0
        if part.trouble is not None:
            place = self.rendezvous.count(f"over/{order.number}", 1)
            # A rank that reached the limit is not announced: other ranks may use as much time as this one.
            if part.trouble.kind not in ENDLESS:
                self.rendezvous.count(failed, 1)
        self.rendezvous.put(f"part/{order.number}/{rank}", (place, part))
        if part.trouble is not None:
            self.close()

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.close()
        self.child = None

    def longest(self, P: int) -> float:
        """Return the seconds within which a rank that still exists writes its result to the rendezvous."""
        return START_SECONDS + 2 * self.limit + (P + 2) * GRACE

    def _new(self, order: Order) -> _RankChild:
        world, spec, P = self.world, self.spec, order.run.P
        device = "cpu" if spec.device == "cpu" else f"cuda:{device_of(world.local_rank)}"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        startup = START_SECONDS + self.limit
        prefix = f"ringlab/check/{attempt}/{self.rendezvous.session}/{order.generation}"
        seat = Seat(world.rank, P, spec.transport, device, prefix, order.number, startup)
        return _RankChild(spec, seat, world, self.limit)


def _lack(world: World, device: str) -> str:
    """Return words for the part that this rank lacks for the device, or "" if it lacks nothing."""
    if device == "cpu":
        return ""
    if not dist.is_nccl_available():
        return f"rank {world.rank}: torch {torch.__version__} without NCCL"
    try:
        device_of(world.local_rank)
    except BackendError as error:
        return f"rank {world.rank}: LOCAL_RANK {world.local_rank}, and {error.got}"
    return ""


class _RankChild(ChildProcess):
    """This rank's child process of one generation."""

    def __init__(self, spec: TargetSpec, seat: Seat, world: World, limit: float) -> None:
        super().__init__(
            "ringlab.conformance.run.torchrun.rank", {"spec": spec, "seat": seat}, _surroundings(seat, world)
        )
        self.limit, self.seat = limit, seat

    def part(self, order: Order, failures: Callable[[], int]) -> RankResult:
        """Return this rank's part of a run, or its trouble; failures() is the number of failed ranks."""
        leave(self.folder / f"{order.number}.run", order.run)
        path = rank_path(self.folder, order.number, self.seat.rank)
        since = looked = last = self.clock.tick()
        limit, what, failed = self.seat.startup, "its start", 0
        while not path.exists():
            self.output.pump(_POLL)
            now = self.clock.tick()
            if what == "its start" and self._begun(order.number):
                limit, what, since = self.limit, "one run", now
                self.output.begin()
            trouble = self.ended(since + limit, limit, what)
            if trouble is None and now > looked + _LOOK:
                looked, before, failed = now, failed, failures()
                last = last if failed == before else now
                if failed and now > last + GRACE:
                    trouble = Trouble(STOPPED, f"{GRACE:g} s after the last error{self.standing().words}")
            if trouble is not None and not path.exists():
                return RankResult(trouble=trouble)
        found: RankResult = pickle.loads(path.read_bytes())
        path.unlink()
        return found

    def standing(self) -> Standing:
        """Return where the rank stands, as far as that is known."""
        return standing(self.folder, [self.seat.rank]) if self._code() is None else Standing()

    def _begun(self, number: int) -> bool:
        path = self.folder / "now"
        return path.exists() and pickle.loads(path.read_bytes()) == number


def _surroundings(seat: Seat, world: World) -> dict[str, str]:
    """Return the environment of a rank's process, in a world of only the first ranks."""
    found = environment(1)
    if world.local_size < world.size and "GLOO_SOCKET_IFNAME" not in os.environ:
        del found["GLOO_SOCKET_IFNAME"]  # the loopback device does not reach other machines
    here = min(world.local_size, seat.world_size - (world.rank - world.local_rank))
    return {
        **found,
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(here),
    }
