"""The all-to-alls of Ulysses: ranks of a row exchange tokens of all heads for heads of all tokens, and back.

`MeshSchedule` calls `to_heads` before the inner attention, and `to_tokens` after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.comm.protocol import Work
from ringlab.merge import state_dtype
from ringlab.schedules.mesh import Mesh


def heads_of(heads: int, member: int, ranks: int) -> slice:
    """Return the slice of the heads that a member of a row computes, if `ranks` ranks share `heads` heads.

    If there are fewer heads than ranks, this is the one head that the member needs.
    """
    if heads >= ranks:
        share = heads // ranks
        return slice(member * share, (member + 1) * share)
    one = member * heads // ranks
    return slice(one, one + 1)


def to_heads(mesh: Mesh, *tensors: Float[Tensor, "B _ L _"], tag: str) -> list[Float[Tensor, "B _ row _"]]:
    """Return this rank's heads for all tokens of the row, given all heads for this rank's tokens.

    All messages are posted before the first wait.
    """
    row = mesh.row
    under_way = []
    for x in tensors:
        mine = heads_of(x.shape[1], row.rank, row.world_size)
        works: list[tuple[int, Work]] = []
        for to, source in _partners(mesh):
            send = x[:, heads_of(x.shape[1], to, row.world_size)].contiguous()
            into = x.new_empty((x.shape[0], mine.stop - mine.start, mesh.lengths[source], x.shape[-1]))
            works.append((source, row.exchange(send=(send,), to=to, receive=(into,), source=source, tag=tag)))
        under_way.append((x[:, mine], works))
    return [_assemble_row(mesh, own, works) for own, works in under_way]


def _assemble_row(mesh: Mesh, own: Tensor, works: list[tuple[int, Work]]) -> Tensor:
    """Return the tokens of the whole row: this rank's own, and those that arrive from other members."""
    whole = own.new_empty((*own.shape[:2], mesh.tokens, own.shape[-1]))
    _place_tokens(mesh, whole, own, mesh.row.rank)
    for source, work in works:
        _place_tokens(mesh, whole, work.wait()[0], source)
    return whole


def _place_tokens(mesh: Mesh, whole: Tensor, part: Tensor, member: int) -> None:
    """Write a member's tokens to their places in the row."""
    for span in mesh.spans(member):
        whole[..., span.in_row, :] = part[..., span.in_rank, :]


def to_tokens(
    mesh: Mesh, *tensors: Float[Tensor, "B _ row _"], heads: tuple[int, ...], tag: str
) -> list[Float[Tensor, "B _ L _"]]:
    """Return all heads for this rank's tokens, given this rank's heads for all tokens of the row.

    This is the inverse of `to_heads`.
    heads: the total number of heads of each tensor. If several ranks hold the same head, their parts are
    summed in rank order and in the state dtype; pass such tensors in the state dtype.
    """
    row = mesh.row
    under_way = []
    for x, count in zip(tensors, heads, strict=True):
        works: dict[int, Work] = {}
        for to, source in _partners(mesh):
            theirs = heads_of(count, source, row.world_size)
            into = x.new_empty((x.shape[0], theirs.stop - theirs.start, mesh.lengths[row.rank], x.shape[-1]))
            works[source] = row.exchange(
                send=(_tokens_of(mesh, x, to),), to=to, receive=(into,), source=source, tag=tag
            )
        under_way.append((x, count, works))
    return [_assemble_heads(mesh, x, count, works) for x, count, works in under_way]


def _assemble_heads(mesh: Mesh, x: Tensor, count: int, works: dict[int, Work]) -> Tensor:
    """Return all `count` heads of this rank's tokens: its own, and those that arrive from other members."""
    row = mesh.row
    parts = {member: work.wait()[0] for member, work in works.items()}
    parts[row.rank] = _tokens_of(mesh, x, row.rank)
    if count >= row.world_size:
        return torch.cat([parts[member] for member in range(row.world_size)], dim=1)
    total = x.new_zeros((x.shape[0], count, *parts[row.rank].shape[2:]), dtype=state_dtype(x.dtype))
    for member in range(row.world_size):
        total[:, heads_of(count, member, row.world_size)] += parts[member]
    return total


def _tokens_of(mesh: Mesh, x: Tensor, member: int) -> Tensor:
    """Return a member's tokens of the row as a contiguous tensor, in the member's own order."""
    part = x.new_empty((*x.shape[:2], mesh.lengths[member], x.shape[-1]))
    for span in mesh.spans(member):
        part[..., span.in_rank, :] = x[..., span.in_row, :]
    return part


def _partners(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield (to, source) of every exchange of an all-to-all, by ascending distance."""
    rank, world_size = mesh.row.rank, mesh.row.world_size
    for distance in range(1, world_size):
        yield (rank + distance) % world_size, (rank - distance) % world_size
