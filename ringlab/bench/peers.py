"""Compares ringlab's ring with published packages, which do the same causal work in the same process group.

Each call's result is compared with float64 attention at a sample of tokens. A wrong package is timed too, and
listed as wrong. Packages that need flash-attn's kernels get torch's flash operator for CPUs instead.
ringlab's `native` block uses the same operator, so the packages then differ in messages, masks and sums, but
not in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.bench.contest import Passed, case, compete, worst_of
from ringlab.bench.device import machine
from ringlab.bench.emulate import Work
from ringlab.bench.problem import Inputs
from ringlab.bench.reference import Reference, reference, sample
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.conformance import peers
from ringlab.conformance.peers.flash_attn import Kernel, choose
from ringlab.conformance.target.claims import Target
from ringlab.errors import BackendError, RinglabError

OURS = "ringlab"
PEERS = (
    "ring-attention-pytorch",
    "ring-flash-attn",
    "ring-flash-attn-zigzag",
    "yunchang-zigzag",
    "torch-context-parallel",
)
DTYPES = ("float32", "bfloat16")
HALF = ("float16", "bfloat16")
OPERATOR = "torch's flash operator for CPUs, in place of flash-attn's kernels"
METHOD = {
    "clock": "from the moment all ranks are ready until all are done; in each round every contender runs once, in turn",
    "check": "of every call, timed or not, each with inputs of its own: rows at a sample of tokens against float64; wrong where the error of any is more than twice "
    "that of the plainest implementation in its worst row, and one unit of last place; as in the conformance suite, "
    "`errors` are relative to the largest row; `row_errors` to the row itself, or the median row, and not judged",
    "ratio": "median over rounds of a contender's time / ringlab's: above 1 ringlab is faster",
    "kernel": "packages over flash-attn's kernels run with torch's flash operator for CPUs in their place; those kernels "
    "take float16 and bfloat16, so in float32 such a package is outside what it is made for",
}


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

    Peers that are not installed, or fail in a small run, are not timed; `not_run` contains the reasons.
    Raises: BackendError for an unknown peer or dtype, or a length that is not divisible by twice the number
    of ranks.
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
        for passed in zip(*outcome.results, strict=True):
            found = {name: _worst(name, passed, expected) for name in running}
            cases.append(case(P, passed[0].of, found, expected, passed[0].times, OURS))
        not_run[str(P)] = absent
        progress()
    return {
        "bench": "peers",
        "ok": all(each["contenders"][OURS]["correct"] for each in cases),
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
        raise BackendError(f"one of the dtypes {', '.join(DTYPES)}", repr(dtype))
    for P in ranks:
        if P < 2 or work.S % (2 * P):
            raise BackendError(f"2 ranks or more, and tokens divisible by {2 * P}", f"S={work.S}, P={P}")


def _inputs(work: Work, dtype: str) -> Inputs:
    return Inputs(*(x.to(getattr(torch, dtype)) for x in work.tensors()))


def _about(name: str, dtype: str) -> str:
    of = peers.peer(name)
    stand_in = of.kernel == peers.STAND_IN
    outside = f"; {dtype} is outside what its own kernels take" if stand_in and dtype not in HALF else ""
    return f"{of.package} {of.version}, kernel: {OPERATOR if stand_in else of.kernel}{outside}"


def _version(name: str) -> str | None:
    """Return the reason why the peer is not installed, or None if it is installed."""
    of = peers.peer(name)
    try:
        of.version  # noqa: B018
    except BackendError as error:
        return f"{error.got}: {error.remedy}"
    obstacle = of.without()
    return None if obstacle is None else f"needs {obstacle.needed}; got: {obstacle.got}"


def _obstacle(name: str, P: int, dtype: str) -> str | None:
    """Return the reason why the peer cannot be timed (not installed, or fails in a small run), or None."""
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


def _target(name: str) -> Target:
    """Return the target called `name`; it is loaded in the process that runs it."""
    if name == OURS:
        return Target(ring_attention, OURS, layouts=("zigzag",), options={"block": "native"}).completed()
    choose(Kernel.OPERATOR)
    return peers.target(name)


def _program(
    ring: Ring, work: Work, dtype: str, names: Sequence[str], rounds: int, tokens: Tensor
) -> list[Passed]:
    entrants = {name: _target(name) for name in names}
    passes = compete(ring, [_inputs(work, dtype)], entrants, tokens, rounds)
    return [each for each in passes if each.times or not rounds]


def _worst(name: str, ranks: Sequence[Passed], expected: Reference) -> dict[str, Tensor]:
    """Return the largest errors over all calls of one entrant.

    ranks: the sampled results of each rank.
    """
    calls = zip(*(rank.looks[name] for rank in ranks), strict=True)
    return worst_of([(0, [look.sampled for look in looks]) for looks in calls], [expected])
