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
READS, CAUSAL_READS = Case(40, 16, 16, H=2), Case(56, 16, 8, shift=0)

SOFTMAX_STAGE = Stage(
    id="04.softmax",
    function="softmax",
    title="softmax of rows, one program per row",
    kind="kernel",
    hints=(
        "A block has 8 lanes and the row 5 columns. What must the other three hold, so that neither the maximum nor the sum "
        "notices them?",
        "Row = tl.program_id(0), columns = tl.arange(0, BLOCK), inside = columns < n. The same mask goes into the load "
        "(with `other`) and into the store. BLOCK is triton.next_power_of_2(columns), the grid (rows,).",
        r"$p_j = e^{x_j - m} / \sum_i e^{x_i - m}$ with $m = \max_i x_i$, missing lanes $x = -\infty$, and $m := 0$ where "
        r"$m = -\infty$.",
    ),
    misconceptions=SOFTMAX,
    checks=(
        Check("small", 2, "visible", "rows that fill their block", softmax.small),
        Check("ragged", 2, "visible", "rows that do not, in a wider buffer", softmax.ragged),
        Check("own", 1, "visible", "nothing is written behind the columns in use", softmax.own),
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
    title="flash forward, one program per block of queries",
    kind="kernel",
    hints=(
        "Lesson 02 carried (m, total, acc) from block to block for one query. What are their shapes for BLOCK_M queries, and "
        "what of them is in memory while the loop runs?",
        "Load q once. In the loop load a tile of k and v, scores = tl.dot(q, tl.trans(k)) * scale, -inf where keys >= S; new "
        "maximum, factor for what is old, add. After the loop divide once and store out and lse, masked by rows < S.",
        r"$m' = \max(m, \max_j s_j),\ \ell' = \ell e^{m-m'} + \sum_j e^{s_j-m'},\ a' = a e^{m-m'} + e^{s-m'} V;\quad "
        r"\mathrm{out} = a/\ell,\ \mathrm{lse} = m + \ln \ell$",
    ),
    misconceptions=(*FLASH, *LSE),
    checks=(
        Check("small", 2, "visible", "one tile: out and lse", flash.values(Case(16), Case(16, D=32))),
        Check(
            "tiles",
            2,
            "visible",
            "several tiles, the maximum rises and falls",
            flash.values(Case(32, 16, 16, slope=8), Case(64, 32, 16, slope=-8), Case(48, 16, 16, gain=4)),
        ),
        Check("heads", 1, "visible", "several heads", flash.values(Case(32, 16, 16, H=3))),
        Check(
            "ragged",
            2,
            "visible",
            "S is a multiple of nothing",
            flash.values(Case(17, 16, 16), Case(37, 16, 32, junk=3.0), Case(5)),
        ),
        Check(
            "own",
            1,
            "visible",
            "nothing behind the last token is written, or changes the result",
            flash.own(Case(21, H=2, junk=math.nan)),
        ),
        Check(
            "half",
            1,
            "visible",
            "bfloat16 and float16 in, sums in float32",
            flash.values(Case(32, dtype=BRAIN), Case(192, 16, 64, dtype=HALF, lift=1000.0, gain=0.2)),
        ),
        Check(
            "work",
            2,
            "visible",
            "a kernel does it, reads q once, and K once per block of queries",
            flash.reads(READS, flash.tiles_of(READS)),
            kind="cost",
        ),
        Check("sharp", 1, "stress", "scores of hundreds", flash.values(Case(48, gain=150))),
        Check(
            "any",
            2,
            "held-out",
            "other lengths, blocks, head dims and dtypes",
            flash.values(
                Case(75, 64, 32, H=3, D=32, junk=math.nan),
                Case(1, junk=math.nan),
                Case(50, 16, 64, dtype=HALF),
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
        "Which row of a block of queries sees most keys, and which key is its last?",
        "Let the loop run to that key instead of S, but never beyond S. Inside, a score counts where keys < S and keys <= "
        "rows + shift. With shift = -1 row 0 sees nothing: guard the -inf, in the maximum and in the division.",
        r"last key of block $b$: $\min(S,\ (b+1)M + \mathrm{shift}) - 1$; visible: $j \le i + \mathrm{shift}$; "
        r"blind row: out $0$, lse $-\infty$.",
    ),
    misconceptions=(*CAUSAL, *LSE),
    checks=(
        Check("small", 2, "visible", "one tile, masked", flash.values(Case(16, shift=0))),
        Check(
            "tiles",
            2,
            "visible",
            "several tiles, and the one on the diagonal",
            flash.values(Case(48, 16, 16, shift=0), Case(64, 32, 16, shift=0), Case(64, 16, 32, shift=0)),
        ),
        Check(
            "shift",
            1,
            "visible",
            "shifted, by more than a tile and by less",
            flash.values(Case(96, 32, 16, shift=35), Case(32, shift=3)),
        ),
        Check(
            "ragged",
            1,
            "visible",
            "shifted, and S a multiple of nothing",
            flash.values(Case(85, 32, 16, shift=35, junk=3.0)),
        ),
        Check(
            "blind",
            2,
            "visible",
            "rows that see no key",
            flash.values(Case(64, 64, 16, shift=-1), Case(40, shift=-17)),
        ),
        Check(
            "own",
            1,
            "visible",
            "nothing behind the last token is written, or changes the result",
            flash.own(Case(37, H=2, shift=0, junk=math.nan)),
        ),
        Check(
            "skip",
            2,
            "visible",
            "tiles of which a block sees nothing are left alone",
            flash.skipped(Case(48, 16, 16, shift=0)),
            kind="cost",
        ),
        Check(
            "work",
            2,
            "visible",
            "a kernel does it, and reads each visible tile once",
            flash.reads(CAUSAL_READS, flash.tiles_of(CAUSAL_READS)),
            kind="cost",
        ),
        Check(
            "any",
            2,
            "held-out",
            "other lengths, blocks, shifts and dtypes",
            flash.values(
                Case(75, 64, 32, H=2, D=32, shift=-1, junk=3.0),
                Case(1, shift=-1),
                Case(90, 32, 16, shift=37, dtype=HALF, junk=math.nan),
            ),
        ),
    ),
)

EXERCISE = Exercise("04", "04_triton_from_zero", "Two kernels", (SOFTMAX_STAGE, FLASH_STAGE, CAUSAL_STAGE))
