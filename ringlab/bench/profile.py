"""Runs torch.profiler on every rank, and records the timelines for readers who do not have several GPUs.

`python -m ringlab.bench.profile FILE` records the ring of lesson 13 in both orders of computing and sending,
with a description of the machine. Each order runs several times, and the run of median duration is kept. If
this machine has two or more GPUs, all of them are used over NCCL (nobody has tried this yet). Otherwise two
gloo processes are used.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ringlab.bench.device import machine
from ringlab.blocks import get_block
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.merge import Partial, merge
from ringlab.viz.lanes import MARK, Span, duration, read

RECORDED = Path("benchmarks/results/profiles/two-processes.json")
ORDERS = {
    "post, wait, compute": ("post", "wait", "compute"),
    "post, compute, wait": ("post", "compute", "wait"),
}
ROUNDS, LAYERS, H, C, D = 5, 3, 8, 1024, 64
"""Runs of each order, layers in a run, heads, tokens per rank, head dim."""


def profiled(ring: Ring, run: Callable[[], Any]) -> list[Span]:
    """Return the lanes of this rank in `run()`, in seconds from its start. All ranks start `run` together."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        ring.barrier()
        with record_function(MARK):
            pass
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # launched kernels may still be running
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(encoding="utf-8")), ring.rank)


@dataclass(frozen=True)
class Recorded:
    """The lanes of all ranks in earlier runs, by name of the run, with a label, the machine and the date."""

    runs: Mapping[str, list[Span]]
    label: str
    machine: str


def recorded(path: Path | None = None) -> Recorded:
    """Return recorded lanes: those of the course, or those in a file that `save` wrote.

    Raises: OSError if the file is missing.
    """
    from ringlab.checkout import find_checkout

    recorded = json.loads((path or find_checkout() / RECORDED).read_text(encoding="utf-8"))
    at = recorded["machine"]
    words = f"{at['processor']}, {at['cores']} cores, torch {at['torch']}, {at['date'][:10]}"
    runs = {name: [Span(**span) for span in spans] for name, spans in recorded["runs"].items()}
    return Recorded(runs, recorded["label"], words)


def save(path: Path, label: str, runs: Mapping[str, Sequence[Span]]) -> None:
    """Write lanes with their machine to `path` for `recorded`, with times rounded to 0.1 microseconds."""
    rows = {
        name: [asdict(s) | {"start": round(s.start, 7), "end": round(s.end, 7)} for s in spans]
        for name, spans in runs.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"label": label, "machine": machine(), "runs": rows}, separators=(",", ":"))
    path.write_text(text.replace('},{"rank"', '},\n{"rank"') + "\n", encoding="utf-8")


def ring_in_order(ring: Ring, q: Any, k: Any, v: Any, order: Sequence[str]) -> Any:
    """Return full attention of q over all ranks' K and V.

    order: the order of post, compute and wait in a step.
    """
    state, block, arriving = Partial.identity(q), get_block("auto", q), None
    for step in range(ring.world_size):
        own = k, v
        for what in order if step < ring.world_size - 1 else ("compute",):
            if what == "post":
                arriving = ring.post(k, v)
            elif what == "compute":
                part = block.forward(q, *own, causal=False, scale=q.shape[-1] ** -0.5)
                state = merge(state, part)
            else:
                assert arriving is not None
                k, v = arriving.wait()
    return state.out


def both_orders(ring: Ring, device: str) -> dict[str, list[list[Span]]]:
    """Return this rank's lanes in every run of each order.

    The orders alternate. The first round is not recorded.
    """
    torch.manual_seed(ring.rank)
    q, k, v = (torch.randn(1, H, C, D, device=device) for _ in range(3))
    found: dict[str, list[list[Span]]] = {name: [] for name in ORDERS}

    def layers(order: Sequence[str]) -> None:
        for _ in range(LAYERS):
            ring_in_order(ring, q, k, v, order)

    for turn in range(ROUNDS + 1):
        for name, order in ORDERS.items():
            spans = profiled(ring, partial(layers, order))
            if turn:
                found[name].append(spans)
    return found


def main(path: Path) -> None:
    """Record both orders, and write the run of median duration of each."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    gpus = torch.cuda.device_count()
    P, transport, device = (gpus, "nccl", "cuda") if gpus > 1 else (2, "gloo", "cpu")
    results = launch(both_orders, P, device, transport=transport, memory=False).results
    kept = {}
    for name in ORDERS:
        runs = [[span for rank in results for span in rank[name][n]] for n in range(ROUNDS)]
        kept[name] = sorted(runs, key=duration)[ROUNDS // 2]
    where = torch.cuda.get_device_name(0) if gpus > 1 else "the CPU of 1 machine: no GPU took part"
    label = f"{P} {transport} processes on {where}; {LAYERS} layers of {H} heads, {C:,} tokens per rank"
    save(path, label, kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
