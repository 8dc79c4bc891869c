"""The speed of ringlab's kernels: one block on one GPU, compared with cuDNN and flash attention of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringlab.bench.contenders import SDPA, Contender, all_sdpa, one_block, whole
from ringlab.bench.device import Cuda, Device, machine
from ringlab.bench.measure import METHOD, Bench, all_subjects_timed
from ringlab.bench.problem import PASSES, Problem

BLOCKS = ("triton", "native")


def bench_kernels(
    problem: Problem,
    blocks: Sequence[str] = BLOCKS,
    masks: Sequence[bool] = (True, False),
    rounds: int = 31,
    device: Device | None = None,
    progress: Callable[[], None] = lambda: None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return times, TFLOP/s, errors and speed ratios of each mask and pass, for JSON; times in seconds.

    `masks` are values of `causal`; `progress` is called after every round, 3 + `rounds` times a case.
    Raises: DeviceError without a GPU.
    """
    device = device or Cuda()
    pairs = {block: tuple(SDPA) for block in blocks}
    cases, seeds = [], []
    for causal in masks:
        bench = Bench(replace(problem, causal=causal), device, seed)
        seeds.append(bench.seed)
        for of in PASSES:
            cases.append(bench.measure(of, _contenders(blocks, causal), pairs, rounds, progress))
    sizes = {name: value for name, value in asdict(problem).items() if name != "causal"}
    return {
        "bench": "kernels",
        "ok": all_subjects_timed(cases, pairs),
        "work": {"B": 1, **sizes, "rounds": rounds, "seeds": seeds},
        "method": METHOD,
        "cases": cases,
        "machine": machine(),
    }


def _contenders(blocks: Sequence[str], causal: bool) -> dict[str, Contender]:
    ours = {block: whole(one_block(block), causal) for block in blocks}
    return ours | all_sdpa(causal)
