"""Exercise 04: what is said about the common mistakes in the two attention kernels."""

from __future__ import annotations

from ringlab.course.contract import Misconception
from ringlab.course.contracts import e04_flash_mistakes as mistakes

NO_KERNEL = "The values are right, but no kernel wrote them: the records show no store into all of {}."

_COMMON = (
    Misconception(
        "no_scale",
        "The scores are not multiplied by `scale`, which is 1/√D.",
        mistakes.no_scale,
    ),
    Misconception(
        "not_transposed",
        "Your scores are q times a tile of k, but they should be q times its transpose: tl.dot(q, tl.trans(k)). The shapes "
        "fit only because BLOCK_N is D here.",
        mistakes.not_transposed,
    ),
    Misconception(
        "exp2_without_log2e",
        "Your weights are powers of 2 of the scores. 2^y is e^s only for y = s · log2(e): multiply the scores by 1.4427 "
        "as well, or use tl.exp.",
        mistakes.changed(mistakes.base_two),
    ),
    Misconception(
        "acc_not_rescaled",
        "When a tile brings a larger maximum, the sum so far shrinks by e^(m_old - m_new), and acc, which was gathered "
        "against the same old maximum, must shrink with it. Yours does not.",
        mistakes.streamed(mistakes.acc_not_rescaled),
    ),
    Misconception(
        "total_not_rescaled",
        "When a tile brings a larger maximum, acc shrinks by e^(m_old - m_new), and total, which was gathered against the "
        "same old maximum, must shrink with it. Yours does not.",
        mistakes.streamed(mistakes.total_not_rescaled),
    ),
    Misconception(
        "never_rescaled",
        "The tiles are measured against different maxima and then added. When the maximum grows, multiply total and "
        "acc by e^(m_old - m_new) first.",
        mistakes.streamed(mistakes.never_rescaled),
    ),
    Misconception(
        "divided_each_time",
        "acc is divided by total in every tile, but the next tile takes it for a sum again. Divide once, after the loop.",
        mistakes.streamed(mistakes.divided_each_time, divide=False),
    ),
    Misconception(
        "maximum_of_the_tile",
        "The new maximum is the tile's own. That is right as long as e^(m_old - m_new) "
        "stays finite; after a much larger earlier tile it overflows. Take tl.maximum(m, …): factors are then at most 1.",
        mistakes.streamed(mistakes.maximum_of_the_tile),
    ),
    Misconception(
        "no_maximum",
        "exp overflows for scores of a hundred: measure every score against the largest one so far.",
        mistakes.no_maximum,
    ),
    Misconception(
        "no_other",
        "Lanes past the last key were masked and came without `other`: then what they hold is undefined, on a GPU whatever "
        "was in the register, here NaN. A weight of 0 does not help, 0 · NaN is NaN. Say other=0.0.",
        mistakes.no_other,
    ),
    Misconception(
        "head_stride_is_S",
        "Heads begin `capacity` rows apart in memory, not S: a buffer has room for more tokens than are in use.",
        mistakes.head_begins(lambda S, capacity, D: S * D),
    ),
    Misconception(
        "head_offset_without_D",
        "Head h begins h · capacity rows on, and a row has D elements: your heads begin only h · capacity elements apart, so "
        "that they overlap. Multiply by D, or add h · capacity to the rows before these are multiplied.",
        mistakes.head_begins(lambda S, capacity, D: capacity),
    ),
    Misconception(
        "head_offset_S_without_D",
        "Your heads begin h · S elements apart, so that they overlap. A head has room for capacity rows of D elements: head "
        "h begins at element h · capacity · D.",
        mistakes.head_begins(lambda S, capacity, D: S),
    ),
    Misconception(
        "tail_dropped",
        "The last keys are missing. S need not be a multiple of BLOCK_N: the loop runs up to S, and a mask handles the "
        "last tile.",
        mistakes.tail_dropped,
    ),
    Misconception(
        "padding_counted",
        "Lanes past the last key were counted. Loaded as 0 they give a score of 0, and e^0 is weight. Set their score "
        "to -inf: the mask of the load alone does not.",
        mistakes.padding_counted,
    ),
    Misconception(
        "padding_read",
        "What stands in memory behind the last key was counted as a key. Mask the loads with `keys < S`, and set the "
        "scores there to -inf.",
        mistakes.padding_read,
    ),
    Misconception(
        "axes_swapped",
        "Grid axis 0 counts blocks of queries, axis 1 heads; your kernel takes them the other way round. What looks "
        "right for one head and one block falls apart here.",
        mistakes.axes_swapped,
    ),
    Misconception(
        "first_head_for_all",
        "Only head 0 was written: every program must begin at its own head, program_id(1) · capacity rows further on.",
        mistakes.first_head_for_all,
    ),
    Misconception(
        "accumulates_in_half",
        "acc overflowed: it is a sum over all keys, not yet divided, and float16 ends at 65,504. Create it with "
        "tl.float32 and keep it so; only the store rounds.",
        mistakes.in_half,
    ),
    Misconception(
        "junk_times_zero",
        "Behind the last token stood NaN, and it reached the result: a weight of 0 does not remove it, as 0 · NaN is NaN. "
        "Load K and V with mask=keys < S and other=0.0.",
        mistakes.junk_times_zero,
    ),
    Misconception(
        "q_loaded_again",
        "The values are right, but q is loaded more than once by a program. It is the same for all tiles of keys: load it "
        "before the loop, and it stays on the chip.",
    ),
    Misconception(
        "reads_unmasked",
        "The values are right, but K or V was loaded behind the last token. In the interpreter that is harmless here; "
        "at the end of an allocation it is a fault. Mask the load.",
    ),
)

