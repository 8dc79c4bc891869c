"""Beyond the case table, the Triton block is right for any scale, strides, head dims and NaN, or refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.blocks import get_block
from ringlab.blocks.naive import Naive
from ringlab.blocks.protocol import BackwardRows
from ringlab.blocks.triton import TritonBlock
from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.steps import Launcher, TritonBackward
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import Case
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.errors import BackendError, DeviceError, DtypeError, RinglabError, ShapeError
from ringlab.layout import Layout, contiguous
from ringlab.plan import Tile
from ringlab.scores import ScoreRules
from tests.blocks.compiled import small_tiles
from tests.blocks.kernel_checks import Task, attend
from tests.laws.draw import Shape, tensors
from tests.philox import factors
from tests.substrates.test_case_table import program as case_program

pytestmark = pytest.mark.needs_triton


def one_block(block: TritonBlock, x: tuple[Tensor, ...], causal: bool, scale: float) -> Results:
    q, k, v, dout = x
    partial = block.forward(q, k, v, causal=causal, scale=scale)
    delta = (dout.contiguous().float() * partial.out.float()).sum(
        -1
    )  # contiguous: strides change torch's sums
    rows = BackwardRows(dout, q, partial.out, partial.lse, delta)
    gradients = block.backward(rows, k, v, causal=causal, scale=scale)
    return Results(partial.out, partial.lse, *gradients)


def beyond(results: Results, x: tuple[Tensor, ...], causal: bool, scale: float) -> dict[str, float]:
    """Return the results whose error is beyond its bound, with the ratio of error and bound."""
    true = truth(*x, causal=causal, scale=scale)
    allowed, found = bounds(*x, causal=causal, scale=scale, true=true), errors(results, true)
    return {name: found[name] / (allowed[name] or 1.0) for name in NAMES if not found[name] <= allowed[name]}


@pytest.mark.parametrize(("scale", "causal"), [(-0.3, True), (0.0, False)])
def test_any_scale_and_more_rows_than_keys(scale: float, causal: bool) -> None:
    x = tensors(Shape(2, 4, 2, 37, 21, 8), 0, torch.float32)
    assert beyond(one_block(small_tiles(), x, causal, scale), x, causal, scale) == {}


@pytest.mark.parametrize("D", [1, 20, 192])
def test_head_dims_that_are_no_power_of_two(D: int) -> None:
    x = tensors(Shape(1, 2, 1, 20, 20, D), 0, torch.float32)
    assert beyond(one_block(TritonBlock(), x, True, D**-0.5), x, True, D**-0.5) == {}


@pytest.mark.parametrize("change", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
                                    lambda x: x.mT.contiguous().mT,
                                    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]])  # fmt: skip
def test_strides_change_no_bit(change) -> None:  # type: ignore[no-untyped-def]
    x = tensors(Shape(2, 4, 2, 20, 20, 8), 0, torch.float32)
    y = tuple(change(each) for each in x)
    assert any(each.stride() != other.stride() for each, other in zip(x, y, strict=True))
    for one, other in zip(
        one_block(TritonBlock(), x, True, 0.3), one_block(TritonBlock(), y, True, 0.3), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "keys"), [(0, 4), (4, 0), (0, 0)])
def test_empty_tiles(rows: int, keys: int) -> None:
    x = tensors(Shape(1, 4, 2, rows, keys, 8), 0, torch.float32)
    results = one_block(TritonBlock(), x, False, 1.0)
    assert (results.out == 0).all() and (results.lse == -math.inf).all()
    for gradient, like in zip(results[2:], x, strict=False):
        assert gradient.shape == like.shape and (gradient == 0).all()


def test_a_row_that_saw_nothing_gives_no_gradient() -> None:
    q, k, v, dout = tensors(Shape(1, 2, 1, 3, 5, 4), 0, torch.float32)
    partial = Naive().forward(q, k, v, causal=False, scale=1.0)
    partial.lse[:, :, 1], partial.out[:, :, 1] = -math.inf, 0.0
    delta = (dout * partial.out).sum(-1)
    rows = BackwardRows(dout, q, partial.out, partial.lse, delta)
    dq, dk, dv = TritonBlock().backward(rows, k, v, causal=False, scale=1.0)
    assert (dq[:, :, 1] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


def program(ring: Ring, x: tuple[Tensor, ...], layout: Layout) -> Tensor:
    q, k, v = (layout.shard(each, ring.rank) for each in x)
    return ring_attention(q, k, v, ring=ring, layout=layout, block="triton")


@pytest.mark.parametrize(("poison", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.bfloat16)])
def test_a_value_reaches_the_rows_that_see_it(poison: float, dtype: torch.dtype) -> None:
    q, k, v, _ = tensors(Shape(1, 2, 1, 13, 13, 8), 0, dtype)
    v[0, 0, 5, 2] = poison
    layout = contiguous(13, 2)
    out = layout.unshard(VirtualCluster(2, memory=False).run(program, (q, k, v), layout).results)
    expected = torch.zeros(out.shape, dtype=torch.bool)
    expected[:, :, 5:, 2] = True
    assert torch.equal(~out.isfinite(), expected)
    assert (out[:, :, 5:, 2].isnan() if math.isnan(poison) else out[:, :, 5:, 2] == poison).all()


def test_a_row_whose_scores_are_all_minus_infinity_is_zero() -> None:
    q, k, v, _ = tensors(Shape(1, 1, 1, 5, 5, 8), 0, torch.float32)
    q[0, 0, 0], k[0, 0, 0] = math.inf, -1.0
    partial = TritonBlock().forward(q, k, v, causal=True, scale=1.0)
    assert (partial.out[0, 0, 0] == 0).all() and partial.lse[0, 0, 0] == -math.inf
    assert partial.out.isfinite().all()


@pytest.mark.parametrize(
    ("q", "limit"),
    [
        (torch.zeros(1, 1, 1, 257), "head dim from 1 to 256, got 257"),
        (torch.zeros(1, 1, 1, 8).double(), "bfloat16, float16 or float32, got torch.float64"),
        (torch.zeros(1, 1, 1, 8, device="meta"), "not on meta"),
    ],
)
def test_refusals_name_the_limit_and_the_block_to_use(q: Tensor, limit: str) -> None:
    for block in ("triton", TritonBlock()):
        with pytest.raises(BackendError, match=limit) as caught:
            get_block(block, q)
        assert "use block=" in caught.value.remedy


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringlab.blocks.triton.block.interpreting", lambda: False)
    with pytest.raises(BackendError, match=r"(?s)TRITON_INTERPRET=1 before Python starts.*block='native'"):
        get_block("triton", torch.zeros(1, 1, 1, 8))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    from ringlab.blocks.triton.block import _unfit_device

    assert "8.0 or more, got 7.5" in str(_unfit_device(torch.device("cuda")))


def test_an_unknown_precision_or_kernel_is_refused() -> None:
    with pytest.raises(BackendError, match="tf32x3"):
        TritonBlock(precision="tf32")
    with pytest.raises(BackendError, match=r"(?s)forward_step, backward_dq, backward_dkv.*'forwardstep'"):
        TritonBlock(configs={"forwardstep": Config(16, 16, 4, 1)})


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid all launches, because a wrong launch may write beyond its tensors."""

    def launch(self: Launcher, kernel: str, *_: object, **__: object) -> None:
        raise AssertionError(f"{kernel} was launched")

    monkeypatch.setattr(Launcher, "launch", launch)


