"""Exercise 10: measure an error, fold in float32, choose a tolerance, find the precision bug from error curves."""

from __future__ import annotations

from ringlab_course.checking.contract import ATTENTION, Check, Exercise, Stage
from ringlab_course.exercises.e10_numerics import accept, checks, diagnose, mistakes

ERROR = Stage(
    id="10.error",
    function="relative_error",
    title="How far off is a result?",
    hints=(
        "A result is 1 % too large in every entry. What should its error be? And if you measure in millimetres instead of metres?",
        "Convert both to float64 first. Before you subtract, handle the cases that need no arithmetic: another shape, a NaN, an "
        "infinity that the truth does not have. Where both are the same infinity, nothing is wrong.",
        "$\\lVert x - t \\rVert_2 \\,/\\, \\lVert t \\rVert_2$, and $\\lVert x \\rVert_2$ for $t = 0$",
    ),
    misconceptions=mistakes.ERROR,
    checks=(
        Check("worked", 2, "visible", "two and three numbers, to follow on paper", checks.check_worked),
        Check("scale", 1, "visible", "the same numbers in another unit", checks.check_scale),
        Check("narrow", 1, "visible", "x in bfloat16 and float16", checks.check_narrow),
        Check("zero", 1, "visible", "zeros in the truth, and nothing but zeros", checks.check_zero),
        Check("not_finite", 1, "visible", "a NaN or an infinity is infinitely wrong", checks.check_not_finite),
        Check("empty_rows", 1, "visible", "lse −inf where the truth says −inf", checks.check_empty_rows),
        Check("shape", 1, "visible", "x of another shape", checks.check_shape),
        Check("any", 1, "held-out", "all sorts of numbers", checks.check_any_error),
    ),
)  # fmt: skip

FOLD = Stage(
    id="10.fold",
    function="fold",
    title="Fold many parts into a float32 state",
    hints=(
        "The parts come in bfloat16. In which dtype is the sum of the first two? And the sum of the first hundred?",
        "Loop over the parts in their order: convert a part, merge it into (out, lse) with logaddexp, go on. Nothing may depend on "
        "later parts, and nothing but (out, lse) may be carried from one part to the next.",
        "$L' = \\mathrm{logaddexp}(L, L_i),\\quad o' = o\\,e^{L - L'} + o_i\\,e^{L_i - L'}$, and weight 0 where $L = -\\infty$",
    ),
    misconceptions=mistakes.FOLD,
    checks=(
        Check("worked", 1, "visible", "one part into one row, and no part at all", checks.check_fold_worked),
        Check("parts", 2, "visible", "several parts, into a state", checks.check_parts),
        Check("empty", 1, "visible", "rows that have seen no key, in the state or in a part", checks.check_fold_empty),
        Check("bf16", 2, "visible", "many bfloat16 parts, a float32 state", checks.check_fold_bf16),
        Check("resumable", 2, "visible", "two batches give the same bits as one", checks.check_resumable),
        Check("large", 1, "visible", "lse of ±1000", checks.check_fold_large),
        Check("any", 1, "held-out", "many parts, rising and falling, some empty", checks.check_any_fold),
    ),
)  # fmt: skip

ACCEPT = Stage(
    id="10.accept",
    function="accept",
    title="Choose a tolerance: accept what is honest, reject what is wrong",
    helpers=("relative_error",),
    hints=(
        "How far off is an implementation without a mistake, in this dtype, on these very inputs? How could you find out?",
        "Write the plainest attention in the dtype of q and measure its error against the oracle. Allow a small multiple of it.",
        "$\\varepsilon(\\mathrm{out}) \\le \\max\\left(2\\,\\varepsilon(\\mathrm{plainest}),\\ \\mathrm{eps}\\right)$",
    ),
    misconceptions=accept.ACCEPT,
    checks=(
        Check("float32", 2, "visible", "float32 inputs: bfloat16 on the way is a fault", accept.check_float32),
        Check("bf16", 2, "visible", "bfloat16 inputs: there it is no fault", accept.check_bf16),
        Check("units", 1, "visible", "v a thousand times smaller, or larger", accept.check_units),
        Check("not_finite", 1, "visible", "a NaN or an infinity is never right", accept.check_nan),
        Check("luck", 1, "visible", "inputs on which the plainest is right by luck", accept.check_luck),
        Check("scores", 2, "visible", "large scores, and scores that rise", accept.check_scores),
        Check("any", 1, "held-out", "other lengths, dtypes and sizes", accept.check_any),
    ),
)  # fmt: skip

DIAGNOSE = Stage(
    id="10.diagnose",
    function="diagnose",
    title="Name the precision bug from error curves",
    hints=(
        "With one block there is nothing to merge. Where is a fault that shows there already? And one that shows only from two blocks on?",
        "Ask in this order: Is something not finite? Do two runs differ? Is something off by tens of percent? Otherwise it is rounding. "
        "Does the error grow with P, fall or stay? And is it as low as one rounding, on large scores too?",
        "$\\varepsilon_P / \\varepsilon_1$ on plain inputs: about 1 flat, below 1 inside the block, above 1 between blocks; out grows like "
        "$\\sqrt{P/2}$ times one rounding, lse by a factor of three more",
    ),
    misconceptions=diagnose.DIAGNOSE,
    checks=(
        Check("merges", 2, "visible", "sound, or rounded between blocks", diagnose.check_merges),
        Check("blocks", 2, "visible", "rounded inside the blocks, or before", diagnose.check_blocks),
        Check("other", 2, "visible", "faults other than rounding", diagnose.check_no_rounding),
        Check("ranks", 1, "stress", "measured at other P", diagnose.check_ranks),
        Check("any", 2, "held-out", "fresh curves of every fault", diagnose.check_any),
    ),
)  # fmt: skip

EXERCISE = Exercise(
    id="10",
    slug="10_numerics",
    title="Numerics",
    stages=(ERROR, FOLD, ACCEPT, DIAGNOSE),
    may_use=(
        *("ringlab.oracle", "ringlab.merge", "ringlab.viz", ATTENTION),
        *(f"ringlab_course.figures.{name}" for name in ("__init__", "error_curves")),
        *("ringlab.conformance.__init__", "ringlab.conformance.tolerance"),
    ),
)
