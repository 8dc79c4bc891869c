"""FlexAttention is right as a block; its tables have just the squares with a visible pair, and it is rarely compiled.

The definition of FlexAttention runs on the CPU. Its backward runs there too, after torch's refusal is taken away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringlab import Mask, VirtualCluster, ring_attention, zigzag
from ringlab.blocks import flex, get_block
from ringlab.blocks.flex import Flex, FlexBackward, block_tables
from ringlab.blocks.naive import Naive
from ringlab.blocks.protocol import BackwardRows
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import Case, covering, join, problem, refusal
from ringlab.conformance.tolerance import NAMES, errors
from ringlab.errors import BackendError
from ringlab.layout import Layout
from ringlab.plan import plan
from ringlab.schedules import available as schedules
from ringlab.scores import ScoreRules
from ringlab.tile import Tile
from tests.blocks.device_calls import Call, flex_calls, flex_gradients
from tests.blocks.test_device_calls import VIEWS, attend
from tests.laws.draw import Shape, tensors
from tests.laws.test_mask_laws import painted, problems
from tests.substrates.test_case_table import beyond, program

JOBS = [
    (case, schedule, list(VIEWS)[number % len(VIEWS)])
    for number, case in enumerate(covering())
    for schedule in (schedules()[number % len(schedules())],)
    if refusal(case, schedule) is None
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Make and compile everything anew, as a test may have changed the code."""
    yield
    block_tables.cache_clear()


def wrong(case: Case, schedule: str = "ring", view: str = "dense") -> set[str]:
    """Return the names of the results that miss the oracle by more than the bounds allow."""
    outcome = VirtualCluster(case.P, memory=False).run(attend, case, "flex", schedule, view)
    expected = problem(case)
    measured = errors(join(case, outcome.results), expected.true)
    return {name for name in NAMES if not measured[name] <= expected.bounds[name]}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_every_case_by_flex_attention(job: tuple[Case, str, str]) -> None:
    """FlexAttention's definition is within the bounds of the oracle, with the backward and the calls that GPUs run."""
    with flex_calls():
        assert wrong(*job) == set()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("case", [job[0] for job in JOBS[::6]], ids=str)
def test_soft_caps_by_flex_attention(case: Case) -> None:
    with flex_gradients():
        outcome = VirtualCluster(case.P, memory=False).run(program, case, "flex", "ring", "softcap")
        assert beyond(case, join(case, outcome.results), "softcap") == {}


