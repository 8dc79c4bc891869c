"""The plain scan, the file to read first, gives the oracle's results: by token, by chunk, and over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.layout import contiguous
from ringlab.scan import oracle
from ringlab.scan.plain import affine_in_the_state, by_chunks, recurrence, relay
from tests.scan.problems import Problem

PROBLEMS = [
    Problem(contiguous(11, 3), kind, K=2, initial=False) for kind in ("plain", "decay", "gated-delta")
]


def inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    given = problem.inputs()
    decay = torch.zeros(1, 2, 11, dtype=torch.float64) if given.decay is None else given.decay
    return given.q, given.k, given.v, decay, given.beta


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.kind)
def test_the_plain_page_is_right(problem: Problem) -> None:
    q, k, v, decay, beta = inputs(problem)
    out, state = oracle.linear_attention(q, k, v, decay=decay, beta=beta)
    nothing, scale = torch.zeros(1, 2, 3, 2, dtype=torch.float64), 3**-0.5
    token_by_token = recurrence(q, k, v, decay, beta, nothing, scale)
    for found in (token_by_token, *(by_chunks(q, k, v, decay, beta, nothing, scale, n) for n in (1, 3, 64))):
        torch.testing.assert_close(found[0], torch.from_numpy(out), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], torch.from_numpy(state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.kind)
def test_the_plain_relay_is_right(problem: Problem) -> None:
    layout = problem.layout
    q, k, v, decay, beta = inputs(problem)

    def of_rank(ring: Ring) -> Tensor:
        tokens = layout.shard((q, k, v), ring.rank)
        gates = [None if x is None else layout.shard(x, ring.rank, dim=-1) for x in (decay, beta)]
        return relay(ring, *tokens, *gates, 3**-0.5, 2)

    out = layout.unshard(VirtualCluster(3).run(of_rank).results)
    true = oracle.linear_attention(q, k, v, decay=decay, beta=beta).out
    torch.testing.assert_close(out, torch.from_numpy(true), rtol=1e-12, atol=1e-12)


def test_a_token_is_affine_in_the_state() -> None:
    q, k, v, decay, beta = inputs(PROBLEMS[2])
    assert beta is not None
    state = torch.randn(1, 2, 3, 2, dtype=torch.float64)
    one = slice(0, 1)
    with_state, without = (
        recurrence(*(x[:, :, one] for x in (q, k, v, decay, beta)), entering, 1.0)[1]
        for entering in (state, torch.zeros_like(state))
    )
    transition = affine_in_the_state(k[0, 0, 0].float(), decay[0, 0, 0].exp().item(), beta[0, 0, 0].item())
    expected = transition.double() @ state[0, 0] + without[0, 0]
    torch.testing.assert_close(with_state[0, 0], expected, rtol=1e-5, atol=1e-6)
