"""What exercise 03 says: hints, and a message for every common mistake."""

from __future__ import annotations

from ringlab.course.contract import Misconception
from ringlab.course.contracts import e03_backward_mistakes as backward
from ringlab.course.contracts import e03_mistakes as mistakes

FORWARD_HINTS = (
    "Two tiles have seen different keys of the same query. Which two things must each tell the other, so that "
    "the result is the same as if one tile had seen all keys? (Lesson 02.)",
    "Outer loop over query tiles, inner loop over key tiles. Start each query tile from the identity, out 0 and "
    "lse −inf, in float32 at least; merge every visited tile into it; write it once at the end. With `causal`, "
    "stop the inner loop at the diagonal tile, and mask only that one.",
    r"For one tile $S = \text{scale}\cdot QK^\top$, $L' = \log\sum_j e^{S_{ij}}$, $O' = e^{S-L'}V$; then "
    r"$L_{new} = \log(e^{L}+e^{L'})$ and $O_{new} = e^{L-L_{new}}\,O + e^{L'-L_{new}}\,O'$.",
)

BACKWARD_HINTS = (
    "Of everything that the forward pass computed, which one number per query row is enough to compute any tile "
    "of P again, without its neighbours?",
    "delta is one sum per query row, taken before the loops. Inside, per tile: scores again (with the diagonal "
    "mask), P from the final lse, dP, dS; then three products, each added to its slice of dQ, dK or dV.",
    r"$P = e^{S - L}$, $\delta = \mathrm{rowsum}(dO \circ O)$, $dV \mathrel{+}= P^\top dO$, "
    r"$dS = P\circ(dO\,V^\top - \delta)$, $dQ \mathrel{+}= \text{scale}\cdot dS\,K$, "
    r"$dK \mathrel{+}= \text{scale}\cdot dS^\top Q$.",
)

FORWARD_MISTAKES = (
    Misconception(
        "averages",
        "You averaged the tiles' results. A tile whose scores are large must weigh more: the weight of a tile is "
        "the share of its sum of exponentials, e^(lse of the tile − lse of all).",
        mistakes.averages,
    ),
    Misconception(
        "no_rescale",
        "When a tile brings a larger maximum, what you had accumulated under the old maximum m must be multiplied "
        "by e^(m_old − m_new), the sum and the output both. Here it was left as it was.",
        mistakes.no_rescale,
    ),
    Misconception(
        "acc_not_rescaled",
        "lse is right and out is not: what the accumulator had gathered against the older maximum was not rescaled. The "
        "sum was multiplied by e^(m_old − m_new) when the maximum grew; the accumulator needs the same factor.",
        mistakes.acc_not_rescaled,
    ),
    Misconception(
        "out_not_rescaled",
        "lse is right and out is not: each tile is weighed by e^(score − lse so far), but the out of earlier tiles keeps "
        "the weight of an older, smaller lse. Multiply it by e^(lse_old − lse_new) before the new tile is added.",
        mistakes.out_not_rescaled,
    ),
    Misconception(
        "lse_is_maximum",
        "What you return as lse is the largest score of the row. The logarithm of the sum is missing: lse = m + ln l.",
        mistakes.lse_is_maximum,
    ),
    Misconception(
        "lse_is_sum",
        "What you return as lse is the sum l of e^(score − m). It should be its natural logarithm, with the maximum "
        "added again: lse = m + ln l.",
        mistakes.lse_is_sum,
    ),
    Misconception(
        "no_scale",
        "Scores are q·k without the scale: multiply by `scale` before anything else sees them.",
        mistakes.no_scale,
    ),
    Misconception(
        "own_scale",
        "You scale by D^(−1/2) whatever is asked: use the argument `scale`.",
        mistakes.own_scale,
    ),
    Misconception(
        "drops_tail",
        "Tokens after the last whole tile are dropped: S // tile rounds down. The last tile is shorter, from "
        "start to min(start + tile, S).",
        mistakes.forward_no_tail,
    ),
    Misconception(
        "local_mask",
        "Every tile is masked as if it lay on the diagonal: the mask compares indices inside the tile. Compare "
        "positions in the sequence. A tile left of the diagonal is seen whole.",
        mistakes.forward_local_mask,
    ),
    Misconception(
        "open_diagonal",
        "The tiles on the diagonal are not masked: a query sees the keys after it in its own tile. Skipping the "
        "tiles above the diagonal is only half of the causal mask.",
        mistakes.forward_open_diagonal,
    ),
    Misconception(
        "above_the_diagonal",
        "Only the diagonal tile was masked, and the tiles above it were seen whole: queries met keys that come later. "
        "End the loop over key tiles at the diagonal tile.",
        mistakes.forward_above_the_diagonal,
    ),
    Misconception(
        "no_maximum",
        "Some e^score overflows or vanishes, and inf/inf is NaN. Subtract the row's maximum before exp, or use "
        "logsumexp, which does.",
        mistakes.no_maximum,
    ),
    Misconception(
        "materialises",
        "Peak memory grows like S²: somewhere a tensor with S × S scores exists (also a mask counts). Compute one "
        "tile of scores, merge it, and let it go before the next.",
    ),
    Misconception(
        "row_of_tiles",
        "You hold the scores of a whole row of tiles at once, tile × S. That is linear in S, but the live set "
        "should not grow with S at all: merge each tile before the next is computed.",
    ),
    Misconception(
        "computes_hidden_tiles",
        "Tiles above the diagonal are computed and masked afterwards. That does twice the work of causal attention, "
        "and weight 0 times NaN is NaN: a query notices keys that it must not see. Leave those tiles out.",
    ),
    Misconception(
        "first_head",
        "Every head has the result of head 0. Index tokens with [..., start:stop, :], so that batch and heads stay.",
        mistakes.forward_first_head,
    ),
    Misconception(
        "low_precision",
        "Part of the running state (out, lse, or the scores that feed them) is in the inputs' bfloat16. Then every "
        "merge rounds to 8 bits. Keep the state in float32 at least, and return it so.",
    ),
)

