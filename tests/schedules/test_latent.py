"""Latent attention equals its definition in float64, on virtual ranks and processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, latent_attention
from ringlab.comm.ring import Ring
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.errors import AgreementError, BackendError, DtypeError, LayoutError, RinglabError, ShapeError
from ringlab.layout import contiguous, zigzag
from ringlab.mask import Mask
from tests.laws.draw import MAKERS
from tests.refusals import assert_refused
from tests.schedules.latent import Problem, beyond, program, solve

SCHEDULES = ("ring", "allgather", "double-ring(node=1)", "query-ring", "burst", "bidirectional")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    S, P = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    mask = draw(
        st.sampled_from(
            [Mask(), Mask(causal=False), Mask(window=1 + S // 3), Mask(documents=(S // 2, S - S // 2))]
        )
    )
    Dn, Dr = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = {"H": draw(st.integers(1, 3)), "B": draw(st.integers(1, 2)), "R": draw(st.integers(1, 6))}
    value = draw(st.integers(1, Dn + Dr))
    layout = draw(st.sampled_from(MAKERS))(S, P)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return Problem(
        layout, Dn=Dn, Dr=Dr, Dv=value, mask=mask, dtype=dtype, through_lse=draw(st.booleans()), **sizes
    )


@settings(max_examples=60)
@given(problems(), st.sampled_from(SCHEDULES), st.sampled_from(["naive", "blockwise", "native"]))
def test_latent_attention_is_its_definition(problem: Problem, schedule: str, block: str) -> None:
    assert not beyond(solve(problem, schedule, block), problem)


def test_triton() -> None:
    problem = Problem(zigzag(24, 2), 2, 12, 4, 8, 16, dtype=torch.bfloat16)
    assert not beyond(solve(problem, "ring", "triton"), problem)


@pytest.mark.parametrize(("schedule", "dtype"), [("ring", "bfloat16"), ("bidirectional", "float64")])
def test_the_latent_is_all_that_travels(schedule: str, dtype: str) -> None:
    problem = Problem(zigzag(23, 4), R=7, Dr=2, dtype=getattr(torch, dtype))
    trace = VirtualCluster(4, memory=False).run(program, problem, schedule).trace
    sizes = Attention(1, 3, 3, 8, dtype, Dv=5)
    for rank in range(4):
        there, back = (
            ring_traffic(sizes, problem.layout, schedule=schedule, rank=rank, backward=b, latent=7 + 2)
            for b in (False, True)
        )
        sent = [e.bytes_sent for e in trace.exchanges(rank)]
        assert (sum(sent), len(sent)) == (
            there.total_bytes + back.total_bytes,
            there.messages + back.messages,
        )


def test_memory_in_flight_is_that_of_the_latent() -> None:
    """Memory in flight is that of latents, and does not grow with the number of ranks."""
    peaks = []
    for P in (4, 8):
        problem = Problem(contiguous(32 * P, P), H=2, Dn=4, Dr=2, Dv=4, R=64, mask=Mask(causal=False))
        peaks.append(max(m.peak_bytes for m in VirtualCluster(P).run(forward_only, problem).memory))
    assert abs(peaks[1] - peaks[0]) < 32 * (64 + 2) * 8 / 4


def forward_only(ring: Ring, problem: Problem) -> None:
    own = [problem.layout.shard(x, ring.rank).clone() for x in problem.tensors()[:3]]
    latent_attention(
        *own, *problem.tensors()[3:5], ring=ring, layout=problem.layout, mask=problem.mask, block="naive"
    )


def inputs(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "q": torch.zeros(1, 2, 4, 8), "latent": torch.zeros(1, 4, 5), "k_rope": torch.zeros(1, 4, 2),
        "w_k": torch.zeros(2, 6, 5), "w_v": torch.zeros(2, 4, 5),
    }  # fmt: skip
    return given | changed


REFUSED: list[tuple[dict[str, Any], type[RinglabError], str]] = [
    ({"w_k": torch.zeros(2, 8, 5)}, ShapeError, "w_k (2, 8, 5)"),
    ({"w_v": torch.zeros(2, 4, 6)}, ShapeError, "w_v (2, 4, 6)"),
    ({"k_rope": torch.zeros(1, 2, 4, 2)}, ShapeError, "k_rope (B, L, Dr)"),
    ({"latent": None}, ShapeError, "latent NoneType"),
    ({"w_v": torch.zeros(2, 4, 5, dtype=torch.float64)}, DtypeError, "of one dtype"),
    ({"latent": torch.zeros(1, 3, 5), "k_rope": torch.zeros(1, 3, 2)}, ShapeError, "3"),
    ({"layout": 3}, LayoutError, "layout="),
    ({"schedule": "ulysses"}, BackendError, "deals heads"),
    ({"schedule": "multi-ring"}, BackendError, "deals heads"),
]


@pytest.mark.parametrize(("changed", "error", "says"), REFUSED)
def test_a_wrong_call_is_refused_on_every_rank(changed: Any, error: type[RinglabError], says: str) -> None:
    def call(ring: Ring, at_fault: bool) -> None:
        given = {"layout": zigzag(8, 2)} | inputs(**(changed if at_fault else {}))
        latent_attention(ring=ring, **given)

    assert_refused(2, call, error, says, (1,))


def test_ranks_with_other_latents_disagree() -> None:
    def of_rank(ring: Ring) -> None:
        more = 2 * ring.rank
        other = {
            "latent": torch.zeros(1, 4, 5 + more),
            "w_k": torch.zeros(2, 6, 5 + more),
            "w_v": torch.zeros(2, 4, 5 + more),
        }
        with pytest.raises(AgreementError, match=r"latent=5\+2"):
            latent_attention(ring=ring, layout=zigzag(8, 2), **inputs(**other))

    VirtualCluster(2, memory=False).run(of_rank)


def test_weights_that_change_before_backward_are_noticed() -> None:
    def of_rank(ring: Ring) -> None:
        given = inputs()
        given["w_k"] = given["w_k"].requires_grad_()
        out = latent_attention(ring=ring, layout=zigzag(4, 1), **given)
        with torch.no_grad():
            given["w_k"].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    VirtualCluster(1, memory=False).run(of_rank)
