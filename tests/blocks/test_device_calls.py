"""All calls of torch operators on CUDA, Triton launches and NCCL messages obey the rules of the called code.

The table of cases runs on virtual ranks with the rules of tests/blocks/device_calls.py, and a mutant breaks
each rule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringlab import Mask, VirtualCluster, contiguous, ring_attention
from ringlab.blocks import flash, get_block, library
from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.cudnn import Cudnn
from ringlab.blocks.flash import FlashAttention, FlashAttention2, FlashAttention3, FlashAttention4, Packed
from ringlab.blocks.library import BackwardTile, LibraryBlock
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.blocks.tilewise import RunningSum, TilewiseBackward, TilewiseForward, add_gradients
from ringlab.blocks.triton import TritonBlock, steps, visits
from ringlab.blocks.triton.steps import Launcher
from ringlab.comm.processes import wire_format
from ringlab.comm.processes.carriers import PointToPoint
from ringlab.comm.processes.distributed import DistributedComm
from ringlab.comm.processes.failure_board import Board
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import Case, covering, inputs, join, problem, refusal
from ringlab.conformance.tolerance import NAMES, errors
from ringlab.errors import RankFailedError
from ringlab.schedules import available as schedules
from ringlab.tile import Tile
from tests.blocks.device_calls import (
    Call,
    TakenForGranted,
    Told,
    check,
    cudnn_operators,
    flash_attn_packages,
    flash_operators,
    messages,
    rewritten,
    triton_launches,
)
from tests.substrates.programs import many_exchanges

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "of (B, L, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "after others": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "before others": lambda x: F.pad(x, (0, 5))[..., :-5],
    "transposed": lambda x: x.mT.contiguous().mT,
}


def attend(ring: Ring, case: Case, block: str, schedule: str, view: str, **scored: Any) -> tuple[Tensor, ...]:
    layout, sinks = case.make_layout(), case.make_sinks()
    q, k, v, dout = (VIEWS[view](layout.shard(x, ring.rank)) for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scored |= {} if sinks is None else {"sinks": sinks}
    out, lse = ring_attention(
        *leaves, ring=ring, layout=layout, mask=case.make_mask(), block=block, schedule=schedule,
        return_lse=True, validate=False, **scored,
    )  # fmt: skip
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


LIBRARIES: dict[str, Callable[..., AbstractContextManager[None]]] = {
    "cudnn": cudnn_operators,
    **{f"flash-{version}": partial(flash_attn_packages, version) for version in (2, 3, 4)},
}
"""The stand-in for the functions of each block of a library."""
JOBS = [
    (replace(case, dtype=("bfloat16", "float16")[number % 2]), schedule, view)
    for number, case in enumerate(covering())
    for schedule in (schedules()[number % len(schedules())],)
    for view in (list(VIEWS)[number % len(VIEWS)],)
    if refusal(case, schedule) is None
]


def sweep(block: str, jobs: list[tuple[Case, str, str]] = JOBS, **scored: Any) -> None:
    for case, schedule, view in jobs:
        VirtualCluster(case.P, memory=False).run(partial(attend, **scored), case, block, schedule, view)


def test_every_case_on_torchs_cuda_operators() -> None:
    with flash_operators():
        sweep("native")


def wrong(block: str, case: Case, schedule: str = "ring", view: str = "dense") -> set[str]:
    """Return the names of the results that miss the oracle by more than the bounds allow."""
    name = block.partition("-")[0]  # the stand-in chooses the version
    outcome = VirtualCluster(case.P, memory=False).run(attend, case, name, schedule, view)
    expected = problem(case)
    measured = errors(join(case, outcome.results), expected.true)
    return {name for name in NAMES if not measured[name] <= expected.bounds[name]}


def wrong_in_a_tile(name: str) -> set[str]:
    """Return the names of a causal tile's results that differ by more than 3 % from blockwise's in float64."""
    given = torch.randn(4, 2, 4, 24, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    q, k, v, dout = given[0], given[1, :, :2], given[2, :, :2], given[3, :1].expand(2, 4, 24, 32)
    found = []
    for block, dtype in (
        (get_block(name.partition("-")[0], q), torch.bfloat16),
        (Blockwise(), torch.float64),
    ):
        a, b, c, d = (x.to(dtype) for x in (q, k, v, dout))
        part = block.forward(a, b, c, causal=True, scale=0.3)
        rows = BackwardRows(d, a, part.out, part.lse, (d * part.out).sum(-1))
        found.append((part.out, part.lse, *block.backward(rows, b, c, causal=True, scale=0.3)))
    return {
        name
        for name, one, other in zip(NAMES, *found, strict=True)
        if not (one - other).norm() <= 0.03 * other.norm()
    }


def jobs_of(block: str) -> list[Any]:
    """Return the jobs whose head dims the block supports."""
    return [job for job in JOBS if block not in ("cudnn", "flash-4") or max(job[0].D, job[0].Dv) <= 128]


@pytest.mark.thorough
@pytest.mark.parametrize("block", LIBRARIES)
def test_every_case_on_a_librarys_functions(block: str) -> None:
    """Calls obey the rules of the library's functions, and results are within the bounds of the oracle."""
    with LIBRARIES[block]():
        assert {str(job): found for job in jobs_of(block) if (found := wrong(block, *job))} == {}


