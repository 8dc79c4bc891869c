"""A group of NCCL only, as Megatron and Accelerate open it, gets one gloo group beside it, for headers.

The processes of these tests have gloo groups of which torch says that they are NCCL's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringlab import launch
from ringlab.comm.ring import Ring
from ringlab.errors import RinglabError, TransportTimeout


def of_nccl_only(*those: dist.ProcessGroup) -> None:
    """Make torch say that `those` groups, and no others, carry CUDA tensors over NCCL."""
    said = dist.get_backend_config
    dist.get_backend_config = lambda group=None: "cuda:nccl" if group in those else said(group)


def over_rows_and_columns(ring: Ring) -> dict[str, Any]:
    """Make the rings of a row and a column of a 2 × 2 mesh, use them, and close the row's group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mine, others = mesh.get_group("cp"), mesh.get_group("dp")
    of_nccl_only(mine, others)
    open_groups = dist.distributed_c10d._world.pg_map
    before = len(open_groups)
    first = Ring.of_group(mine, timeout=20.0)
    comm = first.comm
    result: dict[str, Any] = {
        "carries": sorted(comm._carriers),  # type: ignore[attr-defined]
        "shifted": first.shift(torch.tensor([dist.get_rank()])).item(),
        "headers": comm._traffic.group not in (mine, None),  # type: ignore[attr-defined]
        "kept": Ring.of_group(mine, timeout=20.0).comm is comm,
        "opened": len(open_groups) - before,
    }
    try:  # a second ring at the same time; its headers must not go to the first one
        second = Ring.of_group(others, timeout=20.0)
        works = [each.post(torch.tensor([10 * dist.get_rank()]), tag="both") for each in (first, second)]
        result["both"] = [work.wait()[0].item() for work in works]
    except RinglabError as error:
        result["both"] = type(error).__name__
    dist.barrier()
    dist.destroy_process_group(mine)
    Ring.of_group(timeout=20.0)
    result["left"] = len(open_groups) - before
    return result


def test_its_processes_open_one_gloo_group_beside_it() -> None:
    for rank, found in enumerate(launch(over_rows_and_columns, 4, memory=False).results):
        row, column = divmod(rank, 2)
        assert found == {
            "carries": ["cpu", "cuda"],
            "shifted": 2 * row + 1 - column,
            "headers": True,
            "kept": True,
            "opened": 1,
            "both": [10 * (2 * row + 1 - column), 10 * (2 * (1 - row) + column)],
            # one group was closed with its gloo group, and a gloo group was opened beside the other
            "left": 0,
        }


def alone(ring: Ring) -> str:
    """Make a ring on rank 0 only, and return its error."""
    pair = dist.new_group([0, 1])
    of_nccl_only(pair)
    try:
        if ring.rank == 0:
            Ring.of_group(pair, timeout=1.0)
    except TransportTimeout as error:
        return str(error)
    return ""


@pytest.mark.thorough
def test_a_ring_that_not_all_processes_make_is_an_error() -> None:
    said, nothing = launch(alone, 2, memory=False).results
    assert "call Ring.of_group on every process" in said and nothing == ""
