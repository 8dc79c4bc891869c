"""Exercise 04: a softmax kernel, a flash forward, and causal skipping, run in Triton's interpreter."""

from __future__ import annotations

import math

import torch

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.exercises.e04_triton_from_zero import flash, softmax
from ringlab_course.exercises.e04_triton_from_zero.flash import Case
from ringlab_course.exercises.e04_triton_from_zero.records import CAUSAL, FLASH, LSE
from ringlab_course.exercises.e04_triton_from_zero.softmax import SOFTMAX

HALF, BRAIN = torch.float16, torch.bfloat16

SOFTMAX_STAGE = Stage(
    id="04.softmax",
    function="softmax",
    title="softmax of rows, one program per row",
    kind="kernel",
    hints=(
        "A block has 8 lanes and the row 5 columns. What must the other three lanes hold, so that they change neither "
        "the maximum nor the sum?",
        "The row is tl.program_id(0), the column tl.arange(0, BLOCK), and column < columns is the mask of both the load "
        "(with `other`) and the store. BLOCK is triton.next_power_of_2(columns), the grid (rows,).",
        r"$p_j = e^{x_j - m} / \sum_i e^{x_i - m}$ with $m = \max_i x_i$, missing lanes $x = -\infty$, and $m := 0$ where "
        r"$m = -\infty$.",
    ),
    misconceptions=SOFTMAX,
    checks=(
        Check("small", 2, "visible", "rows that fill their block", softmax.small),
        Check("ragged", 2, "visible", "rows that do not, in a wider buffer", softmax.ragged),
        Check("own", 1, "visible", "nothing is written after the columns in use", softmax.own),
        Check("large", 1, "visible", "large entries", softmax.large),
        Check("hidden", 1, "visible", "entries of -inf, and a row of nothing else", softmax.hidden),
        Check("half", 1, "visible", "bfloat16 and float16 in, sums in float32", softmax.half),
        Check(
            "work", 2, "visible", "a kernel does it, with one load of each element", softmax.work, kind="cost"
        ),
        Check("any", 2, "held-out", "other sizes and dtypes", softmax.anything),
    ),
)

FLASH_STAGE = Stage(
    id="04.flash",
    function="flash",
    title="flash forward for grouped heads, one program per block and key head",
    kind="kernel",
    hints=(
        "Five lanes in a row, two query heads for each key head: which token and which query head has each lane? And "
        "which tile of K do all of them need?",
        "From the row's number derive its token and its query head; from both, its place in q, out and lse. Load q once, "
        "then a tile of k and v at a time: scores, -inf where keys >= S, new maximum, rescale what is old, add. After the "
        "loop divide once. A row exists if its token does.",
        r"With $G$ query heads for each key head $c$, packed row $r$ is token $\lfloor r/G \rfloor$ of head "
        r"$cG + r \bmod G$; $m' = \max(m, \max_j s_j),\ \ell' = \ell e^{m-m'} + \sum_j e^{s_j-m'},\ "
        r"a' = a e^{m-m'} + e^{s-m'} V$; out $= a/\ell$, lse $= m + \ln \ell$.",
    ),
    misconceptions=(*FLASH, *LSE),
    checks=(
        Check(
            "small",
            2,
            "visible",
            "one tile: out and lse",
            flash.values(Case(16, 32), Case(16, 32, H=4, K=2, D=32)),
        ),
        Check(
            "tiles",
            2,
            "visible",
            "several tiles, the maximum rises and falls",
            flash.values(Case(32, 16, 16, slope=8), Case(64, 32, 16, slope=-8), Case(48, 16, 16, gain=4)),
        ),
        Check(
            "heads",
            1,
            "visible",
            "several key heads, shared by two or three query heads",
            flash.values(Case(16, 32, H=4, K=2), Case(16, H=9, K=3), Case(16, H=6, K=3)),
        ),
        Check(
            "ragged",
            2,
            "visible",
            "the last block is not full",
            flash.values(Case(17, 16, 16), Case(37, 16, 32, H=3, junk=3.0), Case(5)),
        ),
        Check(
            "own",
            1,
            "visible",
            "nothing after the last token is written, or changes the result",
            flash.own(Case(21, H=4, K=2, junk=math.nan)),
        ),
        Check(
            "half",
            1,
            "visible",
            "bfloat16 and float16 in, sums in float32",
            flash.values(Case(32, dtype=BRAIN), Case(192, 64, 64, dtype=HALF, lift=1000.0, gain=0.2)),
        ),
        Check(
            "work",
            2,
            "visible",
            "a kernel does it, reads q once, and K once per block of rows",
            flash.reads(Case(24, 32, 16, H=8, K=2)),
            kind="cost",
        ),
        Check(
            "sharp",
            1,
            "visible",
            "scores of hundreds",
            flash.values(Case(48, gain=150), Case(24, 32, 16, H=3, gain=150)),
        ),
        Check(
            "any",
            2,
            "held-out",
            "other lengths, blocks, head dims and dtypes",
            flash.values(
                Case(50, 16, 64, dtype=HALF),
                Case(75, 64, 32, H=6, K=2, D=32, junk=math.nan),
                Case(1, junk=math.nan),
            ),
        ),
    ),
)

