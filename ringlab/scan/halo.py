"""The halo (a few tokens of other ranks before each stretch), and the short convolution that needs it.

Before linear attention, hybrid models mix each token with the 3 tokens before it, channel by channel. A rank
needs the last 3 tokens before its own tokens. They are on the previous rank, or on several ranks if shards
are shorter. In forward these tokens are sent to the rank that needs them. In backward their gradients are
sent to the owners and added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import DeviceError, DtypeError, LayoutError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.rank_agreement import agree, checked_over
from ringlab.torch_modes import as_autocast, refuse_transforms
from ringlab.upload import upload


@dataclass(frozen=True)
class Halo:
    """The tokens that one rank needs from others, and the places of the tokens before each of its tokens.

    sources: (L, tokens) indices of each token's predecessors, the nearest first; −1 if the document has no
    such token. The indices count the rank's own tokens first, and then the arriving ones.
    arriving: (rank, local indices on that rank) in the order of arrival.
    """

    sources: np.ndarray
    arriving: tuple[tuple[int, np.ndarray], ...]


@lru_cache(maxsize=64)
def halos(layout: Layout, documents: tuple[int, ...], tokens: int) -> tuple[Halo, ...]:
    """Return the halo of every rank. A halo contains no tokens of other documents."""
    owner, local = np.zeros(layout.S, np.int64), np.zeros(layout.S, np.int64)
    for rank in range(layout.P):
        owner[layout.positions(rank)] = rank
        local[layout.positions(rank)] = np.arange(layout.length(rank))
    mask = Mask(documents=documents).of_length(layout.S)
    return tuple(_halo(layout.positions(rank), rank, owner, local, mask, tokens) for rank in range(layout.P))


def _halo(
    positions: np.ndarray, rank: int, owner: np.ndarray, local: np.ndarray, mask: Mask, tokens: int
) -> Halo:
    wanted = positions[:, None] - 1 - np.arange(tokens)
    first = mask.bounds[mask.document_of(positions)] if mask.documents else np.zeros(len(positions), np.int64)
    exists = wanted >= first[:, None]
    there = wanted[exists]
    others = np.unique(there[owner[there] != rank])
    others = others[np.argsort(owner[others], kind="stable")]
    place = local.copy()
    place[others] = len(positions) + np.arange(len(others))
    sources = np.full(wanted.shape, -1)
    sources[exists] = place[there]
    ranks = np.unique(owner[others]).tolist()
    return Halo(sources, tuple((source, local[others[owner[others] == source]]) for source in ranks))


def halo(
    x: Float[Tensor, "B L C"],
    tokens: int,
    *,
    ring: Ring,
    layout: Layout,
    documents: tuple[int, ...] = (),
    validate: bool = True,
) -> Tensor:
    """Return the `tokens` tokens before each of this rank's n stretches, (B, n, tokens, C).

    The result is differentiable. A stretch is a run of adjacent tokens. The oldest token is first; tokens
    before the beginning of the document are zeros. A contiguous layout has one stretch on each rank that has
    tokens, so `halo(...)[:, 0]` is the initial state that kernels of short convolutions expect.

    Raises: the errors of `short_convolution`; ShapeError for a number of tokens below 0.

    >>> import torch
    >>> import ringlab
    >>> layout = ringlab.contiguous(6, 2)
    >>> x = torch.arange(6.0).reshape(1, 6, 1)
    >>> def program(ring):
    ...     return halo(layout.shard(x, ring.rank), 4, ring=ring, layout=layout).flatten().tolist()
    >>> ringlab.VirtualCluster(2).run(program).results
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]]
    """
    _agree(lambda: _check_tokens(tokens), f"halo of {tokens}", x, ring, layout, documents, validate)
    around, own = _around(x, tokens, ring, layout, documents, validate)
    positions = layout.positions(ring.rank)
    first = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return _at(around, own.sources[first, ::-1].ravel()).unflatten(1, (len(first), tokens))


def short_convolution(
    x: Float[Tensor, "B L C"],
    weight: Float[Tensor, "C W"],
    *,
    ring: Ring,
    layout: Layout,
    documents: tuple[int, ...] = (),
    validate: bool = True,
) -> Tensor:
    """Return this rank's rows of a causal convolution of each channel over the sequence.

    Row t is Σ_w weight[:, W − 1 − w] · x_{t−w}, over the tokens of its document only, like torch's conv1d
    with padding on the left. The result is differentiable. weight is the same on all ranks. Each rank
    computes the part of its gradient that comes from the rank's own rows, so sum it over the ranks. Under
    autocast x and weight are cast as `ring_attention` casts q, k and v.

    Raises: before any data moves, ShapeError, DtypeError, DeviceError, LayoutError, WorldSizeError,
    MaskError or GradientError on a rank that is called wrongly, and AgreementError on all other ranks.

    >>> import torch
    >>> import ringlab
    >>> layout = ringlab.contiguous(6, 3)
    >>> x, weight = torch.arange(6.0).reshape(1, 6, 1), torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # tokens t − 3 and t − 2
    >>> def program(ring):
    ...     return short_convolution(layout.shard(x, ring.rank), weight, ring=ring, layout=layout)
    >>> layout.unshard(ringlab.VirtualCluster(3).run(program).results).flatten()
    tensor([0., 0., 0., 1., 3., 5.])
    """
    x, weight = as_autocast(x, weight)
    width = weight.shape[-1] if isinstance(weight, Tensor) and weight.ndim else None
    label = f"short convolution of width {width}"
    _agree(lambda: _check_weight(x, weight), label, x, ring, layout, documents, validate)
    around, own = _around(x, weight.shape[1] - 1, ring, layout, documents, validate)
    out = weight[:, -1] * x
    for back, places in enumerate(own.sources.T, start=1):
        out = out + weight[:, -1 - back] * _at(around, places)
    return out


def _around(
    x: Tensor, tokens: int, ring: Ring, layout: Layout, documents: tuple[int, ...], validate: bool
) -> tuple[Tensor, Halo]:
    """Return this rank's tokens followed by the arriving ones, and the halo that indexes into them."""
    halo = halos(layout, documents, tokens)
    return torch.cat([x, _Arriving.apply(x, ring, halo, ring.comm.name_call(), validate)], dim=1), halo[
        ring.rank
    ]


