"""Exercise 02: merge two partial results, update a streaming softmax, stream attention over blocks of keys."""

from __future__ import annotations

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e02_online_softmax import checks

MERGE = Stage(
    id="02.merge",
    function="merge",
    title="merge any number of partial results",
    hints=(
        "Which part should count more: the one with more keys, or the one with the larger sum of exponentials?",
        "Build the common lse with torch.logsumexp over the parts. The weight of each out is e^(its own lse - the common lse). What "
        "is -inf - (-inf), and for which rows does it occur?",
        "$\\mathrm{lse} = \\ln \\sum_i e^{\\mathrm{lse}_i},\\quad \\mathrm{out} = \\sum_i \\mathrm{out}_i e^{\\mathrm{lse}_i - "
        "\\mathrm{lse}}$, and $(0, -\\infty)$ where $\\mathrm{lse} = -\\infty$",
    ),
    misconceptions=misconceptions_of("02.merge"),
    checks=(
        Check(
            "worked",
            2,
            "visible",
            "the example on paper: 24.205; and three parts of two rows",
            checks.check_worked,
        ),
        Check("cut", 2, "visible", "cut anywhere and merged: the softmax of the whole", checks.check_cut),
        Check(
            "empty",
            2,
            "visible",
            "a part that has seen no key changes nothing; such parts alone, or no part, give (0, -inf)",
            checks.check_empty,
        ),
        Check("large", 1, "visible", "an lse near ±1000 neither overflows nor vanishes", checks.check_large),
        Check(
            "state",
            1,
            "visible",
            "the result is float32 at least, and float64 for float64",
            checks.check_state,
        ),
        Check("order", 1, "stress", "three parts, in any grouping and order", checks.check_order),
        Check("many", 2, "held-out", "many parts, some without keys", checks.check_many),
    ),
)

UPDATE = Stage(
    id="02.update",
    function="update",
    may_change=("maximum", "total", "acc"),
    title="one step of a streaming softmax",
    hints=(
        "total and acc are sums of e^(s - m). What happens to them when m becomes larger?",
        "Find the new maximum first. Then one factor corrects everything old, and the new block's terms are measured against the new "
        "maximum.",
        "$m' = \\max(m, \\max_j s_j),\\ \\mathrm{total}' = \\mathrm{total}\\, e^{m-m'} + \\sum_j e^{s_j-m'},\\ "
        "\\mathrm{acc}' = \\mathrm{acc}\\, e^{m-m'} + \\sum_j e^{s_j-m'} v_j$",
    ),
    misconceptions=misconceptions_of("02.update"),
    checks=(
        Check("first", 1, "visible", "the first block", checks.check_first),
        Check("rise", 2, "visible", "the maximum rises: what is old shrinks", checks.check_rise),
        Check("fall", 1, "visible", "the maximum stays: what is old stays", checks.check_fall),
        Check("hidden", 2, "visible", "a row that has seen no key yet", checks.check_hidden),
        Check("blocks", 2, "held-out", "many blocks, large scores, hidden keys", checks.check_blocks),
    ),
)

STREAM = Stage(
    id="02.stream",
    function="streaming_attention",
    title="attention, one block of keys at a time",
    helpers=("merge", "update"),
    hints=(
        "What must be known about the blocks seen so far, and what may be forgotten?",
        "Start from the state that has seen nothing, loop over blocks with update (or merge), divide once at the end. "
        "A slice past the end of a tensor stops at the end.",
        "$(m, \\mathrm{total}, \\mathrm{acc}) = (-\\infty, 0, 0) \\to \\dots,\\quad \\mathrm{out} = "
        "\\mathrm{acc}/\\mathrm{total},\\quad \\mathrm{lse} = m + \\ln \\mathrm{total}$",
    ),
    misconceptions=misconceptions_of("02.stream"),
    checks=(
        Check("small", 2, "visible", "out and lse, whatever the block", checks.check_stream_small),
        Check("ragged", 1, "visible", "a last block that is shorter", checks.check_stream_ragged),
        Check("bf16", 2, "visible", "bfloat16 in, float32 state", checks.check_stream_bf16),
        Check(
            "memory",
            2,
            "visible",
            "what you hold does not grow with the number of keys",
            checks.check_stream_memory,
            kind="cost",
        ),
        Check("sharp", 1, "stress", "large scores", checks.check_stream_sharp),
        Check("any", 2, "held-out", "other lengths and blocks", checks.check_stream_any),
    ),
)

EXERCISE = Exercise("02", "02_online_softmax", "Merge and stream", (MERGE, UPDATE, STREAM))
