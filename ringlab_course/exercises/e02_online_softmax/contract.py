"""Exercise 02: merge two partial results, update a streaming softmax, stream attention over blocks of keys."""

from __future__ import annotations

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.exercises.e02_online_softmax import checks, mistakes

MERGE = Stage(
    id="02.merge",
    function="merge",
    title="merge any number of partial results",
    hints=(
        "Which part should count more: the one with more keys, or the one with the larger sum of exponentials?",
        "Build the common lse with torch.logsumexp over the parts and weigh each out by e^(its own lse - the common lse). Ask what "
        "-inf - (-inf) is, and for which rows it happens.",
        "$L = \\ln \\sum_i e^{L_i},\\quad o = \\sum_i o_i e^{L_i - L}$, and $(0, -\\infty)$ where $L = -\\infty$",
    ),
    misconceptions=mistakes.MERGE,
    checks=(
        Check("worked", 2, "visible", "the example on paper: 24.205", checks.check_worked),
        Check("cut", 2, "visible", "cut anywhere, merged: the softmax of the whole", checks.check_cut),
        Check(
            "empty",
            2,
            "visible",
            "a part that has seen no key changes nothing; such parts alone, or no part, give (0, -inf)",
            checks.check_empty,
        ),
        Check("large", 1, "visible", "lse of ±1000 neither overflows nor vanishes", checks.check_large),
        Check(
            "state",
            1,
            "visible",
            "the state is float32 at least, and float64 for float64",
            checks.check_state,
        ),
        Check("order", 1, "stress", "three parts, in any grouping and order", checks.check_order),
        Check("many", 2, "held-out", "many parts, some without keys", checks.check_many),
    ),
)

UPDATE = Stage(
    id="02.update",
    function="update",
    title="one step of a streaming softmax",
    hints=(
        "total and acc are sums of e^(s - m). What happens to them when m becomes larger?",
        "New maximum first. Then one factor for everything old, and the new block's terms against the new maximum.",
        "$m' = \\max(m, \\max_j s_j),\\ \\ell' = \\ell e^{m-m'} + \\sum_j e^{s_j-m'},\\ a' = a e^{m-m'} + \\sum_j e^{s_j-m'} v_j$",
    ),
    misconceptions=mistakes.UPDATE,
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
        "Slicing past the end of a tensor stops by itself.",
        "$(m, \\ell, a) = (-\\infty, 0, 0) \\to \\dots,\\quad \\mathrm{out} = a/\\ell,\\quad \\mathrm{lse} = m + \\ln \\ell$",
    ),
    misconceptions=mistakes.STREAM,
    checks=(
        Check("small", 2, "visible", "out and lse, whatever the block", checks.check_stream_small),
        Check("ragged", 1, "visible", "a last block that is shorter", checks.check_stream_ragged),
        Check(
            "memory", 2, "visible", "one block of scores at a time", checks.check_stream_memory, kind="cost"
        ),
        Check("bf16", 2, "visible", "bfloat16 in, float32 state", checks.check_stream_bf16),
        Check("sharp", 1, "stress", "large scores", checks.check_stream_sharp),
        Check("any", 2, "held-out", "other lengths and blocks", checks.check_stream_any),
    ),
)

EXERCISE = Exercise("02", "02_online_softmax", "Merge and stream", (MERGE, UPDATE, STREAM))
