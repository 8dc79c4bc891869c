"""Exercise 17 with bfloat16 inputs: the values that are rounded, and the dtype of each message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.checking.reports import run_in_process
from ringlab_course.exercises.e17_ring_in_jax.cases import roundings
from tests.course.submissions_of import submission
from tests.course.test_exercise_17 import EXERCISE, SEEDS

pytestmark = pytest.mark.thorough

_SHIFTED = "dq, k, v, dk, dv = carry[0], *shift(*carry[1:])"


LOOP = (
    "    (dq, _, _, dk, dv), _ = lax.scan(body, (dq, k, v, dk, dv), jnp.arange(1, len(positions)))",
    "    turn = lambda held: (held[0] + 1, body(held[1], held[0])[0])\n"
    "    _, (dq, _, _, dk, dv) = lax.while_loop(lambda held: held[0] < len(positions), turn, (1, (dq, k, v, dk, dv)))",
)
NARROW = (
    _SHIFTED,
    "dq = carry[0]; k, v, dk, dv = shift(*carry[1:3], *(x.astype(q.dtype) for x in carry[3:])); "
    "dk, dv = dk.astype(jnp.float32), dv.astype(jnp.float32)",
)
STRAY = {
    "couriers in float16": (_SHIFTED, "dq, k, v, dk = carry[0], *shift(*carry[1:4]); dv = shift(carry[4].astype(jnp.float16))[0].astype(jnp.float32)"),
    "blocks in float8": (_SHIFTED, "dq = carry[0]; k, v = (shift(x.astype(jnp.float8_e4m3fn))[0].astype(x.dtype) for x in carry[1:3]); dk, dv = shift(*carry[3:])"),
}  # fmt: skip


def of_the_check(stage, name, *edits):
    """Return the report of one check on the plain right answer with these edits."""
    source = submission("17/right_plain").source
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    space = {"__name__": "plain"}
    exec(source, space)
    whole = EXERCISE.stage(stage)
    alone = replace(whole, checks=(replace(whole.check(name), tier="visible", kind="correctness"),))
    (check,) = run_in_process(alone, space).checks
    return check


@pytest.mark.needs_jax
def test_types_are_counted_in_a_while_loop_too():
    assert of_the_check("17.couriers", "wire", LOOP).ok
    check = of_the_check("17.couriers", "wire", LOOP, NARROW)
    assert not check.ok and check.misconception == "narrow_couriers", check


@pytest.mark.needs_jax
@pytest.mark.parametrize("name", STRAY)
def test_nothing_travels_in_a_third_type(name):
    check = of_the_check("17.couriers", "wire", STRAY[name])
    assert not check.ok and "neither that of q, k and v nor float32" in check.message, check


@pytest.mark.needs_jax
def test_what_nobody_uses_is_not_on_the_wire():
    """A last hop of K and V whose result nobody uses is not on the wire, because the compiler removes it."""
    dead = "(dq, *shift(dk, dv))", "(dq, *shift(k, v, dk, dv)[2:])"
    assert of_the_check("17.couriers", "wire", dead).ok


@pytest.mark.needs_jax
def test_an_answer_for_float32_alone_is_none():
    zeros = (
        "return tuple(x.astype(q.dtype) for x",
        "return tuple(x.astype(q.dtype) * (q.dtype == jnp.float32) for x",
    )
    assert not of_the_check("17.couriers", "bfloat16", zeros).ok
    state = (
        "jnp.arange(1, len(positions)))\n    return state",
        ("jnp.arange(1, len(positions)))\n    return tuple(x * (q.dtype == jnp.float32) for x in state)"),
    )
    assert not of_the_check("17.forward", "bfloat16", state).ok


@given(SEEDS, st.floats(-20, 20))
def test_one_rounding_at_the_end_is_one_and_at_every_stop_it_is_more(seed, exponent):
    rng = np.random.default_rng(seed)
    terms = rng.standard_normal((8, 200)) * 2.0**exponent
    exact = 8 * np.finfo(np.float32).eps
    once = torch.from_numpy(terms.astype(np.float32)).sum(0).bfloat16().float().numpy()
    assert roundings(once, terms.sum(0), exact) <= 1
    often = torch.zeros(200)
    for term in terms:
        often = (often + torch.from_numpy(term.astype(np.float32))).bfloat16().float()
    assert roundings(often.numpy(), terms.sum(0), exact) > 2
