"""Lab L1, bandwidth and overlap: how fast neighbours exchange, and how much of a hop hides behind a block.

The lab alternates between three measurements: the time of computing a block of c queries against c keys, the
time of exchanging a K/V block of c tokens, and the time of doing both at once.
hidden = (computing + exchanging − both) / min(computing, exchanging). It is 1 if the shorter of the two costs
no extra time, 0 if both at once take as long as one after the other, and below 0 if they take even longer.

On a GPU the times come from its own events around many calls, which wait in a queue behind other work.
Without this queue, a small message would seem to take as long as Python takes to post it. The seconds of posting are
also reported.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringlab.bench.contest import Passed, Sampled, joined, worst_of
from ringlab.bench.device import Ranks
from ringlab.bench.interleaved import Times, Turn, interleaved
from ringlab.bench.problem import Inputs
from ringlab.bench.reference import Reference, reference
from ringlab.blocks import get_block
from ringlab.comm.ring import Ring
from ringlab.cost.fit import fit_link
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden
from ringlab.errors import CostError, LabError
from ringlab_course.lab.result import expect_attention, expect_ranks, gather

CPU = torch.device("cpu")


@dataclass(frozen=True)
class L1:
    """Settings of lab L1: message sizes, block lengths, and the sizes of attention.

    messages: bytes in each direction. tokens: the lengths c of the blocks. H, K: query heads and key/value
    heads. D: head dim. rounds: the rounds that count.
    """

    messages: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
    tokens: tuple[int, ...] = (256, 512, 1024, 2048)
    H: int = 8
    K: int = 8
    D: int = 64
    dtype: str = "float32"
    rounds: int = 11
    seed: int = 0

    def __post_init__(self) -> None:
        if min(len(set(self.messages)), len(set(self.tokens))) < 2:
            got = f"{', '.join(map(str, self.messages))} bytes and {', '.join(map(str, self.tokens))} tokens"
            raise LabError("at least two message sizes and two lengths", got)
        if min(*self.messages, *self.tokens) < 1 or _twice(self.messages) or _twice(self.tokens):
            got = f"messages {self.messages}, lengths {self.tokens}"
            raise LabError("messages and blocks of at least one byte and one token, each size once", got)
        expect_attention(self.H, self.D, self.dtype, self.rounds, self.seed)
        if self.K < 1 or self.H % self.K:
            raise LabError(
                "query heads that are a multiple of the key/value heads",
                f"H={self.H}, K={self.K}",
                "--kv-heads",
            )

    def check(self, P: int) -> None:
        """Raise LabError unless the lab can run on `P` ranks."""
        expect_ranks(P)

    def needed_bytes(self, P: int, rank: int = 0, device: torch.device = CPU) -> int:
        """Return the most bytes that a rank allocates on `device`, whatever P is.

        These are two buffers for each message, blocks and scores, and a GPU's other work.
        """
        c = max(self.tokens)
        tensors = 4 * c * (self.H + 3 * self.K) * self.D * 4
        other = Queued.OTHER_BYTES if device.type == "cuda" else 0
        return 2 * sum(self.messages) + tensors + other + 64 * 2**20

    @property
    def sizes(self) -> Attention:
        """The sizes in the form of the cost model; not causal, because every query sees the whole block."""
        return Attention(1, self.H, self.K, self.D, self.dtype, causal=False)


def cases(ring: Ring, settings: L1, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the bandwidth of each message size, the fitted link, each length's overlap, and the threshold.

    The threshold is the number of tokens per rank from which a hop is hidden.
    """
    settings.check(ring.world_size)
    links: dict[int, float] = {}
    times, host = _in_turn(
        ring, {str(n): _exchange(ring, n, device) for n in settings.messages}, settings, device
    )
    for nbytes in settings.messages:
        links[nbytes] = statistics.median(times[str(nbytes)])
        yield {
            "case": "bandwidth", "bytes": nbytes, "median_s": links[nbytes],
            "bytes_per_s": nbytes / links[nbytes], "times_s": list(times[str(nbytes)]),
            **({"host_s": host[str(nbytes)]} if host else {}),
        }  # fmt: skip
    try:
        latency_s, bytes_per_s = fit_link(links)
    except CostError as error:
        # Larger messages did not take longer: the sizes are too small, or there were too few rounds.
        latency_s, bytes_per_s = 0.0, max(nbytes / seconds for nbytes, seconds in links.items())
        yield {"case": "link", "latency_s": latency_s, "bytes_per_s": bytes_per_s, "unfit": error.got}
    else:
        yield {"case": "link", "latency_s": latency_s, "bytes_per_s": bytes_per_s}
    flops_per_s = 0.0
    for c in sorted(settings.tokens):
        case = _overlap(ring, settings, c, device)
        flops_per_s = case["flops_per_s"]  # the last value, the rate of the longest block, is used below
        yield case
    sizes = settings.sizes
    least = least_tokens_hidden(flops_per_s, bytes_per_s, sizes, latency_s=latency_s)
    yield {"case": "threshold", "tokens": least, "flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s}


def _twice(numbers: tuple[int, ...]) -> bool:
    return len(set(numbers)) < len(numbers)


class _Own(Ranks):
    """The seconds of one rank alone, from the moment when all ranks are ready.

    A barrier at the end would take a large part of the time of a small message.
    """

    def seconds(self, run: Callable[[], Any]) -> float:
        self.settle()
        self.ring.barrier()
        begin = self.ring.comm.now()
        kept = run()
        self.settle()
        end = self.ring.comm.now()
        del kept
        return end - begin


class Queued(_Own):
    """The seconds of a call on one rank's GPU, measured with GPU events around `CALLS` calls in a row.

    Before these calls the GPU gets enough other work to keep it busy until Python has posted all of them.
    """

    CALLS = 8
    FIRST = 0.01  # seconds that posting is assumed to take until it is measured
    OTHER_BYTES = 2**28  # bytes that one pass of the other work writes

    def __init__(self, ring: Ring, device: torch.device) -> None:
        super().__init__(ring, device)
        self._other = torch.empty(self.OTHER_BYTES, dtype=torch.uint8, device=device)
        self._posting = self.FIRST
        self._pass_s = min(self._events(self._other.zero_) for _ in range(3))

    def _events(self, run: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def seconds(self, run: Callable[[], Any]) -> float:
        self.settle()
        self.ring.barrier()
        for _ in range(math.ceil(2 * self._posting / self._pass_s)):
            self._other.zero_()
        began = time.perf_counter()

        def calls() -> None:
            kept = None
            for _ in range(self.CALLS):
                kept = run()
            self._posting = time.perf_counter() - began
            del kept

        return self._events(calls) / self.CALLS


def _in_turn(
    ring: Ring, runs: dict[str, Callable[[], Any]], settings: L1, device: torch.device
) -> tuple[Times, dict[str, float]]:
    """Return each run's seconds in every round, on the slowest rank, and its median seconds of posting.

    The seconds of posting are left out without a GPU, where a call ends only when its work is done.
    """
    posting: dict[str, list[float]] = {name: [] for name in runs}
    turns = {name: Turn(partial(_run, run, posting[name])) for name, run in runs.items()}
    clock = Queued(ring, device) if device.type == "cuda" else _Own(ring, device)
    own = interleaved(turns, clock, settings.rounds, 2)
    everyone = gather(ring.comm, own, device)
    times = {
        name: tuple(max(of_round) for of_round in zip(*(each[name] for each in everyone), strict=True))
        for name in runs
    }
    host = {name: statistics.median(seconds) for name, seconds in posting.items()}
    return times, host if device.type == "cuda" else {}


def _run(run: Callable[[], Any], posting: list[float], _: Any) -> Any:
    began = time.perf_counter()
    kept = run()
    posting.append(time.perf_counter() - began)
    return kept


def _exchange(ring: Ring, nbytes: int, device: torch.device) -> Callable[[], Any]:
    sent, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: ring.post(sent, into=[into]).wait()


def _overlap(ring: Ring, settings: L1, c: int, device: torch.device) -> dict[str, Any]:
    dtype = getattr(torch, settings.dtype)
    q = torch.randn(1, settings.H, c, settings.D, device=device).to(dtype)
    k, v = (torch.randn(1, settings.K, c, settings.D, device=device).to(dtype) for _ in range(2))
    into = [torch.empty_like(k), torch.empty_like(v)]
    block = get_block("auto", q)

    def compute() -> Any:
        return block.forward(q, k, v, causal=False, scale=settings.D**-0.5)

    def exchange() -> Any:
        return ring.post(k, v, into=into).wait()

    def both() -> Any:
        work = ring.post(k, v, into=into)
        part = compute()
        return part, work.wait()

    times, host = _in_turn(ring, {"compute": compute, "exchange": exchange, "both": both}, settings, device)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    shorter = min(median["compute"], median["exchange"])
    return {
        "case": "overlap", "tokens": c, "block": block.name,
        **{f"{name}_s": seconds for name, seconds in median.items()},
        "hidden": (median["compute"] + median["exchange"] - median["both"]) / shorter,
        "flops_per_s": 4 * settings.H * settings.D * c**2 / median["compute"],
        "times_s": {name: list(seconds) for name, seconds in times.items()},
        **({"host_s": host["both"]} if host else {}),
    }  # fmt: skip


class Truth:
    """The references of some draws, computed on rank 0, which measure the errors of a pass."""

    def __init__(self, ring: Ring, draws: Sequence[Inputs], tokens: Tensor) -> None:
        self.ring, self.count, self.device = ring, len(tokens), draws[0].q.device
        self.by_draw = [_on_cpu(reference(each, True, tokens)) for each in draws] if ring.rank == 0 else []

    @property
    def all(self) -> Reference:
        """All references joined into one, on rank 0."""
        return joined(self.by_draw)

    def errors(self, passed: Passed) -> dict[str, dict[str, Tensor]]:
        """Return each entrant's largest errors over all its calls, for `contest.judged`.

        The result is empty on other ranks.
        """
        calls = {
            name: [
                (look.draw, [gather_rows(self.ring, look.sampled, self.count, self.device)]) for look in looks
            ]
            for name, looks in passed.looks.items()
        }
        return {name: worst_of(each, self.by_draw) for name, each in calls.items() if self.by_draw}


def _on_cpu(expected: Reference) -> Reference:
    true, bounds = ({name: x.cpu() for name, x in of.items()} for of in (expected.true, expected.bounds))
    return replace(expected, tokens=expected.tokens.cpu(), true=true, bounds=bounds)


def gather_rows(ring: Ring, own: Sampled, count: int, device: torch.device) -> Sampled:
    """Return the `count` sampled rows, of which each rank has some; rows that no rank has are NaN.

    They are summed over ranks in float64. This changes no row, because one rank has the row and the others
    add zeros.
    """
    given = torch.zeros(count, dtype=torch.float64)
    given[own.numbers] = 1.0
    given = ring.all_reduce(given.to(device)).cpu()
    rows = {}
    for name, part in own.rows.items():
        whole = torch.zeros(part.shape[0], count, part.shape[2], dtype=torch.float64)
        whole[:, own.numbers] = torch.nan_to_num(part.double(), nan=0.0, posinf=0.0, neginf=0.0)
        rows[name] = ring.all_reduce(whole.to(device)).cpu()
        rows[name][:, given != 1.0] = torch.nan
    finite = ring.all_reduce(torch.tensor([float(own.finite)], device=device))
    return Sampled(list(range(count)), rows, bool(finite.item() == ring.world_size))
