"""The clock, the peak of memory and the poison, on which the GPU benchmarks rely, are right on a GPU."""

from __future__ import annotations

import pytest
import torch

from ringlab.bench.contenders import Contender, sdpa, whole
from ringlab.bench.device import Cuda
from ringlab.bench.emulated_ring import bench_ring
from ringlab.bench.interleaved import Turn
from ringlab.bench.kernels import bench_kernels
from ringlab.bench.measure import Bench
from ringlab.bench.problem import Problem

pytestmark = pytest.mark.needs_cuda
SMALL = Problem(H=2, S=1000, D=64)


@pytest.fixture(scope="module")
def device() -> Cuda:
    return Cuda()


def test_the_clock_counts_the_work_and_not_the_wait(device: Cuda) -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products(count: int) -> float:
        device.settle()
        return device.seconds(lambda: [x @ x for _ in range(count)])

    products(2)
    few, many = (min(products(count) for _ in range(5)) for count in (4, 16))
    assert 0 < few < many


def test_a_kernel_that_writes_nothing_is_found_out(device: Cuda) -> None:
    """Only the poison finds this kernel, because its output memory still has the right result."""
    bench = Bench(SMALL, device)
    right = whole(sdpa(torch.nn.attention.SDPBackend.FLASH_ATTENTION), SMALL.causal)
    shape, dtype = bench.inputs.q.shape, bench.inputs.q.dtype
    lazy = Contender(
        lambda inputs, of: Turn(lambda _: {"out": torch.empty(shape, dtype=dtype, device="cuda")})
    )
    assert bench.admit(right, "forward").refusal is None
    assert "not written" in str(bench.admit(lazy, "forward").refusal)


def test_the_peak_is_what_was_allocated(device: Cuda) -> None:
    def run() -> None:
        first = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        del first
        torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")

    assert 3 * 2**20 <= device.peak_bytes(run) < 4 * 2**20


def test_the_benches_run_at_a_small_size(device: Cuda) -> None:
    kernels = bench_kernels(SMALL, rounds=2, device=device)
    assert kernels["ok"], [case["not_timed"] for case in kernels["cases"]]
    ring = bench_ring(SMALL, P=4, rounds=2, device=device)
    assert ring["ok"], [case["not_timed"] for case in ring["cases"]]
    assert kernels["machine"]["gpu"]["name"] and kernels["machine"]["versions"]["cuda"]
    assert all(0 < side["peak_shards"] < 20 for passes in ring["memory"].values() for side in passes.values())