def of_a_tile(causal: bool, block: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return out, lse and the gradients of one tile, whose rows also see keys outside it.

    The backward is given a random delta in place of out, as with a gradient of lse.
    """
    q, k, v, dout = (x.to(dtype) for x in tensors(Shape(2, 4, 2, 9, 7, 8), 0))
    generator = torch.Generator().manual_seed(1)
    part = Naive().forward(q, k, v, causal=causal, scale=0.3)
    final = part.lse + torch.rand(part.lse.shape, generator=generator, dtype=part.lse.dtype)
    delta = torch.randn(part.lse.shape, generator=generator, dtype=part.lse.dtype)
    rows = BackwardRows(dout, q, None, final, delta, through_lse=True)
    found = block.forward(q, k, v, causal=causal, scale=0.3)
    return found.out, found.lse, *block.backward(rows, k, v, causal=causal, scale=0.3)


def wrong_in_a_tile() -> set[str]:
    return {
        name
        for causal in (True, False)
        for name, one, other in zip(NAMES, of_a_tile(causal, Flex()), of_a_tile(causal, Naive()), strict=True)
        if not (one - other).abs().max() <= 1e-12
    }


def test_a_tile_with_the_final_lse_and_any_delta() -> None:
    with flex_gradients():
        assert wrong_in_a_tile() == set()


@pytest.mark.thorough
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_graphs_pass_through_autograds_compiler(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler that derives the backward on a GPU changes no result when it is used on the CPU."""
    found = []
    for compiler in ("eager", "aot_eager"):
        monkeypatch.setitem(flex.COMPILERS, "cpu", compiler)
        flex._compiled.cache_clear()
        with flex_gradients():
            for S in (16, 40):  # the second length is compiled for all lengths
                found.append(
                    VirtualCluster(2, memory=False).run(trains, S, Mask(window=5, prefix=3), softcap).results
                )
    flex._compiled.cache_clear()
    for one, other in zip(found[:2], found[2:], strict=True):
        for x, y in zip(sum(one, ()), sum(other, ()), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_each_scale_and_cap_is_a_constant_of_its_graph() -> None:
    """Scales and caps are constants: torch makes a graph input of a varying number, and FlexAttention refuses it."""
    q, k, v, _ = tensors(Shape(1, 2, 1, 4, 4, 8), 0)
    for number in (0.3, 0.5, 0.7):
        rules = ScoreRules(softcap=10 * number).of_tile(np.arange(0), np.arange(0))
        one, other = (
            block.forward(q, k, v, causal=True, scale=number, rules=rules) for block in (Flex(), Naive())
        )
        torch.testing.assert_close(one.lse, other.lse, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.out, other.out, rtol=1e-12, atol=1e-12)


def test_a_row_that_saw_nothing_gives_no_gradient() -> None:
    """A row whose lse is −inf in a block, or over all keys, has a weight of 0 and not NaN."""
    with flex_gradients():
        q, k, v, dout = tensors(Shape(1, 2, 1, 3, 2, 8), 0)
        tiles = (Tile(0, 1, 0, 2, causal=False),)  # rows 1 and 2 see no key
        steps = Flex().begin_forward(q, 1, scale=1.0)
        steps.attend(tiles, k, v)
        part = steps.partial()
        assert (part.lse[..., 1:] == -math.inf).all() and (part.out[..., 1:, :] == 0).all()
        final = part.lse.clone()
        final[..., 1] = 0.5  # row 1 sees keys of another block
        back = FlexBackward(BackwardRows(dout, q, part.out, final, (dout * part.out).sum(-1)), 1.0)
        [gradient] = back.differentiate(tiles, k, v)
        assert (back.query_gradient()[..., 1:, :].nan_to_num(1.0) == 0).all()
        assert gradient.dk.isfinite().all() and gradient.dv.isfinite().all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_tiles(rows: int, keys: int) -> None:
    q, k, v, dout = tensors(Shape(1, 4, 2, rows, keys, 8), 0)
    with flex_gradients():
        part = Flex().forward(q, k, v, causal=False, scale=1.0)
        of_rows = BackwardRows(dout, q, part.out, part.lse, torch.zeros(q.shape[:-1]))
        gradients = Flex().backward(of_rows, k, v, causal=False, scale=1.0)
    assert part.out.shape == q.shape and (part.lse == -math.inf).all()
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in gradients)


@given(problems())
def test_tables_show_the_keys_of_the_tiles(problem: tuple[Layout, Mask]) -> None:
    """Rows see the keys of the mask's tiles, by intervals and by squares."""
    layout, mask = problem
    ranks = range(layout.P)
    for rank, origin in product(ranks, ranks):
        tiles = plan(layout, mask).of_rank(rank)[origin]
        rows, keys = layout.length(rank), layout.length(origin)
        if not tiles:
            continue
        expected = painted(tiles, rows, keys)
        intervals = flex.visible_intervals(tiles, rows)
        column = np.arange(keys)
        seen = (intervals[:, 0, :, None] <= column) & (column < intervals[:, 1, :, None])
        assert (seen.sum(0) == expected).all()
        padded = np.pad(expected, ((0, -rows % 4), (0, -keys % 4)))
        squares = padded.reshape(len(padded) // 4, 4, -1, 4).sum((1, 3))
        assert (flex.visible_squares(intervals, keys, 4) == squares).all()


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=False), Mask(window=70), Mask(documents=(200, 440))], ids=str
)
def test_flex_attention_computes_the_squares_that_hold_a_visible_pair(mask: Mask) -> None:
    """The tables list each square with a visible pair once: in one list if the square is whole, else in the other.

    FlexAttention computes the listed squares only, and does not call the mask for whole squares.
    """
    layout = zigzag(640, 1)
    found = block_tables(plan(layout, mask).of_rank(0)[0], 640, 640, torch.device("cpu")).mask
    seen = mask.visible(np.arange(640), np.arange(640)).reshape(5, 128, 5, 128).sum((1, 3))
    some, whole = (seen > 0) & (seen < 128**2), seen == 128**2
    for name, expected in {"kv": some, "full_kv": whole, "q": some.T, "full_q": whole.T}.items():
        number = getattr(found, f"{name}_num_blocks")[0, 0].tolist()
        indices = getattr(found, f"{name}_indices")[0, 0].tolist()
        assert [sorted(listed[:n]) for listed, n in zip(indices, number, strict=True)] == [
            np.flatnonzero(row).tolist() for row in expected
        ]


def trains(ring: Ring, S: int, mask: Mask, softcap: float | None = None) -> tuple[Tensor, ...]:
    layout, generator = zigzag(S, ring.world_size), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, S, 16, generator=generator) for heads in (4, 2, 2))
    leaves = [layout.shard(x, ring.rank).requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, ring=ring, layout=layout, mask=mask, block="flex", softcap=softcap)
    out.sin().sum().backward()
    return out.detach(), *(leaf.grad for leaf in leaves)


