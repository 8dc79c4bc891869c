"""The ranks of torchrun's processes, and the values that the processes exchange through torchrun's store."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringlab.comm.processes.connect import torchrun_store
from ringlab.conformance.run.isolation import START_SECONDS
from ringlab.conformance.run.loading import TargetSpec
from ringlab.conformance.run.run import Run
from ringlab.errors import TransportTimeout

# The largest number of bytes sent at once, because torch's store closes the connection at 8 MiB.
_PIECE = 4 << 20


@dataclass(frozen=True)
class World:
    """This process's place among the processes that torchrun started, on all machines and on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World | None:
    """Return this process's place among torchrun's processes, or None if torchrun did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", *names)):
        return None
    return World(*(int(os.environ[name]) for name in names))


class Rendezvous:
    """A store in which ranks write values for each other, by name; each value is written once.

    session: the number of the command among those of this torchrun, counted from 1.
    """

    def __init__(self, store: dist.Store, session: int) -> None:
        self.session = session
        self.store = dist.PrefixStore(f"ringlab/check/{session}", store)

    def put(self, name: str, value: Any) -> None:
        """Write `value` under `name`."""
        content = pickle.dumps(value)
        starts = range(0, len(content), _PIECE)
        for index, start in enumerate(starts):
            self.store.set(f"{name}/{index}", content[start : start + _PIECE])  # type: ignore[arg-type]
        self.store.set(name, str(len(starts)))

    def read(self, name: str, seconds: float) -> Any:
        """Return the value called `name`. Raises: TransportTimeout if it does not exist within `seconds`."""
        try:
            self.store.wait([name], timedelta(seconds=max(seconds, 0.001)))
        except dist.DistStoreError as error:
            raise TransportTimeout(f"{name} within {seconds:.3g} s", str(error).split("\n")[0]) from error
        return pickle.loads(b"".join(self.store.get(f"{name}/{i}") for i in range(int(self.store.get(name)))))

    def forget(self, name: str) -> None:
        """Remove the value called `name`, which no rank reads any more."""
        for each in (*(f"{name}/{i}" for i in range(int(self.store.get(name)))), name):
            self.store.delete_key(each)

    def count(self, name: str, more: int = 0) -> int:
        """Add `more` to the counter called `name`, and return the new count."""
        return self.store.add(f"count/{name}", more)


def connected(world: World) -> Rendezvous:
    """Return the rendezvous of this process. Raises: TransportTimeout if torchrun's store does not answer."""
    store = torchrun_store(START_SECONDS)
    return Rendezvous(store, store.add(f"ringlab/check/sessions/{world.rank}", 1))


@dataclass(frozen=True)
class Job:
    """The first message of rank 0: the target, and the time limit for each run."""

    spec: TargetSpec
    limit: float


@dataclass(frozen=True)
class Order:
    """A run that the processes of this generation must make."""

    number: int
    generation: int
    run: Run


@dataclass(frozen=True)
class End:
    """The last message of rank 0: the exit status of all ranks."""

    status: int
