"""Measures this machine for the simulator, and compares the simulator's predictions with this machine.

P gloo processes, each with one thread, measure tiles of attention, exchanges between neighbours, and the
ring itself at several lengths. The three kinds of measurement alternate, round after round, so that a slow
minute of the machine slows all of them alike. `ringlab.cost.fit` makes a hardware file from the times of the
tiles and the exchanges. The ring is simulated with this file, and the prediction is compared with the
measured ring. A ring of `FEW` tokens, whose tiles take almost no time, shows the time that each step
takes regardless of the length. The model leaves out that gloo's copies slow down the computation.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringlab.attention import ring_attention
from ringlab.bench.device import machine
from ringlab.blocks import get_block
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.blocks.tilewise import TilewiseBackward, TilewiseForward
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.cost.fit import fit_kernel_tile, fit_link, fit_tiles
from ringlab.cost.hardware import Hardware, Link, MeasuredBlock, check_name
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.units import short
from ringlab.errors import CostError
from ringlab.layout import zigzag
from ringlab.plan import Tile, cut
from ringlab.schedules.ring import sum_gradients

EDGES = (256, 512, 1024, 2048)
"""Rows and keys of the timed tiles."""
MESSAGES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the timed exchanges, each way."""

FEW = 64
"""Tokens of a ring so short that its time is that of its steps."""
_ROUNDS = 30

DTYPES = ("float32", "bfloat16")

BLOCK = "native"
"""torch's own operators, the fastest on a CPU."""

Probe = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Measured seconds, each the median over rounds.

    For `runs` and `short`, the seconds of a round are those of the slowest rank, otherwise the mean over ranks.

    tiles: seconds by (pass, rows, keys). causal: seconds of square tiles under a causal mask, by (pass,
    rows).
    links: seconds by bytes in each direction. runs: seconds by (pass, tokens).
    short: seconds of rings of `FEW` tokens, by pass. matmul_flops_per_s, copy_bytes_per_s: the speed of one
    process while all other processes do the same work.
    """

    sizes: Attention
    P: int
    rounds: int
    tiles: dict[tuple[str, int, int], float]
    links: dict[int, float]
    runs: dict[tuple[str, int], float]
    causal: dict[tuple[str, int], float]
    short: dict[str, float]
    matmul_flops_per_s: float
    copy_bytes_per_s: float


def calibrate(
    sizes: Attention,
    P: int = 2,
    tokens: tuple[int, ...] = (4096, 6144, 8192),
    rounds: int = 9,
    name: str = "this-machine",
) -> tuple[Hardware, dict[str, Any]]:
    """Return this machine as hardware, and a report for JSON: the measurements, and the errors of predictions.

    The report's `cases` hold `measured_s`, `predicted_s` and `relative_error` = predicted/measured − 1
    of whole rings at the lengths `tokens`. `worst_relative_error` is the largest absolute relative error.
    Raises: CostError, before anything is measured, for an impossible request or a name that no file can
    have.
    """
    check_name(name)
    measured = measure(sizes, P, tokens, rounds)
    found = as_hardware(measured, name)
    cases = compare(measured, found)
    worst = max(abs(case["relative_error"]) for case in cases)
    report = {
        "bench": "calibrate",
        "ok": True,
        "work": {**vars(sizes), "P": P, "transport": "gloo", "layout": "zigzag", "block": BLOCK},
        "rounds": rounds,
        "title": found.title,
        "block_times": {
            block.pass_: f"{short(block.per_score_s, 'seconds')} per score element and head, "
            f"{short(block.per_row_s, 'seconds')} per row and head, {short(block.per_launch_s, 'seconds')} per tile"
            f", {short(block.per_step_s, 'seconds')} per step"
            + (f", kernel tiles of {block.kernel_tile}" if block.kernel_tile else "")
            for block in found.block_times
        },
        "link": f"{short(found.inside.bytes_per_s, 'bytes/s')} each way, latency {short(found.inside.latency_s, 'seconds')}",
        "cases": cases,
        "worst_relative_error": round(worst, 4),
        "tiles": [
            {"pass": of, "rows": rows, "keys": keys, "measured_s": seconds}
            for (of, rows, keys), seconds in measured.tiles.items()
        ],
        "short": {"tokens": FEW, **measured.short},
        "links": [{"bytes": nbytes, "measured_s": s} for nbytes, s in measured.links.items()],
        "machine": machine(),
    }
    return found, report


def compare(measured: Measured, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the measured and predicted seconds of each ring."""
    cases = []
    for (of, S), seconds in measured.runs.items():
        predicted = _predicted(measured, hardware, of, S)
        error = round(predicted / seconds - 1, 4)
        case = {"pass": of, "tokens": S, "measured_s": seconds, "predicted_s": predicted}
        cases.append({**case, "relative_error": error})
    return cases


