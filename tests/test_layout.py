"""Layouts equal those worked out by hand, refuse arguments that do not fit, and are known by name everywhere.

All layouts with a name are in one table, and each layout in the table can be used everywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringlab import VirtualCluster, contiguous, dealt, per_document, striped, zigzag
from ringlab.errors import LayoutError, ShapeError, WorldSizeError
from ringlab.layout import LAYOUTS, Layout, Run, get_layout, layout_names
from tests.new_layout import PLACES


def owned(layout: Layout) -> list[list[int]]:
    return [sorted(layout.positions(rank).tolist()) for rank in range(layout.P)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (contiguous(8, 4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (contiguous(7, 3), [[0, 1, 2], [3, 4, 5], [6]]),
        (striped(8, 4), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (zigzag(16, 4), [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (dealt(16, 4, chunk=2, folded=True), [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (dealt(16, 4, chunk=1, folded=True), [[0, 7, 8, 15], [1, 6, 9, 14], [2, 5, 10, 13], [3, 4, 11, 12]]),
    ],
    ids=str,
)
def test_known_layouts(layout: Layout, expected: list[list[int]]) -> None:
    assert owned(layout) == expected


def test_swapped_sizes_are_named_where_they_do_not_fit() -> None:
    """The error names swapped sizes when a tensor does not fit. A layout alone cannot notice them: P may exceed S."""
    with pytest.raises(ShapeError, match=r"tokens come before ranks: \(S=32, P=2\)"):
        zigzag(2, 32).shard(torch.zeros(1, 4, 32, 8), 0)
    with pytest.raises(WorldSizeError, match=r"tokens come first: \(S=32, P=2\)"):
        zigzag(2, 32).of_ranks(2)
    with pytest.raises(WorldSizeError, match="P=4"):
        zigzag(32, 2).of_ranks(4)
    assert zigzag(2, 32).of_ranks(32) == zigzag(2, 32)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_an_axis_is_not_guessed_where_two_fit(make: Callable[..., Any]) -> None:
    """An array with two axes of S entries needs dim=, since axis −2 may be the batch."""
    layout = zigzag(8, 2)
    for shape in ((8, 8), (8, 8, 3)):
        with pytest.raises(ShapeError, match="dim=0 or dim=1"):
            layout.shard(make(shape), 0)
        for dim in (0, 1):
            shards = [layout.shard(make(shape), rank, dim=dim) for rank in range(2)]
            assert shards[0].shape[dim] == 4 and layout.unshard(shards, dim=dim).shape == shape
    halves = [make((4, 4))] * 2
    with pytest.raises(ShapeError, match="dim=0 or dim=1"):
        layout.unshard(halves)
    with pytest.raises(ShapeError, match="dim=0 or dim=1"):
        VirtualCluster(2).run(lambda ring: layout.gather(ring, torch.zeros(4, 4)))
    assert layout.shard(make((2, 8, 8, 3)), 0).shape == (2, 8, 4, 3)  # heads come before tokens


def test_fewer_tokens_than_ranks_leave_ranks_empty() -> None:
    for make in (contiguous, striped, zigzag):
        layout = make(2, 5)
        assert sorted(layout.length(rank) for rank in range(5)) == [0, 0, 0, 1, 1]
        shards = [layout.shard(torch.arange(2.0)[:, None], rank) for rank in range(5)]
        assert torch.equal(layout.unshard(shards), torch.arange(2.0)[:, None])


def test_small_chunks_make_few_runs() -> None:
    """A token-level layout of a long sequence has one or two runs on each rank, not one for each token."""
    assert all(len(striped(2**16, 8).runs(rank)) == 1 for rank in range(8))
    assert all(len(dealt(2**16, 8, chunk=1, folded=True).runs(rank)) == 2 for rank in range(8))


def test_layouts_compare_and_hash_by_value() -> None:
    assert zigzag(16, 4) == zigzag(16, 4)
    assert len({zigzag(16, 4), zigzag(16, 4), striped(16, 4)}) == 2
    assert repr(zigzag(16, 4)) == "zigzag(S=16, P=4)"


def test_shard_is_differentiable() -> None:
    x = torch.ones(6, 2, requires_grad=True)
    zigzag(6, 2).shard(x, 0).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0 if i in zigzag(6, 2).positions(0) else 0.0 for i in range(6)]


@pytest.mark.parametrize(
    ("S", "P", "chunk"), [(-1, 2, 1), (4, 0, 1), (4, 2, 0), (4.0, 2, 1), (4, "2", 1), (4, 2, None)]
)
def test_impossible_sizes(S: Any, P: Any, chunk: Any) -> None:
    with pytest.raises(LayoutError, match="an integer"):
        dealt(S, P, chunk=chunk)


@pytest.mark.parametrize("lengths", [5, None, (3, -1), (3, 1.5), "12"])
def test_impossible_documents(lengths: Any) -> None:
    with pytest.raises(LayoutError, match="documents' lengths"):
        per_document(lengths, 2)


@pytest.mark.parametrize("rank", [-1, 4])
def test_an_invalid_rank(rank: int) -> None:
    for method in (zigzag(16, 4).runs, zigzag(16, 4).length, zigzag(16, 4).positions):
        with pytest.raises(WorldSizeError, match="0 to 3"):
            method(rank)


def test_runs_that_do_not_partition() -> None:
    with pytest.raises(LayoutError, match="exactly once"):
        Layout(4, 2, "mine", ((Run(0, 1, 3),), (Run(2, 1, 2),)))
    with pytest.raises(LayoutError, match="2 ranks"):
        Layout(4, 2, "mine", ((Run(0, 1, 4),),))


def test_runs_that_do_not_ascend() -> None:
    """Runs that do not ascend are refused, since tile plans assume that runs ascend."""
    for step in (0, -1):
        with pytest.raises(LayoutError, match="ascend"):
            Layout(4, 2, "mine", ((Run(3, step, 2),), (Run(1, step, 2),)))


def test_wrong_tensors() -> None:
    layout = zigzag(16, 4)
    with pytest.raises(ShapeError, match="not a shard"):
        layout.shard(torch.ones(1, 2, 4, 8), 0)
    with pytest.raises(ShapeError, match="dim="):
        layout.shard(np.ones(16), 0, dim=1)
    with pytest.raises(WorldSizeError, match="4 shards"):
        layout.unshard([torch.ones(4, 1)] * 3)
    with pytest.raises(ShapeError, match="from rank 2"):
        layout.unshard([torch.ones(4, 1), torch.ones(4, 1), torch.ones(5, 1), torch.ones(3, 1)])


def places(*options: str) -> dict[str, bool]:
    """Return the places that accept a layout which a new process has registered before all other imports."""
    command = [sys.executable, "-m", "tests.new_layout", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_registered_layout_is_known_everywhere() -> None:
    assert places() == dict.fromkeys(PLACES, True)


def test_a_layout_in_another_table_is_known_nowhere() -> None:
    assert places("--in-a-copy") == dict.fromkeys(PLACES, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_made_by_its_name(name: str) -> None:
    made = get_layout(name, 11, 3)
    assert made == LAYOUTS[name](11, 3) and made.name == name and name in layout_names()


def test_an_unknown_layout_names_those_that_are_known() -> None:
    with pytest.raises(
        LayoutError, match="(?s)one of the layouts contiguous, striped, zigzag.*no-such-layout"
    ):
        get_layout("no-such-layout", 8, 2)
