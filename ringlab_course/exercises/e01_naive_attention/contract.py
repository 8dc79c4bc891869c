"""Exercise 01: attention in NumPy. Softmax, the causal mask by position, attention, grouped heads."""

from __future__ import annotations

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e01_naive_attention import checks

SOFTMAX = Stage(
    id="01.softmax",
    function="softmax",
    title="softmax that cannot overflow",
    hints=(
        "What is exp(1000) in float32? Which number could you subtract from every score of a row without changing its weights?",
        "Subtract each row's own maximum before exp, and add it to lse again. What is that maximum in a row of -inf?",
        "$m = \\max_j s_j$ (0 if $-\\infty$), $w_j = e^{s_j-m} / \\sum_i e^{s_i-m}$, $\\mathrm{lse} = m + \\ln\\sum_i e^{s_i-m}$",
    ),
    misconceptions=misconceptions_of("01.softmax"),
    checks=(
        Check("small", 2, "visible", "weights and lse of a few scores", checks.check_softmax_small),
        Check(
            "large", 2, "visible", "scores near ±1000 neither overflow nor vanish", checks.check_softmax_large
        ),
        Check("spread", 2, "visible", "rows whose scores lie far apart", checks.check_softmax_spread),
        Check(
            "masked", 2, "visible", "a row that sees no key: weights 0, lse -inf", checks.check_softmax_masked
        ),
        Check("mixed", 2, "held-out", "many shapes, large scores, masked rows", checks.check_softmax_mixed),
    ),
)

CAUSAL = Stage(
    id="01.causal",
    function="causal_mask",
    title="the causal mask, by position",
    hints=(
        "May a token see itself? May it see a token that comes after it in the text?",
        "Compare positions, not indices: turn one of the two vectors into a column and let NumPy broadcast.",
        "$\\mathrm{mask}_{ij} = [\\,0 \\le \\mathrm{query}_i - \\mathrm{key}_j < \\mathrm{window}\\,]$; without a window, no upper bound",
    ),
    misconceptions=misconceptions_of("01.causal"),
    checks=(
        Check(
            "origin",
            1,
            "visible",
            "queries and keys in order, from the same position on",
            checks.check_mask_origin,
        ),
        Check("positions", 2, "visible", "keys from elsewhere in the text", checks.check_mask_positions),
        Check("window", 2, "visible", "a window: no key ahead, none too far back", checks.check_mask_window),
        Check("any", 1, "held-out", "any positions, in any order", checks.check_mask_any),
    ),
)

ATTENTION = Stage(
    id="01.attention",
    function="attention",
    title="attention with any mask",
    helpers=("softmax",),
    hints=(
        "Which numbers must a mask change so that a hidden key gets weight exactly 0 and the others still add up to 1?",
        "Set the scores of hidden pairs to -inf before softmax. Your own softmax does the rest, also for a row that sees no key.",
        "$s = qk^\\top/\\sqrt D$, capped if asked$,\\quad s_{ij} = -\\infty$ where hidden$,\\quad \\mathrm{out} = \\mathrm{softmax}(s)\\,v$",
    ),
    misconceptions=misconceptions_of("01.attention"),
    checks=(
        Check("small", 2, "visible", "one head, a few tokens", checks.check_attention_small),
        Check("heads", 1, "visible", "batch and heads stay apart", checks.check_attention_heads),
        Check(
            "mask",
            2,
            "visible",
            "hidden keys get no weight, the rest add up to 1",
            checks.check_attention_mask,
        ),
        Check(
            "blind", 2, "visible", "a query that sees no key: out 0, lse -inf", checks.check_attention_blind
        ),
        Check("cap", 2, "visible", "capped scores, before hiding", checks.check_attention_cap),
        Check("sharp", 1, "stress", "large scores", checks.check_attention_sharp),
        Check("any", 2, "held-out", "unequal lengths, a mask per batch entry", checks.check_attention_any),
    ),
)

GROUPED = Stage(
    id="01.grouped",
    function="grouped_attention",
    title="grouped heads (GQA)",
    helpers=("attention", "softmax"),
    hints=(
        "With 4 query heads and 2 key/value heads: which query heads share key/value head 0?",
        "Neighbours share: heads 0 and 1 use K/V head 0, heads 2 and 3 use K/V head 1. Instead of repeating k and v, give q two axes "
        "for its heads, (K, H/K).",
        "query head $h$ uses key/value head $\\lfloor h / (H/K) \\rfloor$",
    ),
    misconceptions=misconceptions_of("01.grouped"),
    checks=(
        Check("pairs", 2, "visible", "4 query heads share 2 key/value heads", checks.check_grouped_pairs),
        Check(
            "extremes",
            1,
            "visible",
            "K = H is plain attention, K = 1 is multi-query",
            checks.check_grouped_extremes,
        ),
        Check("mask", 1, "visible", "the mask reaches every head", checks.check_grouped_mask),
        Check(
            "memory",
            2,
            "visible",
            "k and v are not copied for every query head",
            checks.check_grouped_memory,
            kind="cost",
        ),
        Check("any", 2, "held-out", "other numbers of heads, batches and masks", checks.check_grouped_any),
    ),
)

EXERCISE = Exercise(
    "01",
    "01_naive_attention",
    "Attention in NumPy",
    (SOFTMAX, CAUSAL, ATTENTION, GROUPED),
    without=("torch", "jax", "scipy"),
)
