"""The cost of real processes: P gloo processes compared with torch with P threads, in one process group."""

from __future__ import annotations

from typing import Any

import torch

from ringlab.bench.device import machine
from ringlab.bench.emulate import Work, ring_program, sdpa, shards
from ringlab.bench.interleaved import Paired
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring


def bench_processes(work: Work, P: int = 2, pairs: int = 11, timeout: float = 1800.0) -> dict[str, Any]:
    """Return ratios, times and the machine, for JSON; times in seconds.

    Every process has one thread. Between the ring's runs rank 0 computes the whole problem with P
    threads while the others wait, so that both sides see the same machine.
    """
    outcome = launch(_program, P, work, pairs, timeout=timeout, threads=1, memory=False)
    forward, both = (Paired(*times) for times in outcome.results[0])
    return {
        "bench": "processes",
        "work": {**work.as_dict(), "P": P, "backend": "gloo", "threads_per_process": 1},
        "threads": P,
        "forward_ratio": round(forward.ratio, 4),
        "forward_backward_ratio": round(both.ratio, 4),
        "forward": forward.summary(),
        "forward_backward": both.summary(),
        "machine": machine(),
    }


def _program(ring: Ring, work: Work, pairs: int) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    tensors = work.tensors()
    mine = shards(ring.rank, ring.world_size, tensors)
    return [_pairs(ring, work, tensors, mine, pairs, gradients) for gradients in (False, True)]


def _pairs(
    ring: Ring, work: Work, tensors: tuple[Any, ...], mine: tuple[Any, ...], pairs: int, gradients: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    subject, baseline = [], []
    for _ in range(pairs + 2):
        subject.append(_timed(ring, lambda: ring_program(ring, work.S, mine, gradients)))
        torch.set_num_threads(ring.world_size)
        baseline.append(_timed(ring, lambda: sdpa(tensors, gradients) if ring.rank == 0 else None))
        torch.set_num_threads(1)
    return tuple(subject[2:]), tuple(baseline[2:])


def _timed(ring: Ring, run: Any) -> float:
    """Seconds from the moment all ranks are ready until all are done."""
    ring.barrier()
    begin = ring.comm.now()
    run()
    ring.barrier()
    return ring.comm.now() - begin