def like(L: int = 8, H: int = 2, D: int = 8, B: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(B, H, L, D, dtype=dtype)


def steps_of(count: int) -> list[Callable[..., object]]:
    """Return the forward and the backward of 8-token rows, as functions that take the next K/V block."""
    state = torch.zeros(1, 2, 8)
    rows = BackwardRows(like(), like(), like(), state, state)
    forward = TritonBlock().begin_forward(like(), count, scale=0.3)
    return [forward.attend, TritonBlock().begin_backward(rows, count, scale=0.3).differentiate]


WHOLE = (Tile(0, 8, 0, 8, True),)

# k, v, tiles, the error and its message, for rows of 8 tokens, 2 heads and a head dim of 8.
UNFIT: dict[str, tuple[Tensor, Tensor, tuple[Tile, ...], type[RinglabError], str]] = {
    "another batch": (like(B=2), like(B=2), WHOLE, ShapeError, r"k \(2, 2, 8, 8\)"),
    "another head dim": (like(D=4), like(D=4), WHOLE, ShapeError, r"k \(1, 2, 8, 4\)"),
    "v unlike k": (like(), like(L=9), WHOLE, ShapeError, r"v \(1, 2, 9, 8\)"),
    "three axes": (like()[0], like()[0], WHOLE, ShapeError, r"k \(2, 8, 8\)"),
    "heads that do not divide": (like(H=3), like(H=3), WHOLE, ShapeError, "2 and 3"),
    "no key/value heads": (like(H=0), like(H=0), WHOLE, ShapeError, "2 and 0"),
    "k of another dtype": (like(dtype=torch.float16), like(), WHOLE, DtypeError, r"k\.to\(q\.dtype\)"),
    "v of another dtype": (like(), like(dtype=torch.float64), WHOLE, DtypeError, r"v torch\.float64"),
    "v elsewhere": (like(), like().to("meta"), WHOLE, DeviceError, "v on meta"),
    "rows beyond q": (like(), like(), (Tile(4, 9, 0, 8, False),), ShapeError, "within 8 rows and 8 keys"),
    "keys beyond k": (like(L=7), like(L=7), WHOLE, ShapeError, "within 8 rows and 7 keys"),
    "keys below 0": (like(), like(), (Tile(0, 8, -1, 7, True),), ShapeError, "within 8 rows and 8 keys"),
    "causal, not square": (like(), like(), (Tile(0, 4, 0, 8, True),), ShapeError, "as many keys as rows"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_before_a_launch(name: str, no_launch: None) -> None:
    k, v, tiles, kind, words = UNFIT[name]
    for take in steps_of(2):
        with pytest.raises(kind, match=words):
            take(tiles, k, v)


def test_more_keys_than_rows_are_no_causal_tile(no_launch: None) -> None:
    q, k = like(L=4, H=1), like(L=40, H=1)
    with pytest.raises(ShapeError, match=r"(?s)4 rows, 40 keys.*causal=False"):
        TritonBlock().forward(q, k, k, causal=True, scale=0.3)
    state = torch.zeros(1, 1, 4)
    with pytest.raises(ShapeError, match=r"(?s)4 rows, 40 keys.*causal=False"):
        TritonBlock().backward(BackwardRows(q, q, q, state, state), k, k, causal=True, scale=0.3)


def test_rows_that_backward_cannot_use_are_refused() -> None:
    state = torch.zeros(1, 2, 8)
    wrong = (
        (like(L=7), state, state, ShapeError, r"dout \(1, 2, 7, 8\)"),
        (like(), state[..., 1:], state, ShapeError, r"lse \(1, 2, 7\)"),
        (like(), state, state[0], ShapeError, r"delta \(2, 8\)"),
        (like(dtype=torch.bfloat16), state, state, DtypeError, "dout in the dtype of q"),
        (like(), state, state.to("meta"), DeviceError, "delta on meta"),
    )
    for dout, lse, delta, kind, words in wrong:
        with pytest.raises(kind, match=words):
            rows = BackwardRows(dout, like(), like(), lse, delta)
            TritonBackward(Launcher(lambda kernel, value_dim, rules: Config(16, 16, 4, 1), 0.3), rows, 1)


def test_there_are_no_more_steps_than_were_announced() -> None:
    for take in steps_of(1):
        take(WHOLE, like(), like())
        with pytest.raises(BackendError, match="1 steps"):
            take(WHOLE, like(), like())


def test_two_runs_give_the_same_bits() -> None:
    task = Task(S=131, D=40, Dv=24, H=4, K=2, P=2)
    one, other = (attend(task, task.tensors()) for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_a_step_is_one_launch(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is one launch of each kernel for each rank and visible block, under all masks and rules."""
    case, launched = Case("zigzag", 2, 33, 1, 16, "float32", mask), []
    launch, windows = Launcher.launch, []

    def counted(self: Launcher, kernel: str, *arguments: object, **constants: object) -> None:
        launched.append((kernel, constants["SOFTCAP"], constants["DROPOUT"]))
        windows.append(constants["WINDOW"])
        launch(self, kernel, *arguments, **constants)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "launch", counted)
    VirtualCluster(case.P, memory=False).run(case_program, case, "triton", "ring", "both")
    kernels = "forward_step", "backward_dq", "backward_dkv"
    assert sorted(launched) == sorted((kernel, True, True) for kernel in kernels for _ in range(4))
    assert any(windows) == (mask == "window"), "only a window's left edge takes a kernel of its own"


@pytest.mark.parametrize("rate", [1e-11, 0.999])
def test_a_rate_that_drops_nothing_or_nearly_all(rate: float) -> None:
    """A rate below 2^-33 drops no pair in any block, and the results for a rate close to 1 are right, too."""
    q, k, v, dout = torch.randn(4, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    drawn = factors(1, 1, 20, rate, 3)
    rules = ScoreRules(dropout=rate, seed=3).of_tile(*[torch.arange(20).numpy()] * 2)
    block = small_tiles()
    part = block.forward(q, k, v, causal=False, scale=0.25, rules=rules)
    delta = (dout * part.out).sum(-1)
    rows = BackwardRows(dout, q, part.out, part.lse, delta)
    gradients = block.backward(rows, k, v, causal=False, scale=0.25, rules=rules)
    true = truth(q, k, v, dout, scale=0.25, factors=drawn)
    allowed = bounds(q, k, v, dout, scale=0.25, factors=drawn, true=true)
    found = errors(Results(part.out, part.lse, *gradients), true)
    assert all(found[name] <= allowed[name] for name in NAMES), (found, allowed)
