"""Common mistakes in the kernel of one ring step, each with what it computes, in float64."""

from __future__ import annotations

from ringlab.course.contract import Misconception


def _makes(name: str, message: str) -> Misconception:
    """A mistake that the case's own emulation makes under the same name."""
    return Misconception(name, message, lambda case: case.answer((name,)))


NAN_IN_BLIND_ROWS = Misconception(
    "nan_in_blind_rows",
    "There is a NaN in a row that has seen no key yet. Its maximum is −∞, and −∞ − (−∞) is NaN: subtract 0 where the new "
    "maximum is −∞, so that all weights are 2^(−∞) = 0.",
)
DIVIDES_BY_ZERO = Misconception(
    "divides_by_zero",
    "There is a NaN in OUT or LSE of a row that saw no key: 0 / 0. Divide by 1 where total is 0, and take the logarithm of that; "
    "m is −∞ there, which makes LSE −∞ too.",
)
OVERFLOWS = Misconception(
    "overflows",
    "NaN or infinity for large scores: 2^score overflows above 128. Subtract the larger of the old maximum and the tile's, "
    "in both exponents, before you take powers.",
)
LOW_PRECISION_STATE = Misconception(
    "low_precision_state",
    "The state lost digits: it holds bfloat16 numbers. Here all weights are 1, and sums of bfloat16 values are exact in "
    "float32. acc, m and total stay float32 between tiles and steps; convert the weights, not acc.",
)
ROUNDED_BETWEEN_STEPS = Misconception(
    "state_rounded_between_steps",
    "The state lost digits between two steps: what was written are bfloat16 numbers. Here all weights are 1, and sums of "
    "bfloat16 values are exact in float32. What goes to memory is float32, or every step adds an "
    "error of its own.",
)
FIRST_READS = Misconception(
    "first_step_reads_state",
    "The first step used what lay in ACC, M or TOTAL. Nobody has written there yet: on a GPU it is the garbage of an earlier "
    "tensor. With FIRST the state begins in registers: acc = 0, m = −∞, total = 0.",
)
LAST_WRITES_STATE = Misconception(
    "last_step_writes_state",
    "The last step wrote the state back. Nobody reads it again: that is as many bytes as the fused step wanted to save. "
    "With LAST write OUT and LSE only.",
)
UNWRITTEN = Misconception(
    "unwritten_rows",
    "Some of OUT or LSE was never written: what lay there before is still there. On the last step every row is written, "
    "rows that saw no key too (OUT = 0, LSE = −∞).",
)
TOO_EARLY = Misconception(
    "writes_out_too_early",
    "OUT or LSE was written on a step that is not the last: bytes that the next step throws away. Until LAST only the "
    "state goes to memory.",
)
READS_UNNAMED = Misconception(
    "reads_unnamed_keys",
    "Keys that no segment names got into the answer: they held NaN here, and 0 · NaN is NaN. A key that is masked after it "
    "was read has been read: visit k_begin … k_end only, and mask the load at k_end, with other=0.",
)
SEVERAL_LAUNCHES = Misconception(
    "several_launches",
    "The values are right, but one step took several launches. Between two launches the state goes through memory once "
    "more; batch entries and heads are programs of the same grid.",
)
READS_TWICE = Misconception(
    "reads_twice",
    "The values are right, but a program reads the same elements more than once. One pass is enough: the running maximum "
    "is there so that no tile has to be seen again.",
)
HIDDEN_TILES = Misconception(
    "computes_hidden_tiles",
    "The values are right, but a program reads keys that none of its segments names, and masks all of them. Skipping is the "
    "point of the table: a tile that is read, computed and thrown away costs as much as one that counts.",
)
TAIL = _makes(
    "tail_counts",
    "The last, short tile of keys counts keys that do not exist. `other=0.0` makes their score 0, and 2^(0 − m) is not 0: "
    "hide them in `visible` as well.",
)
SHORT = _makes(
    "drops_the_short_tile",
    "The last, short tile of keys was not visited: count tiles upwards, range(start, stop, BLOCK_N), and mask its end.",
)
GROUP = _makes(
    "wrong_group",
    "A query head read the wrong K/V head: this is h mod K. Heads that share a K/V head stand side by side, so head h reads "
    "h // group.",
)

