"""A layer with attention on a grid of tokens × heads, and projections over all ranks, equals one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import ShardedCache, VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.conformance.tolerance import FACTOR, relative_error
from ringlab.errors import AgreementError, RinglabError, ShapeError, WorldSizeError
from ringlab.mask import Mask
from ringlab.serving import HelixGrid, PagedCache
from tests.serving.problems import assert_rows, sinks_of, whole

H, K, D, WIDTH, HIDDEN = 8, 2, 4, 16, 32
PROMPT, STEPS = 9, 3
S = PROMPT + STEPS


@dataclass(frozen=True)
class Weights:
    """A layer: x + attention(x)·output, then x + relu(x·up)·down. q, k, v have one matrix per head."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    up: Tensor
    down: Tensor

    def to(self, dtype: torch.dtype) -> Weights:
        return Weights(*(x.to(dtype) for x in vars(self).values()))


def drawn() -> tuple[Weights, Tensor]:
    """Return the weights, and the layer's inputs for all tokens, (1, S, WIDTH)."""
    random = np.random.default_rng(7)
    shapes = ((H, WIDTH, D), (K, WIDTH, D), (K, WIDTH, D), (H, D, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    draw = [random.standard_normal(shape) / shape[-2] ** 0.5 for shape in (*shapes, (1, S, WIDTH))]
    *weights, x = (torch.from_numpy(one).float() for one in draw)
    return Weights(*weights), x


def heads_of(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (1, n, WIDTH) projected to heads, (1, heads, n, D)."""
    return torch.einsum("bnw,hwd->bhnd", x, weight)


def on_one_process(weights: Weights, x: Tensor) -> Tensor:
    """Return the layer's output for the generated tokens, all computed at once on one process."""
    q, k, v = heads_of(x, weights.q), heads_of(x, weights.k), heads_of(x, weights.v)
    k, v = (each.repeat_interleave(H // K, dim=1) for each in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    y = x + torch.einsum("bhnd,hdw->bnw", scores.softmax(-1) @ v, weights.output)
    return (y + (y @ weights.up).relu() @ weights.down)[:, PROMPT:]


def on_a_grid(ring: Ring, token_ranks: int) -> Tensor:
    """Return the layer's output token by token, on ranks that share heads, tokens and feed-forward."""
    weights, x = drawn()
    grid = HelixGrid(ring, token_ranks=token_ranks, head_ranks=ring.world_size // token_ranks)
    queries, keys, mine = grid.attended(H), grid.attended(K), grid.owned(H)
    share = HIDDEN // ring.world_size
    hidden = slice(ring.rank * share, (ring.rank + 1) * share)
    k, v = heads_of(x, weights.k[keys]), heads_of(x, weights.v[keys])
    cache = ShardedCache(grid.tokens, batch=1, kv_heads=k.shape[1], head_dim=D)
    cache.append(k[:, :, :PROMPT], v[:, :, :PROMPT])
    found = []
    for token in range(PROMPT, S):
        here = slice(token, token + 1)
        cache.append(k[:, :, here], v[:, :, here])
        out = grid.attend(heads_of(x[:, here], weights.q[queries]), cache, heads=H)
        projected = torch.einsum("bhnd,hdw->bnw", out, weights.output[mine])
        y = x[:, here] + ring.all_reduce(projected)
        found.append(y + ring.all_reduce((y @ weights.up[:, hidden]).relu() @ weights.down[hidden]))
    return torch.cat(found, dim=1)


def assert_layer(results: list[Tensor]) -> None:
    """Fail unless the error is at most twice one process's in float32, plus one rounding of the result."""
    weights, x = drawn()
    true = on_one_process(weights.to(torch.float64), x.double()).numpy()
    plain = relative_error(on_one_process(weights, x), true)
    for mine in results:
        assert torch.equal(mine, results[0])
        assert relative_error(mine, true) <= FACTOR * plain + torch.finfo(torch.float32).eps, (
            "the layer is wrong"
        )


@pytest.mark.parametrize("token_ranks", [1, 2, 4])
def test_a_layer_on_a_grid_is_the_layer(token_ranks: int) -> None:
    """A layer on a grid is right on four ranks, and on two ranks that share heads but no tokens."""
    P = 2 if token_ranks == 1 else 4
    assert_layer(VirtualCluster(P, memory=False).run(on_a_grid, token_ranks).results)


def with_sinks(ring: Ring) -> tuple[Tensor, Tensor]:
    """Return out and lse of one token on a 2 × 2 grid, where each head has its own sink."""
    q, k, v = whole(1, H, K, S, D, 3, torch.float64)
    grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
    queries, keys = grid.attended(H), grid.attended(K)
    cache = ShardedCache(grid.tokens, batch=1, kv_heads=1, head_dim=D, dtype=torch.float64)
    cache.append(k[:, keys], v[:, keys])
    sinks = sinks_of(H, torch.float64)[queries]
    found: Any = grid.attend(q[:, queries, -1:], cache, sinks=sinks, return_lse=True, block="naive")
    return found


def test_each_row_has_the_sinks_of_its_heads() -> None:
    out, lse = (
        torch.cat(parts, dim=1)
        for parts in zip(*VirtualCluster(4, memory=False).run(with_sinks).results, strict=True)
    )
    sinks, sequence = sinks_of(H, torch.float64).numpy(), whole(1, H, K, S, D, 3, torch.float64)
    assert_rows(out, lse, sequence, slice(S - 1, S), mask=Mask(), sinks=sinks)


def test_what_is_no_grid() -> None:
    def program(ring: Ring) -> None:
        with pytest.raises(WorldSizeError, match="= 4 ranks"):
            HelixGrid(ring, token_ranks=2, head_ranks=3)
        grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
        with pytest.raises(ShapeError, match="2 ranks can share"):
            grid.attended(3)
        with pytest.raises(WorldSizeError, match=r"grid\.tokens, the 2 ranks"):
            grid.attend(torch.ones(1, 4, 1, 8), PagedCache(ring, kv_heads=1, head_dim=8, pages=1))

    VirtualCluster(4, memory=False).run(program)


def column(ring: Ring, grid: HelixGrid) -> Ring:
    """Return a ring of a column's ranks: as many ranks as in a row, but with different heads."""
    return Ring(SubGroup(ring.comm, (ring.rank % 2, ring.rank % 2 + 2)))


def backwards(ring: Ring, grid: HelixGrid) -> Ring:
    """Return a ring of the row's ranks in reverse order, as if each rank had the other rank's tokens."""
    return Ring(SubGroup(grid.tokens.comm, (1, 0)))


def made_again(ring: Ring, grid: HelixGrid) -> Ring:
    """Return a new ring of the ranks of the row, made by another path."""
    first = grid.row * 2
    return Ring(SubGroup(SubGroup(ring.comm, (3, 2, 1, 0)), (3 - first, 2 - first)))


def attended_with(ring: Ring, make: Callable[[Ring, HelixGrid], Ring | None], wrong: tuple[int, ...]) -> Any:
    """Return a rank's result or error on a 2 × 2 grid. The caches of ranks in `wrong` are on the ring of `make`."""
    grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
    on = make(ring, grid) if ring.rank in wrong else grid.tokens
    cache = None if on is None else ShardedCache(on, batch=1, kv_heads=1, head_dim=8)
    if cache is not None:
        cache.append(torch.ones(1, 1, 5, 8), torch.full((1, 1, 5, 8), float(grid.row)))
    try:
        return grid.attend(torch.ones(1, 4, 1, 8), cache)  # type: ignore[arg-type]
    except RinglabError as error:
        return error


@pytest.mark.parametrize("wrong", [(0, 1, 2, 3), (2,)], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("make", [column, backwards, lambda ring, grid: None])
def test_a_cache_on_another_ring_is_refused_on_all_ranks(make: Any, wrong: tuple[int, ...]) -> None:
    """A cache on another ring is refused on all ranks of both rows, which exchange heads after attention."""
    outcome = VirtualCluster(4, memory=False).run(attended_with, make, wrong)
    assert outcome.trace.bytes_sent() == 0
    for rank, error in enumerate(outcome.results):
        assert type(error) is (WorldSizeError if rank in wrong else AgreementError), error
        assert "grid.tokens, the 2 ranks of this row" in str(error)


def test_the_ring_of_the_row_may_be_made_again() -> None:
    results = VirtualCluster(4, memory=False).run(attended_with, made_again, (0, 1, 2, 3)).results
    assert [out.unique().item() for out in results] == [0, 0, 1, 1]


def test_a_wrong_call_is_refused_on_the_other_row_too() -> None:
    def program(ring: Ring) -> RinglabError:
        grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
        cache = ShardedCache(grid.tokens, batch=1, kv_heads=1, head_dim=8)
        cache.append(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8))
        with pytest.raises(RinglabError) as raised:
            grid.attend(torch.ones(1, 4, 1, 4 if ring.rank == 1 else 8), cache)
        return raised.value

    errors = VirtualCluster(4, memory=False).run(program).results
    assert [type(error) for error in errors] == [AgreementError, ShapeError, AgreementError, AgreementError]


def test_heads_of_all_rows_are_refused_where_their_number_is_given() -> None:
    def program(ring: Ring) -> tuple[int, ...]:
        grid = HelixGrid(ring, token_ranks=2, head_ranks=2)
        cache = ShardedCache(grid.tokens, batch=1, kv_heads=1, head_dim=8)
        cache.append(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8))
        with pytest.raises(ShapeError, match="4 query heads"):
            grid.attend(torch.ones(1, 8, 1, 8), cache, heads=8)
        return tuple(grid.attend(torch.ones(1, 4, 1, 8), cache, heads=8).shape)  # type: ignore[union-attr]

    assert VirtualCluster(4, memory=False).run(program).results == [(1, 2, 1, 8)] * 4
