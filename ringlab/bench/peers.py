"""Known packages of ring attention beside ringlab's ring: the same causal work, in turn, in one process group.

Each is looked at first: its results at a sample of tokens against float64. One that is wrong is timed too, and listed
as wrong. Packages that need flash-attn's kernels get torch's flash operator for CPUs instead, which is the one that
ringlab's `native` block uses: what differs then is messages, masks and sums, not the kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.bench.interleaved import Times, Turn, interleaved, speed_ratio
from ringlab.bench.machine import machine
from ringlab.bench.problem import Inputs
from ringlab.bench.processes import _timed as timed
from ringlab.bench.reference import Reference, errors, reference, sample
from ringlab.bench.work import Work
from ringlab.comm.launch import launch
from ringlab.comm.ring import Ring
from ringlab.conformance import peers
from ringlab.conformance.peers.flash_attn import Kernel, choose
from ringlab.conformance.target import Target, as_axes, call, tensors_of
from ringlab.errors import BackendError, RinglabError

OURS = "ringlab"
PEERS = (
    "ring-attention-pytorch",
    "ring-flash-attn",
    "ring-flash-attn-zigzag",
    "yunchang-zigzag",
    "torch-context-parallel",
)
PASSES = {"forward": ("out",), "forward_backward": ("out", "dq", "dk", "dv")}
DTYPES = ("float32", "bfloat16")
HALF = ("float16", "bfloat16")
WARM_UP = 2
OPERATOR = "torch's flash operator for CPUs, in place of flash-attn's kernels"
METHOD = {
    "clock": "from the moment all ranks are ready until all are done; in each round every contender runs once, in turn",
    "check": "before timing, rows at a sample of tokens against float64; wrong where the error of any is more than twice "
    "that of the plainest implementation in its worst row, and one unit of last place; as in the conformance suite, "
    "`errors` are relative to the largest row; `row_errors` to the row itself, or the median row, and not judged",
    "ratio": "median over rounds of a contender's time / ringlab's: above 1 ringlab is faster",
    "kernel": "packages over flash-attn's kernels run with torch's flash operator for CPUs in their place; those kernels "
    "take float16 and bfloat16, so in float32 such a package is outside what it is made for",
}


@dataclass(frozen=True)
class Sampled:
    """One rank's rows at some of the sampled tokens: numbers in the sample, rows (H, n, D) by result, all finite?"""

    numbers: list[int]
    rows: dict[str, Tensor]
    finite: bool


