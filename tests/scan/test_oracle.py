"""The oracle of linear attention gives the results of known cases, and gradients equal to finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlab.layout import contiguous
from ringlab.scan import oracle
from tests.scan.problems import Problem

KINDS = ("plain", "decay", "delta", "gated-delta")
LEAVES = ("q", "k", "v", "decay", "beta", "initial_state")


def arrays(problem: Problem) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arguments of the oracle that have gradients, and the other arguments."""
    given = problem.inputs()
    named = dict(zip(LEAVES, given.leaves, strict=True))
    return {name: x.numpy() for name, x in named.items() if x is not None}, {"documents": given.documents}


def loss(arguments: dict[str, np.ndarray], other: dict[str, Any], problem: Problem) -> float:
    given = problem.inputs()
    found = oracle.linear_attention(**arguments, **other)
    return float((found.out * given.dout.numpy()).sum() + (found.state * given.dstate.numpy()).sum())


def law_gradients_are_differences(problem: Problem) -> None:
    """The loss changes along random directions as the gradient says, up to errors of central differences."""
    arguments, other = arrays(problem)
    given = problem.inputs()
    found = oracle.gradients(**arguments, **other, dout=given.dout, dstate=given.dstate)
    draw = np.random.default_rng(1).standard_normal
    for name, gradient in zip(LEAVES, found, strict=True):
        if name not in arguments:
            continue
        direction, step = draw(gradient.shape), 1e-5
        there, back = (
            loss(arguments | {name: arguments[name] + sign * step * direction}, other, problem)
            for sign in (1, -1)
        )
        measured, expected = (there - back) / (2 * step), float((gradient * direction).sum())
        # The third derivative adds an error of the order of step², and the loss's rounding is divided by the
        # step.
        assert abs(measured - expected) <= 1e-7 * (1 + np.abs(gradient * direction).sum()), name


@pytest.mark.parametrize("documents", [(), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, documents: tuple[int, ...]) -> None:
    law_gradients_are_differences(Problem(contiguous(7, 1), kind, documents))


def test_plain_is_a_product_of_matrices() -> None:
    arguments, _ = arrays(Problem(contiguous(6, 1), "plain", initial=False))
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    scores = np.tril(q @ k.swapaxes(-1, -2)) * 3**-0.5
    np.testing.assert_allclose(oracle.linear_attention(q, k, v).out, scores @ v, atol=1e-14)


def test_the_delta_rule_is_its_product_of_transitions() -> None:
    """The delta rule is S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, as in the paper."""
    arguments, _ = arrays(Problem(contiguous(5, 1)))
    state = arguments["initial_state"][0, 1]
    for t in range(5):
        k, v = arguments["k"][0, 0, t], arguments["v"][0, 1, t]
        alpha, beta = np.exp(arguments["decay"][0, 1, t]), arguments["beta"][0, 1, t]
        state = alpha * (np.eye(3) - beta * np.outer(k, k)) @ state + beta * np.outer(k, v)
    np.testing.assert_allclose(oracle.linear_attention(**arguments).state[0, 1], state, atol=1e-14)


def test_packed_documents_are_alone() -> None:
    problem = Problem(contiguous(9, 1), documents=(4, 5))
    arguments, other = arrays(problem)
    packed = oracle.linear_attention(**arguments, **other)
    initial = arguments.pop("initial_state")
    parts = [{name: x[:, :, rows] for name, x in arguments.items()} for rows in (slice(4), slice(4, None))]
    first, second = (
        oracle.linear_attention(**parts[0], initial_state=initial),
        oracle.linear_attention(**parts[1]),
    )
    np.testing.assert_array_equal(packed.out, np.concatenate([first.out, second.out], axis=2))
    np.testing.assert_array_equal(packed.state, second.state)