@pytest.mark.needs_interpreter
def test_every_case_on_the_triton_kernels() -> None:
    with triton_launches():
        sweep("triton")
        sweep("triton", JOBS[::9], softcap=3.0, dropout=0.25, seed=7)


TWO_DOCUMENTS = replace(
    JOBS[0][0], layout="contiguous", P=1, S=97, group=8, D=64, Dv=0, mask="documents", sinks=False
)
STRIDED = [
    Case("zigzag", 8, 256, 8, 64, "bfloat16", "causal"),
    Case("striped", 8, 256, 8, 64, "bfloat16", "causal"),
    replace(TWO_DOCUMENTS, dtype="bfloat16"),
]
OLD = LibraryBlock, "_tile_backward", "lse = rows.lse.contiguous()", "lse = rows.lse"


@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_gradients_are_right_though_the_kernel_reads_lse_as_dense(case: Case) -> None:
    """Gradients are right with a dense lse and wrong with a strided one, which the kernel reads as dense."""
    with flash_operators(lambda operator, call: None):
        assert wrong("native", case) == set()
        with rewritten(*OLD):
            assert wrong("native", case) == {"dq", "dk", "dv"}


SPIES = {"native": flash_operators, "triton": triton_launches} | LIBRARIES


def refusing_run(block: str, jobs: list[tuple[Case, str, str]], **scored: Any) -> str:
    """Return the rules that the first refused job breaks, or "" if no job breaks a rule."""
    spy = SPIES[block]
    with spy():
        try:
            sweep(block.partition("-")[0], jobs, **scored)
        except RankFailedError as error:
            assert isinstance(error.__cause__, TakenForGranted), error
            return str(error.__cause__)
    return ""


