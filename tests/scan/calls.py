"""A correct call, on one of two ranks, of every function that hybrid layers use. Tests change parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringlab import contiguous, latent_attention, linear_attention
from ringlab.comm.ring import Ring
from ringlab.scan.halo import halo, short_convolution

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
