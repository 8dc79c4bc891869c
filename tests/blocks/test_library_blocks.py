"""Blocks whose kernels belong to a library accept just the tensors that the library's operators support."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringlab import Mask, VirtualCluster, contiguous, ring_attention
from ringlab.blocks import get_block
from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.cudnn import Cudnn
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError
from ringlab.merge import Partial
from ringlab.schedules.cache import ShardedCache
from ringlab.schedules.decode import decode
from tests.blocks.device_calls import as_on_a_gpu, cudnn_operators, flash_attn_packages


def reason(name: str, capability: tuple[int, int], D: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return the reason why a block refuses tensors on a GPU of this compute capability, or ""."""
    with as_on_a_gpu(capability):
        try:
            get_block(name, torch.empty(1, 1, 4, D, dtype=dtype))
        except BackendError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "capability", "D"),
    [("cudnn", (8, 0), 128), ("cudnn", (9, 0), 128), ("cudnn", (10, 0), 128), ("cudnn", (12, 0), 8)],
)
def test_the_largest_head_dim_on_each_gpu(name: str, capability: tuple[int, int], D: int) -> None:
    assert reason(name, capability, D) == ""
    if D > 8:
        assert f"a multiple of 8 up to {D}, got {D + 8}" in reason(name, capability, D + 8)
    assert f"got {D + 4}" in reason(name, capability, D + 4)
    assert "needs float16 or bfloat16, got torch.float32" in reason(name, capability, D, torch.float32)


@pytest.mark.parametrize(
    ("name", "capability", "text"),
    [
        ("cudnn", (7, 5), r"capability 8.0 or more, got 7.5"),
        ("cudnn", (13, 0), "does not run on GPUs of compute capability 13.0"),
    ],
)
def test_a_gpu_that_a_library_does_not_support_is_refused(
    name: str, capability: tuple[int, int], text: str
) -> None:
    assert text in reason(name, capability, 64)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a_block_for_gpus_refuses_the_cpu_and_names_another_block(name: str) -> None:
    with pytest.raises(BackendError, match="runs on cuda, not on cpu") as caught:
        get_block(name, torch.empty(1, 1, 4, 64, dtype=torch.bfloat16))
    assert caught.value.remedy == "use block='native'"


@pytest.mark.parametrize(("version", "text"), [(None, "needs cuDNN"), (8907, "cuDNN 9.0 or later")])
def test_a_build_of_torch_without_a_new_cudnn_is_refused(
    version: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with as_on_a_gpu(), monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "version", lambda: version)
        with pytest.raises(BackendError, match=text):
            get_block("cudnn", torch.empty(1, 1, 4, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("Dv", [16, 8])
@pytest.mark.parametrize("part", [slice(0, 6), slice(2, 6)], ids=["all rows", "some rows"])
def test_cudnns_backward_finds_its_plan_by_the_strides_of_q(Dv: int, part: slice) -> None:
    """torch finds cuDNN's plan by q, k and v alone, so the block gives out and dout the strides of that plan."""
    layouts = (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    q, out, dout = (torch.randn(1, 4, 6, D, dtype=torch.bfloat16) for D in (16, Dv, Dv))
    k, v = q[:, :2, part], out[:, :2, part]
    lse = torch.randn(1, 4, 6)
    plain = BackwardRows(dout, q, out, lse, torch.zeros_like(lse))
    found = []
    for of_q, of_out in itertools.product(layouts, layouts):
        rows = replace(plain, q=of_q(q), out=of_out(out))
        with cudnn_operators():
            found.append(Cudnn().backward(rows.part(part), k, v, causal=True, scale=0.3))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one, same)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("name", "Dv"), [("native", 64), ("cudnn", 64), ("cudnn", 32)])
def test_torchs_operators_take_the_calls_and_promise_the_shapes(name: str, Dv: int) -> None:
    """The operators' own schemas accept the calls, and their shape functions give the expected shapes."""
    with FakeTensorMode(), as_on_a_gpu():
        q, k, v, dout = (
            torch.empty(2, heads, 16, D, device="cuda", dtype=torch.bfloat16)
            for heads, D in ((4, 64), (2, 64), (2, Dv), (4, Dv))
        )
        block = get_block(name, q, v=v)
        part = block.forward(q, k, v, causal=True, scale=0.3)
        assert part.out.shape == dout.shape and part.out.dtype == torch.bfloat16
        assert part.lse.shape == q.shape[:3] and part.lse.dtype == torch.float32
        rows = BackwardRows(dout, q, part.out, part.lse, torch.empty_like(part.lse))
        gradients = block.backward(rows, k, v, causal=True, scale=0.3)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_cudnns_lse_has_the_shape_that_the_backward_passes() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1]
        assert lse.shape == (2, 4, 16, 1) and lse.is_contiguous()