NATIVE_MUTANTS = [
    (*OLD, "a dense lse"),
    (LibraryBlock, "_tile_forward", "map(loadable, (q, k, v))", "(q, k, v)", "rows at multiples of 16 bytes"),
    (LibraryBlock, "_tile_backward", "map(loadable, (rows.dout, rows.q, k, v, rows.out))",
     "rows.dout, rows.q, k, v, rows.out", "rows at multiples of 16 bytes"),
    (library, "loadable", "fits = x.stride(-1) == 1 and not any(place % _LOAD for place in rows)",
     "fits = x.stride(-1) == 1", "rows at multiples of 16 bytes"),
    (LibraryBlock, "forward", "if q.shape[-1] == v.shape[-1]", "if True", "head dims that are multiples of 8, to 256"),
    (LibraryBlock, "backward", "if rows.q.shape[-1] == v.shape[-1]", "if True", "head dims that are multiples of 8, to 256"),
]  # fmt: skip
LIBRARY_MUTANTS = [  # these break a rule
    ("cudnn", LibraryBlock, "too_short", "< self.shortest", "< 0", "enough rows and keys"),
    ("cudnn", Cudnn, "_library_backward", "lse.unsqueeze(-1)", "lse", "lse of its shape"),
    (
        "flash-2",
        FlashAttention,
        "_library_forward",
        '.transpose(1, 2), "k"',
        ', "k"',
        "query heads divisible by key/value heads",
    ),
    ("flash-2", FlashAttention, "_library_backward", "x.transpose(1, 2)", "x", "lse of its shape"),
    (
        "flash-2",
        FlashAttention,
        "_backward",
        "memory_format=torch.contiguous_format",
        "dtype=torch.float32",
        "dense gradients",
    ),
]
FLASH = {2: FlashAttention2, 3: FlashAttention3, 4: FlashAttention4}
WRONG_MUTANTS = [  # these obey all rules, and give wrong results
    ("cudnn", Cudnn, "_library_forward", "is_causal=causal", "is_causal=False", {*NAMES}),
    ("cudnn", Cudnn, "_library_forward", ", scale=scale", "", {*NAMES}),
    ("cudnn", Cudnn, "_library_backward", "is_causal=tile.causal", "is_causal=False", {"dq", "dk", "dv"}),
    ("cudnn", Cudnn, "_library_backward", "scale=tile.scale", "scale=None", {"dq", "dk", "dv"}),
    ("cudnn", Cudnn, "_library_backward", "tile.dout,", "tile.out,", {"dq", "dk", "dv"}),
    ("cudnn", Cudnn, "_library_backward", "tile.out)", "tile.dout)", {"dq", "dk"}),
    *(
        (f"flash-{number}", version, "_call_forward", *change, {*NAMES})
        for number, version in FLASH.items()
        for change in (("causal=causal", "causal=False"), ("softmax_scale=scale", "softmax_scale=None"))
    ),
    *(
        (f"flash-{number}", version, "_call_backward", *change, {"dq", "dk", "dv"})
        for number, version in FLASH.items()
        for change in (("causal=causal", "causal=False"), ("softmax_scale=scale", "softmax_scale=None"))
    ),
    ("flash-2", FlashAttention, "_backward", '"dk": dk, "dv": dv', '"dk": dv, "dv": dk', {"dk", "dv"}),
    ("flash-2", FlashAttention, "_library_backward", '"out": tile.out', '"out": tile.dout', {"dq", "dk"}),
    ("flash-2", FlashAttention, "_library_backward", '"dout": tile.dout', '"dout": tile.out', {"dq", "dk", "dv"}),
]  # fmt: skip
TRITON_MUTANTS = [  # the interpreter is right with these, or notices other broken rules
    (steps, "dense_rows", "return x if", "return x.mT.contiguous().mT if", "dense states and results"),
    (steps, "dense_rows", " and _starts_evenly(x)", "", "addresses that are multiples of 16 bytes"),
    (steps, "dense", " and _starts_evenly(x)", "", "addresses that are multiples of 16 bytes"),
    (steps, "dense", "near and whole", "near", "the strides of the tensors, in units"),
    (steps, "_unit", "gcd(dim, 8)", "gcd(dim, 4)", "the strides of the tensors, in units"),
    (visits, "_tables", "np.int32", "np.int64", "dense int32 tables"),
]  # fmt: skip


def run_of_mutant(block: str, mutant: tuple[Any, str, str, str, str]) -> str:
    with rewritten(*mutant[:4]):
        visits.row_visits.cache_clear()
        visits.key_visits.cache_clear()
        return refusing_run(block, jobs_of(block))


@pytest.mark.parametrize("mutant", NATIVE_MUTANTS, ids=lambda mutant: f"{mutant[1]}: {mutant[3]}")
def test_a_mutant_of_the_native_block_breaks_a_rule(mutant: tuple[Any, str, str, str, str]) -> None:
    assert mutant[4] in run_of_mutant("native", mutant)


def named(mutant: tuple[Any, ...]) -> str:
    return f"{mutant[0]}: {mutant[2]}: {mutant[4].strip()}"


@pytest.mark.parametrize("mutant", LIBRARY_MUTANTS, ids=named)
def test_a_mutant_of_a_librarys_block_breaks_a_rule(mutant: tuple[Any, ...]) -> None:
    assert mutant[5] in run_of_mutant(mutant[0], mutant[1:])


@pytest.mark.parametrize("mutant", WRONG_MUTANTS, ids=named)
def test_a_mutant_of_a_librarys_block_gives_wrong_results(mutant: tuple[Any, ...]) -> None:
    block, *change, expected = mutant
    with LIBRARIES[block]():
        assert wrong_in_a_tile(block) == set()
        with rewritten(*change):
            assert wrong_in_a_tile(block) == expected


def test_a_broadcast_gradient_is_copied() -> None:
    """A dout that is one tensor for all batches, as of out.sum(0), is copied, because libraries may refuse it."""
    copied = library, "loadable", " and not broadcast", ""
    with (
        LIBRARIES["flash-2"](),
        rewritten(*copied),
        pytest.raises(TakenForGranted, match="no broadcast axes"),
    ):
        wrong_in_a_tile("flash-2")


