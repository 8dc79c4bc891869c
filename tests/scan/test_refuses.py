"""Linear attention and the other functions of hybrid layers refuse impossible calls, by name and on every rank.

Torch's transforms are refused too, on all ranks before any data moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringlab import VirtualCluster, latent_attention
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    BackendError,
    DeviceError,
    DtypeError,
    GradientError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    WorldSizeError,
)
from ringlab.layout import contiguous, striped, zigzag
from ringlab.mask import Mask
from ringlab.scan.attention import linear_attention
from ringlab.scan.halo import halo, short_convolution
from tests.refusals import assert_refused, errors_on


def ones(*shape: int, **other: Any) -> torch.Tensor:
    return torch.ones(*shape, **other)


def call(ring: Ring, change: dict[str, Any]) -> Any:
    """Call linear attention on two ranks of two tokens, with four heads of v over two of q and k."""
    given: dict[str, Any] = {"q": ones(1, 2, 2, 3), "k": ones(1, 2, 2, 3), "v": ones(1, 4, 2, 5)}
    given |= {"ring": ring, "layout": contiguous(4, 2)} | change
    return linear_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


WRONG: dict[str, tuple[dict[str, Any], type[RinglabError], str]] = {
    "no ring": ({"ring": None, "validate": False}, WorldSizeError, "ring="),
    "no layout": ({"layout": "zigzag"}, LayoutError, "layout="),
    "other ranks": ({"layout": contiguous(4, 3)}, WorldSizeError, "2 ranks"),
    "single tokens": ({"layout": striped(4, 2)}, LayoutError, "use contiguous(S, P)"),
    "no tensor": ({"q": 3}, ShapeError, "int"),
    "other keys": ({"k": ones(1, 2, 2, 4)}, ShapeError, "q and k both"),
    "heads that do not divide": ({"v": ones(1, 3, 2, 5)}, ShapeError, "3 and 2"),
    "more heads of q": ({"v": ones(1, 1, 2, 5)}, ShapeError, "repeat k and v"),
    "the whole sequence": ({"v": ones(1, 4, 4, 5)}, ShapeError, "layout.shard"),
    "mixed dtypes": ({"v": ones(1, 4, 2, 5).double()}, DtypeError, "float64"),
    "integers": ({name: ones(1, 2, 2, 3, dtype=torch.int64) for name in "qkv"}, DtypeError, "floating"),
    "another device": ({"v": ones(1, 4, 2, 5, device="meta")}, DeviceError, "meta"),
    "a decay for each channel": ({"decay": ones(1, 4, 2, 3)}, ShapeError, "Kimi Delta Attention"),
    "a decay of the heads of q": ({"decay": ones(1, 2, 2)}, ShapeError, "each head of v"),
    "whole numbers for beta": ({"beta": ones(1, 4, 2, dtype=torch.int64)}, DtypeError, "beta"),
    "beta elsewhere": ({"beta": ones(1, 4, 2, device="meta")}, DeviceError, "beta"),
    "another initial state": ({"initial_state": ones(1, 4, 5, 3)}, ShapeError, "(1, 4, 3, 5)"),
    "a scale of NaN": ({"scale": float("nan")}, DtypeError, "finite"),
    "chunks of nothing": ({"chunk": 0}, ShapeError, "chunk="),
    "several scans": ({"scan": ["relay"]}, BackendError, "relay, all-gather, doubling"),
    "an unknown scan": ({"scan": "ring"}, BackendError, "relay, all-gather, doubling"),
    "documents of another length": ({"documents": (2, 3)}, MaskError, "4 tokens"),
    "a mask": ({"documents": Mask(documents=(4,))}, MaskError, "mask.documents"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_on_every_rank(name: str) -> None:
    change, kind, words = WRONG[name]
    for wrong in ((0, 1), (1,)) if "validate" not in change else ((0, 1),):
        assert_refused(2, lambda ring, at_fault: call(ring, change if at_fault else {}), kind, words, wrong)


OTHERWISE: dict[str, dict[str, Any]] = {
    "scan": {"scan": "relay"},
    "scale": {"scale": 2.0},
    "layout": {"layout": zigzag(4, 2)},
    "documents": {"documents": (1, 3)},
    "gates": {"beta": ones(1, 4, 2)},
    "gradients": {"v": ones(1, 4, 2, 5, requires_grad=True)},
    "the last state": {"return_state": True},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_ranks_that_call_differently_are_refused(name: str) -> None:
    errors = errors_on(2, lambda ring: call(ring, OTHERWISE[name] if ring.rank else {}))
    assert [type(error) for error in errors] == [AgreementError] * 2


def test_backward_through_another_call_is_refused() -> None:
    """Backward is refused if one rank goes back through the first of two calls and one through the second."""

    def program(ring: Ring) -> str:
        q = ones(1, 2, 2, 3, requires_grad=True)
        outs = [call(ring, {"q": q}) for _ in range(2)]
        try:
            outs[ring.rank].sum().backward()
        except AgreementError as error:
            return str(error)
        return ""

    for words in VirtualCluster(2, memory=False).run(program).results:
        assert "backward through call 1" in words and "backward through call 2" in words


def test_nothing_at_all() -> None:
    """Without tokens there are no outputs, and the last state is the initial one, with its gradient."""

    def program(ring: Ring) -> Any:
        state = torch.full((1, 4, 3, 5), 2.0, requires_grad=True)
        empty: dict[str, Any] = {
            name: torch.ones(1, heads, 0, D) for name, heads, D in (("q", 2, 3), ("k", 2, 3), ("v", 4, 5))
        }
        out, last = call(
            ring, empty | {"layout": contiguous(0, 2), "initial_state": state, "return_state": True}
        )
        last.sum().backward()
        return out.shape, last.unique().item(), state.grad is not None and state.grad.unique().item()

    assert VirtualCluster(2).run(program).results == [((1, 4, 0, 5), 2.0, 1.0)] * 2


P = 2
LAYOUT = contiguous(8, P)


def drawn(*shape: int) -> Tensor:
    """Return numbers made without a random generator, which vmap would refuse."""
    return (torch.arange(math.prod(shape)) + len(shape)).sin().reshape(shape)


def shapes_of_latent(Dn: int = 6, Dr: int = 2, R: int = 5, Dv: int = 4) -> list[tuple[int, ...]]:
    """Return the shapes of q, latent, k_rope, w_k and w_v."""
    return [(1, 2, 4, Dn + Dr), (1, 4, R), (1, 4, Dr), (2, Dn, R), (2, Dv, R)]


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "linear attention": (
        linear_attention,
        [(1, 2, 4, 3), (1, 2, 4, 3), (1, 4, 4, 5)],
        {"decay": (1, 4, 4), "beta": (1, 4, 4), "initial_state": (1, 4, 3, 5)},
    ),
    "short convolution": (short_convolution, [(1, 4, 3), (3, 4)], {}),
    "halo": (lambda x, **how: halo(x, 3, **how), [(1, 4, 3)], {}),
    "latent attention": (latent_attention, shapes_of_latent(), {}),
}
"""Each call with the shapes of its tensors, by position and by name."""


def tensors(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the tensors of one rank's call, by position and by name."""
    _, shapes, named = CALLS[name]
    return [drawn(*shape) for shape in shapes], {key: -drawn(*shape).abs() for key, shape in named.items()}