FLASH = (
    *_COMMON,
    Misconception(
        "stores_unmasked",
        "The last block of queries is wider than what is left of the sequence, and you wrote all of it: rows behind "
        "token S - 1 belong to somebody else. Mask both stores with `rows < S`.",
    ),
    Misconception("computed_by_torch", NO_KERNEL.format("out and lse")),
    Misconception(
        "reads_too_often",
        "The values are right, but K or V is read more often than once per block of queries. One pass is enough: while "
        "a tile of K is here, update maximum, sum and acc, and forget it.",
    ),
)

CAUSAL = (
    Misconception(
        "mask_ignored",
        "Every row saw every key. Row i sees key j only where j <= i + shift.",
        mistakes.masked(lambda rows, keys, S, shift, m, n: keys < S),
    ),
    Misconception(
        "mask_upside_down",
        "The mask is the wrong way round: rows see the keys that come after them.",
        mistakes.masked(lambda rows, keys, S, shift, m, n: keys >= rows + shift),
    ),
    Misconception(
        "strictly_before",
        "Row i does not see key i + shift, but it should: j <= i + shift, not j < i + shift.",
        mistakes.masked(lambda rows, keys, S, shift, m, n: keys < rows + shift),
    ),
    Misconception(
        "shift_ignored",
        "Your mask is j <= i, whatever shift is. On a ring two shards may be shifted by a token: j <= i + shift.",
        mistakes.masked(lambda rows, keys, S, shift, m, n: keys <= rows),
    ),
    Misconception(
        "shift_backwards",
        "Your mask moves the wrong way with shift: row i sees keys up to i + shift, not up to i - shift.",
        mistakes.masked(
            lambda rows, keys, S, shift, m, n: (
                (keys <= rows - shift) & (keys < -(-((rows // m + 1) * m + shift) // n) * n)
            )
        ),
    ),
    Misconception(
        "mask_within_the_tile",
        "Your mask compares places within a tile. Compare places in the sequence: `rows` and `keys` with the starts of "
        "their blocks added.",
        mistakes.masked(lambda rows, keys, S, shift, m, n: keys % n <= rows % m + shift),
    ),
    Misconception(
        "tiles_rounded_down",
        "The number of tiles was rounded down, so that the last, partly visible one was left out. Round up: tl.cdiv.",
        mistakes.up_to(lambda block, shift, m, n: ((block + 1) * m + shift) // n * n),
    ),
    Misconception(
        "diagonal_tile_missing",
        "The loop stops before the tile on the diagonal. Its keys are hidden from some rows of the block, not from all: "
        "the last row, (program_id(0) + 1) · BLOCK_M - 1, says where to stop.",
        mistakes.up_to(lambda block, shift, m, n: block * m + shift),
    ),
    Misconception(
        "assumes_equal_blocks",
        "The loop stops at (program_id(0) + 1) · BLOCK_N, which is right only where BLOCK_M = BLOCK_N. Queries come in "
        "blocks of BLOCK_M.",
        mistakes.up_to(lambda block, shift, m, n: (block + 1) * n + shift),
    ),
    Misconception(
        "stop_ignores_shift",
        "The loop ends at (program_id(0) + 1) · BLOCK_M whatever shift is. The mask is right, but the block's last row sees "
        "`shift` keys more than that: add shift to the end of the loop as well.",
        mistakes.up_to(lambda block, shift, m, n: (block + 1) * m),
    ),
    Misconception(
        "blind_rows_are_nan",
        "A row that sees no key came out as NaN: its maximum stays -inf, and -inf - (-inf) has no value. Measure against "
        "0 while the maximum is -inf, and do not divide by a sum of 0. It should be out 0, lse -inf.",
        mistakes.blind_rows_nan,
    ),
    Misconception(
        "blind_blocks_unwritten",
        "Rows of blocks that see no key at all were never written. They hold whatever was in memory: store out 0 and lse "
        "-inf there, too.",
        mistakes.blind_blocks_unwritten,
    ),
    Misconception(
        "padding_seen",
        "The last rows see lanes behind the last key: with shift > 0, j <= i + shift reaches beyond S - 1. These lanes, loaded "
        "as 0, have the score 0, and e^0 is weight. A score counts only where keys < S as well.",
        mistakes.padding_counted,
    ),
    *_COMMON,
    Misconception(
        "stores_unmasked",
        "The last block of queries is wider than what is left of the sequence, causal or not, and you wrote all of it. "
        "Both stores need mask=rows < S.",
    ),
    Misconception("computed_by_torch", "The values are right, but no kernel stored all of out and lse."),
    Misconception(
        "visits_hidden_tiles",
        "Your kernel computes tiles of which its rows see nothing, and multiplies them by 0. The result is right and "
        "half of the work was for nothing. Stop the loop behind the last key that the last row sees.",
    ),
    Misconception(
        "reads_too_often",
        "The values are right, but tiles of K or V are read that no row of the block sees, or read twice. Let the loop "
        "end where the block's last row ends to see.",
    ),
)

LSE = (
    Misconception(
        "lse_in_base_two",
        "out is right. lse is in base 2: it should be the natural logarithm, m + ln(total). With exp2 inside, multiply by "
        "ln 2 = 0.6931 at the end.",
        mistakes.lse_of(mistakes.lse_in_base_two),
    ),
    Misconception(
        "lse_by_log2",
        "out is right. Your lse takes the logarithm of the sum in base 2, and adds a maximum that is not: with tl.exp inside, "
        "it is m + tl.log(total).",
        mistakes.lse_of(mistakes.lse_by_log2),
    ),
    Misconception(
        "lse_is_the_maximum",
        "out is right. Your lse is only the largest score: add the logarithm of the sum.",
        mistakes.lse_of(mistakes.lse_is_the_maximum),
    ),
    Misconception(
        "lse_without_maximum",
        "out is right. Your lse lacks the maximum that was subtracted from the scores: lse = m + ln(total).",
        mistakes.lse_of(mistakes.lse_without_maximum),
    ),
)
