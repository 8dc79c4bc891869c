"""Paired timings: what is reported, never how fast it was."""

from __future__ import annotations

import torch

from ringlab.bench.emulate import bench_emulate
from ringlab.bench.machine import machine
from ringlab.bench.paired import Paired, paired
from ringlab.bench.work import Work, ring_program, sdpa, shards
from ringlab.comm.virtual.cluster import VirtualCluster


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_medians() -> None:
    measured = Paired(subject=(1.0, 10.0, 3.0), baseline=(1.0, 5.0, 4.0))
    assert measured.ratio == 1.0
    assert measured.summary()["subject_median_s"] == 3.0 and measured.summary()["baseline_median_s"] == 4.0


def test_runs_are_interleaved_and_the_first_side_alternates() -> None:
    order: list[str] = []
    ticks: list[int] = []
    measured = paired(lambda: order.append("s"), lambda: order.append("b"), 4, 1, lambda: ticks.append(1))
    assert "".join(order) in ("sbbssbbssb", "bssbbssbbs")
    assert len(measured.subject) == len(measured.baseline) == 4 and len(ticks) == 5


def test_both_sides_do_the_same_work() -> None:
    work, P = Work(H=2, S=96, D=16), 4
    q, k, v, dout = work.tensors()
    layout_out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    parts = [shards(rank, P, (q, k, v, dout, layout_out)) for rank in range(P)]

    def program(ring) -> torch.Tensor:
        from ringlab import ring_attention, zigzag

        mine = parts[ring.rank]
        ring_program(ring, work.S, mine[:4], gradients=True)
        return ring_attention(*mine[:3], ring=ring, layout=zigzag(work.S, P)) - mine[4]

    assert max(float(r.abs().max()) for r in VirtualCluster(P).run(program).results) < 1e-5
    sdpa((q, k, v, dout), gradients=True)


def test_a_report_has_what_readers_need() -> None:
    told: list[None] = []
    report = bench_emulate(Work(H=1, S=64, D=16), P=2, pairs=2, progress=lambda: told.append(None))
    assert report["forward_ratio"] > 0 and report["forward_backward_ratio"] > 0
    assert len(report["forward"]["subject_s"]) == len(report["forward"]["baseline_s"]) == 2
    assert len(told) == 8
    memory = report["memory"]["forward_backward"]
    assert len(memory["peak_bytes"]) == 2 and 0 < memory["largest_bytes"] <= max(memory["peak_bytes"])
    assert {"processor", "cores", "torch", "date", "gpus"} <= set(machine())