CAUSAL_STAGE = Stage(
    id="04.causal",
    function="causal_flash",
    title="causal, without the tiles that nobody sees",
    kind="kernel",
    hints=(
        "Which token of a block sees most keys, and which key is its last? What if that key is before key 0?",
        "Let the loop run to that key instead of S, but never beyond S. Inside, a score counts where keys < S and keys <= "
        "token + shift. With shift = -1 token 0 sees nothing: guard against the maximum of -inf, and against the sum of 0.",
        r"last token of block $b$: $t = \min(S - 1, \lfloor ((b+1)M - 1)/G \rfloor)$; its last key: "
        r"$\min(S - 1,\ t + \mathrm{shift})$; visible: $j \le t + \mathrm{shift}$; a row that sees nothing: out $0$, "
        r"lse $-\infty$.",
    ),
    misconceptions=(*CAUSAL, *LSE),
    checks=(
        Check(
            "small", 2, "visible", "one tile, masked", flash.values(Case(8, shift=0), Case(5, H=3, shift=0))
        ),
        Check(
            "tiles",
            2,
            "visible",
            "several tiles, and the one on the diagonal",
            flash.values(Case(24, 16, 16, shift=0), Case(64, 64, 16, shift=0), Case(48, 16, 32, shift=0)),
        ),
        Check(
            "shift",
            1,
            "visible",
            "shifted, by more than a tile and by less",
            flash.values(
                Case(32, 32, 16, shift=1),
                Case(48, 32, 16, shift=19),
                Case(32, 32, 16, shift=3),
                Case(48, 16, 16, H=1, shift=1),
            ),
        ),
        Check(
            "ragged",
            1,
            "visible",
            "shifted, and the last block is not full",
            flash.values(Case(21, 32, 16, shift=3, junk=3.0), Case(43, 32, 16, shift=19, junk=3.0)),
        ),
        Check(
            "blind",
            2,
            "visible",
            "rows that see no key",
            flash.values(
                Case(24, 32, 16, shift=-1), Case(24, 32, 16, H=3, shift=-5, gain=150), Case(40, shift=-17)
            ),
        ),
        Check(
            "own",
            1,
            "visible",
            "nothing after the last token is written, or changes the result",
            flash.own(Case(37, H=4, K=2, shift=0, junk=math.nan)),
        ),
        Check(
            "skip",
            2,
            "visible",
            "tiles of which a block sees nothing are left alone",
            flash.skipped(
                Case(24, 16, 16, shift=0), Case(40, 16, 16, shift=-17), Case(33, 32, 16, H=1, shift=-16)
            ),
            kind="cost",
        ),
        Check(
            "work",
            2,
            "visible",
            "a kernel does it, and reads each visible tile once",
            flash.reads(Case(28, 16, 8, H=8, K=2, shift=0), Case(40, 32, 16, shift=-17), Case(24, shift=19)),
            kind="cost",
        ),
        Check(
            "any",
            2,
            "held-out",
            "other lengths, blocks, shifts and dtypes",
            flash.values(
                Case(75, 64, 32, H=6, K=2, D=32, shift=-1, junk=3.0),
                Case(1, shift=-1),
                Case(24, H=1, shift=-15),
                Case(90, 64, 32, shift=37, dtype=HALF, junk=math.nan),
            ),
        ),
    ),
)

EXERCISE = Exercise("04", "04_triton_from_zero", "Three kernels", (SOFTMAX_STAGE, FLASH_STAGE, CAUSAL_STAGE))
