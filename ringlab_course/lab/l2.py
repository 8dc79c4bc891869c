"""Lab L2, layouts and scaling: how close each layout comes to a perfect split, in strong and weak scaling.

Strong scaling runs the same sequence on more ranks. Weak scaling adds ranks with the same number of tokens
per rank. There the sequence grows with the number of ranks, and so does the work of each rank, because
attention is quadratic.

efficiency = the time of a perfect split / the ring's time. On GPUs, the time of a perfect split is 1/P of the
time in which one GPU computes torch's own attention of the whole sequence. On CPUs, where processes share the
cores, it is the time of torch's own attention in one process with P threads, while the other processes wait.
This measurement and the ring alternate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.bench.contest import case, compete
from ringlab.bench.emulate import sdpa
from ringlab.bench.problem import Inputs, Problem, draw
from ringlab.bench.reference import sample
from ringlab.comm.protocol import CONTROL
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.conformance.target.claims import Target
from ringlab.errors import LabError
from ringlab.layout import layout_names
from ringlab_course.lab.l1 import Truth
from ringlab_course.lab.result import expect_attention, expect_ranks

PERFECT = "a perfect split"
TURN = CONTROL + "turn"


@dataclass(frozen=True)
class L2:
    """Settings of lab L2: S tokens for strong scaling, and c tokens per rank for weak scaling.

    ranks: the numbers of ranks to measure; if empty, powers of two and all ranks. layouts: all layouts by
    default.
    """

    S: int = 8192
    c: int = 2048
    H: int = 8
    D: int = 64
    dtype: str = "float32"
    ranks: tuple[int, ...] = ()
    layouts: tuple[str, ...] = field(default_factory=layout_names)
    block: str = "auto"
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.layouts if name not in layout_names()]
        if unknown or not self.layouts or len(set(self.layouts)) < len(self.layouts):
            raise LabError(
                f"layouts among {', '.join(layout_names())}, each once", ", ".join(self.layouts) or "none"
            )
        if min(self.S, self.c) < 16:
            raise LabError("at least 16 tokens", f"S={self.S}, c={self.c}")
        expect_attention(self.H, self.D, self.dtype, self.rounds, self.seed, self.block)

    def check(self, P: int) -> None:
        """Raise LabError unless the lab can run on `P` ranks."""
        expect_ranks(P)
        self.numbers(P)

    def needed_bytes(self, P: int, rank: int = 0, device: torch.device | None = None) -> int:
        """Return the most bytes that a rank allocates.

        Every rank has the whole sequence, and rank 0 also computes the float64 reference.
        """
        S = max(self.S, self.c * P)
        return self.H * S * self.D * 8 * (24 if rank == 0 else 8) + 2 ** (30 if rank == 0 else 29)

    def numbers(self, P: int) -> tuple[int, ...]:
        """Return the numbers of ranks to measure. Raises: LabError for a number below 2 or above `P`."""
        found = tuple(sorted(set(self.ranks))) or (*(p for p in (2, 4, 8, 16, 32, 64) if p < P), P)
        if not 2 <= min(found) <= max(found) <= P:
            raise LabError(f"numbers of ranks from 2 to {P}", ", ".join(map(str, found)), "start more ranks")
        return found


def cases(ring: Ring, settings: L2, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield every layout's time, efficiency and correctness, for each scaling, number of ranks and pass."""
    settings.check(ring.world_size)
    for p in settings.numbers(ring.world_size):
        for scaling, S in (("strong", settings.S), ("weak", settings.c * p)):
            if ring.rank < p:
                for found in _measured(ring, settings, p, S, device):
                    yield {"case": "scaling", "scaling": scaling, "S": S, **found}
                _tell(ring, p, DONE)
            else:
                _wait(ring)
            ring.barrier()


MEASURING, DONE = 1, 0


def _tell(ring: Ring, p: int, what: int) -> None:
    """Send the waiting ranks, those from p on, MEASURING or DONE from rank 0.

    Rank 0 does this after every call, because a whole measurement may take longer than a rank may wait for
    one message.
    """
    if ring.rank == 0:
        said = torch.tensor([what], dtype=torch.uint8)
        for rank in range(p, ring.world_size):
            ring.comm.exchange(send=(said,), to=rank, tag=TURN).wait()


def _wait(ring: Ring) -> None:
    said = torch.tensor([MEASURING], dtype=torch.uint8)
    while said.item() != DONE:
        ring.comm.exchange(receive=(said,), source=0, tag=TURN).wait()


def _measured(ring: Ring, settings: L2, p: int, S: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the results of the first p ranks, pass by pass; only rank 0 yields any."""
    part = Ring(SubGroup(ring.comm, range(p)))
    problem = Problem(settings.H, S, settings.D, True, settings.dtype)
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    inputs = draw(problem, str(device), generator)
    tokens = sample(S, torch.Generator().manual_seed(settings.seed + 1))
    entrants = {name: entrant(name, settings.block) for name in settings.layouts}
    beside = {PERFECT: _alone(part, inputs)}
    truth = Truth(part, [inputs], tokens)

    def called() -> None:
        _tell(ring, p, MEASURING)

    for passed in compete(part, [inputs], entrants, tokens, settings.rounds, beside, settings.seed, called):
        if not passed.times:
            continue  # this pass is not timed; its calls are checked again with the timed ones
        errors, times = truth.errors(passed), passed.times
        if part.rank != 0:
            yield {}
            continue
        found = case(p, passed.of, errors, truth.all, times, settings.layouts[0])
        yield _with_efficiency(problem, found, times[PERFECT], device)


def entrant(layout: str, block: str) -> Target:
    """Return ringlab's ring with one layout as an entrant."""
    options = {"block": block, "validate": False}
    return Target(ring_attention, layout, layouts=(layout,), options=options).completed()


def _alone(part: Ring, inputs: Inputs) -> Callable[[str], None]:
    """Return a function that runs torch's own attention of the whole sequence on rank 0.

    On a CPU it uses as many threads as there are ranks.
    """

    def run(of: str) -> None:
        if part.rank != 0:
            return
        tensors: tuple[Tensor, ...] = inputs
        before = torch.get_num_threads()
        if inputs.q.device.type == "cpu":
            torch.set_num_threads(part.world_size)
        try:
            sdpa(tensors, of != "forward")
        finally:
            torch.set_num_threads(before)

    return run


def _with_efficiency(
    problem: Problem, found: dict[str, Any], alone: tuple[float, ...], device: torch.device
) -> dict[str, Any]:
    """Return the case with each layout's median efficiency over rounds, and its TFLOP/s per rank."""
    P = found["P"]
    split = 1 if device.type == "cpu" else P
    for each in found["contenders"].values():
        rounds = [whole / split / own for whole, own in zip(alone, each["times_s"], strict=True)]
        each["efficiency"] = statistics.median(rounds)
        each["tflops_per_rank"] = problem.flops(found["pass"]) / P / each["median_s"] / 1e12
        del each["ratio"]
    return {**found, "perfect_s": statistics.median(alone) / split}
