"""The cost of real processes: a ring of P gloo processes is compared with torch's attention on P threads."""

from __future__ import annotations

from typing import Any

import torch

from ringlab.bench.device import Ranks, machine
from ringlab.bench.emulate import Work, ring_program, sdpa, shards
from ringlab.bench.interleaved import Times, Turn, interleaved, paired
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring


def bench_processes(work: Work, P: int = 2, pairs: int = 11, timeout: float = 1800.0) -> dict[str, Any]:
    """Return ratios, times and the machine, for JSON; times in seconds.

    Every process has one thread. Between the ring's runs rank 0 computes the whole problem with P
    threads while the others wait, so that both sides see the same machine.
    """
    outcome = launch(_program, P, work, pairs, timeout=timeout, threads=1, memory=False)
    measured = dict(zip(("forward", "forward_backward"), map(paired, outcome.results[0]), strict=True))
    return {
        "bench": "processes",
        "work": {**work.as_dict(), "P": P, "backend": "gloo", "threads_per_process": 1},
        "threads": P,
        **{f"{of}_ratio": found["ratio"] for of, found in measured.items()},
        **measured,
        "machine": machine(),
    }


def _program(ring: Ring, work: Work, pairs: int) -> list[Times]:
    tensors = work.tensors()
    mine = shards(ring.rank, ring.world_size, tensors)

    def timed(gradients: bool) -> Times:
        def whole(_: Any) -> None:
            if ring.rank == 0:
                sdpa(tensors, gradients)

        turns = {
            "subject": Turn(
                lambda _: ring_program(ring, work.S, mine, gradients), lambda: torch.set_num_threads(1)
            ),
            "baseline": Turn(whole, lambda: torch.set_num_threads(ring.world_size)),
        }
        return interleaved(turns, Ranks(ring), pairs, 2)

    return [timed(gradients) for gradients in (False, True)]
