"""Exercise 03: tiled attention, forward and backward, with memory linear in S."""

from __future__ import annotations

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.exercises.e03_tiled_attention.checks import (
    BACKWARD,
    FORWARD,
    Case,
    backward_skips,
    backward_values,
    forward_skips,
    forward_values,
    live_set,
    memory_exponent,
    mixed,
    on_cases,
    precision,
)
from ringlab_course.exercises.e03_tiled_attention.texts import (
    BACKWARD_HINTS,
    BACKWARD_MISTAKES,
    FORWARD_HINTS,
    FORWARD_MISTAKES,
)

FORWARD_STAGE = Stage(
    id="03.forward",
    function="tiled_forward",
    title="Attention by tiles",
    hints=FORWARD_HINTS,
    misconceptions=FORWARD_MISTAKES,
    checks=(
        Check(
            "values",
            2,
            "visible",
            "tiles merge to exact attention",
            on_cases(forward_values, Case(2, 1, 2), Case(4, 2, 2), Case(6, 2, 3), Case(9, 3, 4)),
        ),
        Check(
            "tail",
            1,
            "visible",
            "a last tile that is shorter, and a tile longer than S",
            on_cases(forward_values, Case(3, 2, 2), Case(7, 3, 2), Case(3, 8, 2)),
        ),
        Check(
            "causal",
            2,
            "visible",
            "causal: tiles skipped, full and diagonal",
            on_cases(forward_values, Case(2, 1, 2, True), Case(4, 2, 2, True), Case(7, 3, 2, True)),
        ),
        Check(
            "memory",
            2,
            "visible",
            "peak memory grows like S",
            memory_exponent(FORWARD_MISTAKES, 3),
            kind="cost",
        ),
        Check(
            "large",
            1,
            "stress",
            "large scores overflow nothing",
            on_cases(forward_values, Case(4, 2, 2, reach=900), Case(16, 4, 4, True, reach=900)),
        ),
        Check(
            "live-set",
            1,
            "stress",
            "one tile of scores at a time",
            live_set(FORWARD_MISTAKES, 3),
            kind="cost",
        ),
        Check("skips", 1, "stress", "hidden tiles are not computed", forward_skips, kind="cost"),
        Check(
            "precision",
            1,
            "stress",
            "state in float32 for bfloat16 inputs",
            precision(FORWARD_MISTAKES, FORWARD),
        ),
        Check("mixed", 1, "held-out", "batches, heads and odd sizes", mixed(forward_values)),
    ),
)

BACKWARD_STAGE = Stage(
    id="03.backward",
    function="tiled_backward",
    title="The backward from lse and delta",
    hints=BACKWARD_HINTS,
    misconceptions=BACKWARD_MISTAKES,
    checks=(
        Check(
            "values",
            3,
            "visible",
            "dQ, dK and dV are exact",
            on_cases(backward_values, Case(2, 1, 2), Case(4, 2, 2), Case(6, 2, 3), Case(9, 3, 4)),
        ),
        Check(
            "tail",
            1,
            "visible",
            "a last tile that is shorter, and a tile longer than S",
            on_cases(backward_values, Case(3, 2, 2), Case(7, 3, 2), Case(3, 8, 2)),
        ),
        Check(
            "causal",
            2,
            "visible",
            "causal: tiles skipped, full and diagonal",
            on_cases(backward_values, Case(2, 1, 2, True), Case(4, 2, 2, True), Case(7, 3, 2, True)),
        ),
        Check(
            "memory",
            2,
            "visible",
            "peak memory grows like S",
            memory_exponent(BACKWARD_MISTAKES, 4),
            kind="cost",
        ),
        Check("live-set", 1, "stress", "a few tiles at a time", live_set(BACKWARD_MISTAKES, 4), kind="cost"),
        Check("skips", 1, "stress", "hidden tiles are not computed", backward_skips, kind="cost"),
        Check(
            "precision",
            1,
            "stress",
            "gradients gathered in float32 for bfloat16 inputs",
            precision(BACKWARD_MISTAKES, BACKWARD),
        ),
        Check("mixed", 1, "held-out", "batches, heads and odd sizes", mixed(backward_values)),
    ),
)

EXERCISE = Exercise(
    id="03",
    slug="03_tiled_attention",
    title="Tiled attention, forward and backward",
    stages=(FORWARD_STAGE, BACKWARD_STAGE),
    may_use=(
        *("ringlab.merge", "ringlab.scores"),
        *("ringlab.blocks.__init__", "ringlab.blocks.naive", "ringlab.blocks.protocol"),
    ),
)
