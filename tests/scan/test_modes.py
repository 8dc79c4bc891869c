"""Torch's modes are honoured or refused around linear attention, short convolution and latent attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, GradientError, RinglabError
from tests.scan.calls import CALLS, P, attend, places, tensors


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
    """The rank inside a transform refuses it by name, and the other rank is informed."""

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
