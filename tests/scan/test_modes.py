"""Torch's modes around linear attention, the short convolution and latent attention: honoured, or refused on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringlab import VirtualCluster, contiguous, latent_attention, linear_attention
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, GradientError, RinglabError
from ringlab.scan.halo import halo, short_convolution

P = 2
LAYOUT = contiguous(8, P)


def drawn(*shape: int) -> Tensor:
    """Return numbers that vmap lets one make."""
    return (torch.arange(math.prod(shape)) + len(shape)).sin().reshape(shape)


def shapes_of_latent(Dn: int = 6, Dr: int = 2, R: int = 5, Dv: int = 4) -> list[tuple[int, ...]]:
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
    _, shapes, named = CALLS[name]
    return [drawn(*shape) for shape in shapes], {key: -drawn(*shape).abs() for key, shape in named.items()}


def attend(ring: Ring, name: str, replaced: int | str = 0, by: Tensor | None = None) -> Any:
    """Call with one tensor replaced."""
    given, named = tensors(name)
    if by is not None and isinstance(replaced, int):
        given[replaced] = by
    elif by is not None:
        named[str(replaced)] = by
    return CALLS[name][0](*given, **named, ring=ring, layout=LAYOUT)


def places(name: str) -> list[int | str]:
    return [*range(len(CALLS[name][1])), *CALLS[name][2]]


def error_of(program: Callable[[], Any]) -> Any:
    try:
        return program()
    except RinglabError as error:
        return error


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
    """On the rank that is inside one; the other is told."""

    def program(ring: Ring) -> list[Any]:
        return [
            error_of(lambda: transformed(way, ring, name, place) if ring.rank else attend(ring, name))  # noqa: B023
            for place in places(name)
        ]

    with forward_ad.dual_level() if way == "forward_ad" else nullcontext():
        run = VirtualCluster(P, memory=False).run(program)
    for told, refused in zip(*run.results, strict=True):
        assert isinstance(told, AgreementError) and isinstance(refused, GradientError)
        assert way in str(told) and way in str(refused)
    assert run.trace.bytes_sent() == 0
