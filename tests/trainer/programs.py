"""All programs that tests run on four processes with several groups, in one launch: meshes, rings, DDP, FSDP2."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringlab import ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import RinglabError, TrainingError
from ringlab.nn import sum_gradients
from tests.schedules.problems import Problem, program
from tests.trainer.model import Gradients, Model, gradients, share_over

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCHES = (0, 1)
"""The seed of each replica's batch: a mesh has two replicas, each a ring of two ranks."""
RANKS = 4


def four(ring: Ring, problem: Problem) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rows = Ring.of_group(mesh["cp"])
    return {
        "rows": [program(rows, replace(problem, dtype=dtype), "ring") for dtype in DTYPES],
        "columns": program(Ring.of_group(mesh.get_group("dp")), problem, "ring"),
        "all": program(Ring.of_group(), replace(problem, layout=zigzag(problem.layout.S, RANKS)), "ring"),
        "both": both_at_once((Ring.of_group(mesh["dp"]), rows), problem),
        "autocast": step_under_autocast(rows),
        "kept": Ring.of_group(mesh.get_group("cp")).comm is rows.comm,
        "closed": over_groups_that_are_closed(problem),
        "refused": refusals(mesh),
        "trained": {name: train(mesh) for name, train in TRAINERS.items()},
    }


def both_at_once(rings: tuple[Ring, Ring], problem: Problem) -> list[tuple[Tensor, ...]]:
    """Make a call over each of two rings; both forwards run before the first backward."""
    layout = problem.layout
    shards = [layout.shard(problem.tensors(), ring.rank) for ring in rings]
    leaves = [tuple(x.requires_grad_() for x in shard[:3]) for shard in shards]
    outs = [
        ring_attention(*qkv, ring=ring, layout=layout, mask=problem.mask, block="naive")
        for ring, qkv in zip(rings, leaves, strict=True)
    ]
    return [
        (out.detach(), *torch.autograd.grad(out, qkv, dout))
        for out, qkv, (*_, dout) in zip(outs, leaves, shards, strict=True)
    ]


def step_under_autocast(ring: Ring) -> Gradients:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = share_over(ring, model)
    loss.backward()
    return gradients(model)


def over_groups_that_are_closed(problem: Problem) -> tuple[Tensor, ...]:
    """Return the results over a group that follows a closed group of the same processes."""
    made: tuple[Tensor, ...] = ()
    for _ in range(2):
        pairs = [dist.new_group([first, first + 1]) for first in range(0, RANKS, 2)]
        mine = pairs[dist.get_rank() // 2]
        made = program(Ring.of_group(mine), problem, "ring")
        dist.barrier()
        dist.destroy_process_group(mine)
    return made


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """Return the errors of wrong groups: a mesh of two dimensions, a name, a group without this process."""
    alone = dist.new_group([0])
    asked: dict[str, Callable[[], Any]] = {
        "Ring(mesh)": lambda: Ring(mesh["cp"]),  # type: ignore[arg-type]
        "two dimensions": lambda: Ring.of_group(mesh),
        "a name": lambda: Ring.of_group("cp"),  # type: ignore[arg-type]
        "the group of rank 0": lambda: Ring.of_group(alone),
    }
    return {name: _answer(ask) for name, ask in asked.items()}


def _answer(ask: Callable[[], Any]) -> str:
    try:
        return repr(ask())
    except RinglabError as error:
        return f"{type(error).__name__}: {error}"


def _step(mesh: DeviceMesh, model: Any, factor: float = RANKS) -> Gradients:
    """Return the gradients of the replicas' mean loss, scaled by `factor` before the ranks reduce them."""
    seed = BATCHES[mesh["dp"].get_local_rank()]
    loss = share_over(Ring.of_group(mesh["cp"]), model, seed) / len(BATCHES)
    (factor * loss).backward()
    return gradients(model)


def _ddp(recompute: bool | None = None) -> Any:
    return DistributedDataParallel(Model(recompute).double())


def _sharded(mesh: DeviceMesh, recompute: bool | None = None, dtype: torch.dtype = torch.float64) -> Any:
    model = Model(recompute).to(dtype)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    return model


def _summing(mesh: DeviceMesh) -> Any:
    """Return a sharded model after the calls in sum_gradients' remedy. In float64, FSDP would sum differently."""
    model = _sharded(mesh, dtype=torch.float32)
    with pytest.raises(TrainingError) as refused:
        sum_gradients(model)
    calls = re.findall(r"(set_\w+)\((.+?)\)", refused.value.remedy)
    assert calls
    for unit in (*model.layers, model):
        for name, value in calls:
            getattr(unit, name)(ast.literal_eval(value))
    return model


TRAINERS: dict[str, Callable[[DeviceMesh], Gradients]] = {
    "DDP": lambda mesh: _step(mesh, _ddp()),
    "DDP, not multiplied": lambda mesh: _step(mesh, _ddp(), factor=1.0),
    "DDP, checkpoints": lambda mesh: _step(mesh, _ddp(recompute=False)),
    "DDP, reentrant checkpoints": lambda mesh: _step(mesh, _ddp(recompute=True)),
    "FSDP2": lambda mesh: _step(mesh, _sharded(mesh)),
    "FSDP2, as the remedy says": lambda mesh: _step(mesh, _summing(mesh), factor=1.0),
    "FSDP2, checkpoints": lambda mesh: _step(mesh, _sharded(mesh, recompute=False)),
}
