"""Every block computes the case table on a GPU, within the CPU's bounds of the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringlab import Mask, VirtualCluster, ring_attention
from ringlab.blocks import get_block
from ringlab.blocks.flash import VERSIONS, FlashAttention
from ringlab.blocks.protocol import Block
from ringlab.blocks.triton.offline import BETWEEN
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import LAYOUTS, Case, attend, covering, join
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.errors import BackendError
from tests.substrates.test_case_table import RULED, beyond, program

DTYPES = {
    "triton": ("float32", "bfloat16", "float16"),
    "native": ("bfloat16", "float16"),
    "cudnn": ("bfloat16", "float16"),
    "flex": ("bfloat16", "float16", "float32"),
    **{block.name: ("bfloat16", "float16") for block in VERSIONS},
}
"""The dtypes of each block on CUDA; the table's float64 is for CPUs."""
LIBRARIES = ("cudnn", "flex", *(block.name for block in VERSIONS))
"""Blocks that not every machine with a GPU has, and that compile or plan for each shape: one dtype a case."""
OBJECTS: dict[str, Block] = {block.name: block for block in VERSIONS}


def cases(block: str) -> list[Case]:
    """Return every case of the table in each dtype of the block, or in one of them for blocks of `LIBRARIES`."""
    dtypes = DTYPES[block]
    found = [
        replace(case, dtype=dtype)
        for number, case in enumerate(covering())
        for dtype in (dtypes[number % len(dtypes) :][:1] if block in LIBRARIES else dtypes)
    ]
    return list(dict.fromkeys(found))


def block_of(name: str, case: Case) -> str | Block:
    """Return the block for `ring_attention`; skip the test if this machine cannot compute the case by it."""
    block = OBJECTS.get(name, name)
    q, v = (
        torch.empty(1, 1, 2, D, device="cuda", dtype=getattr(torch, case.dtype))
        for D in (case.D, case.Dv or case.D)
    )
    if name in LIBRARIES:
        try:
            get_block(block, q, v=v)
        except BackendError as error:
            pytest.skip(error.needed)
    return block


# A fifth of the cases for flex, because torch compiles kernels for each of them.
SHARE = {block: 5 if block == "flex" else 1 for block in DTYPES}
TABLE = [(block, "ring", case) for block in DTYPES for case in cases(block)[:: SHARE[block]]]
TABLE += [(block, "allgather", case) for block in DTYPES for case in cases(block)[:: 5 * SHARE[block]]]
TABLE += [
    ("triton", "ring", Case("zigzag", P=3, S=97, group=2, D=D, dtype="bfloat16", mask="causal"))
    for D in BETWEEN
]


SCORED = [
    (block, schedule, case, kind)
    for block in DTYPES
    if block not in LIBRARIES  # they give such tiles to blockwise, as native does
    for number, case in enumerate(cases(block)[::5])
    for schedule, kind in [(("ring", "allgather")[number % 2], RULED[number % 3])]
]
SCORED += [("flex", "ring", case, "softcap") for case in cases("flex")[:: 5 * SHARE["flex"]]]


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("block", "schedule", "case"), TABLE, ids=str)
def test_on_the_gpu(block: str, schedule: str, case: Case) -> None:
    cluster = VirtualCluster(case.P, memory=False)
    results = join(case, cluster.run(attend, case, block_of(block, case), schedule, "cuda").results)
    assert results.out.device.type == "cuda"
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == torch.float32
    assert beyond(case, results) == {}


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("block", "schedule", "case", "kind"), SCORED, ids=str)
def test_soft_caps_and_dropout_on_the_gpu(block: str, schedule: str, case: Case, kind: str) -> None:
    """The GPU drops the pairs of tests/philox.py, and blockwise computes native's tiles."""
    cluster = VirtualCluster(case.P, memory=False)
    used = block_of(block, case)
    results = join(case, cluster.run(program, case, used, schedule, kind, "cuda").results)
    assert results.out.device.type == "cuda"
    assert beyond(case, results, kind) == {}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("block", VERSIONS, ids=lambda block: block.name)
def test_many_documents_take_few_calls_of_flash_attn(
    block: FlashAttention, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of 24 documents are right, and no rank has a call for each document."""
    P, mask = 2, Mask(documents=tuple(range(1, 25)))
    S = sum(mask.documents)
    block_of(block.name, Case(layout, P, S, 2, 64, "bfloat16", "documents"))  # or skip
    generator, sizes = torch.Generator().manual_seed(0), ((4, 64), (2, 64), (2, 64), (4, 64))
    whole = [torch.randn(2, heads, S, D, generator=generator).to(torch.bfloat16) for heads, D in sizes]
    made = LAYOUTS[layout](S, P)
    calls: list[int] = []
    for name in ("_call_forward", "_call_backward"):
        called = getattr(type(block), name)
        monkeypatch.setattr(
            type(block), name, lambda *given, called=called: calls.append(1) or called(*given)
        )

    def program(ring: Ring) -> tuple[Tensor, ...]:
        *qkv, dout = (x.to("cuda") for x in made.shard(tuple(whole), ring.rank))
        leaves = [x.requires_grad_() for x in qkv]
        out, lse = ring_attention(*leaves, ring=ring, layout=made, mask=mask, block=block, return_lse=True)
        return tuple(x.detach().cpu() for x in (out, lse, *torch.autograd.grad(out, leaves, dout)))

    shards = zip(*VirtualCluster(P, memory=False).run(program).results, strict=True)
    found = [made.unshard(x, dim=-1 if name == "lse" else -2) for name, x in zip(NAMES, shards, strict=True)]
    true = truth(*whole, mask=mask)
    measured, most = errors(Results(*found), true), bounds(*whole, true=true, mask=mask)
    assert {name: measured[name] for name in NAMES if not measured[name] <= most[name]} == {}
    assert (
        len(calls) <= 3 * 2 * P * P
    )  # at most three kinds of tiles in each of two passes over P blocks on P ranks


@pytest.mark.needs_cuda
@pytest.mark.parametrize("block", DTYPES)
def test_the_same_bits_every_time(block: str) -> None:
    """Two runs give the same bits, except for the gradients of libraries' backward, which adds with atomics."""
    case = Case("zigzag", P=4, S=97, group=2, D=64, dtype="bfloat16", mask="causal")
    cluster = VirtualCluster(case.P, memory=False)
    used = block_of(block, case)
    first, second = (join(case, cluster.run(attend, case, used, "ring", "cuda").results) for _ in range(2))
    for name in NAMES if block == "triton" else ("out", "lse"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.needs_cuda
def test_cudnns_lse_has_the_shape_that_the_backward_passes() -> None:
    q = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    block_of("cudnn", Case("contiguous", P=1, S=16, group=1, D=64, dtype="bfloat16", mask="full"))
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1]
    assert lse.shape == (2, 4, 16, 1) and lse.is_contiguous()