def _predicted(measured: Measured, hardware: Hardware, of: str, S: int) -> float:
    layout, backward = zigzag(S, measured.P), of == "forward_backward"
    return simulate(measured.sizes, layout, hardware, backward=backward).makespan_s


def as_hardware(measured: Measured, name: str) -> Hardware:
    """Return the measurements as hardware: a rank is a process of one thread."""
    found = _without_steps(measured, name)
    for of, pass_ in (("forward", "forward"), ("forward_backward", "backward")):
        found = _with_steps(measured, found, of, pass_)
    return found


def _with_steps(measured: Measured, found: Hardware, of: str, pass_: str) -> Hardware:
    """Return the hardware with the time per step of `pass_` that makes the short ring's prediction right."""
    # A message may hide part of the added time. Then a round adds too little, and later rounds add the rest.
    for _ in range(_ROUNDS):
        missing = max(0.0, measured.short[of] - _predicted(measured, found, of, FEW)) / measured.P
        blocks = (
            replace(block, per_step_s=block.per_step_s + missing * (block.pass_ == pass_))
            for block in found.block_times
        )
        found = replace(found, block_times=tuple(blocks))
    return found


def _without_steps(measured: Measured, name: str) -> Hardware:
    sizes, said = measured.sizes, f"measured, medians of {measured.rounds} rounds, {measured.P} processes"
    latency_s, bytes_per_s = fit_link(measured.links)
    loopback = Link("gloo on one machine", bytes_per_s, latency_s, said)
    elsewhere = Link("gloo on one machine", bytes_per_s, latency_s, "not measured: taken as inside")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        name=name,
        title=f"{machine()['processor']}, {measured.P} processes of one thread",
        ranks_per_node=measured.P,
        memory_bytes=whole / measured.P,
        memory_bytes_per_s=measured.copy_bytes_per_s,
        flops_per_s={sizes.dtype: measured.matmul_flops_per_s},
        inside=loopback,
        between=elsewhere,
        source=f"{said}; FLOP/s of a product of {_MATMUL} × {_MATMUL} matrices, bandwidth of a copy",
        block_times=tuple(_block(measured, of, said) for of in ("forward", "backward")),
    )


def _block(measured: Measured, of: str, said: str) -> MeasuredBlock:
    sizes = measured.sizes
    tiles = {(rows, keys): s for (which, rows, keys), s in measured.tiles.items() if which == of}
    largest = get_block(BLOCK, torch.empty(1, 1, 1, sizes.D)).largest_causal
    fitted = fit_tiles(tiles, sizes.B * sizes.H)
    causal = {rows: s for (which, rows), s in measured.causal.items() if which == of}
    kernel_tile = fit_kernel_tile(causal, fitted, sizes.B * sizes.H) if largest is None else None
    source = f"{said}, block {BLOCK}"
    return MeasuredBlock(sizes.dtype, of, *fitted, sizes.D, source, largest, kernel_tile)


def measure(
    sizes: Attention,
    P: int = 2,
    tokens: tuple[int, ...] = (4096, 6144, 8192),
    rounds: int = 9,
    timeout: float = 1800.0,
) -> Measured:
    """Return the measurements of P gloo processes of one thread on this machine.

    Raises: CostError for fewer than two processes, no round, lengths below P, or a dtype not in `DTYPES`.
    """
    if sizes.dtype not in DTYPES:
        needed = f"a dtype that a CPU computes attention in: {' or '.join(DTYPES)}"
        raise CostError(needed, repr(sizes.dtype), f"nearest: {DTYPES[sizes.dtype != 'float64']}")
    if P < 2 or rounds < 1 or not tokens or min(tokens) < P:
        got = f"{P} processes, {rounds} rounds, lengths {', '.join(map(str, tokens))}"
        raise CostError("at least 2 processes, 1 round and lengths of at least one token per rank", got)
    outcome = launch(_program, P, sizes, tokens, rounds, timeout=timeout, threads=1, memory=False)
    seconds = {
        name: statistics.median(
            # A ring ends when its slowest rank ends. Every rank measures all other probes separately.
            (max if name[0] in ("run", "short") else statistics.fmean)(of_round)
            for of_round in zip(*(of_rank[name] for of_rank in outcome.results), strict=True)
        )
        for name in outcome.results[0]
    }
    return Measured(
        sizes,
        P,
        rounds,
        {(n[0], n[1], n[2]): s for n, s in seconds.items() if n[0] in ("forward", "backward")},
        {n[1]: s for n, s in seconds.items() if n[0] == "link"},
        {(n[1], n[2]): s for n, s in seconds.items() if n[0] == "run"},
        {(n[0].split()[1], n[1]): s for n, s in seconds.items() if n[0].startswith("causal ")},
        {str(n[1]): s for n, s in seconds.items() if n[0] == "short"},
        2 * _MATMUL**3 / seconds[("matmul",)],
        2 * _COPY / seconds[("copy",)],
    )


