"""Ring attention under any mask: against the oracle, document by document, and by what hidden tokens can move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, contiguous, ring_attention, zigzag
from ringlab.comm.ring import Ring
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.errors import RinglabError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.schedules import available, get_schedule
from tests.laws.draw import SEEDS, Shape, refute, tensors
from tests.laws.test_mask_laws import problems
from tests.philox import factors

Whole = tuple[Tensor, ...]
Attention = Callable[[Whole, Layout, Mask, "Way"], Results]


@dataclass(frozen=True)
class Way:
    """How it is computed, and what becomes of scores."""

    block: str = "naive"
    schedule: str = "ring"
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | None = None


WAYS = st.builds(
    Way,
    st.sampled_from(["naive", "blockwise"]),
    st.sampled_from(available()),
    st.sampled_from([None, 0.8]),
    st.sampled_from([0.0, 0.4]),
    SEEDS,
)


def program(ring: Ring, whole: Whole, layout: Layout, mask: Mask, way: Way) -> Whole:
    *qkv, dout = layout.shard(whole, ring.rank)
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out, lse = ring_attention(q, k, v, ring=ring, layout=layout, mask=mask, return_lse=True, **vars(way))
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)


def attend(whole: Whole, layout: Layout, mask: Mask, way: Way) -> Results:
    try:
        get_schedule(way.schedule).check(whole[0].shape[1], whole[1].shape[1], layout.P)
    except RinglabError:  # heads that cannot be shared, ranks that do not factor
        way = replace(way, schedule="ring")
    shards = VirtualCluster(layout.P, memory=False).run(program, whole, layout, mask, way).results
    out, lse, *gradients = zip(*shards, strict=True)
    return Results(layout.unshard(out), layout.unshard(lse, dim=-1), *map(layout.unshard, gradients))


def law_equals_the_oracle(attend: Attention, whole: Whole, layout: Layout, mask: Mask, way: Way) -> None:
    B, H, S, _ = whole[0].shape
    drawn = factors(B, H, S, way.dropout, way.seed or 0) if way.dropout else None
    how: dict[str, Any] = {"mask": mask, "softcap": way.softcap, "factors": drawn}
    true = truth(*whole, **how)
    allowed, measured = bounds(*whole, **how, true=true), errors(attend(whole, layout, mask, way), true)
    for name in NAMES:
        assert measured[name] <= allowed[name], (name, measured[name], allowed[name])


def law_documents_are_alone(attend: Attention, whole: Whole, layout: Layout, mask: Mask, way: Way) -> None:
    """Packed, each document has the results that it has on one process by itself."""
    packed = attend(whole, layout, mask, replace(way, dropout=0.0))
    for number, (start, stop) in enumerate(pairwise(mask.bounds.tolist())):
        if start == stop:
            continue
        alone = replace(mask, documents=(), prefix=mask.prefixes[number])
        own = tuple(x[..., start:stop, :] for x in whole)
        single = attend(own, contiguous(stop - start, 1), alone, replace(way, dropout=0.0))
        for name in NAMES:
            part = getattr(packed, name)
            part = part[..., start:stop] if name == "lse" else part[..., start:stop, :]
            assert torch.allclose(part, getattr(single, name), rtol=1e-11, atol=1e-12), name


def law_hidden_tokens_move_nothing(
    attend: Attention, whole: Whole, layout: Layout, mask: Mask, way: Way
) -> None:
    """Change token j: the rows that do not see it keep their bits, those that do have another lse."""
    j = layout.S // 2
    moved = tuple(x.clone() for x in whole)
    for x in moved[1:3]:
        x[..., j, :] += 1.0
    before, after = attend(whole, layout, mask, way), attend(moved, layout, mask, way)
    sees = torch.from_numpy(mask.visible(np.arange(layout.S), np.array([j]))[:, 0])
    assert torch.equal(before.out[..., ~sees, :], after.out[..., ~sees, :])
    assert torch.equal(before.lse[..., ~sees], after.lse[..., ~sees])
    assert (before.lse[..., sees] != after.lse[..., sees]).all()


LAWS = (law_equals_the_oracle, law_documents_are_alone, law_hidden_tokens_move_nothing)


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=15)
@given(
    problem=problems().filter(lambda problem: problem[0].S > 0),
    K=st.integers(1, 2),
    group=st.integers(1, 3),
    D=st.sampled_from([2, 8]),
    seed=SEEDS,
    way=WAYS,
)
def test_masked_attention(
    law: Callable[..., None], problem: tuple[Layout, Mask], K: int, group: int, D: int, seed: int, way: Way
) -> None:
    layout, mask = problem
    law(attend, tensors(Shape(2, K * group, K, layout.S, layout.S, D), seed), layout, mask, way)


# Mutants: the right attention under a mask that is a little wrong.

MASK = Mask(window=5, prefix=(2, 0, 3), documents=(7, 12, 5))
PROBLEM = tensors(Shape(1, 4, 2, 24, 24, 8), 1)
EXAMPLES = [
    (PROBLEM, layout, mask, Way(seed=3))
    for layout in (contiguous(24, 3), zigzag(24, 3))
    for mask in (MASK, replace(MASK, prefix=0), replace(MASK, window=None))
]


def under(change: Callable[[Mask], Mask]) -> Attention:
    return lambda whole, layout, mask, way: attend(whole, layout, change(mask), way)


WRONG: dict[str, Callable[[Mask], Mask]] = {
    "no documents": lambda mask: replace(mask, documents=(), prefix=0),
    "no window": lambda mask: replace(mask, window=None),
    "a key more": lambda mask: replace(mask, window=mask.window and mask.window + 1),
    "a key less": lambda mask: replace(mask, window=mask.window and mask.window - 1),
    "no prefix": lambda mask: replace(mask, prefix=0),
    "a document's end moved": lambda mask: replace(mask, documents=(7, 11, 6)),
    "both ways": lambda mask: replace(mask, causal=False, prefix=0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_oracle_notices(wrong: str) -> None:
    refute(law_equals_the_oracle, attend, under(WRONG[wrong]), EXAMPLES)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (law_documents_are_alone, "no documents"),
        (law_documents_are_alone, "a document's end moved"),
        (law_hidden_tokens_move_nothing, "no documents"),
        (law_hidden_tokens_move_nothing, "a key more"),
        (law_hidden_tokens_move_nothing, "both ways"),
    ],
)
def test_the_law_notices(law: Callable[..., None], wrong: str) -> None:
    """The fault is where documents are packed; alone they are attended to rightly."""
    packed = under(WRONG[wrong])

    def mutant(whole: Whole, layout: Layout, mask: Mask, way: Way) -> Results:
        return (packed if mask.documents else attend)(whole, layout, mask, way)

    refute(law, attend, mutant, EXAMPLES)
