"""What exercise 03 says: hints, and a message for every common mistake."""

from __future__ import annotations

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e03_tiled_attention import mistakes
from ringlab_course.exercises.e03_tiled_attention import mistakes as backward

backward_mistake = mistakes_of("03.backward")
forward_mistake = mistakes_of("03.forward")

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
    forward_mistake("averages", mistakes.averages),
    forward_mistake("no_rescale", mistakes.no_rescale),
    forward_mistake("acc_not_rescaled", mistakes.acc_not_rescaled),
    forward_mistake("out_not_rescaled", mistakes.out_not_rescaled),
    forward_mistake("lse_is_maximum", mistakes.lse_is_maximum),
    forward_mistake("lse_is_sum", mistakes.lse_is_sum),
    forward_mistake("no_scale", mistakes.no_scale),
    forward_mistake("own_scale", mistakes.own_scale),
    forward_mistake("drops_tail", mistakes.forward_no_tail),
    forward_mistake("local_mask", mistakes.forward_local_mask),
    forward_mistake("open_diagonal", mistakes.forward_open_diagonal),
    forward_mistake("above_the_diagonal", mistakes.forward_above_the_diagonal),
    forward_mistake("no_maximum", mistakes.no_maximum),
    forward_mistake("materialises"),
    forward_mistake("row_of_tiles"),
    forward_mistake("computes_hidden_tiles"),
    forward_mistake("first_head", mistakes.forward_first_head),
    forward_mistake("low_precision"),
)

BACKWARD_MISTAKES = (
    backward_mistake("tile_delta", backward.tile_delta),
    backward_mistake("tile_lse", backward.tile_lse),
    backward_mistake("no_delta", backward.no_delta),
    backward_mistake("plus_delta", backward.plus_delta),
    backward_mistake("delta_of_values", backward.delta_of_values),
    backward_mistake("unscaled_dk", backward.unscaled_dk),
    backward_mistake("unscaled", backward.unscaled),
    backward_mistake("overwrites", backward.overwrites),
    backward_mistake("overwrites_dq", backward.overwrites_dq),
    backward_mistake("overwrites_all", backward.overwrites_all),
    backward_mistake("drops_tail", backward.backward_no_tail),
    backward_mistake("local_mask", backward.backward_local_mask),
    backward_mistake("open_diagonal", backward.backward_open_diagonal),
    backward_mistake("above_the_diagonal", backward.above_the_diagonal),
    backward_mistake("calls_autograd"),
    backward_mistake("materialises"),
    backward_mistake("row_of_tiles"),
    backward_mistake("computes_hidden_tiles"),
    backward_mistake("first_head", backward.backward_first_head),
    backward_mistake("low_precision"),
)
