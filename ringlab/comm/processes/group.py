"""`comm_of_group`: a transport over a process group or DeviceMesh dimension that the program made itself."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringlab.comm.processes.distributed import DistributedComm, carriers_of
from ringlab.errors import BackendError, TransportTimeout, WorldSizeError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_comms: dict[dist.ProcessGroup, DistributedComm] = {}


def comm_of_group(group: dist.ProcessGroup | DeviceMesh | None, timeout: float) -> DistributedComm:
    """Return this process's end of the transport over `group`. Every call returns the same object.

    Each group has only one transport, because the transport counts the calls of attention, and ranks compare
    these counts in backward.

    Raises: BackendError for an object that is not a group, if torch.distributed is not initialized, or for a
    group that cannot carry CPU tensors; WorldSizeError for a mesh of several dimensions, or for a group
    without this process.
    """
    found = _process_group(group)
    for closed in _comms.keys() - dist.distributed_c10d._world.pg_map.keys():
        _comms.pop(closed).close()
    if found not in _comms:
        _comms[found] = _comm_over(found, timeout)
    _comms[found].timeout = timeout
    return _comms[found]


def _comm_over(group: dist.ProcessGroup, timeout: float) -> DistributedComm:
    """Return a transport over `group`. If the group has only NCCL, also open a gloo group of its processes.

    Megatron and Accelerate open groups with only NCCL. These cannot carry headers, which are CPU tensors.
    """
    limit = timedelta(seconds=timeout)
    carriers = carriers_of(group, limit)
    if list(carriers) != ["cuda"]:
        return DistributedComm(group, timeout, carriers=carriers)
    try:
        beside = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=limit,
            backend="gloo",
            use_local_synchronization=True,
            group_desc="ringlab: headers",
        )
    except RuntimeError as error:
        raise TransportTimeout(
            f"a gloo group of the NCCL group's processes, opened within {timeout:g} s",
            str(error).split("\n")[0],
            "call Ring.of_group on every process of the group, or open it with 'cpu:gloo,cuda:nccl'",
        ) from error
    return DistributedComm(
        group, timeout, carriers={**carriers_of(beside, limit), **carriers}, headers=beside
    )


def _process_group(group: Any) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise BackendError(
            "a process group of torch.distributed",
            "none is open",
            "torch.distributed.init_process_group(), or ringlab.connect() under torchrun, which opens one",
        )
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):  # a DeviceMesh
        group = _group_of_mesh(group)
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise WorldSizeError(
            f"a group that rank {dist.get_rank()} is in",
            "a group of other ranks",
            "only members of a group make its ring",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise BackendError(
            "a process group, a DeviceMesh of one dimension, or None for all processes",
            f"a {type(group).__name__}",
            'pass one of them, as in Ring.of_group(mesh["cp"])',
        )
    return group


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise WorldSizeError(
            "a mesh of one dimension",
            f"{mesh.ndim} dimensions" + (f", {', '.join(names)}" if names else ""),
            f"mesh[{names[-1]!r}]" if names else "name the dimensions, and take one of them: mesh['cp']",
        )
    return mesh.get_group()
