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
from ringlab.cost.planner.suggest import most_tokens
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


def _longest(request: Request) -> float:
    return most_tokens(request) or 0


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
LONGEST = Measure("longest context that fits", "{:,.0f} tokens", _longest, False)
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
        """The factor by which the published run was slower, or needed more memory, than planned."""
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
TITAN_SOURCE = "docs/performance.md of pytorch/torchtitan at commit 0413364; tokens per second of a GPU"
TITAN = Request("llama3-70b", 8192, "a100", 8, batch=64, dp=64, tp=1, cp=1, recomputation="full")
TITAN_KERNELS = (
    "norms, rotary embedding and activation functions, and the loss of all tokens of a GPU at once"
)
EASY_SOURCE = "the README of jzhang38/EasyContext, tokens per second of 8 GPUs"
EASY = Request(
    "llama2-7b", 2**16, "a100", tp=1, ring=8, recomputation="full", logits_chunk=4096, offload="optimizer,weights"
)  # fmt: skip
EASY_LEFT_OUT = (
    "an optimizer that computes on the host, merges and launches; a mean of the first five steps, in which the source "
    "expects variance"
)
PREFILL = Request("llama3-405b", 10**6, "h100", 16, purpose="prefill", tp=8, ring=16, ulysses=1)
PREFILL_SOURCE = "the abstract of arXiv 2411.01783, which names no dtype and no kind of H100"
PREFILL_LEFT_OUT = "merges, launches, and whatever its GPUs and dtype differ in; the plan shares weights over the ring to fit"
ALST = Request(
    "llama3-8b", 12_000_000, "h100", nodes=4, tp=1, ring=4, ulysses=8, recomputation="full", logits_chunk=1024, ffn_chunk=4096,
    offload="activations,optimizer",
)  # fmt: skip
ALST_SOURCE = "the abstract of arXiv 2506.13996"
ALST_LEFT_OUT = "peaks of different entries that do not fall together; sizes of its pieces and its split, which the abstract does not give"
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
    Published("Llama 3 70B, 8,192 tokens, 64 × A100", STEP, 8192 / 331, TITAN_SOURCE, TITAN, TITAN_KERNELS),
    Published(
        "Llama 3 8B, 8,192 tokens, 64 × A100",
        STEP,
        8192 / 2973,
        TITAN_SOURCE,
        replace(TITAN, model="llama3-8b", recomputation="selective"),
        f"{TITAN_KERNELS}; the run computes other operations again than attention (selective op)",
    ),
    Published(
        "Llama 2 13B, 4,096 tokens, 64 × A100",
        STEP,
        2 * 4096 / 2162,
        TITAN_SOURCE,
        replace(TITAN, model="llama2-13b", tokens=4096, batch=128, recomputation="none"),
        TITAN_KERNELS,
    ),
    Published(
        "Llama 2 70B, 4,096 tokens, 64 × A100",
        STEP,
        2 * 4096 / 353,
        TITAN_SOURCE,
        replace(TITAN, model="llama2-70b", tokens=4096, batch=128),
        TITAN_KERNELS,
    ),
    *(
        Published(
            f"Llama 2 7B, {tokens:,} tokens, 8 × A100",
            STEP,
            tokens / rate,
            EASY_SOURCE,
            EASY.but(tokens=tokens),
            EASY_LEFT_OUT,
        )
        for tokens, rate in ((2**16, 7816), (2**17, 4266), (2**19, 2133), (700_000, 1603))
    ),
    Published(
        "Llama 2 7B, 8 sequences of 65,536 tokens, 8 × A100, no ring",
        STEP,
        8 * 2**16 / 10240,
        EASY_SOURCE,
        EASY.but(ring=1, batch=8, dp=8),
        EASY_LEFT_OUT,
    ),
    Published(
        "Llama 3 405B, prefill of 1,000,000 tokens, 128 × H100",
        STEP,
        77,
        PREFILL_SOURCE,
        PREFILL,
        PREFILL_LEFT_OUT,
    ),
    Published(
        "Llama 3 405B, prefill of 128,000 tokens, 128 × H100",
        STEP,
        3.8,
        PREFILL_SOURCE,
        PREFILL.but(tokens=128_000),
        PREFILL_LEFT_OUT,
    ),
    *(
        Published(f"Llama 3 8B, {where}", LONGEST, tokens, ALST_SOURCE, ALST.but(**split), ALST_LEFT_OUT)
        for where, tokens, split in (
            (
                "one H100",
                500_000,
                {
                    "tokens": 400_000,
                    "nodes": 1,
                    "gpus_per_node": 1,
                    "ring": 1,
                    "ulysses": 1,
                    "offload": "activations,optimizer,weights",
                },
            ),
            ("8 × H100", 3_700_000, {"tokens": 3_000_000, "nodes": 1, "ring": 1}),
            ("32 × H100", 15_000_000, {}),
        )
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
        "its model is deepseek2-16b, and what could be read of it names neither split nor batch",
    ),
    (
        "Zig-zag ring over packed documents, 8 × H800: 0.702 forward, 0.759 with backward (the README of zhuzilin/ring-flash-attention)",
        "a mean over four packings in which every document is dealt by itself; plans take one sequence without documents",
    ),
    (
        "ParallelKittens: up to 4.08 times as fast as other kernels under sequence parallelism (arXiv 2511.13940)",
        "a ratio of two implementations of one method, for which a plan has one figure",
    ),
    (
        "GLM-4.5-Air, 65,536 tokens, 8 × H200: 57 to 85 thousand tokens a second (PrimeIntellect-ai/prime-rl pull request 2418)",
        "more FLOPs than the peak if tokens attend to all before them, so that the run's sequences must be packed documents, of "
        "lengths that it does not give",
    ),
)
"""Published figures that a plan cannot predict, with the reason."""


