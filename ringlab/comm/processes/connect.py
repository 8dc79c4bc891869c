"""`connect` makes a ring of the processes that torchrun started; `join` lets any process join a transport.

`TRANSPORTS` lists the names of the transports between processes. `lack` returns what this machine lacks for
a transport.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ringlab.comm.processes.carriers import AllToAll, Carrier, high_priority
from ringlab.comm.processes.devices import check_own_gpus, device_of
from ringlab.comm.processes.distributed import DistributedComm, carriers_of
from ringlab.comm.processes.failure_board import common_start
from ringlab.comm.processes.shared_memory import SharedMemory, SymmetricMemory
from ringlab.comm.processes.symmetric import Windows
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, TransportTimeout, WorldSizeError

TRANSPORTS = {
    "gloo": "CPU tensors between processes, on one machine or many",
    "nccl": "a GPU for each rank, on one machine or many",
    "symmetric": "a GPU for each rank of one machine; each reads the memory of the others",
    "shared-gpu": "several ranks on one GPU, through the CPU's memory",
}
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "symmetric": "gloo", "shared-gpu": "gloo"}
"""torch's backend of the process group; headers and control messages always travel on the CPU."""


@dataclass(frozen=True)
class Lack:
    """A requirement of a transport that this machine does not meet: `needed`, `got` and `remedy`."""

    needed: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"needs {self.needed}; found {self.got}: {self.remedy}"


def available() -> dict[str, str | None]:
    """Return for each transport None if it runs on this machine as intended, or else the reason and a remedy.

    On a machine without a GPU, 'symmetric' and 'shared-gpu' still carry CPU tensors, so that all their code
    except the transfer between GPUs can be tried. 'symmetric' then uses shared memory.
    """
    ranks = {"gloo": 1, "nccl": 2, "symmetric": 2, "shared-gpu": 1}
    lacks = {name: lack(name, ranks[name]) or _no_gpu_to_use(name) for name in TRANSPORTS}
    return {name: None if found is None else str(found) for name, found in lacks.items()}


def check(transport: str, ranks: int) -> None:
    """Check that `ranks` ranks of this machine can use `transport`. Raises: BackendError if they cannot."""
    found = lack(transport, ranks)
    if found is not None:
        raise BackendError(f"{found.needed}, for transport '{transport}'", found.got, found.remedy)


def lack(transport: str, ranks: int) -> Lack | None:
    """Return the unmet requirement that keeps `ranks` ranks of this machine from using `transport`, or None.

    Raises: BackendError for an unknown name.
    """
    if transport not in TRANSPORTS:
        raise BackendError(f"one of the transports {', '.join(TRANSPORTS)}", repr(transport))
    gpus = torch.cuda.device_count()
    if transport == "nccl" and not dist.is_nccl_available():
        return Lack("a torch that was built with NCCL", f"torch {torch.__version__}", "use transport='gloo'")
    if gpus < ranks and (transport == "nccl" or (transport == "symmetric" and gpus)):
        one = "transport='shared-gpu', or " if gpus else ""
        remedy = f"use {one}transport='gloo' with tensors on the CPU"
        return Lack(f"a GPU for each of {ranks} ranks", f"{gpus} GPU{'' if gpus == 1 else 's'}", remedy)
    if transport == "symmetric" and gpus:
        return _no_symmetric_memory(ranks)
    return None


