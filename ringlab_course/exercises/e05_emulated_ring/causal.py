"""Checks of 05.causal: the ring with a causal mask by global position, on any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.numbers import NAMES
from ringlab_course.checking.positions import Shards, compare_ranks, expect_bytes, expect_neighbours, shards
from ringlab_course.checking.ring_mistakes import CAUSAL, FORWARD

MISTAKES = {mistake.name: mistake for mistake in (*CAUSAL, *FORWARD)}


def _case(rng: np.random.Generator, layout: Layout, H: int = 1, K: int = 1, D: int = 2) -> Shards:
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.P)]
    lengths = [layout.length(rank) for rank in range(layout.P)]
    return shards(rng, lengths, H, K, D, text=f", {layout.name}, S={layout.S}", positions=positions)


def _verify(subject: Any, case: Shards) -> Any:
    outcome = case.run(subject)
    for rank, result in enumerate(outcome.results):
        out, _ = expect_tuple(result, NAMES)
        if torch.isnan(torch.as_tensor(out)).any():
            raise MISTAKES["nan_in_blind_blocks"].failure(f"{case.text}: rank {rank}")
    compare_ranks(case, outcome.results, CAUSAL)
    return outcome


def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    for S, P in ((2, 1), (4, 2), (6, 3)):
        _verify(subject, _case(rng, layouts.contiguous(S, P)))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    for S, P in ((4, 2), (6, 3), (12, 3)):
        folded = layouts.dealt(S, P, chunk=1, folded=True)
        for layout in (layouts.striped(S, P), folded, layouts.zigzag(S, P)):
            if len({layout.length(rank) for rank in range(P)}) == 1:
                _verify(subject, _case(rng, layout))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    for layout in (
        layouts.contiguous(3, 2),
        layouts.striped(5, 2),
        layouts.zigzag(7, 3),
        layouts.contiguous(2, 3),
    ):
        _verify(subject, _case(rng, layout))


def _check_eight_ranks(subject: Any, rng: np.random.Generator) -> None:
    for make, S in (
        (layouts.zigzag, 16),
        (layouts.striped, 19),
        (layouts.contiguous, 29),
        (layouts.striped, 5),
    ):
        _verify(subject, _case(rng, make(S, 8), 2, 1, 8))


def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for layout in (layouts.contiguous(6, 3), layouts.zigzag(13, 3)):
        case = _case(rng, layout)
        trace = case.run(subject).trace
        expect_neighbours(trace, case.text)
        _expect_unpadded(case, trace)
        expect_bytes(case, trace)


def _expect_unpadded(case: Shards, trace: Any) -> None:
    longest = max(case.block_bytes(origin) for origin in range(case.world_size))
    for rank in range(case.world_size):
        exact = sum(case.block_bytes((rank - step) % case.world_size) for step in range(case.world_size - 1))
        sent = trace.bytes_sent(rank)
        if sent > exact and sent == (case.world_size - 1) * longest:
            example = f"{case.text}: rank {rank} sent {sent:,} bytes, the tokens take {exact:,}"
            raise MISTAKES["pads_the_blocks"].failure(example)


HINTS = (
    "Token 3 of your shard: is it token 3 of the sequence? And token 3 of the block that is here?",
    "In each step find out whose block is here, take the positions of your queries and of that block's keys, and give "
    "ring_step the mask that compares them. A block that lies in the future is still passed on; the next block may have "
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
    misconceptions=(
        *CAUSAL,
        *(
            MISTAKES[name]
            for name in (
                "sends_p_times",
                "gathers_everything",
                "sends_too_many_bytes",
                "does_not_unpack",
                "never_waits",
            )
        ),
    ),
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