PRIME = Request(
    "glm-4.5-air", 2**16, "h200", tp=1, dp=4, batch=4, ring=2, ulysses=1, fsdp=8, recomputation="full", logits_chunk=4096,
    offload="optimizer",
)  # fmt: skip
PRIME_SOURCE = "PrimeIntellect-ai/prime-rl pull request 2418"


@dataclass(frozen=True)
class Pair:
    """Two published splits of one run on the same GPUs. times: the time of the first, in times of the second."""

    what: str
    times: float
    source: str
    first: Request
    second: Request

    @property
    def planned(self) -> float:
        """The planned time of the first for a sequence, in times of the second."""
        first, second = (_step_s(each) / each.batch for each in (self.first, self.second))
        return first / second

    @property
    def factor(self) -> float:
        """The factor, at least 1, by which the planned ratio differs from the published one."""
        return max(self.times / self.planned, self.planned / self.times)


PAIRS = (
    Pair(
        "ring of 16 beside Ulysses of 16, Llama 2 7B on 64 TPU v5p",
        16.38 / 8.90,
        MAXTEXT_SOURCE,
        MAXTEXT.but(ring=16),
        MAXTEXT.but(ulysses=16),
    ),
    Pair(
        "ring of 8 beside a sequence on each GPU, Llama 2 7B on 8 A100",
        10240 / 7816,
        EASY_SOURCE,
        EASY,
        EASY.but(ring=1, batch=8, dp=8),
    ),
    Pair(
        "ring of 2 beside Ulysses of 2, GLM-4.5-Air on 8 H200",
        77 / 60,
        PRIME_SOURCE,
        PRIME,
        PRIME.but(ring=1, ulysses=2),
    ),
    Pair(
        "ring of 4 beside Ulysses of 4, GLM-4.5-Air on 8 H200",
        85 / 57,
        PRIME_SOURCE,
        PRIME.but(dp=2, batch=2, ring=4),
        PRIME.but(dp=2, batch=2, ring=1, ulysses=4),
    ),
)
"""Pairs whose ratios tell how far plans can be trusted in a comparison of two splits."""


def compared() -> float:
    """Return the largest factor by which a planned ratio of two splits differs from the published one."""
    return max(pair.factor for pair in PAIRS)


def runs_beside_plans(purpose: str) -> PublishedRuns | None:
    """Return how published steps of this purpose compare with their plans, or None if there are none."""
    found = [
        row.ratio
        for row in PUBLISHED
        if row.request.purpose == purpose and row.measure in (STEP, UTILISATION)
    ]
    return PublishedRuns(len(found), min(found), max(found)) if found else None
