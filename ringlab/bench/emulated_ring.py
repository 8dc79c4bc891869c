"""The cost of the ring without links: P virtual ranks on one GPU are compared with one call of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringlab.bench.contenders import (
    SDPA,
    Alone,
    Contender,
    all_sdpa,
    emulated_ring,
    one_block,
    rank_program,
    whole,
)
from ringlab.bench.device import Cuda, Device, machine
from ringlab.bench.kernels import BLOCKS
from ringlab.bench.measure import METHOD, Bench, all_subjects_timed
from ringlab.bench.problem import Problem
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag

PASSES = ("forward", "forward_backward")
MEMORY = (
    "the allocator's peak on a rank that runs alone, its neighbours played by copies, beyond its shard of "
    "q, k, v and dout; in tensors of S/P tokens of all heads"
)


def bench_ring(
    problem: Problem,
    P: int = 8,
    blocks: Sequence[str] = BLOCKS,
    rounds: int = 15,
    device: Device | None = None,
    progress: Callable[[], None] = lambda: None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return times, speed ratios and memory of the emulated zig-zag ring, for JSON; times in seconds.

    Each block's ring is compared to the same block called once on the whole problem, and to torch's
    attention called once. `progress` is called after every round, 3 + `rounds` times in each pass.
    Raises: DeviceError without a GPU.
    """
    device = device or Cuda()
    bench = Bench(problem, device, seed)
    contenders: dict[str, Contender] = {}
    for block in blocks:
        contenders[f"{block} ring"] = emulated_ring(block, P, problem.causal)
        contenders[f"{block} once"] = whole(one_block(block), problem.causal)
    contenders |= all_sdpa(problem.causal)
    pairs = {f"{block} ring": (f"{block} once", *SDPA) for block in blocks}
    cases = [bench.measure(of, contenders, pairs, rounds, progress) for of in PASSES]
    right = [block for block in blocks if all(f"{block} ring" in case["contenders"] for case in cases)]
    return {
        "bench": "ring",
        "ok": all_subjects_timed(cases, pairs),
        "work": {**problem.as_dict(), "P": P, "layout": "zigzag", "rounds": rounds, "seeds": [bench.seed]},
        "method": {**METHOD, "memory": MEMORY, "ranks": "threads of one process that share the GPU"},
        "cases": cases,
        "memory": {block: {of: _memory(bench, block, P, of) for of in PASSES} for block in right},
        "machine": machine(),
    }


def _memory(bench: Bench, block: str, P: int, of: str) -> dict[str, Any]:
    """Return the peak of each rank, in bytes and as a number of tensors of S/P tokens."""
    problem, layout = bench.problem, zigzag(bench.problem.S, P)
    peaks = []
    for rank in range(P):
        shards = tuple(layout.shard(x, rank).clone() for x in bench.inputs)
        ring = Ring(Alone(rank, P))

        def run(ring: Ring = ring, shards: tuple[torch.Tensor, ...] = shards) -> Any:
            return rank_program(ring, shards, layout, block, problem.causal, of != "forward")

        run()  # makes the tables and workspaces that later runs reuse, so that they are not counted
        peaks.append(bench.device.peak_bytes(run))
    one = problem.tensor_bytes // problem.S * -(-problem.S // P)
    return {
        "peak_bytes": peaks,
        "tensor_bytes": one,
        "shard_bytes": 4 * one,
        "peak_shards": round(max(peaks) / one, 2),
    }