def bench_peers(
    work: Work,
    ranks: Sequence[int] = (2, 4),
    rounds: int = 7,
    names: Sequence[str] = PEERS,
    dtype: str = "float32",
    timeout: float = 3600.0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return errors, times and ratios for each number of ranks and pass, for JSON; times in seconds.

    Peers that are not installed, or fail in a small run, are not timed; `not_run` says why. Raises:
    BackendError for an unknown peer or dtype, or a length that does not divide by twice the ranks.
    """
    _check(work, ranks, names, dtype)
    inputs = _inputs(work, dtype)
    expected = reference(inputs, True, sample(work.S, torch.Generator().manual_seed(1)))
    cases, not_run = [], {}
    for P in ranks:
        absent = {name: reason for name in names if (reason := _obstacle(name, P, dtype)) is not None}
        running = [OURS, *(name for name in names if name not in absent)]
        given = (work, dtype, running, rounds, expected.tokens)
        outcome = launch(_program, P, *given, timeout=timeout, threads=1, memory=False)
        looked = [sampled for sampled, _ in outcome.results]
        found = {name: _errors([rank[name] for rank in looked], expected, work) for name in running}
        cases += [_case(P, of, found, expected, outcome.results[0][1][of]) for of in PASSES]
        not_run[str(P)] = absent
        progress()
    return {
        "bench": "peers",
        "ok": all(case["contenders"][OURS]["correct"] for case in cases),
        "work": {**work.as_dict(), "dtype": dtype, "backend": "gloo", "threads_per_process": 1},
        "method": METHOD,
        "about": {name: _about(name, dtype) for name in names if _version(name) is None},
        "cases": cases,
        "not_run": not_run,
        "machine": machine(),
    }


def _check(work: Work, ranks: Sequence[int], names: Sequence[str], dtype: str) -> None:
    for name in names:
        peers.peer(name)
    if dtype not in DTYPES:
        raise BackendError(f"a dtype among {', '.join(DTYPES)}", repr(dtype))
    for P in ranks:
        if P < 2 or work.S % (2 * P):
            raise BackendError(f"2 ranks or more, and tokens that divide by {2 * P}", f"S={work.S}, P={P}")


def _inputs(work: Work, dtype: str) -> Inputs:
    return Inputs(*(x.to(getattr(torch, dtype)) for x in work.tensors()))


def _about(name: str, dtype: str) -> str:
    of = peers.peer(name)
    stand_in = of.kernel == peers.STAND_IN
    outside = f"; {dtype} is outside what its own kernels take" if stand_in and dtype not in HALF else ""
    return f"{of.package} {of.version}, kernel: {OPERATOR if stand_in else of.kernel}{outside}"


def _version(name: str) -> str | None:
    """Why the peer is not there, None if it is."""
    of = peers.peer(name)
    try:
        of.version  # noqa: B018
    except BackendError as error:
        return f"{error.got}: {error.remedy}"
    obstacle = of.without()
    return None if obstacle is None else f"needs {obstacle.needed}; got: {obstacle.got}"


def _obstacle(name: str, P: int, dtype: str) -> str | None:
    """Why the peer cannot be timed: it is not there, or it fails in a small run of its own."""
    absent = _version(name)
    if absent is not None:
        return absent
    small = Work(H=2, S=8 * P, D=16)
    try:
        launch(_program, P, small, dtype, [name], 0, torch.arange(1), timeout=60.0, threads=1, memory=False)
    except RinglabError as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    return None


Contender = Callable[[bool], tuple[Tensor, ...]]
"""Given whether gradients are wanted, out or (out, dq, dk, dv) of this rank, as the contender has its axes."""


def _ours(ring: Ring, work: Work, tensors: Inputs) -> tuple[Target, Contender]:
    target = Target(ring_attention, OURS, layouts=("zigzag",), options={"block": "native"}).completed()
    return target, _contender(target, ring, work, tensors)


def _theirs(name: str, ring: Ring, work: Work, tensors: Inputs) -> tuple[Target, Contender]:
    choose(Kernel.OPERATOR)
    target = peers.target(name)
    return target, _contender(target, ring, work, tensors)


def _contender(target: Target, ring: Ring, work: Work, tensors: Inputs) -> Contender:
    layout, P = next(iter(target.layouts)), ring.world_size
    positions = tensors_of(target.positions(layout, work.S, P), "cpu")
    shards = [as_axes(x.index_select(-2, positions[ring.rank]), target.axes) for x in tensors]
    known = {
        "ring": ring, "group": torch.distributed.group.WORLD, "rank": ring.rank, "world_size": P, "causal": True,
        "layout": target.known_layout(layout, work.S, P), "positions": positions, "scale": None,
        "return_lse": False, **target.options,
    }  # fmt: skip

    def run(gradients: bool) -> tuple[Tensor, ...]:
        *qkv, dout = shards
        leaves = tuple(x.detach().requires_grad_(gradients) for x in qkv)
        with torch.set_grad_enabled(gradients):
            result = call(target.function, (leaves[0], leaves[1], leaves[2]), known)
        out: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return (out.detach(), *torch.autograd.grad(out, leaves, dout)) if gradients else (out,)

    return run


class _Ranks:
    """All ranks as the device of `interleaved`: a run is over when the last rank is done."""

    name = "cpu"

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def seconds(self, run: Callable[[], Any]) -> float:
        return timed(self.ring, run)

    def settle(self) -> None:
        pass

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        pass

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        raise NotImplementedError("memory is not weighed here")


def _program(
    ring: Ring, work: Work, dtype: str, names: Sequence[str], rounds: int, tokens: Tensor
) -> tuple[dict[str, Sampled], dict[str, Times]]:
    """What every contender gives at the sampled tokens, and how long it takes: on each rank."""
    tensors = _inputs(work, dtype)
    made = {
        name: _ours(ring, work, tensors) if name == OURS else _theirs(name, ring, work, tensors)
        for name in names
    }
    sampled = {name: _sampled(ring, work, target, run(True), tokens) for name, (target, run) in made.items()}
    times: dict[str, Times] = {}
    for of in PASSES if rounds else ():
        turns = {name: Turn(partial(_turn, run, of)) for name, (_, run) in made.items()}
        times[of] = interleaved(turns, _Ranks(ring), rounds, WARM_UP)
    return sampled, times


def _turn(run: Contender, of: str, _: Any) -> tuple[Tensor, ...]:
    return run(of != "forward")


def _sampled(ring: Ring, work: Work, target: Target, results: tuple[Tensor, ...], tokens: Tensor) -> Sampled:
    own = target.positions(next(iter(target.layouts)), work.S, ring.world_size)[ring.rank].tolist()
    place = {position: index for index, position in enumerate(own)}
    numbers = [number for number, token in enumerate(tokens.tolist()) if token in place]
    here = torch.tensor([place[int(tokens[number])] for number in numbers], dtype=torch.int64)
    whole = {
        name: as_axes(x, target.axes) for name, x in zip(PASSES["forward_backward"], results, strict=True)
    }
    rows = {name: x[0].index_select(1, here).clone() for name, x in whole.items()}
    return Sampled(numbers, rows, all(bool(x.isfinite().all()) for x in whole.values()))


def _errors(parts: list[Sampled], expected: Reference, work: Work) -> dict[str, Tensor]:
    """Each result's error in each sampled row, (H, tokens), of one contender; NaN where a result is not finite."""
    found = {}
    for name in PASSES["forward_backward"]:
        whole = torch.full_like(expected.true[name], torch.nan)
        for part in parts:
            whole[:, part.numbers] = part.rows[name].to(whole.dtype)
        error = errors(name, whole, expected.true[name])
        found[name] = error if all(part.finite for part in parts) else torch.full_like(error, torch.nan)
    return found


def _of_largest(rows: Tensor, expected: Reference, result: str) -> tuple[float, float]:
    """The largest error of a row and the largest allowed, both relative to the largest row."""
    lengths = expected.true[result].double().norm(dim=-1)
    lengths = lengths.clamp(min=float(lengths.median()))
    largest = float(lengths.max())
    return float((rows * lengths).max()) / largest, float((expected.bounds[result] * lengths).max()) / largest


def _case(
    P: int, of: str, found: dict[str, dict[str, Tensor]], expected: Reference, times: Times
) -> dict[str, Any]:
    """One pass on P ranks: who is right, how long each takes, and the fastest of those that are right."""
    contenders: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        judged = {result: _of_largest(found[name][result], expected, result) for result in PASSES[of]}
        contenders[name] = {
            "correct": all(error <= allowed for error, allowed in judged.values()),
            "errors": {result: error for result, (error, _) in judged.items()},
            "bounds": {result: allowed for result, (_, allowed) in judged.items()},
            "row_errors": {result: float(found[name][result].max()) for result in PASSES[of]},
            "median_s": statistics.median(seconds),
            "ratio": round(speed_ratio(times, OURS, name), 4),
            "times_s": list(seconds),
        }
    right = [name for name, each in contenders.items() if each["correct"]]
    fastest = min(right, key=lambda name: float(contenders[name]["median_s"]), default=None)
    return {"P": P, "pass": of, "fastest_correct": fastest, "contenders": contenders}