def attend(ring: Ring, name: str, replaced: int | str = 0, by: Tensor | None = None, **options: Any) -> Any:
    """Return the result of the call with one tensor replaced."""
    given, named = tensors(name)
    if by is not None and isinstance(replaced, int):
        given[replaced] = by
    elif by is not None:
        named[str(replaced)] = by
    return CALLS[name][0](*given, **named, ring=ring, layout=LAYOUT, **options)


def places(name: str) -> list[int | str]:
    """Return the positions and names of all tensors of a call."""
    return [*range(len(CALLS[name][1])), *CALLS[name][2]]


class Incomparable(float):
    """A number whose comparison raises an error that no check expects."""

    def __ge__(self, other: object) -> bool:
        raise ArithmeticError("no such number")


class Unreadable(tuple[int, ...]):
    """Lengths whose iteration raises an error that no check expects."""

    def __iter__(self) -> Iterator[int]:
        raise ArithmeticError("no such lengths")


UNFORESEEN: dict[str, dict[str, Any]] = {
    "linear attention": {"scale": Incomparable(1.0)},
    "latent attention": {"scale": Incomparable(1.0)},
    "short convolution": {"documents": Unreadable((3, 5))},
    "halo": {"documents": Unreadable((3, 5))},
}


@pytest.mark.parametrize("name", UNFORESEEN)
def test_no_rank_waits_for_one_whose_checks_fail_in_any_way(name: str) -> None:
    told, failed = errors_on(2, lambda ring: attend(ring, name, **(UNFORESEEN[name] if ring.rank else {})))
    assert isinstance(told, AgreementError) and "ArithmeticError: no such" in str(told)
    assert isinstance(failed, ArithmeticError)


def transformed(way: str, ring: Ring, name: str, place: int | str) -> Any:
    given, named = tensors(name)
    x = given[place] if isinstance(place, int) else named[place]

    def call(x: Tensor) -> Tensor:
        return attend(ring, name, place, x)

    if way == "forward_ad":
        return call(forward_ad.make_dual(x, x))
    if way == "vmap":
        return torch.func.vmap(call)(x[None])
    if way == "grad":
        return torch.func.grad(lambda x: call(x).sum())(x)
    return torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("way", ["grad", "vmap", "jvp", "forward_ad"])
@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused_by_name(name: str, way: str) -> None:
    """The rank inside a transform refuses it by name, and the other rank is informed."""
    for place in places(name):
        with forward_ad.dual_level() if way == "forward_ad" else nullcontext():
            told, refused = errors_on(
                P,
                lambda ring: transformed(way, ring, name, place) if ring.rank else attend(ring, name),  # noqa: B023
            )
        assert isinstance(told, AgreementError) and isinstance(refused, GradientError)
        assert way in str(told) and way in str(refused)
