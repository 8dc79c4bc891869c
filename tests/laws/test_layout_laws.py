"""Layouts partition the sequence for any dealing; shard and unshard are inverse; runs describe positions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.layout import LAYOUTS as REGISTERED
from ringlab.layout import Layout, Run, contiguous, dealt
from tests.laws.draw import refute

Dealing = tuple[int, int, int, bool]
DEALINGS = st.tuples(st.integers(0, 200), st.integers(1, 9), st.integers(1, 40), st.booleans())
NAMED = st.sampled_from([*REGISTERED.values()])


def deal(S: int, P: int, chunk: int, folded: bool) -> Layout:
    return dealt(S, P, chunk=chunk, folded=folded)


def law_dealt_as_defined(make: Callable[..., Layout], S: int, P: int, chunk: int, folded: bool) -> None:
    layout = make(S, P, chunk, folded)
    for rank in range(P):
        for position in layout.positions(rank):
            turn, place = divmod(int(position) // chunk, P)
            assert rank == (P - 1 - place if folded and turn % 2 else place)


def law_runs_describe_positions(make: Callable[..., Layout], *dealing: Any) -> None:
    layout = make(*dealing)
    for rank in range(layout.P):
        spelled = [run.start + run.step * i for run in layout.runs(rank) for i in range(run.length)]
        assert spelled == list(layout.positions(rank))
        assert layout.length(rank) == len(spelled)
        assert all(run.length > 0 and run.step > 0 for run in layout.runs(rank))


def law_a_shard_holds_the_positions(make: Callable[..., Layout], x: Any, dim: int, *dealing: Any) -> None:
    layout = make(*dealing)
    for rank in range(layout.P):
        shard = layout.shard(x, rank, dim=dim)
        assert type(shard) is type(x)
        assert shard.dtype == x.dtype
        assert np.array_equal(np.asarray(shard), np.take(np.asarray(x), layout.positions(rank), axis=dim))


def law_unshard_undoes_shard(make: Callable[..., Layout], x: Any, dim: int, *dealing: Any) -> None:
    layout = make(*dealing)
    whole = layout.unshard([layout.shard(x, rank, dim=dim) for rank in range(layout.P)], dim=dim)
    assert type(whole) is type(x)
    parts = zip(x, whole, strict=True) if isinstance(x, tuple) else [(x, whole)]
    for before, after in parts:
        assert type(before) is type(after)
        assert np.array_equal(np.asarray(before), np.asarray(after))


def law_a_shard_is_a_copy(make: Callable[..., Layout], *dealing: Any) -> None:
    layout = make(*dealing)
    whole = torch.arange(layout.S).unsqueeze(-1)
    for rank in range(layout.P):
        layout.shard(whole, rank).fill_(-1)
    assert torch.equal(whole.squeeze(-1), torch.arange(layout.S))


@given(make=NAMED, S=st.integers(0, 200), P=st.integers(1, 9))
def test_named_layouts_obey_the_laws(make: Callable[..., Layout], S: int, P: int) -> None:
    law_runs_describe_positions(make, S, P)


@given(dealing=DEALINGS)
def test_tokens_are_dealt_as_defined(dealing: Dealing) -> None:
    law_dealt_as_defined(deal, *dealing)
    law_runs_describe_positions(deal, *dealing)
    law_a_shard_is_a_copy(deal, *dealing)


def tokens_on(dim: int, S: int) -> np.ndarray:
    """Return an array of different numbers with three axes, S of them on axis `dim`."""
    shape = [2, 3, 2]
    shape[dim] = S
    return np.arange(np.prod(shape)).reshape(shape)


@given(dealing=DEALINGS, dim=st.integers(-3, 2))
def test_shard_and_unshard_on_any_axis(dealing: Dealing, dim: int) -> None:
    array = tokens_on(dim, dealing[0])
    for x in (array, torch.from_numpy(array)):
        law_a_shard_holds_the_positions(deal, x, dim, *dealing)
        law_unshard_undoes_shard(deal, x, dim, *dealing)


@given(dealing=DEALINGS)
def test_unshard_undoes_shard_of_tuples(dealing: Dealing) -> None:
    array = tokens_on(1, dealing[0])
    law_unshard_undoes_shard(deal, (array, torch.from_numpy(array) * 2, array + 0.5), 1, *dealing)


# Each mutant is a layout with one fault, listed with the law that must notice the fault.


class Broken:
    """A layout with some methods replaced; `whole` is the right layout."""

    def __init__(self, layout: Layout, **methods: Callable[..., Any]) -> None:
        self.whole = layout
        for name, method in methods.items():
            setattr(self, name, partial(method, layout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def never_folds(S: int, P: int, chunk: int, folded: bool) -> Layout:
    return deal(S, P, chunk, False)


def forgets_the_step(S: int, P: int, chunk: int, folded: bool) -> Any:
    def runs(layout: Layout, rank: int) -> tuple[Run, ...]:
        return tuple(dataclasses.replace(run, step=1) for run in layout.runs(rank))

    return Broken(deal(S, P, chunk, folded), runs=runs)


def shards_contiguously(S: int, P: int, chunk: int, folded: bool) -> Any:
    return Broken(deal(S, P, chunk, folded), shard=lambda _, x, r, dim=-2: contiguous(S, P).shard(x, r, dim))


def lays_shards_end_to_end(S: int, P: int, chunk: int, folded: bool) -> Any:
    def unshard(layout: Layout, shards: list[Any], dim: int = -2) -> Any:
        join = torch.cat if isinstance(shards[0], torch.Tensor) else np.concatenate
        return join(shards, dim)  # type: ignore[operator]

    return Broken(deal(S, P, chunk, folded), unshard=unshard)


def gives_a_view(S: int, P: int, chunk: int, folded: bool) -> Any:
    return Broken(
        deal(S, P, chunk, folded),
        shard=lambda lay, x, r, dim=-2: x[lay.runs(r)[0].index] if lay.runs(r) else x[:0],
    )


EXAMPLES = list(itertools.product((0, 1, 7, 24, 50), (1, 2, 3, 4), (1, 2, 5), (False, True)))
WITH_ARRAY = [(tokens_on(1, example[0]), 1, *example) for example in EXAMPLES]
WITH_TENSOR = [(torch.from_numpy(x), *rest) for x, *rest in WITH_ARRAY]


@pytest.mark.parametrize(
    ("law", "mutant", "examples"),
    [
        (law_dealt_as_defined, never_folds, EXAMPLES),
        (law_runs_describe_positions, forgets_the_step, EXAMPLES),
        (law_a_shard_holds_the_positions, shards_contiguously, WITH_TENSOR),
        (law_unshard_undoes_shard, lays_shards_end_to_end, WITH_TENSOR),
        (law_a_shard_is_a_copy, gives_a_view, EXAMPLES),
    ],
)
def test_the_law_notices(law: Callable[..., None], mutant: Callable[..., Any], examples: list[Any]) -> None:
    refute(law, deal, mutant, examples)