@pytest.mark.parametrize(
    ("installed", "capability", "D", "chosen"),
    [
        ((2, 3, 4), (9, 0), 64, "flash-4"),
        ((2, 3, 4), (9, 0), 256, "flash-3"),
        ((2, 3, 4), (8, 0), 64, "flash-2"),
        ((2, 3, 4), (10, 3), 128, "flash-4"),
        ((2, 3, 4), (12, 0), 64, "flash-2"),
        ((2, 3), (9, 0), 64, "flash-3"),
        ((2, 3), (10, 0), 64, "flash-2"),
        ((2,), (9, 0), 256, "flash-2"),
    ],
)
def test_flash_is_the_newest_installed_version_that_supports_the_tensors(
    installed: tuple[int, ...], capability: tuple[int, int], D: int, chosen: str
) -> None:
    with flash_attn_packages(*installed, capability=capability):
        assert get_block("flash", torch.empty(1, 1, 4, D, dtype=torch.bfloat16)).name == chosen


@pytest.mark.parametrize(
    ("installed", "capability", "D", "text"),
    [
        ((), (9, 0), 64, "pip install --no-build-isolation 'ringlab[flash]'"),
        ((3,), (10, 0), 64, "'flash-3' supports: it does not run on GPUs of compute capability 10.0"),
        (
            (4,),
            (9, 0),
            256,
            "'flash-4' supports: it on cuda needs a head dim that is a multiple of 8 up to 128",
        ),
        ((2,), (7, 5), 64, "capability 8.0 or more, got 7.5"),
    ],
)
def test_flash_says_why_it_cannot_run(
    installed: tuple[int, ...], capability: tuple[int, int], D: int, text: str
) -> None:
    q = torch.empty(1, 1, 4, D, dtype=torch.bfloat16)
    with flash_attn_packages(*installed, capability=capability), pytest.raises(BackendError) as caught:
        get_block("flash", q)
    assert text in str(caught.value)


def test_a_flash_attn_with_other_arguments_is_refused() -> None:
    q = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16)
    with (
        flash_attn_packages(2, of_2="2.6.3"),
        pytest.raises(BackendError, match=r"2\.7 or later .*got 2\.6\.3"),
    ):
        get_block("flash", q)


def test_the_trace_records_which_version_of_flash_attn_computes() -> None:
    q = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)

    def program(ring: Ring, softcap: float | None = None) -> None:
        layout = contiguous(16, ring.world_size)
        shard = layout.shard(q, ring.rank)
        ring_attention(shard, shard, shard, ring=ring, layout=layout, block="flash", softcap=softcap)

    with flash_attn_packages(2, 3):
        plain = VirtualCluster(1).run(program)
        capped = VirtualCluster(1).run(program, 2.0)
    assert [(each.asked, each.chosen) for each in plain.trace.choices()] == [("block='flash'", "flash-3")]
    assert ("block='flash-3' with softcap", "blockwise") in {
        (each.asked, each.chosen) for each in capped.trace.choices()
    }


SHORT = ("block='cudnn' for tiles with fewer than 2 rows or keys", "blockwise")


@pytest.mark.parametrize(
    ("mask", "P", "schedule", "short"),
    [
        (Mask(), 1, "ring", False),
        (Mask(documents=(8, 8)), 2, "ring", False),
        (Mask(documents=(7, 1, 8)), 2, "ring", True),  # a document of one token
        (Mask(documents=(7, 1, 8)), 2, "query-ring", True),
        (Mask(documents=(7, 1, 8)), 2, "multi-ring", True),
        (Mask(), 2, "ulysses", False),
        (Mask(), 16, "ring", True),  # one token on each rank
        (Mask(), 16, "hybrid(ring=8, ulysses=2)", False),  # two tokens in each row of ranks
    ],
    ids=str,
)
def test_the_trace_records_tiles_that_are_too_short_for_a_library(
    mask: Mask, P: int, schedule: str, short: bool
) -> None:
    """Tiles with one row or one key are computed by blockwise, on the ranks that have them and nowhere else."""
    q = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
    computed: set[tuple[int, ...]] = set()

    def watched(self: Blockwise, q: Tensor, k: Tensor, v: Tensor, **other: Any) -> Partial:
        computed.add((q.shape[-2], k.shape[-2]))
        return Partial.identity(q, v.shape[-1])

    def program(ring: Ring) -> None:
        layout = contiguous(16, ring.world_size)
        shard = layout.shard(q, ring.rank)
        ring_attention(
            shard, shard, shard, ring=ring, layout=layout, mask=mask, block="cudnn", schedule=schedule
        )

    with cudnn_operators(), mock.patch.object(Blockwise, "forward", watched):
        choices = VirtualCluster(P).run(program).trace.choices()
    assert {(each.asked, each.chosen) for each in choices} == ({SHORT} if short else set())
    assert bool(computed) is short and all(min(size) == 1 for size in computed)


@pytest.mark.parametrize(("rows", "short"), [(1, True), (2, False)])
def test_the_trace_records_the_decode_of_one_row(rows: int, short: bool) -> None:
    q, k = (torch.randn(1, 2, n, 16, dtype=torch.bfloat16) for n in (rows, 8))

    def program(ring: Ring) -> None:
        cache = ShardedCache.of_shards(ring, contiguous(8, 1), k, k)
        decode(q, cache, mask=Mask(causal=False), block="cudnn")

    with cudnn_operators():
        choices = VirtualCluster(1).run(program).trace.choices()
    assert {(each.asked, each.chosen) for each in choices} == ({SHORT} if short else set())