def test_training_after_an_evaluation_uses_tensors_that_autograd_can_save() -> None:
    """Tables are made once, and outside inference mode, because autograd cannot save tensors made in it."""
    flex.block_tables.cache_clear()
    with torch.inference_mode():
        found = flex.block_tables((Tile(0, 4, 0, 4, causal=True),), 4, 4, torch.device("cpu"))
    assert not any(x.is_inference() for x in found.mask.as_tuple() if isinstance(x, Tensor))


def test_a_step_is_one_call() -> None:
    """A rank calls FlexAttention once for each K/V block that it sees, and once more in backward, under any mask."""
    called: list[tuple[int, ...]] = []

    def told(operator: str, call: Call) -> None:
        called.append((call["q"].shape[2], call["k"].shape[2]))

    with flex_calls(told):
        VirtualCluster(2, memory=False).run(trains, 64, Mask(window=9, prefix=3, documents=(30, 34)))
    assert called == [(32, 32)] * 8


GRAPHS = [
    ((64,), Mask(), 2),  # one for the forward, and one for the backward
    ((64,), Mask(window=5, prefix=3), 4),  # rows see one or two intervals
    pytest.param(  # the first length, other lengths up to 128 on a rank, and longer ones
        (64, 128, 200, 333, 512, 1000, 1200), Mask(), 6, marks=pytest.mark.thorough
    ),
]


@pytest.mark.parametrize(("lengths", "mask", "graphs"), GRAPHS, ids=str)
def test_a_ring_compiles_few_graphs(
    lengths: tuple[int, ...], mask: Mask, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setitem(flex.COMPILERS, "cpu", counted)
    flex._compiled.cache_clear()
    torch.compiler.reset()  # it remembers the lengths of earlier tests
    with flex_gradients():
        for S in lengths:
            VirtualCluster(4, memory=False).run(trains, S, mask)
    flex._compiled.cache_clear()
    assert len(made) == graphs


def test_the_cpu_trains_by_blockwise_and_says_so() -> None:
    """torch refuses FlexAttention's backward on the CPU; the meter of memory does not disturb its forward."""
    found = VirtualCluster(2).run(trains, 32, Mask(), 3.0)
    with flex_gradients():
        by_flex = VirtualCluster(2).run(trains, 32, Mask(), 3.0)
    for one, other in zip(found.results, by_flex.results, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    said = {(each.asked, each.chosen) for each in found.trace.choices()}
    assert said == {("the backward of block='flex'", "blockwise")}
    assert by_flex.trace.choices() == []


@pytest.mark.parametrize(
    ("device", "D", "dtype", "capability", "text"),
    [
        ("cuda", 16, torch.float32, (9, 0), ""),
        ("cuda", 256, torch.bfloat16, (8, 0), ""),
        ("cuda", 8, torch.bfloat16, (9, 0), "a head dim from 16 to 256, got 8"),
        ("cuda", 264, torch.bfloat16, (9, 0), "a head dim from 16 to 256, got 264"),
        ("cuda", 64, torch.float64, (9, 0), "one of float32, bfloat16, float16, got torch.float64"),
        ("cuda", 64, torch.bfloat16, (7, 5), "capability 8.0 or more, got 7.5"),
        ("cpu", 3, torch.float64, (0, 0), ""),
        ("meta", 64, torch.float32, (0, 0), "runs on cpu and cuda, not on meta"),
    ],
)
def test_the_limits(
    device: str,
    D: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, D, dtype=dtype, device=device)
    if not text:
        assert get_block("flex", q).name == "flex"
        return
    with pytest.raises(BackendError) as caught:
        get_block("flex", q)
    assert text in str(caught.value)


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    with FakeTensorMode(), pytest.raises(BackendError, match="pip install triton"):
        get_block("flex", torch.empty(1, 2, 4, 64, device="cuda"))


def test_dropout_is_refused() -> None:
    with pytest.raises(BackendError, match="a block that supports dropout"):
        get_block("flex", torch.empty(1, 2, 4, 16), frozenset({"dropout"}))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_shapes_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own shape functions give the shapes and dtypes of a block."""
    monkeypatch.setattr(flex, "outside_modes", nullcontext)  # the mode of fake tensors has to stay
    block_tables.cache_clear()
    with FakeTensorMode(), flex_gradients():
        q, k, v, dout = (
            torch.empty(2, heads, 16, D, dtype=torch.bfloat16)
            for heads, D in ((4, 64), (2, 64), (2, 32), (4, 32))
        )
        part = Flex().forward(q, k, v, causal=True, scale=0.3)
        assert part.out.shape == dout.shape
        assert part.lse.shape == q.shape[:3] and part.lse.dtype == torch.float32
        rows = BackwardRows(dout, q, None, part.lse, torch.empty_like(part.lse), through_lse=True)
        gradients = Flex().backward(rows, k, v, causal=True, scale=0.3)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
