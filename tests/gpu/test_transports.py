"""Transports that carry CUDA tensors give gloo's data and one rank's attention on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cloudpickle", reason="needs cloudpickle: pip install cloudpickle")

from ringlab import Mask, VirtualCluster, launch, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import members
from ringlab.errors import BackendError
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


CAUSAL, DOCUMENTS = Mask(), Mask(documents=(100, 0, 1, 200))


def attention(
    ring: Ring,
    device: str,
    block: str = "blockwise",
    heads: tuple[int, int] = (4, 2),
    mask: Mask = CAUSAL,
    schedule: str = "ring",
) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of this rank's shards, twice in a row over the same buffers."""
    generator = torch.Generator().manual_seed(0)
    layout, results = zigzag(301, ring.world_size), []
    H, K = heads
    for _ in range(2):
        whole = [torch.randn(1, count, 301, 32, generator=generator) for count in (H, K, K)]
        q, k, v = (layout.shard(x, ring.rank).to(device).requires_grad_() for x in whole)
        out = ring_attention(q, k, v, ring=ring, layout=layout, block=block, mask=mask, schedule=schedule)
        out.square().sum().backward()
        results += [out.detach().cpu(), *(x.grad.cpu() for x in (q, k, v) if x.grad is not None)]
    return results


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


@pytest.mark.parametrize("transport", EVERYWHERE)
def test_attention_on_gpus_is_that_of_virtual_ranks_on_the_cpu(transport: str) -> None:
    on_gpu = launch(attention, 2, "cuda", transport=transport, memory=False)
    on_cpu = VirtualCluster(2).run(attention, "cpu")
    for mine, theirs in zip(on_gpu.results, on_cpu.results, strict=True):
        assert_same(mine, theirs, rtol=1e-4)


@pytest.mark.parametrize("transport", EVERYWHERE)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["4 heads", "4 heads of one key"])
@pytest.mark.parametrize("mask", [CAUSAL, DOCUMENTS], ids=["causal", "documents"])
def test_triton_between_gpus_is_blockwise_of_virtual_ranks_on_the_cpu(
    transport: str, heads: tuple[int, int], mask: Mask
) -> None:
    """The kernels read what the transport has just delivered, which no virtual rank can show."""
    ranks = 2 if transport == "shared-gpu" else torch.cuda.device_count()
    on_gpu = launch(attention, ranks, "cuda", "triton", heads, mask, transport=transport, memory=False)
    on_cpu = VirtualCluster(ranks).run(attention, "cpu", "blockwise", heads, mask)
    for mine, theirs in zip(on_gpu.results, on_cpu.results, strict=True):
        assert_same(mine, theirs, rtol=1e-4)


@pytest.mark.needs_two_gpus
def test_both_transports_give_the_same_bits() -> None:
    nccl, symmetric = (
        launch(attention, 2, "cuda", transport=name, memory=False).results for name in ("nccl", "symmetric")
    )
    for mine, theirs in zip(nccl, symmetric, strict=True):
        assert_same(mine, theirs, rtol=0)


def over_ways(ring: Ring, device: str, schedule: str) -> tuple[list[torch.Tensor], int, bool]:
    """Return the results of `attention`, the number of NCCL's communicators, and whether they have priority."""
    results, transport = attention(ring, device, schedule=schedule), members(ring.comm)[0]
    lines = transport._carriers["cuda"]._lines.values()  # type: ignore[attr-defined]
    groups = [line.group or dist.group.WORLD for line in lines]
    backends = [group._get_backend(torch.device("cuda")) for group in groups if group is not None]
    return results, len(lines), all(each.options.is_high_priority_stream for each in backends)


@pytest.mark.needs_two_gpus
@pytest.mark.parametrize("schedule", ["ring", "double-ring(node=2)", "bidirectional", "multi-ring"])
def test_each_way_over_nccl_has_a_communicator_of_high_priority(schedule: str) -> None:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2  # two ranks are only neighbours, and need one way
    on_gpu = launch(over_ways, ranks, "cuda", schedule, transport="nccl", memory=False)
    on_cpu = VirtualCluster(ranks).run(attention, "cpu", "blockwise", (4, 2), CAUSAL, schedule)
    for (mine, communicators, high), theirs in zip(on_gpu.results, on_cpu.results, strict=True):
        assert_same(mine, theirs, rtol=1e-4)
        assert communicators == (1 if ranks == 2 or schedule == "ring" else 2) and high


def over_plain_nccl(ring: Ring, device: str) -> list[torch.Tensor]:
    """Return the results of `attention` over a group with NCCL alone, as Megatron and Accelerate open theirs."""
    return attention(Ring.of_group(dist.new_group(backend="nccl")), device)


@pytest.mark.needs_two_gpus
def test_a_group_of_nccl_only() -> None:
    plain = launch(over_plain_nccl, 2, "cuda", transport="nccl", memory=False).results
    for mine, theirs in zip(plain, VirtualCluster(2).run(attention, "cpu").results, strict=True):
        assert_same(mine, theirs, rtol=1e-4)


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
