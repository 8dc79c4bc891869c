"""Checks of 05.causal, the causal ring: masks by global position, on any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.positions import (
    Shards,
    compare_ranks,
    compare_runs,
    expect_bytes,
    expect_neighbours,
    shards,
)
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("05.causal")


def _case(rng: np.random.Generator, layout: Layout, H: int = 1, K: int = 1, D: int = 2) -> Shards:
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.P)]
    lengths = [layout.length(rank) for rank in range(layout.P)]
    return shards(rng, lengths, H, K, D, text=f", {layout.name}, S={layout.S}", positions=positions)


def _compare(subject: Any, cases: Iterable[Shards]) -> None:
    compare_runs(subject, cases, mistake("nan_in_blind_blocks"))


def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((2, 1, 1, 1), (4, 2, 1, 1), (6, 3, 1, 1), (6, 3, 4, 2))
    _compare(subject, (_case(rng, layouts.contiguous(S, P), H, K) for S, P, H, K in sizes))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, (_case(rng, layout) for layout in _even_layouts()))


def _even_layouts() -> Iterator[Layout]:
    for S, P in ((4, 2), (6, 3), (12, 3)):
        folded = layouts.dealt(S, P, chunk=1, folded=True)
        for layout in (layouts.striped(S, P), folded, layouts.zigzag(S, P)):
            if len({layout.length(rank) for rank in range(P)}) == 1:
                yield layout


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    ragged = (layouts.contiguous(3, 2), layouts.striped(5, 2), layouts.zigzag(7, 3), layouts.contiguous(2, 3))
    _compare(subject, (_case(rng, layout) for layout in ragged))


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    made = ((layouts.zigzag, 16), (layouts.striped, 19), (layouts.contiguous, 29), (layouts.striped, 5))
    _compare(subject, (_case(rng, make(S, 8), 2, 1, 8) for make, S in made))


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for layout in (layouts.contiguous(6, 3), layouts.zigzag(13, 3)):
        case = _case(rng, layout)
        outcome = case.run(subject)
        expect_neighbours(outcome.trace, case.text)
        _expect_unpadded(case, outcome.trace)
        expect_bytes(case, outcome.trace)
        compare_ranks(case, outcome.results)


def _expect_unpadded(case: Shards, trace: Any) -> None:
    longest = max(case.block_bytes(origin) for origin in range(case.world_size))
    for rank in range(case.world_size):
        exact = sum(case.block_bytes((rank - step) % case.world_size) for step in range(case.world_size - 1))
        sent = trace.bytes_sent(rank)
        if sent > exact and sent == (case.world_size - 1) * longest:
            example = f"{case.text}: rank {rank} sent {sent:,} bytes, the tokens take {exact:,}"
            raise mistake("pads_the_blocks").failure(example)


HINTS = (
    "Is token 3 of your shard also token 3 of the sequence? What about token 3 of the block that you hold now?",
    "In each step, find out whose block you hold. Compare the positions of your queries with those of its keys, and give "
    "ring_step that mask. Pass on every block, also one that none of your queries may see. The next block may have "
    "another length.",
    r"$M_{ij} = \left[\mathrm{positions}[r]_i \ge \mathrm{positions}[o]_j\right]$ with $o = (r - t) \bmod P$",
)

STAGE = Stage(
    id="05.causal",
    function="ring_forward_causal",
    title="The causal ring, on any layout",
    kind="ring",
    helpers=("ring_step",),
    hints=HINTS,
    misconceptions=misconceptions_of("05.causal"),
    checks=(
        Check("contiguous", 2, "visible", "rank r owns the r-th stretch", _check_contiguous),
        Check("layouts", 2, "visible", "striped, folded and zig-zag layouts", _check_layouts),
        Check("ragged", 2, "visible", "shards of different lengths, and empty ones", _check_ragged),
        Check("eight_ranks", 2, "stress", "eight ranks, several heads, ragged", _check_eight_ranks),
        Check(
            "traffic",
            1,
            "held-out",
            "P − 1 exchanges, exactly the bytes of K and V",
            _check_traffic,
            kind="cost",
        ),
    ),
)
