"""What emulation costs: P virtual ranks against torch doing the whole problem in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlab.bench.machine import machine
from ringlab.bench.paired import Paired, paired
from ringlab.bench.work import Work, ring_program, sdpa, shards
from ringlab.comm.memory import MemoryReport
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster


def bench_emulate(
    work: Work, P: int = 8, pairs: int = 11, progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return ratios, times and the machine, for JSON; times in seconds.

    Shards lie ready before the clock starts, as they do for SDPA. Memory is accounted in runs of
    its own, per rank and beyond the shards that lie ready.
    """
    tensors = work.tensors()
    parts = [shards(rank, P, tensors) for rank in range(P)]
    cluster = VirtualCluster(P, memory=False)

    def measure(gradients: bool) -> Paired:
        def program(ring: Ring) -> None:
            ring_program(ring, work.S, parts[ring.rank], gradients)

        return paired(lambda: cluster.run(program), lambda: sdpa(tensors, gradients), pairs, 2, progress)

    def memory(gradients: bool) -> dict[str, Any]:
        def program(ring: Ring) -> None:
            ring_program(ring, work.S, parts[ring.rank], gradients)

        return _memory(VirtualCluster(P).run(program).memory, work, P)

    measured = {"forward": measure(False), "forward_backward": measure(True)}
    return {
        "bench": "emulate",
        "work": {**work.as_dict(), "P": P},
        "threads": torch.get_num_threads(),
        "forward_ratio": round(measured["forward"].ratio, 4),
        "forward_backward_ratio": round(measured["forward_backward"].ratio, 4),
        "memory": {"forward": memory(False), "forward_backward": memory(True)},
        "forward": measured["forward"].summary(),
        "forward_backward": measured["forward_backward"].summary(),
        "machine": machine(),
    }


def _memory(reports: list[MemoryReport], work: Work, P: int) -> dict[str, Any]:
    """Peaks per rank, and in shards: tensors of S/P tokens of all heads."""
    shard = work.B * work.H * -(-work.S // P) * work.D * 4
    return {
        "peak_bytes": [report.peak_bytes for report in reports],
        "largest_bytes": max(report.largest_bytes for report in reports),
        "peak_shards": round(max(report.peak_bytes for report in reports) / shard, 2),
        "scores_of_a_row_of_blocks_bytes": -(-work.S // P) * work.S * 4,
    }