BACKWARD_MISTAKES = (
    Misconception(
        "tile_delta",
        "delta was summed over the keys of one tile only, rowsum(P·dP) of the tile. The softmax couples a row with "
        "ALL its keys: delta = rowsum(dO·O) with the final O, the same for every tile of the row.",
        backward.tile_delta,
    ),
    Misconception(
        "tile_lse",
        "P was normalised inside the tile. A tile's share of the row is e^(S − lse) with the final lse, over all "
        "keys; its rows do not add up to 1.",
        backward.tile_lse,
    ),
    Misconception(
        "no_delta",
        "dS = P·dP lacks − delta: raising one score lowers all the other weights of its row. dS = P·(dP − delta).",
        backward.no_delta,
    ),
    Misconception(
        "plus_delta",
        "delta has the wrong sign, dS = P·(dP + delta). It is subtracted: the weights of a row add up to 1, so what one "
        "gains the others lose, and the rows of dS add up to 0. dS = P·(dP − delta).",
        backward.plus_delta,
    ),
    Misconception(
        "delta_of_values",
        "delta was taken from the values, rowsum(dO·V). It belongs to a query row, and is taken from what that row "
        "returned: delta = rowsum(dO·O).",
        backward.delta_of_values,
    ),
    Misconception(
        "unscaled_dk",
        "dK lacks the factor `scale` that dQ has. Scores are scale·q·k, so both gradients carry it.",
        backward.unscaled_dk,
    ),
    Misconception(
        "unscaled",
        "dQ and dK both lack the factor `scale`: dS is the gradient of the scaled scores, scale·q·k.",
        backward.unscaled,
    ),
    Misconception(
        "overwrites",
        "dK and dV of a key tile hold only what the last query tile gave. Every query tile that saw those keys "
        "adds its part: += instead of =.",
        backward.overwrites,
    ),
    Misconception(
        "overwrites_dq",
        "dQ of a query tile holds only what the last key tile gave. Every key tile that those queries saw adds its "
        "part to dQ: += instead of =.",
        backward.overwrites_dq,
    ),
    Misconception(
        "overwrites_all",
        "dQ, dK and dV hold only what the last visited tile gave. Each of the three is a sum over tiles: start from "
        "zeros, and use += instead of = for all three.",
        backward.overwrites_all,
    ),
    Misconception(
        "drops_tail",
        "The last S % tile tokens get no gradient, and give none: S // tile rounds down. The last tile is shorter.",
        backward.backward_no_tail,
    ),
    Misconception(
        "local_mask",
        "When P is computed again, every tile is masked as if it lay on the diagonal. Only the diagonal tile has a "
        "mask; a tile left of it is seen whole.",
        backward.backward_local_mask,
    ),
    Misconception(
        "open_diagonal",
        "P was computed again without the causal mask of the diagonal tile. The backward must mask what the "
        "forward masked, else hidden pairs get a gradient.",
        backward.backward_open_diagonal,
    ),
    Misconception(
        "above_the_diagonal",
        "Tiles above the diagonal were taken as if they were seen whole: only the diagonal tile was masked. There "
        "every key comes after every query. Start the loop over query tiles at the key tile (or end the loop over "
        "key tiles at the query tile).",
        backward.above_the_diagonal,
    ),
    Misconception(
        "calls_autograd",
        "Your code calls autograd. The tensors it gets have no graph to go back through, and a forward that writes its "
        "tiles in place cannot be differentiated. Write the five formulas instead: P from lse, dV, dP, dS, then dQ "
        "and dK.",
    ),
    Misconception(
        "materialises",
        "Peak memory grows like S²: P or dS exists whole, or autograd saved the tiles of a forward pass. Compute "
        "one tile of P again from lse, use it in three products, and let it go.",
    ),
    Misconception(
        "row_of_tiles",
        "P or dS is held for a whole row of tiles at once, tile × S. Linear in S, but the live set should not "
        "grow with S: finish each tile's three products before the next tile.",
    ),
    Misconception(
        "computes_hidden_tiles",
        "Tiles above the diagonal are computed and masked afterwards: half of the backward's work gives zeros, and "
        "0 times NaN is NaN, so dQ notices keys that the query never saw. Leave those tiles out.",
    ),
    Misconception(
        "first_head",
        "Every head has the gradients of head 0. Each head has its own P: keep the axes B and H in every product.",
        backward.backward_first_head,
    ),
    Misconception(
        "low_precision",
        "Gradients are gathered in the inputs' bfloat16, where a sum over many tiles stops growing. Gather dQ, dK "
        "and dV in float32 at least, and return them so.",
    ),
)
