"""Compares published figures of training and serving runs with the figures that a plan predicts for them.

Each row has its source and a sentence on what the plan's assumptions leave out. Nothing is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ringlab.cost.planner.plan import PublishedRuns
from ringlab.cost.planner.request import Request
from ringlab.cost.planner.search import Candidate, search
from ringlab.cost.planner.step_time import StepTime
from ringlab.cost.units import short_count


@dataclass(frozen=True)
class Measure:
    """One kind of figure: its name in a table, its format, and how to compute it from a plan's request.

    slower_is_more: whether a larger figure means a longer time or more memory.
    """

    name: str
    written: str
    of: Callable[[Request], float]
    slower_is_more: bool


def _step_s(request: Request) -> float:
    return search(request)[0].step_s


def _memory_gb(request: Request) -> float:
    return search(request)[0].memory.total_bytes / 1e9


def _utilisation(request: Request) -> float:
    return search(request)[0].utilisation


def _share_forward(request: Request) -> float:
    return _share(request, 1)


def _share_both(request: Request) -> float:
    return _share(request, 2)


def _share(request: Request, passes: int) -> float:
    """Return the speed of a layer's attention in a ring, as a share of that of one GPU with its tokens.

    In the ring, causal attention gives each GPU P times the work of a single GPU with as many tokens, so the
    ratio of times is multiplied by P.
    """
    P = search(request)[0].degrees.ring
    alone = replace(
        request, tokens=request.tokens // P, gpus_per_node=1, ring=1, fsdp=1, layout=None, reserve=0.0
    )
    one, many = (_attention_s(search(each)[0], passes) for each in (alone, request))
    return P * one / many


def _attention_s(candidate: Candidate, passes: int) -> float:
    assert isinstance(candidate.time, StepTime)
    return sum(it.attention_s + it.ring_exposed_s for it in candidate.time.passes[:passes])


STEP = Measure("a step", "{:.4g} s", _step_s, True)
MEMORY = Measure("memory of a GPU", "{:.3g} GB", _memory_gb, True)
UTILISATION = Measure("of the peak (MFU)", "{:.0%}", _utilisation, False)
FORWARD = Measure("of one GPU's speed, forward", "{:.3f}", _share_forward, False)
BOTH = Measure("of one GPU's speed, forward and backward", "{:.3f}", _share_both, False)


@dataclass(frozen=True)
class Published:
    """One published figure, and the request for the plan that predicts it."""

    run: str
    measure: Measure
    figure: float
    source: str
    request: Request
    left_out: str

    @property
    def planned(self) -> float:
        """The figure according to the plan."""
        return self.measure.of(self.request)

    @property
    def ratio(self) -> float:
        """How much slower, or larger in memory, the published run was than the plan says, as a factor."""
        over = self.figure / self.planned
        return over if self.measure.slower_is_more else 1 / over

    @property
    def command(self) -> str:
        """A command that prints the plan's figure or, for attention alone, the time from which it follows."""
        request = self.request
        if self.measure not in (FORWARD, BOTH):
            return request.command()
        words = f"ringlab simulate --tokens {short_count(request.tokens)} --ranks {request.ring} --hardware {request.hardware}"
        return f"{words} --layout {request.layout}" + (" --backward" if self.measure is BOTH else "")


QWEN = Request(
    "qwen3-8b", 2**20, "h100", ring=8, tp=1, recomputation="full", logits_chunk=256, offload="activations"
)
QWEN_SOURCE = "huggingface/trl pull request 6846, and its release notes v1.13.0"
LLAMA = Request("llama3-405b", 8192, "h100", 1024, batch=2048, dp=64, tp=8, cp=1, pp=16, interleave=8)
LLAMA_SOURCE = "arXiv 2407.21783, table 4"
LLAMA_CHUNKS = "the paper names no number of chunks: 8 are one layer each"
LLAMA_GATHERED = (
    "the run kept gathered weights after a forward, the plan gathers them for every pass of every micro-batch, which takes "
    f"longer; {LLAMA_CHUNKS}"
)
MAXTEXT = Request("llama2-7b", 2**15, "tpu-v5p", gpus_per_node=64, batch=64, dp=4, tp=1, recomputation="full")
MAXTEXT_SOURCE = "AI-Hypercomputer/maxtext pull request 4687"
MAXTEXT_REMAT = "the run kept attention's output, the plan computes all of a layer again"
LAYER = Request("llama3-8b", 2**16, "h800", dp=1, tp=1, ring=8, ulysses=1, recomputation="none", fsdp=8)
LAYER_SOURCE = "the README of zhuzilin/ring-flash-attention, batch api"
MERGES = (
    "launches, and merging partial outputs and sums of gradients, which the package does in separate kernels"
)


