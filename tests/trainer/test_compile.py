"""A compiled model over a ring gives the same bits, and graphs that end before each call of attention."""

from __future__ import annotations

import pytest
import torch

from ringlab import launch
from tests.trainer.compiled import Compiled, steps

pytestmark = pytest.mark.thorough

P = 2


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Compiled]]:
    return launch(steps, P, memory=False, timeout=300.0).results


@pytest.mark.parametrize("way", ["validate", "not validated"])
def test_the_same_bits(way: str, ranks: list[dict[str, Compiled]]) -> None:
    for of in ranks:
        found, plain = of[way], of["plain"]
        assert found.loss == plain.loss
        assert found.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(x, plain.gradients[name]) for name, x in found.gradients.items())


def few(found: Compiled) -> bool:
    """Return whether there is one graph before attention and one after, and only attention ended a graph."""
    return found.graphs == 2 and len(found.breaks) == 1 and "_attend" in found.breaks[0]


@pytest.mark.parametrize("way", ["validate", "not validated", "a call"])
def test_torch_does_not_trace_into_the_ring(way: str, ranks: list[dict[str, Compiled]]) -> None:
    assert [few(of[way]) for of in ranks] == [True] * P


def test_that_is_noticed(ranks: list[dict[str, Compiled]]) -> None:
    """A mutant attention that torch may trace is noticed, as graphs then have pieces of the communication."""
    assert [few(of["traced into"]) for of in ranks] == [False] * P
    assert all(of["traced into"].loss == of["a call"].loss for of in ranks)
