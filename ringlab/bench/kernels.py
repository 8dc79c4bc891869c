"""The speed of ringlab's kernels: one block on one GPU, compared with cuDNN and flash attention of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from ringlab.bench.contenders import SDPA, Contender, all_sdpa, one_block, whole
from ringlab.bench.device import Cuda, Device, machine
from ringlab.bench.measure import METHOD, Bench, all_subjects_timed
from ringlab.bench.problem import PASSES, Problem
from ringlab.blocks import get_block
from ringlab.errors import BackendError

OPTIONAL = ("cudnn", "flash", "flex")
"""Blocks whose libraries a machine may lack. Those blocks are then not timed, which is not a failure."""
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

    ringlab's blocks `cudnn` and `flash` have the names of torch's own backends, so the result calls them "cudnn block"
    and "flash block". "computed_by" names the block that computes, such as flash-3.
    `masks` are values of `causal`; `progress` is called after every round, 3 + `rounds` times a case.
    Raises: DeviceError without a GPU.
    """
    device = device or Cuda()
    pairs = {_subject(block): tuple(SDPA) for block in blocks}
    here: dict[str, str] = {}
    cases, seeds = [], []
    for causal in masks:
        bench = Bench(replace(problem, causal=causal), device, seed)
        seeds.append(bench.seed)
        named = {_subject(block): _computing(block, bench.inputs.q) for block in blocks}
        here = {subject: name for subject, name in named.items() if name}
        for of in PASSES:
            cases.append(bench.measure(of, _contenders(blocks, causal), pairs, rounds, progress))
    sizes = {name: value for name, value in asdict(problem).items() if name != "causal"}
    return {
        "bench": "kernels",
        "ok": bool(here) and all_subjects_timed(cases, here),
        "computed_by": here,
        "work": {"B": 1, **sizes, "rounds": rounds, "seeds": seeds},
        "method": METHOD,
        "cases": cases,
        "machine": machine(),
    }


def _contenders(blocks: Sequence[str], causal: bool) -> dict[str, Contender]:
    ours = {_subject(block): whole(one_block(block), causal) for block in blocks}
    return ours | all_sdpa(causal)


def _subject(block: str) -> str:
    """Return a name for the results of ringlab's block that no backend of torch's own attention has."""
    return f"{block} block" if block in SDPA else block


def _computing(block: str, q: Tensor) -> str | None:
    """Return the name of the block that computes, or None for a library's block that the machine lacks."""
    try:
        return get_block(block, q).name
    except BackendError:
        return None if block in OPTIONAL else block