def _layer(layout: str, measure: Measure, figure: float, left_out: str = MERGES) -> Published:
    run = f"{layout} ring, 8 × H800, 8,192 tokens a GPU"
    return Published(run, measure, figure, LAYER_SOURCE, LAYER.but(layout=layout), left_out)


PUBLISHED = (
    Published(
        "Qwen3 8B, 1,048,576 tokens, 8 × H100",
        STEP,
        380,
        QWEN_SOURCE,
        QWEN,
        "norms, rotary embedding and activation functions, the loss in pieces of 256 tokens, and torch's own attention kernels",
    ),
    Published(
        "Qwen3 8B, 1,048,576 tokens, 8 × H100",
        MEMORY,
        56.2,
        QWEN_SOURCE,
        QWEN,
        "peaks of different entries that do not fall together, and what an allocator adds",
    ),
    Published(
        "Llama 3.1 405B, 131,072 tokens, 16,384 × H100",
        UTILISATION,
        0.38,
        LLAMA_SOURCE,
        LLAMA.but(tokens=2**17, nodes=2048, batch=128, dp=8, cp=None, ring=16, ulysses=1),
        "K/V gathered before attention in place of a ring, congestion among 2,048 nodes, stragglers, and everything but "
        f"matrices and attention; {LLAMA_CHUNKS}",
    ),
    Published(
        "Llama 3.1 405B, 8,192 tokens, 8,192 × H100", UTILISATION, 0.43, LLAMA_SOURCE, LLAMA, LLAMA_GATHERED
    ),
    Published(
        "Llama 3.1 405B, 8,192 tokens, 16,384 × H100",
        UTILISATION,
        0.41,
        LLAMA_SOURCE,
        LLAMA.but(nodes=2048, dp=128),
        LLAMA_GATHERED,
    ),
    Published(
        "Llama 2 7B, 32,768 tokens, 64 TPU v5p, ring of 16",
        STEP,
        16.38,
        MAXTEXT_SOURCE,
        MAXTEXT.but(ring=16),
        MAXTEXT_REMAT,
    ),
    Published(
        "Llama 2 7B, 32,768 tokens, 64 TPU v5p, Ulysses of 16",
        STEP,
        8.90,
        MAXTEXT_SOURCE,
        MAXTEXT.but(ulysses=16),
        f"{MAXTEXT_REMAT}; kernels below their whole peak, which the table of hardware has for TPUs",
    ),
    _layer("zigzag", FORWARD, 0.852),
    _layer("zigzag", BOTH, 0.902),
    _layer("striped", FORWARD, 0.744, f"{MERGES}; whole masked tiles that a kernel visits on each diagonal"),
    _layer("striped", BOTH, 0.829, f"{MERGES}; whole masked tiles that a kernel visits on each diagonal"),
    _layer("contiguous", FORWARD, 0.521),
    _layer("contiguous", BOTH, 0.539),
)
NOT_ASKED = (
    (
        "FlashAttention-4 on B200: 1,613 TFLOP/s, 71 % of the peak (the abstract of its paper)",
        "a kernel's rate, which plans for B200 take from the table of hardware",
    ),
    (
        "MaxText, latent attention (MLA) in a ring on TPU v5p-128: 31.8 % of the peak at 256k tokens, 32.3 % at 1M "
        "(AI-Hypercomputer/maxtext pull request 4719)",
        "the model has experts and a latent in place of K/V heads, and plans know neither",
    ),
    (
        "Zig-zag ring over packed documents, 8 × H800: 0.702 forward, 0.759 with backward (the README of zhuzilin/ring-flash-attention)",
        "a mean over four packings in which every document is dealt by itself; plans take one sequence without documents",
    ),
    (
        "ParallelKittens: up to 4.08 times as fast as other kernels under sequence parallelism (arXiv 2511.13940)",
        "a ratio of two implementations of one method, for which a plan has one figure",
    ),
)
"""Published figures that a plan cannot predict, with the reason."""


def runs_beside_plans(purpose: str) -> PublishedRuns | None:
    """Return how published steps of this purpose compare with their plans, or None if there are none."""
    found = [
        row.ratio
        for row in PUBLISHED
        if row.request.purpose == purpose and row.measure in (STEP, UTILISATION)
    ]
    return PublishedRuns(len(found), min(found), max(found)) if found else None