TILE = (
    _makes(
        "acc_not_rescaled",
        "acc is still relative to the old maximum. When the maximum rises, acc and total are both worth less: multiply both by "
        "2^(old m − new m); here only total was.",
    ),
    _makes(
        "total_not_rescaled",
        "total is still relative to the old maximum. When the maximum rises, acc and total are both worth less: multiply both by "
        "2^(old m − new m); here only acc was.",
    ),
    _makes(
        "never_rescaled",
        "Neither acc nor total is brought to the new maximum: what earlier tiles found counts too much as soon as a larger score "
        "comes. Multiply both by 2^(old m − new m).",
    ),
    _makes(
        "no_scale",
        "The scores are not multiplied by scale2: this is what you get with q·k itself as the exponent of 2.",
    ),
    _makes(
        "natural_exponential",
        "You took e^x where the state wants 2^x: scale2 holds the log₂e already, so exp counts it twice. Use tl.math.exp2.",
    ),
    _makes("mask_ignored", "Hidden keys count: set their scores to −∞ before you take the maximum."),
    _makes("mask_inverted", "The mask is upside down: `visible` is true where a row does see the key."),
    _makes(
        "zero_for_hidden",
        "Hidden scores are 0, not −∞: 2^(0 − m) is a weight like any other. Put −∞ where `visible` is false.",
    ),
    _makes(
        "clamps_the_maximum",
        "A row that has seen nothing leaves with m = 0. The 0 is for the subtraction only; m itself stays −∞, or the next "
        "scores below 0 meet a maximum that no key had.",
    ),
    NAN_IN_BLIND_ROWS,
    OVERFLOWS,
    LOW_PRECISION_STATE,
)

ENDS = (
    _makes(
        "last_not_normalised",
        "The last step wrote acc as it is. acc is the sum of weights times values; the answer is acc / total.",
    ),
    _makes(
        "lse_in_base_two",
        "LSE is m + log₂ total, the logarithm in base 2. What leaves the kernel is the natural one: multiply by ln 2 = 0.6931….",
    ),
    _makes(
        "lse_mixes_bases",
        "LSE is m + ln total: m is in base 2, so the two cannot be added. (m + log₂ total) · ln 2.",
    ),
    _makes(
        "lse_is_the_maximum",
        "LSE is only the largest score. The sum of the weights is missing: (m + log₂ total) · ln 2.",
    ),
    FIRST_READS,
    LAST_WRITES_STATE,
    UNWRITTEN,
    TOO_EARLY,
    DIVIDES_BY_ZERO,
)

STEP = (
    _makes(
        "drops_the_state",
        "Every step begins anew: what the steps before found is lost. Only FIRST begins with nothing; else read ACC, M, TOTAL.",
    ),
    _makes(
        "normalises_every_step",
        "acc was divided by total at the end of a step, and the next step took it for a sum of weights times values. A mean "
        "forgets how many keys it stands for: carry acc as it is, and divide once, on the last step.",
    ),
    GROUP,
    TAIL,
    SHORT,
    ROUNDED_BETWEEN_STEPS,
    SEVERAL_LAUNCHES,
    READS_TWICE,
    *TILE,
    *ENDS,
)

TABLE = (
    _makes(
        "strictly_before",
        "Off by one: a row does not see the key at its own place. Row i sees key j where j ≤ i + shift, equality included.",
    ),
    _makes(
        "shift_ignored",
        "The mask compares places in the shards, j ≤ i. Rows and keys of a segment begin at different places: j ≤ i + shift.",
    ),
    _makes(
        "row_of_the_program",
        "The mask counts rows from the program's first one. i in j ≤ i + shift is the row of the shard: row_start + 0, 1, ….",
    ),
    _makes(
        "no_mask",
        "Keys k_full … k_end − 1 are masked ones; here all of them count for every row.",
    ),
    _makes(
        "first_segment_only",
        "Only the first segment of each program was visited; they run from first_segment to last_segment − 1.",
    ),
    _makes(
        "full_part_forgotten",
        "Keys k_begin … k_full − 1 were not visited at all: they need no mask, but they are seen. Visit them first, then the "
        "masked ones.",
    ),
    _makes(
        "keys_not_offset",
        "The unmasked keys were read from the beginning of the block: in `visit` K and V are read at base + key, and keys "
        "count from `start`, which need not be 0.",
    ),
    _makes(
        "writes_foreign_rows",
        "A program wrote rows beyond its row_stop. They belong to the next program, which then adds its tiles to a state "
        "that has them already: `own` is rows < row_stop.",
    ),
    READS_UNNAMED,
    HIDDEN_TILES,
    *STEP,
)