def _at(around: Tensor, places: np.ndarray) -> Tensor:
    """Return the tokens at these places, with zeros for −1."""
    index = upload(places, around.device)
    return around.index_select(1, index.clamp_min(0)).masked_fill((index < 0)[:, None], 0.0)


class _Arriving(torch.autograd.Function):
    """The tokens of other ranks that this rank needs, (B, n, C); backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, halo: tuple[Halo, ...], name: str, validate: bool) -> Tensor:
        ctx.ring, ctx.halo, ctx.name, ctx.validate, ctx.shape = ring, halo, name, validate, x.shape
        works = []
        for to, source, places in _messages(halo):
            if source == ring.rank:
                part = x.detach()[:, upload(places, x.device)]
                works.append(ring.comm.exchange(send=(part,), to=to, tag="halo"))
            elif to == ring.rank:
                into = x.new_empty((x.shape[0], len(places), x.shape[2]))
                works.append(ring.comm.exchange(receive=(into,), source=source, tag="halo"))
        return torch.cat([x[:, :0].detach(), *(part for work in works for part in work.wait())], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, darriving: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        if ctx.validate:
            agree(ring.comm, f"backward through the halo of {ctx.name}", None)
        dx, works, at = darriving.new_zeros(ctx.shape), [], 0
        for to, source, places in _messages(ctx.halo):
            if to == ring.rank:
                part = darriving[:, at : at + len(places)].contiguous()
                at += len(places)
                works.append((ring.comm.exchange(send=(part,), to=source, tag="dhalo"), places))
            elif source == ring.rank:
                into = dx.new_empty((dx.shape[0], len(places), dx.shape[2]))
                works.append((ring.comm.exchange(receive=(into,), source=to, tag="dhalo"), places))
        for work, places in works:
            for part in work.wait():
                dx[:, upload(places, dx.device)] += part
        return dx, None, None, None, None


def _messages(halo: tuple[Halo, ...]) -> list[tuple[int, int, np.ndarray]]:
    """Return all messages as (receiving rank, owner, local indices on the owner), in posting order."""
    return [(to, source, places) for to, each in enumerate(halo) for source, places in each.arriving]


def _agree(
    check: Callable[[], None],
    label: str,
    x: Any,
    ring: Any,
    layout: Any,
    documents: tuple[int, ...],
    validate: bool,
) -> None:
    """Check that all ranks make the same call. Raises: this rank's error, or AgreementError."""

    def check_all() -> tuple[None, str]:
        refuse_transforms(x)
        _check(x, ring, layout)
        check()
        Mask(documents=documents).of_length(layout.S)
        return None, f"{label} {_describe(x, layout, documents)}" if validate else ""

    checked_over(ring, check_all, validate)


def _describe(x: Tensor, layout: Layout, documents: tuple[int, ...]) -> str:
    grad = torch.is_grad_enabled() and x.requires_grad
    sizes = f"B={x.shape[0]} C={x.shape[2]} {x.dtype} gradients={grad}"
    return f"{layout!r} #{hash((layout.ranks, documents)):x} {sizes}"


def _check(x: Any, ring: Any, layout: Any) -> None:
    check_ring(ring)
    if not isinstance(layout, Layout):
        raise LayoutError("layout= a ringlab layout, such as contiguous(S, P)", repr(layout))
    layout.of_ranks(ring.world_size)
    length = layout.length(ring.rank)
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != length:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        needed = f"x (B, {length}, C), the tokens of rank {ring.rank} under {layout!r}"
        raise ShapeError(needed, str(got), "pass layout.shard(x, ring.rank)")
    if not x.is_floating_point():
        raise DtypeError("x of a floating point dtype", str(x.dtype))


def _check_weight(x: Tensor, weight: Any) -> None:
    refuse_transforms(weight)
    if (
        not isinstance(weight, Tensor)
        or weight.ndim != 2
        or weight.shape[0] != x.shape[2]
        or not weight.shape[1]
    ):
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ShapeError(f"weight ({x.shape[2]}, W), W numbers for each channel of x, W ≥ 1", str(got))
    if x.dtype != weight.dtype:
        raise DtypeError("x and weight of one dtype", f"{x.dtype} and {weight.dtype}")
    if x.device != weight.device:
        raise DeviceError("x and weight on one device", f"{x.device} and {weight.device}")


def _check_tokens(tokens: Any) -> None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ShapeError("a number of tokens ≥ 0", repr(tokens))
