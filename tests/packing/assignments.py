"""Problems of assignment, an exact search for small ones, and a program that trains on its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.cost.hardware import Link
from ringlab.cost.sequence_time import Pass, SequenceCosts, shares
from ringlab.nn import IGNORE, loss_share, sum_gradients
from ringlab.nn.loss import summed
from ringlab.packing.assignment import Assignment
from ringlab.packing.groups import GroupedContext
from tests.nn.ways import CONFIG, Gradients, gradients_of, model_of

LINK = Link("made up", 1e6, 2e-4, "for tests")
COSTS = SequenceCosts(
    1e-5, (Pass(1e-7, 8, 0, 2), Pass(2.5e-7, 16, 8, 2)), LINK, replace(LINK, bytes_per_s=2e5), 2
)
"""At some hundred tokens, linear layers, pairs and hops cost about the same. Links between nodes are slower."""


@st.composite
def problems(draw: st.DrawFn, most: int = 12) -> tuple[list[int], int, int]:
    """Return lengths, P, and a capacity large enough for the longest sequence on all ranks."""
    P = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lengths = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=most))
    least = max(int(shares(max(lengths), P).max()), 1)
    return lengths, P, draw(st.integers(least, 3 * least + 100))


# A training step on an assignment.


def sequences_of(lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocabulary, (n,), generator=draw) for n in lengths]


@lru_cache(maxsize=4)
def one_process(lengths: tuple[int, ...]) -> tuple[float, Gradients]:
    """Return the loss and gradients of one process, sequence by sequence, with torch's own attention."""
    model = model_of()
    long = [x for x in sequences_of(lengths) if len(x) > 1]
    each = [torch.nn.functional.cross_entropy(model(x[None])[0, :-1], x[1:], reduction="sum") for x in long]
    loss = torch.stack(each).sum() / sum(len(x) - 1 for x in long)
    loss.backward()
    return loss.item(), gradients_of(model)


def step(ring: Ring, assignment: Assignment, schedule: str = "ring") -> tuple[float, Gradients]:
    """Return the loss of all sequences and its gradients on every rank, summed over the micro-batches."""
    model, sequences = model_of(), sequences_of(assignment.lengths)
    count = sum(max(0, n - 1) for n in assignment.lengths)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(assignment.micro_batches)):
        context = GroupedContext.of(ring, assignment, number, block="naive", schedule=schedule)
        tokens = torch.cat([sequences[i] for i in assignment.sequences(number)])[None]
        mine = assignment.packing(number).shard(context.layout, ring.rank, tokens=tokens, labels=tokens)
        share = loss_share(model(mine["tokens"], context), mine["labels"], count)
        share.backward()
        total += share.detach()
    sum_gradients(model, ring)
    return float(summed(total, ring)), gradients_of(model)


def counted(assignment: Assignment) -> int:
    """Return the number of counted labels in the shards of all ranks."""
    found = 0
    for number in range(len(assignment.micro_batches)):
        packing, layout = assignment.packing(number), assignment.layout(number)
        tokens = torch.zeros(1, packing.length, dtype=torch.long)
        parts = [packing.shard(layout, rank, labels=tokens)["labels"] for rank in range(assignment.P)]
        found += sum(int((part != IGNORE).sum()) for part in parts)
    return found
