"""`bench kernels` and `bench ring` as wholes, on a scripted device: what they report, never how fast it was."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from ringlab import VirtualCluster, zigzag
from ringlab.bench.contenders import Alone, rank_program
from ringlab.bench.emulated_ring import bench_ring
from ringlab.bench.kernels import bench_kernels
from ringlab.bench.problem import Problem, draw
from ringlab.comm.memory import MemoryMeter
from ringlab.comm.ring import Ring
from tests.bench.test_measure import Scripted

SMALL = Problem(H=2, S=130, D=16)


@pytest.mark.parametrize(
    ("of", "causal", "products"),
    [("forward", True, 1), ("forward", False, 2), ("backward", True, 2.5), ("backward", False, 5),
     ("forward_backward", False, 7)],
)  # fmt: skip
def test_the_flops_are_those_of_the_convention(of: str, causal: bool, products: float) -> None:
    """`products` matrix products of 2·S²·D·H; causal halves them."""
    assert Problem(H=16, S=16384, D=128, causal=causal).flops(of) == products * 2 * 16384**2 * 128 * 16


def test_the_fewest_bytes_are_each_tensor_once() -> None:
    problem = Problem(H=16, S=16384, D=128)
    assert problem.tensor_bytes == 16 * 16384 * 128 * 2
    assert problem.least_bytes("forward") == 4 * problem.tensor_bytes
    assert problem.least_bytes("backward") == 8 * problem.tensor_bytes


def test_a_report_of_kernels_has_what_readers_need() -> None:
    ticks: list[int] = []
    report = bench_kernels(
        SMALL, ("native", "naive"), rounds=2, device=Scripted(), progress=lambda: ticks.append(1)
    )
    assert json.loads(json.dumps(report)) == report
    assert [(case["pass"], case["causal"]) for case in report["cases"]] == [
        ("forward", True), ("backward", True), ("forward", False), ("backward", False)
    ]  # fmt: skip
    assert len(ticks) == 4 * (3 + 2)
    assert report["ok"] and len(set(report["work"]["seeds"])) == 2
    assert {"clock", "inputs", "cache", "check", "flops", "speed_ratio"} <= set(report["method"])
    for case in report["cases"]:
        assert set(case["speed_ratio"]) == {"native", "naive"}
        assert "cudnn" in case["not_timed"]  # there is none for CPUs, and nothing ran in its place
        assert all(0 < ratio <= 1 for ratio in case["contenders"]["native"]["errors_over_bounds"].values())
    assert report["machine"]["date"] and report["machine"]["torch"]


def test_times_and_ratios_belong_to_their_contenders() -> None:
    """Every contender takes its place in the order of the first round; the script says how long."""

    class Clock(Scripted):
        def seconds(self, run) -> float:
            before = len(running)
            run()
            return {"naive": 3.0, "native": 2.0}.get(running[-1], 1.0) if len(running) > before else 1.0

    running: list[str] = []
    from ringlab.blocks.naive import Naive
    from ringlab.blocks.native import Native

    def spied(kind: type, name: str):
        def forward(self, *args, **options):
            running.append(name)
            return kind.forward(self, *args, **options)

        return type(name, (kind,), {"forward": forward, "name": name, "largest_causal": None})()

    from ringlab.bench.contenders import SDPA, one_block, sdpa, whole
    from ringlab.bench.measure import Bench

    contenders = {n: whole(one_block(spied(k, n)), True) for n, k in (("naive", Naive), ("native", Native))}
    contenders["flash"] = whole(sdpa(SDPA["flash"]), True)
    case = Bench(SMALL, Clock()).measure("forward", contenders, {"naive": ("native", "flash")}, rounds=3)
    assert case["contenders"]["naive"]["times_s"] == [3.0] * 3
    assert case["contenders"]["native"]["times_s"] == [2.0] * 3
    assert case["speed_ratio"] == {"naive": {"native": round(2 / 3, 4), "flash": round(1 / 3, 4)}}


def test_a_block_that_cannot_run_makes_the_report_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench_kernels(SMALL, ("native", "nonesuch"), (True,), rounds=1, device=Scripted())
    assert report["ok"] is False
    assert all("nonesuch" in case["not_timed"]["nonesuch"] for case in report["cases"])


def test_a_report_of_the_ring_has_ratios_to_one_call_and_memory() -> None:
    report = bench_ring(SMALL, P=3, blocks=("native",), rounds=2, device=Scripted(peak=44 * 2 * 16 * 2 * 5))
    assert json.loads(json.dumps(report)) == report
    assert report["ok"] and report["work"]["P"] == 3
    assert [case["pass"] for case in report["cases"]] == ["forward", "forward_backward"]
    for case in report["cases"]:
        assert case["speed_ratio"]["native ring"].keys() == {"native once", "flash"}
    memory = report["memory"]["native"]["forward_backward"]
    assert len(memory["peak_bytes"]) == 3 and memory["peak_shards"] == 5.0  # 44 tokens a rank at most


def test_a_rank_alone_holds_what_it_holds_among_others() -> None:
    """Memory is weighed on a rank alone, since an allocator cannot tell ranks of one process apart."""
    P, layout = 4, zigzag(256, 4)
    inputs = draw(Problem(H=2, S=256, D=16, dtype="float32"), "cpu", torch.Generator().manual_seed(0))
    parts = [tuple(layout.shard(x, rank) for x in inputs) for rank in range(P)]

    def program(ring: Ring) -> None:
        rank_program(ring, parts[ring.rank], layout, "naive", True, True)

    together = VirtualCluster(P).run(program).memory
    for rank in range(P):
        meter = MemoryMeter(rank)
        with meter.watch():
            program(Ring(Alone(rank, P)))
        one = inputs.q.nbytes // P
        assert abs(meter.peak_bytes - together[rank].peak_bytes) <= 2 * one, (
            meter.peak_bytes,
            together[rank],
        )
        assert meter.largest_bytes == together[rank].largest_bytes


def test_a_rank_alone_gets_back_what_it_sends_as_far_as_it_goes() -> None:
    ring = Ring(Alone(1, 4))
    assert (ring.next, ring.previous) == (2, 0)
    short = ring.shift(torch.arange(6.0).reshape(3, 2), length=2)
    assert short.tolist() == [[0, 1], [2, 3]]
    assert list(itertools.chain(*ring.shift(torch.ones(2), torch.zeros(1)))) == [1, 1, 0]