# Steps of several tiles, by flash-attn's functions for sequences of varying length.
LENGTH, KEYS = 32, 30
STEP = (
    *(Tile(a, b, a, b, True) for a, b in ((0, 5), (5, 6), (6, 20))),
    Tile(24, 30, 20, 26, True),  # after a gap in the rows and in the keys
    Tile(6, 20, 0, 6, False),
    Tile(20, 24, 3, 9, False),  # keys 3 to 5 for the second time
    Tile(24, 30, 1, 2, False),
    Tile(26, 30, 10, 12, False),  # rows 26 to 29 for the second time
    Tile(0, 4, 26, 30, True, mirrored=True),
    Tile(5, 7, 22, 24, True, mirrored=True),
)
"""Tiles of three kinds; rows 30 and 31 see no key."""
BLOCKS = (STEP, STEP[1:3], STEP[:1])
"""The tiles of three K/V blocks: the rows of the second are one stretch, and the third has a single tile."""


def of_a_step(block: Block, dtype: torch.dtype, Dv: int, B: int) -> dict[str, Tensor]:
    """Return the results of three K/V blocks, whose tiles are `BLOCKS`."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, LENGTH, 32), (2, KEYS, 32), (2, KEYS, Dv), (4, LENGTH, Dv)
    q, k, v, dout = (
        torch.randn(B, *shape, generator=generator).to(torch.bfloat16).to(dtype) for shape in shapes
    )
    flash = isinstance(block, FlashAttention)
    steps = block.begin_forward(q, len(BLOCKS), scale=0.3) if flash else TilewiseForward(block, q, 0.3)
    for tiles in BLOCKS:
        steps.attend(tiles, k, v)
    part = steps.partial()
    rows = BackwardRows(dout, q, part.out.to(dtype), part.lse, (dout * part.out).sum(-1))
    back = block.begin_backward(rows, len(BLOCKS), scale=0.3) if flash else TilewiseBackward(block, rows, 0.3)
    sums = RunningSum(k), RunningSum(v)
    for tiles in BLOCKS:
        add_gradients(sums, back.differentiate(tiles, k, v))
    found = part.out, part.lse[:, :, :KEYS], back.query_gradient(), *(x.value() for x in sums)
    return dict(zip(NAMES, found, strict=True))


def wrong_in_a_step(name: str, Dv: int = 32, B: int = 2) -> set[str]:
    """Return the names of the results of `of_a_step` that differ by more than 3 % from blockwise's in float64."""
    block = get_block(name.partition("-")[0], torch.empty(1, 1, 1, 32, dtype=torch.bfloat16))
    found, true = of_a_step(block, torch.bfloat16, Dv, B), of_a_step(Blockwise(), torch.float64, Dv, B)
    return {x for x in NAMES if not (found[x] - true[x]).norm() <= 0.03 * true[x].norm()}


@pytest.mark.parametrize("Dv", [32, 24])
@pytest.mark.parametrize("version", FLASH)
def test_flash_attn_computes_the_tiles_of_a_step_in_a_call_for_each_kind(version: int, Dv: int) -> None:
    told: list[tuple[str, int]] = []

    def checked(operator: str, call: Call) -> None:
        check(operator, call)
        told.append((operator, len(call["cu_seqlens_q"]) - 1 if "varlen" in operator else 1))

    with flash_attn_packages(version, tell=checked):
        assert wrong_in_a_step("flash", Dv) == set()
    # The tiles of two batches: four causal ones, two mirrored ones, four of all pairs; then those of the other blocks.
    sequences = [("_varlen", 8), ("_varlen", 4), ("_varlen", 8), ("_varlen", 4), ("", 1)]
    assert told == [
        (f"flash_attn{kind}_{way}", n) for way in ("forward", "backward") for kind, n in sequences
    ]


FORWARD, BACKWARD = "flash_attn_varlen_forward", "flash_attn_varlen_backward"


