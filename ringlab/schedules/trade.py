"""The all-to-alls of Ulysses: ranks of a row trade tokens of all heads for some heads of all tokens, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.comm.protocol import Work
from ringlab.merge import state_dtype
from ringlab.schedules.mesh import Mesh


def heads_of(heads: int, member: int, ranks: int) -> slice:
    """Return which of `heads` a member of a row of `ranks` takes: its share, or where there are fewer, the one it needs."""
    if heads >= ranks:
        share = heads // ranks
        return slice(member * share, (member + 1) * share)
    one = member * heads // ranks
    return slice(one, one + 1)


def to_heads(mesh: Mesh, *tensors: Tensor, tag: str) -> list[Tensor]:
    """Return this rank's heads of all tokens of the row, from tensors of all heads of its own tokens.

    All messages are posted before the first is waited for.
    """
    row = mesh.row
    under_way = []
    for x in tensors:
        mine = heads_of(x.shape[1], row.rank, row.world_size)
        works: list[tuple[int, Work]] = []
        for to, source in _turns(mesh):
            send = x[:, heads_of(x.shape[1], to, row.world_size)].contiguous()
            into = x.new_empty((x.shape[0], mine.stop - mine.start, mesh.lengths[source], x.shape[-1]))
            works.append((source, row.exchange(send=(send,), to=to, receive=(into,), source=source, tag=tag)))
        under_way.append((x[:, mine], works))
    return [_together(mesh, own, works) for own, works in under_way]


def _together(mesh: Mesh, own: Tensor, works: list[tuple[int, Work]]) -> Tensor:
    """Lay what comes from the members of the row where it belongs."""
    whole = own.new_empty((*own.shape[:2], mesh.tokens, own.shape[-1]))
    _lay(mesh, whole, own, mesh.row.rank)
    for source, work in works:
        _lay(mesh, whole, work.wait()[0], source)
    return whole


def _lay(mesh: Mesh, whole: Tensor, part: Tensor, member: int) -> None:
    for stretch in mesh.stretches(member):
        whole[..., stretch.row, :] = part[..., stretch.own, :]


def to_tokens(mesh: Mesh, *tensors: Tensor, heads: tuple[int, ...], tag: str) -> list[Tensor]:
    """Return all heads of this rank's tokens, from tensors of its heads of all tokens of the row: `to_heads` undone.

    heads: how many there are in all, for each tensor. Where several ranks hold one head, what they send is summed,
    in the order of the ranks and in the state dtype, so it has to come in that.
    """
    row = mesh.row
    under_way = []
    for x, count in zip(tensors, heads, strict=True):
        works: dict[int, Work] = {}
        for to, source in _turns(mesh):
            theirs = heads_of(count, source, row.world_size)
            into = x.new_empty((x.shape[0], theirs.stop - theirs.start, mesh.lengths[row.rank], x.shape[-1]))
            works[source] = row.exchange(
                send=(_taken(mesh, x, to),), to=to, receive=(into,), source=source, tag=tag
            )
        under_way.append((x, count, works))
    return [_all_heads(mesh, x, count, works) for x, count, works in under_way]


def _all_heads(mesh: Mesh, x: Tensor, count: int, works: dict[int, Work]) -> Tensor:
    row = mesh.row
    parts = {member: work.wait()[0] for member, work in works.items()}
    parts[row.rank] = _taken(mesh, x, row.rank)
    if count >= row.world_size:
        return torch.cat([parts[member] for member in range(row.world_size)], dim=1)
    total = x.new_zeros((x.shape[0], count, *parts[row.rank].shape[2:]), dtype=state_dtype(x.dtype))
    for member in range(row.world_size):
        total[:, heads_of(count, member, row.world_size)] += parts[member]
    return total


def _taken(mesh: Mesh, x: Tensor, member: int) -> Tensor:
    """The tokens of a member, in its own order, dense."""
    part = x.new_empty((*x.shape[:2], mesh.lengths[member], x.shape[-1]))
    for stretch in mesh.stretches(member):
        part[..., stretch.own, :] = x[..., stretch.row, :]
    return part


def _turns(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield (to, source) of every exchange of an all-to-all: neighbours first, each by one distance."""
    rank, world_size = mesh.row.rank, mesh.row.world_size
    for distance in range(1, world_size):
        yield (rank + distance) % world_size, (rank - distance) % world_size
