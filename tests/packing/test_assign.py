"""Laws of assignment: each token is assigned once, within capacity, in no more time than at a static degree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ringlab.cost.flops import attention_flops, linear_flops, vocabulary_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.sequence_time import SequenceCosts
from ringlab.cost.traffic import ring_traffic
from ringlab.errors import CostError, LayoutError
from ringlab.layout import zigzag
from ringlab.packing import Assignment, Placement, assign, least_seconds, static
from tests.packing.assignments import COSTS, counted, problems

Drawn = tuple[list[int], int, int]


@settings(max_examples=60)
@given(drawn=problems())
def test_a_step_can_run_an_assignment_in_at_most_the_static_time(drawn: Drawn) -> None:
    lengths, P, capacity = drawn
    made = assign(lengths, P, capacity, COSTS)
    assert counted(made) == sum(max(0, n - 1) for n in lengths)
    owned = np.zeros((len(lengths), P), int)
    for number in range(len(made.micro_batches)):
        for rank, shared in enumerate(made.owners(number)):
            assert sum(tokens for _, tokens in shared) == made.layout(number).length(rank) <= capacity
            for sequence, tokens in shared:
                owned[sequence, rank] += tokens
    assert owned.sum(1).tolist() == lengths
    seconds, least = made.seconds(COSTS), least_seconds(lengths, P, capacity, COSTS)
    assert least <= seconds * (1 + 1e-12) and seconds <= static(lengths, P, capacity, COSTS).seconds(COSTS)
    busiest = [
        max(busy_of(made, number, rank) for rank in range(P)) for number in range(len(made.micro_batches))
    ]
    assert seconds == pytest.approx(sum(busiest))


def busy_of(made: Assignment, number: int, rank: int) -> float:
    return sum(COSTS.rank_s(p.length, p.degree) for p in made.micro_batches[number] if rank in p.ranks)


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([[Placement(0, 8, 0, 2), Placement(1, 4, 1, 2)]], "disjoint, or one inside the other"),
        ([[Placement(0, 8, 3, 2), Placement(1, 4, 1, 1)]], "one of the ranks 0 to 3"),
        ([[Placement(1, 4, 1, 1), Placement(0, 8, 0, 2)]], "from the largest group"),
        ([[Placement(0, 8, 0, 1), Placement(1, 4, 0, 1)]], "at most 8 tokens"),
        ([[Placement(0, 8, 0, 2)]], "exactly once"),
        ([[Placement(0, 8, 0, 2), Placement(1, 4, 0, 1)], [Placement(1, 4, 1, 1)]], "exactly once"),
        ([[Placement(0, 8, 0, 2), Placement(1, 3, 0, 1)]], "whole sequences exactly once"),
    ],
)
def test_what_no_step_can_run_is_refused(placements: list[list[Placement]], words: str) -> None:
    """Crossing groups, missing ranks, exceeded capacities, and tokens dealt twice or never are refused."""
    with pytest.raises(LayoutError) as caught:
        Assignment((8, 4), 4, 8, tuple(map(tuple, placements)))
    assert words in str(caught.value)


@pytest.mark.parametrize("degree", [1, 8])
def test_the_time_of_a_sequence_is_made_of_counted_work(degree: int) -> None:
    """The time of a sequence follows from `ringlab.cost`'s FLOPs and bytes, with and without hidden hops."""
    a_model, machine, n = model("llama3-8b"), hardware("h100"), 16384
    costs, sizes = SequenceCosts.of(a_model, machine), a_model.attention()
    peak, link, expected = machine.peak("bfloat16"), machine.inside, 0.0
    linear = 3 * (linear_flops(a_model, n // degree) + vocabulary_flops(a_model, n // degree))
    expected += linear / peak / machine.reached.linear
    for backward, reached in (
        (False, machine.reached.attention_forward),
        (True, machine.reached.attention_backward),
    ):
        flops = attention_flops(sizes, n * (n + 1) // 2, backward) / degree**2
        block = a_model.layers * flops / peak / reached
        sent = ring_traffic(sizes, zigzag(n, degree), backward=backward).by_step_bytes
        hops = [a_model.layers * (link.latency_s + size / link.bytes_per_s) for size in sent]
        hops, home = (hops[:-1], hops[-1:]) if backward else (hops, [])
        expected += block + sum(max(block, hop) for hop in hops) + sum(home)
    assert costs.rank_s(n, degree) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: assign([900], 2, 400, COSTS), LayoutError, "a capacity of 450 tokens"),
        (lambda: assign([9], 4, 9, COSTS, degrees=(2, 3)), LayoutError, "each divides the next"),
        (lambda: assign([9], 4, 9, COSTS, degrees=(3,)), LayoutError, "the last P=4"),
        (lambda: assign([9], 4, 0, COSTS), LayoutError, "a capacity >= 1 token"),
        (lambda: assign([-1], 4, 9, COSTS), CostError, "a length >= 0"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_no_sequences_at_all() -> None:
    made = assign([], 4, 9, COSTS)
    assert made.micro_batches == () and made.seconds(COSTS) == least_seconds([], 4, 9, COSTS) == 0.0