@pytest.mark.parametrize(
    ("rules", "calls", "blocks"),
    [
        ({}, [FORWARD, BACKWARD], {"flash-2"}),
        ({"softcap": 5.0}, [], {"blockwise"}),
        ({"return_lse": True}, [FORWARD], {"flash-2", "blockwise"}),
    ],
    ids=str,
)
def test_a_packed_step_takes_one_call_however_many_documents_there_are(
    rules: dict[str, Any], calls: list[str], blocks: set[str]
) -> None:
    """All documents of a rank take one call forward and one backward; blockwise computes a soft cap."""
    told: list[str] = []
    q, dout = torch.randn(2, 1, 4, 64, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    mask = Mask(documents=(4, *(3,) * 20))

    def program(ring: Ring) -> None:
        x = q.clone().requires_grad_()
        found = ring_attention(
            x, x, x, ring=ring, layout=contiguous(64, 1), mask=mask, block="flash", **rules
        )
        out, lse = found if isinstance(found, tuple) else (found, found[:0])
        ((out * dout).sum() + lse.sum()).backward()

    with flash_attn_packages(2, tell=lambda operator, call: told.append(operator)):
        choices = VirtualCluster(1, memory=False).run(program).trace.choices()
    assert told == calls and {each.chosen for each in choices} == blocks


STEP_MUTANTS = [  # the place, the edit, the broken rule, and the wrong results if nothing checks the rule
    (flash, "_bounds", "*accumulate(lengths)]", "*(end - 1 for end in accumulate(lengths[:-1])), sum(lengths)]",
     "the length of the longest sequence", {*NAMES}),
    (flash, "_bounds", "*accumulate(lengths)]", "*accumulate(lengths[:-1])]", "bounds of all tokens", {*NAMES}),
    (flash, "_bounds", "max(lengths)", "min(lengths)", "the length of the longest sequence", {*NAMES}),
    (flash, "_bounds", "np.int32", "np.int64", "dense int32 bounds", set()),
    (flash, "_bounds", "tiles[::-1]", "tiles[::1]", "", {*NAMES}),
    (flash, "_bounds", "] * B", "]", "bounds of all tokens", {*NAMES}),
    (Packed, "rows_of_lse", ".contiguous()", "", "a dense lse", {"dq", "dk", "dv"}),  # in a batch of one
    (Packed, "rows_of_lse", ".transpose(0, 1).flatten(1, 2)", ".flatten(0, 1)", "lse of its shape", {"dq", "dk", "dv"}),
    (Packed, "rows_of_lse", ".transpose(0, 1).flatten(1, 2)", ".reshape(lse.shape[1], -1)", "", {"dq", "dk", "dv"}),
    (Packed, "unpacked_lse", "lse.unflatten(1, (B, -1)).transpose(0, 1)", "lse.reshape(B, len(lse), -1)", "",
     {*NAMES}),
    (Packed, "_packed", "found.flip(1) if self.mirrored else found", "found", "", {*NAMES}),
    (flash, "calls_of", "(tile.causal, tile.mirrored)", "(False, False)", "", {*NAMES}),
]  # fmt: skip


@pytest.mark.parametrize("mutant", STEP_MUTANTS, ids=lambda mutant: f"{mutant[1]}: {mutant[3]}")
def test_a_mutant_of_a_step_breaks_a_rule_or_gives_wrong_results(mutant: tuple[Any, ...]) -> None:
    *change, rule, expected = mutant
    B = 1 if rule == "a dense lse" else 2
    with flash_attn_packages(2, tell=lambda operator, call: None), rewritten(*change):
        assert wrong_in_a_step("flash", B=B) == expected
    if rule:
        with flash_attn_packages(2), rewritten(*change), pytest.raises(TakenForGranted, match=rule):
            wrong_in_a_step("flash", B=B)


@pytest.mark.needs_interpreter
@pytest.mark.parametrize("mutant", TRITON_MUTANTS, ids=lambda mutant: f"{mutant[1]}: {mutant[3]}")
def test_a_mutant_of_the_triton_steps_breaks_a_rule(mutant: tuple[Any, str, str, str, str]) -> None:
    try:
        assert mutant[4] in run_of_mutant("triton", mutant)
    finally:
        visits.row_visits.cache_clear()
        visits.key_visits.cache_clear()


STATE = {"forward_step": "ACC", "backward_dq": "ACC", "backward_dkv": "DV"}


class Devices:
    """A stand-in for the functions of torch.cuda that read and set the current device; no GPU is needed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            monkeypatch.setattr(torch.cuda, name, self.exchange)

    def exchange(self, device: int) -> int:
        before, self.current = self.current, self.current if device < 0 else device
        return before


def on_second_device(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Run the Triton block on tensors of cuda:1 while device 0 is current; return the launched kernels."""
    devices, launched = Devices(monkeypatch), set()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)

    def told(operator: str, call: Call) -> None:
        check(operator, call)
        launched.add(operator)

    visits.row_visits.cache_clear()
    visits.key_visits.cache_clear()
    try:
        with FakeTensorMode(), triton_launches(told):
            q, k, v, dout = (torch.empty(1, 2, 48, 16, device="cuda:1") for _ in range(4))
            found = TritonBlock().forward(q, k, v, causal=True, scale=0.3)
            rows = BackwardRows(dout, q, found.out, found.lse, torch.empty_like(found.lse))
            TritonBlock().backward(rows, k, v, causal=True, scale=0.3)
    finally:
        visits.row_visits.cache_clear()
        visits.key_visits.cache_clear()
    assert devices.current == 0
    return launched


