"""Transports that carry CUDA tensors give gloo's data and one rank's attention on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cloudpickle", reason="needs cloudpickle: pip install cloudpickle")

from ringlab import launch
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import members
from ringlab.conformance.cases import Case
from ringlab.errors import BackendError
from tests.substrates.test_case_table import Job, attend_all, jobs_on_gpus, missed
from tests.substrates.test_distributed import torchrun

ON_ONE = pytest.param("shared-gpu", marks=pytest.mark.needs_cuda)
ON_TWO = [pytest.param(name, marks=pytest.mark.needs_two_gpus) for name in ("nccl", "symmetric")]
EVERYWHERE = [ON_ONE, *ON_TWO]


def messages(ring: Ring, device: str) -> list[torch.Tensor]:
    """Shift and relay blocks of many sizes, reuse each buffer at once, and return what arrived."""
    came = []
    for length in (1, 1000, 3_000_000, 7):
        k = torch.arange(length, dtype=torch.float32, device=device) + 10 * ring.rank
        v = (k * 2).to(torch.bfloat16)
        work = ring.post(k, v, into=(torch.empty_like(k), torch.empty_like(v)), hops=0, tag="kv")
        busy = torch.ones(512, 512, device=device).matrix_power(8)
        k_there, v_there = work.wait()
        k.zero_()
        v.zero_()
        total = ring.shift(k_there + busy[0, 0] * 0)
        came += [k_there.cpu(), v_there.cpu(), total.cpu()]
        k_there.fill_(-1)
    ring.barrier()
    return [*came, ring.all_reduce(torch.full((3,), float(ring.rank + 1), device=device)).cpu()]


def ranks_on(transport: str) -> int:
    """Return how many ranks to run: four have every way of every schedule, if there is a GPU for each."""
    return 4 if transport != "shared-gpu" and torch.cuda.device_count() >= 4 else 2


def job_of(ranks: int, schedule: str = "ring") -> Job:
    return Case("zigzag", ranks, 301, 2, 32, "float32", "causal"), "blockwise", schedule, "plain"


def assert_same(one: Any, other: Any, rtol: float) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_what_arrives_on_a_gpu_is_what_arrives_on_a_cpu(transport: str) -> None:
    on_gpu = launch(messages, 2, "cuda", transport=transport, memory=False)
    on_cpu = launch(messages, 2, "cpu", memory=False)
    for mine, theirs in zip(on_gpu.results, on_cpu.results, strict=True):
        assert_same(mine, theirs, rtol=0)
    for rank in range(2):
        assert all(e.exposed >= 0 for e in on_gpu.trace.exchanges(rank))
        assert isinstance(on_gpu.trace.exchanges(rank)[0].stall, float), "it was measured by the GPU's events"


@pytest.mark.parametrize("block", ["blockwise", "triton"])
@pytest.mark.parametrize("transport", EVERYWHERE)
def test_every_schedule_between_gpus(transport: str, block: str) -> None:
    """The kernels read tensors that the transport has just delivered, and ranks ask each other for gradients of lse."""
    ranks = ranks_on(transport)
    jobs = jobs_on_gpus(ranks, block)
    on_gpu = launch(attend_all, ranks, jobs, "cuda", transport=transport, memory=False, timeout=500.0)
    assert missed(jobs, on_gpu.results) == {}


@pytest.mark.needs_two_gpus
def test_both_transports_give_the_same_bits() -> None:
    nccl, symmetric = (
        launch(attend_all, 2, [job_of(2)], "cuda", transport=name, memory=False).results
        for name in ("nccl", "symmetric")
    )
    for mine, theirs in zip(nccl, symmetric, strict=True):
        assert_same(mine, theirs, rtol=0)


def over_ways(ring: Ring, jobs: list[Job]) -> tuple[list[tuple[torch.Tensor, ...]], int, bool]:
    """Return the results of the jobs, the number of NCCL's communicators, and whether they have priority."""
    results, transport = attend_all(ring, jobs, "cuda"), members(ring.comm)[0]
    lines = transport._carriers["cuda"]._lines.values()  # type: ignore[attr-defined]
    groups = [line.group or dist.group.WORLD for line in lines]
    backends = [group._get_backend(torch.device("cuda")) for group in groups if group is not None]
    return results, len(lines), all(each.options.is_high_priority_stream for each in backends)


@pytest.mark.needs_two_gpus
@pytest.mark.parametrize("schedule", ["ring", "double-ring(node=2)", "bidirectional", "multi-ring"])
def test_each_way_over_nccl_has_a_communicator_of_high_priority(schedule: str) -> None:
    ranks = ranks_on("nccl")
    jobs = [job_of(ranks, schedule)]
    results, communicators, high = zip(
        *launch(over_ways, ranks, jobs, transport="nccl", memory=False).results, strict=True
    )
    assert missed(jobs, list(results)) == {}
    # Two ranks are only neighbours, and need one way.
    assert set(communicators) == {1 if ranks == 2 or schedule == "ring" else 2} and all(high)


def over_plain_nccl(ring: Ring, jobs: list[Job]) -> list[tuple[torch.Tensor, ...]]:
    """Return the results of the jobs over a group with NCCL alone, as Megatron and Accelerate open theirs."""
    return attend_all(Ring.of_group(dist.new_group(backend="nccl")), jobs, "cuda")


@pytest.mark.needs_two_gpus
def test_a_group_of_nccl_only() -> None:
    jobs = [job_of(2)]
    assert missed(jobs, launch(over_plain_nccl, 2, jobs, transport="nccl", memory=False).results) == {}


@pytest.mark.needs_cuda
def test_processes_that_see_the_same_gpu_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sees one GPU, as under SLURM, and both see the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = torchrun(tmp_path, fail=False, transport="nccl")
    assert done.returncode != 0 and "ranks 0, 1 on GPU-" in done.stderr


@pytest.mark.needs_cuda
def test_more_ranks_than_gpus() -> None:
    ranks = torch.cuda.device_count() + 1
    for transport in ("nccl", "symmetric"):
        with pytest.raises(BackendError, match="shared-gpu"):
            launch(messages, ranks, "cuda", transport=transport)
