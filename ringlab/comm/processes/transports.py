"""The transports between processes, by name, and what each needs from the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringlab.errors import BackendError

TRANSPORTS = {
    "gloo": "CPU tensors between processes, on one machine or many",
    "nccl": "a GPU for each rank, on one machine or many",
    "symmetric": "a GPU for each rank of one machine; each reads the memory of the others",
    "shared-gpu": "several ranks on one GPU, through the CPU's memory",
}
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "symmetric": "gloo", "shared-gpu": "gloo"}
"""torch's backend of the process group; headers and control messages travel on the CPU always."""


@dataclass(frozen=True)
class Lack:
    """What a transport needs, what there is, and what to use instead."""

    needed: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"needs {self.needed}; found {self.got}: {self.remedy}"


def available() -> dict[str, str | None]:
    """Return, for each transport, None where it runs here as it is meant, else why not and what to do.

    On a machine without a GPU 'symmetric' and 'shared-gpu' carry CPU tensors all the same, the first
    through shared memory, so that everything but the wire can be tried.
    """
    ranks = {"gloo": 1, "nccl": 2, "symmetric": 2, "shared-gpu": 1}
    lacks = {name: lack(name, ranks[name]) or _no_gpu_to_use(name) for name in TRANSPORTS}
    return {name: None if found is None else str(found) for name, found in lacks.items()}


def check(transport: str, ranks: int) -> None:
    """Raise BackendError unless `ranks` ranks of this machine can use `transport`."""
    found = lack(transport, ranks)
    if found is not None:
        raise BackendError(f"{found.needed}, for transport '{transport}'", found.got, found.remedy)


def lack(transport: str, ranks: int) -> Lack | None:
    """Return what keeps `ranks` ranks of this machine from using `transport`, None if nothing does.

    Raises: BackendError for an unknown name.
    """
    if transport not in TRANSPORTS:
        raise BackendError(f"a transport among {', '.join(TRANSPORTS)}", repr(transport))
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