_MATMUL, _COPY = 1024, 1 << 26
"""Rows of a square matrix product; bytes of a copy, which are read and written."""


def _program(ring: Ring, sizes: Attention, tokens: tuple[int, ...], rounds: int) -> dict[tuple, list[float]]:
    """Time every probe once in each round, on all ranks at the same time. The first round is a warm-up."""
    chosen = get_block(BLOCK, torch.empty(1, 1, 1, sizes.D, dtype=getattr(torch, sizes.dtype)))
    probes = {**_tile_probes(sizes, chosen), **_link_probes(ring), **_machine_probes(sizes)}
    for S in tokens:
        forward, both = _run_probes(ring, sizes, S, chosen)
        probes |= {("run", "forward", S): forward, ("run", "forward_backward", S): both}
    probes["short", "forward"], probes["short", "forward_backward"] = _run_probes(ring, sizes, FEW, chosen)
    times: dict[tuple, list[float]] = {name: [] for name in probes}
    for _ in range(rounds + 1):
        for name, probe in probes.items():
            ring.barrier()
            begin = time.perf_counter()
            probe()
            times[name].append(time.perf_counter() - begin)
    return {name: seconds[1:] for name, seconds in times.items()}


def _tensor(sizes: Attention, heads: int, rows: int) -> Tensor:
    return torch.randn(sizes.B, heads, rows, sizes.D).to(getattr(torch, sizes.dtype))


def _tile_probes(sizes: Attention, block: Block) -> dict[tuple, Probe]:
    """Return probes of a ring step on one tile, with merge and sums; square tiles also with a causal mask."""
    probes: dict[tuple, Probe] = {}
    masks = ("forward", "backward", False), ("causal forward", "causal backward", True)
    for forward, backward, causal in masks:
        for rows in EDGES:
            for keys in (rows,) if causal else EDGES:
                tile = Tile(0, rows, 0, keys, causal)
                probes[forward, rows, keys], probes[backward, rows, keys] = _probes_of(sizes, block, tile)
    return probes


def _probes_of(sizes: Attention, block: Block, tile: Tile) -> tuple[Probe, Probe]:
    """Return the probes of the forward and the backward of one tile."""
    q, dout = (_tensor(sizes, sizes.H, tile.q_stop) for _ in range(2))
    k, v = (_tensor(sizes, sizes.K, tile.k_stop) for _ in range(2))
    tiles, scale = tuple(cut(tile, block.largest_causal)), sizes.D**-0.5
    forward = TilewiseForward(block, q, scale)
    forward.attend(tiles, k, v)
    partial = forward.partial()
    out, lse = partial.out.to(q.dtype).clone(), partial.lse.clone()
    delta = (dout.float() * out.float()).sum(-1)
    backward = TilewiseBackward(block, BackwardRows(dout, q, out, lse, delta), scale)
    sums = sum_gradients(k, v, backward.differentiate(tiles, k, v), None)
    return (
        lambda: forward.attend(tiles, k, v),
        lambda: sum_gradients(k, v, backward.differentiate(tiles, k, v), sums),
    )


def _link_probes(ring: Ring) -> dict[tuple, Probe]:
    """Return probes that exchange a number of bytes with both neighbours, on all ranks at once."""
    probes: dict[tuple, Probe] = {}
    for nbytes in MESSAGES:
        sent, into = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        probes["link", nbytes] = lambda sent=sent, into=into: ring.post(sent, into=[into]).wait()  # type: ignore[misc]
    return probes


def _machine_probes(sizes: Attention) -> dict[tuple, Probe]:
    a, b = (torch.randn(_MATMUL, _MATMUL).to(getattr(torch, sizes.dtype)) for _ in range(2))
    source, into = (torch.zeros(_COPY, dtype=torch.uint8) for _ in range(2))
    return {("matmul",): lambda: a @ b, ("copy",): lambda: into.copy_(source)}


def _run_probes(ring: Ring, sizes: Attention, S: int, block: Block) -> tuple[Probe, Probe]:
    """Return the probes of the ring at one length: forward, and forward with backward."""
    layout = zigzag(S, ring.world_size)
    rows = layout.length(ring.rank)
    q, dout = (_tensor(sizes, sizes.H, rows) for _ in range(2))
    k, v = (_tensor(sizes, sizes.K, rows) for _ in range(2))

    def attend(*shards: Tensor) -> Tensor:
        return ring_attention(
            *shards, ring=ring, layout=layout, causal=sizes.causal, block=block, validate=False
        )

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        shards = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*shards), shards, dout)

    return forward, both