@pytest.mark.needs_interpreter
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_second_device(monkeypatch) == set(STATE)


def flash_attn_on_second_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the current device in the forward and in the backward of flash-attn for tensors on device 1."""
    devices, current = Devices(monkeypatch), []

    def call(
        self: FlashAttention, functions: Any, tensors: dict[str, Tensor], *others: Any
    ) -> tuple[Tensor, Tensor]:
        current.append(devices.current)
        return tensors["q"], tensors["q"]

    monkeypatch.setattr(FlashAttention4, "_call_forward", call)
    monkeypatch.setattr(FlashAttention4, "_call_backward", call)
    block, causal, scale = FlashAttention4(), True, 0.3
    with FakeTensorMode(), flash_attn_packages(4):
        x = torch.empty(1, 2, 48, 16, device="cuda:1", dtype=torch.float16)
        block._library_forward(x, x, x, causal, scale)
        block._library_backward(BackwardTile(x, x, x, x, x, x, causal, scale))
    assert devices.current == 0
    return current


def test_flash_attn_is_called_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attn_on_second_device(monkeypatch) == [1, 1]
    with rewritten(FlashAttention, "_forward", 'with torch.cuda.device_of(given["q"]):', "if True:"):
        assert flash_attn_on_second_device(monkeypatch) == [0, 1]
    with rewritten(FlashAttention, "_backward", "with torch.cuda.device_of(dq):", "if True:"):
        assert flash_attn_on_second_device(monkeypatch) == [1, 0]


@pytest.mark.needs_interpreter
def test_a_launch_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "with torch.cuda.device_of(arguments[0]):", "if True:"
    with rewritten(Launcher, "launch", *guard), pytest.raises(TakenForGranted, match="on the device of its"):
        on_second_device(monkeypatch)


def on_one_of_three(program: Callable[[Ring], Any], tell: Told = check) -> None:
    """Run one rank of three alone: its sends are reported and dropped, and it receives arbitrary data."""
    headers = wire_format.Traffic._headers

    def come(
        self: wire_format.Traffic, message: wire_format.Message | None, expected: wire_format.Expected | None
    ) -> None:
        headers(self, message, expected)
        if expected is not None and not expected.local:
            expected.header = expected.signature.header()

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        with messages(tell), mock.patch.object(wire_format.Traffic, "_headers", come):
            comm = DistributedComm(None, 60.0, board=Board(None), carriers={"cpu": PointToPoint(None)})
            program(Ring(comm))
            comm.close()
    finally:
        dist.destroy_process_group()


def all_messages(ring: Ring) -> None:
    """Run shifts and collectives, with empty and non-contiguous tensors, and attention of the table."""
    many_exchanges(ring, torch.linspace(-1, 1, 7))
    for case, schedule, view in JOBS:
        if case.P == 3:
            attend(ring, case, "native", schedule, view)


def test_messages_are_what_nccl_takes_for_granted() -> None:
    """Messages obey NCCL's rules. Other GPU transports also run on the CPU, and need no such test."""
    told: list[str] = []

    def checked(operator: str, call: Call) -> None:
        check(operator, call)
        told.append(operator)

    on_one_of_three(all_messages, checked)
    assert "exchange" in told


def test_an_empty_message_breaks_a_rule() -> None:
    change = PointToPoint, "_ops", "if tensor.numel()", ""
    with rewritten(*change), pytest.raises(TakenForGranted, match="no empty message"):
        on_one_of_three(all_messages)
