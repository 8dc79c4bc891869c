"""The schedules of a plan's ring: bytes by hand, the choice by hardware, and mistakes that are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import ringlab.cost.planner.ring_table as module
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.parallelism import Degrees, Group
from ringlab.cost.planner.ring_table import RingTable
from ringlab.cost.planner.step_time import ring_sizes
from ringlab.cost.sizes import Attention
from tests.cost.planner_cases import failures, ideal, small_model

SPLIT = {"dp": 1, "tp": 2, "ring": 8, "ulysses": 1, "fsdp": 1, "recomputation": "full"}


def found(K: int, purpose: str = "training", **changes: object) -> RingTable:
    given = {"hardware": ideal()} | SPLIT | changes
    asked = Request(small_model(H=32, K=K), 2**16, nodes=2, purpose=purpose, **given)  # type: ignore[arg-type]
    travel = plan(asked).ring_table
    assert travel is not None
    return travel


def sent(travel: RingTable) -> dict[str, int]:
    return {it.schedule: it.sent_bytes or 0 for it in travel.options}


def check_all_heads() -> None:
    """With as many K/V heads as query heads, burst sends less than the ring.

    A rank has 16 of 32 heads and 8,192 tokens. Blocks make 7 hops and gradients 8. Burst's q, dout, lse,
    delta and dq take fewer bytes than the ring's K, V, dK and dV.
    """
    travel, tokens, head = found(32), 8192 * 16, 128
    kv = 7 * 2 * head * 2
    ring = tokens * (2 * kv + 8 * 2 * head * 4)
    burst = tokens * (kv + 7 * (2 * head * 2 + 2 * 4) + 8 * head * 4)
    assert sent(travel)["ring"] == ring and sent(travel)["burst"] == burst < ring
    assert travel.least.schedule == "burst" and travel.latent_below == 2 * 16 * head


def check_grouped_heads() -> None:
    """With 4 of 8 K/V heads on each rank, the ring sends the fewest bytes; a prompt has no gradients."""
    travel = found(8, "prefill", recomputation=None)
    assert travel.least is travel.ring and travel.ring.sent_bytes == 7 * 8192 * 2 * 4 * 128 * 2
    assert travel.latent_below == 2 * 4 * 128


def check_links() -> None:
    """On a torus, a rank sends to both neighbours at once; between nodes, a hop takes the slower link."""
    slow = replace(ideal(between=1e9), name="slow")
    travel = found(8, "prefill", hardware=slow, recomputation=None)
    torus = replace(slow, name="tpu-made-up")
    both = found(8, "prefill", hardware=torus, recomputation=None)
    assert (travel.links, both.links, travel.link) == (1, 2, "between")
    assert both.shortest.schedule != "ring" and (both.shortest.exposed_s or 0) < 0.7 * (
        travel.shortest.exposed_s or 0
    )
    hop = 8192 * 2 * 4 * 128 * 2 / 1e9
    assert 0.8 * 7 * hop < (travel.ring.exposed_s or 0) < 7 * hop


CHECKS = (check_all_heads, check_grouped_heads, check_links)


@pytest.mark.parametrize("check", CHECKS)
def test_the_table_of_a_ring(check: Callable[[], None]) -> None:
    check()


def test_nothing_is_said_without_a_ring_or_of_a_token() -> None:
    for changes in ({"ring": 1, "ulysses": 8}, {"purpose": "decode", "recomputation": None}):
        asked = Request(small_model(), 2**16, ideal(), 2, **(SPLIT | changes))  # type: ignore[arg-type]
        assert plan(asked).ring_table is None and plan(asked).as_dict()["travel"] is None


def whole_heads(request: Request, degrees: Degrees) -> Attention:
    return ring_sizes(request, replace(degrees, tp=1))


WEIGH = module.weigh_rings
MUTANTS: dict[str, tuple[str, object]] = {
    "all heads on each rank": ("ring_sizes", whole_heads),
    "links inside the node": ("group", lambda name, degrees, machine: Group(8, 8, False, machine)),
    "no backward": ("weigh_rings", lambda *a, **k: WEIGH(*a, **(k | {"training": False}))),
    "always a backward": ("weigh_rings", lambda *a, **k: WEIGH(*a, **(k | {"training": True}))),
    "one link": ("weigh_rings", lambda *a, **k: WEIGH(*a, **(k | {"links": 1}))),
    "the whole sequence on each rank": ("weigh_rings", lambda s, tokens, P, *a, **k: WEIGH(s, P * tokens, P, *a, **k)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(name: str) -> None:
    assert failures(CHECKS, (module, *MUTANTS[name])), f"nobody noticed: {name}"