def _no_symmetric_memory(ranks: int) -> Lack | None:
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        del _SymmetricMemory
    except ImportError:
        return Lack(
            "torch 2.11 or later, with symmetric memory", f"torch {torch.__version__}", "use transport='nccl'"
        )
    blind = [
        (a, b)
        for a in range(ranks)
        for b in range(ranks)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if blind:
        got = f"GPU {blind[0][0]} cannot access GPU {blind[0][1]}"
        return Lack("GPUs that can read each other's memory (NVLink, P2P)", got, "use transport='nccl'")
    return None


def _no_gpu_to_use(transport: str) -> Lack | None:
    if transport in ("gloo", "nccl") or torch.cuda.device_count():
        return None
    needed = "a GPU for each rank" if transport == "symmetric" else "a GPU"
    return Lack(needed, "0 GPUs", "carries CPU tensors only; transport='gloo' is the usual choice for them")


_UNDER_SLURM = (
    "start one torchrun per node by srun, or set RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID "
    "in each task, and MASTER_ADDR and MASTER_PORT: docs/guide/processes.md shows both"
)
_LAST_WORDS = 2.0  # seconds for which a failed rank stays, so that other ranks can report their errors
_CPU_SLOT = 1 << 20  # bytes per slot on the CPU; shared memory is small in containers
_uses: dict[str, Iterator[int]] = defaultdict(itertools.count)


@contextmanager
def connect(transport: str = "gloo", timeout: float = 60.0, startup: float | None = None) -> Iterator[Ring]:
    """Yield the ring of the processes that torchrun started, and close the group at the end of the block.

    transport: "gloo" for tensors on the CPU; "nccl", or on one machine "symmetric", if each rank has its own
    GPU; "shared-gpu" if ranks share a GPU. The function sets this rank's CUDA device: GPU number LOCAL_RANK
    among the GPUs that the process sees, or the only GPU that it sees.
    timeout: the seconds that a message may take.
    startup: the seconds in which all ranks must connect; by default `timeout`.

    Raises: WorldSizeError outside torchrun; TransportTimeout, with the missing ranks, if not all ranks
    connect in time; BackendError, which names another transport, if this transport cannot run on this
    machine.

    >>> from ringlab import connect, errors
    >>> try:
    ...     with connect("gloo") as ring:  # runs on every rank that torchrun started; this process was not
    ...         print(ring)
    ... except errors.WorldSizeError as error:
    ...     print(error)
    needed: a process that torchrun started
       got: no RANK in the environment
    remedy: torchrun --nproc-per-node 2 program.py, or ringlab.launch(program, 2)
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise WorldSizeError(
                "a process that torchrun started",
                f"no {name} in the environment",
                _UNDER_SLURM
                if "SLURM_PROCID" in os.environ
                else "torchrun --nproc-per-node 2 program.py, or ringlab.launch(program, 2)",
            )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if here is None:  # the launcher is not torchrun; the ranks of this machine are counted below
        check(transport, 1)
    else:
        _check_here(transport, int(here), world_size)
    # Each group gets its own keys in the store. Otherwise it would find an earlier group's addresses.
    startup = timeout if startup is None else startup
    store = dist.PrefixStore(f"ringlab/connect/{next(_uses['connect'])}", torchrun_store(startup))
    hosts = _wait_for_all(store, rank, world_size, startup)
    neighbours = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    if here is None:
        _check_here(transport, len(neighbours), world_size)
    local_rank = int(os.environ.get("LOCAL_RANK", neighbours.index(rank)))
    comm = join(transport, startup, timeout, store, rank, world_size, local_rank)
    with closing(comm):
        yield Ring(comm)


def _check_here(transport: str, here: int, world_size: int) -> None:
    """Check that this process, one of `here` on this machine, can use `transport`. Raises: BackendError.

    Over NCCL one GPU is enough here, because the process may see only its own. `device_of` checks the rest.
    """
    if transport == "symmetric" and here != world_size:
        got = f"{here} of {world_size} ranks here"
        raise BackendError("all ranks on one machine, for transport 'symmetric'", got, "use transport='nccl'")
    check(transport, 1 if transport == "nccl" else here)


def _wait_for_all(store: dist.Store, rank: int, world_size: int, startup: float) -> list[str]:
    """Wait until every rank has connected, and return the name of each rank's machine.

    Raises: TransportTimeout, with the ranks that have not connected.
    """
    come = [f"come/{each}" for each in range(world_size)]
    try:
        store.set(come[rank], socket.gethostname())
        store.wait(come, timedelta(seconds=startup))
        return [store.get(key).decode() for key in come]
    except (dist.DistError, RuntimeError) as error:
        try:
            missing = [str(each) for each, key in enumerate(come) if not store.check([key])]
        except RuntimeError:  # the process that hosts the store is gone
            raise _not_connected(error, startup) from error
        got = f"no word from {'ranks' if len(missing) > 1 else 'rank'} {', '.join(missing)} of {world_size}"
        raise TransportTimeout(
            f"all ranks connected within {startup:g} s",
            got,
            "look at the output of the missing ranks, and at their machines",
        ) from error


def join(
    transport: str,
    startup: float,
    timeout: float,
    store: dist.Store,
    rank: int,
    world_size: int,
    local_rank: int,
    **options: Any,
) -> DistributedComm:
    """Return this rank's end of `transport`. The ranks find each other by addresses in `store`.

    local_rank: the number of this rank among the ranks of its machine, which selects the GPU.
    startup: the seconds in which all ranks must connect. timeout: the seconds that a message may take.
    options: further options of DistributedComm. `closing` closes the result.

    Raises: BackendError if a process group is open already, if this rank has no GPU, or if ranks share a GPU
    and `transport` does not support this; TransportTimeout if the ranks do not connect.
    """
    if dist.is_initialized():
        raise BackendError("no process group yet", "one is open", "use ringlab.Ring.of_group() on it")
    own_gpu = transport in ("nccl", "symmetric") and torch.cuda.is_available()
    if own_gpu:
        torch.cuda.set_device(device_of(local_rank))
    elif transport == "shared-gpu" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # NCCL's watchdog ends a process if a message takes longer than the limit of the group, so this limit
    # must be at least that of messages.
    limit = timedelta(seconds=max(startup, timeout))
    try:
        dist.init_process_group(
            BACKENDS[transport],
            timeout=limit,
            store=store,
            rank=rank,
            world_size=world_size,
            pg_options=high_priority(limit) if transport == "nccl" else None,
        )
        if own_gpu:
            check_own_gpus(transport)
        # NCCL requires that all ranks take part in the first operation of a group.
        if transport == "nccl":
            dist.all_reduce(torch.zeros(1, device="cuda"))
        carriers = _carriers(transport, rank, world_size, timeout, limit)
    except BackendError:  # raised on all ranks, which may then connect by another transport
        dist.destroy_process_group()
        raise
    except RuntimeError as error:  # gloo's errors have no class of their own
        raise _not_connected(error, startup) from error
    return DistributedComm(None, timeout, start=_shared_start(startup), carriers=carriers, **options)


def _carriers(
    transport: str, rank: int, world_size: int, timeout: float, limit: timedelta
) -> dict[str, Carrier]:
    if transport in ("gloo", "nccl"):
        return carriers_of(None, limit)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    if transport == "shared-gpu":
        shift = AllToAll(rank, world_size, group, timeout)
        return {"cpu": shift, "cuda": shift}
    if not torch.cuda.is_available():
        return {"cpu": Windows(rank, group, timeout, SharedMemory, _CPU_SLOT)}
    return {**carriers_of(None, limit), "cuda": Windows(rank, group, timeout, SymmetricMemory)}


@contextmanager
def closing(comm: DistributedComm) -> Iterator[None]:
    """After the block, finish `comm` or report the block's error to the other ranks, and close the group."""
    leave = dist.destroy_process_group
    try:
        yield
        comm.finish()
    except BaseException as error:
        comm.fail(error)
        comm.board.end(comm.rank)
        if "nccl" in str(dist.get_backend_config()):
            # Destroying the group would wait for its kernels, which may wait for a rank that has failed.
            leave = dist.distributed_c10d._abort_process_group
        raise
    finally:
        leave()
        comm.close()
        if comm.board.first_failure() is not None:  # torchrun ends all ranks as soon as one of them ends
            comm.board.linger(list(range(comm.world_size)), _LAST_WORDS)


@cache
def torchrun_store(timeout: float) -> dist.Store:
    """Return torchrun's store. It is cached, because without torchrun's agent rank 0 hosts it.

    Raises: TransportTimeout if the store does not answer within `timeout` seconds.
    """
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except dist.DistError as error:
        raise _not_connected(error, timeout) from error
    return store


def _not_connected(error: Exception, timeout: float) -> TransportTimeout:
    first_line = str(error).split("\n")[0]
    return TransportTimeout(
        f"all ranks connected within {timeout:g} s", first_line, "start every rank, and look at its output"
    )


def _shared_start(timeout: float) -> float:
    """Return the value of time.perf_counter that all ranks of this machine use as time zero."""
    store = dist.distributed_c10d._get_default_store()
    use = dist.PrefixStore(f"ringlab/start/{next(_uses['start'])}", store)
    return common_start(use, dist.get_rank(), socket.gethostname(), timeout)
