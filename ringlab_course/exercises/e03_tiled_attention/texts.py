"""What exercise 03 says: hints, and a message for every common mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e03_tiled_attention import mistakes
from ringlab_course.exercises.e03_tiled_attention.mistakes import (
    Part,
    backward,
    backward_on,
    backward_with,
    forward_on,
    forward_with,
)

PARTS: dict[str, Part] = {
    "drops_tail": lambda M, N, tile: (M // tile * tile, N // tile * tile),
    "drops_last_queries": lambda M, N, tile: (M // tile * tile, N),
    "drops_last_keys": lambda M, N, tile: (M, N // tile * tile),
}
"""How many queries and keys are left where a number of tiles is rounded down."""


def _first_keys(M: int, N: int, tile: int) -> tuple[int, int]:
    return M, min(M, N)


def _without_mask(imitate: Callable[..., Any]) -> Callable[..., Any]:
    """Return an imitation that cannot be made under a causal mask: there the mistake is `from_the_corner`."""

    def answer(*tensors: Any, causal: bool, **how: Any) -> Any:
        if causal:
            raise ValueError("it has another name")
        return imitate(*tensors, causal=causal, **how)

    return answer


backward_mistake = mistakes_of("03.backward")
forward_mistake = mistakes_of("03.forward")

FORWARD_HINTS = (
    "At which position of the sequence is query i? Which is the last key that a tile of queries sees, and which "
    "is the last key that all of its queries see?",
    "Start each query tile from out 0 and lse −inf, in float32 at least, and merge every visited tile into it. With "
    "`causal`, stop after the last key that the tile's last query sees; mask by position. For grouped heads give the "
    "query heads that share a key head an axis of their own, (B, K, H/K, M, D), and let K and V broadcast along it. "
    "A row of a cut tile may see no key of it: its part is out 0 and lse −inf, and must not become NaN.",
    r"Query $i$ is at position $p_i = N - M + i$ and sees $j \le p_i$. For one tile $S = \text{scale}\cdot QK^\top$, "
    r"$L' = \log\sum_j e^{S_{ij}}$, $O' = e^{S-L'}V$, or $O' = 0$ where $L' = -\infty$; then "
    r"$L_{new} = \log(e^{L}+e^{L'})$ and $O_{new} = e^{L-L_{new}}\,O + e^{L'-L_{new}}\,O'$.",
)

BACKWARD_HINTS = (
    "Which number per query row is enough to compute any tile of P again? And how many query heads use one entry of "
    "K: what does that make of its gradient?",
    "delta is one sum per query row, taken before the loops. Inside, per tile: scores again (masked as in the "
    "forward), P from the final lse, dP, dS; then three products, each added to its slice of dQ, dK or dV.",
    r"$P = e^{S - \mathrm{lse}}$, $\delta = \mathrm{rowsum}(dO \circ O)$, $dS = P\circ(dO\,V^\top - \delta)$, "
    r"$dQ \mathrel{+}= \text{scale}\cdot dS\,K$; over the query heads $h$ that share a key head, "
    r"$dK \mathrel{+}= \text{scale}\cdot \sum_h dS_h^\top Q_h$ and $dV \mathrel{+}= \sum_h P_h^\top dO_h$.",
)

FORWARD_MISTAKES = (
    forward_mistake("averages", mistakes.averages),
    forward_mistake("no_rescale", mistakes.no_rescale),
    forward_mistake("acc_not_rescaled", mistakes.acc_not_rescaled),
    forward_mistake("out_not_rescaled", mistakes.out_not_rescaled),
    forward_mistake("lse_is_maximum", mistakes.lse_is_maximum),
    forward_mistake("lse_is_sum", mistakes.lse_is_sum),
    forward_mistake("lse_without_maximum", partial(mistakes.lse_is_sum, ln=True)),
    forward_mistake("lse_to_base_two", mistakes.lse_to_base_two),
    forward_mistake("no_scale", forward_with(scale=1.0)),
    forward_mistake("own_scale", mistakes.own_scale),
    forward_mistake("keys_of_the_queries", _without_mask(forward_on(_first_keys))),
    *(forward_mistake(name, forward_on(part)) for name, part in PARTS.items()),
    forward_mistake(
        "from_the_corner", forward_with(visit=mistakes.without_start, mask=mistakes.hidden_from_the_corner)
    ),
    forward_mistake("stops_too_early", forward_with(visit=mistakes.without_start)),
    forward_mistake("stops_at_the_first_query", forward_with(visit=mistakes.to_the_first_query)),
    forward_mistake("empty_row", mistakes.merged_with(mistakes.with_lse)),
    forward_mistake("masks_the_last_tile", forward_with(mask=mistakes.hidden_in_the_last)),
    forward_mistake("local_mask", forward_with(mask=mistakes.hidden_locally)),
    forward_mistake("open_diagonal", forward_with(mask=mistakes.nothing_hidden)),
    forward_mistake("causal_ignored", forward_with(visit=mistakes.everything, mask=mistakes.nothing_hidden)),
    forward_mistake("hides_the_own_token", forward_with(mask=mistakes.hidden_with_itself)),
    forward_mistake("offset_in_the_tile", forward_with(mask=mistakes.hidden_with_the_offset)),
    forward_mistake("masks_where_starts_meet", forward_with(mask=mistakes.hidden_where_they_meet)),
    forward_mistake("masks_where_indices_meet", forward_with(mask=mistakes.hidden_where_indices_meet)),
    forward_mistake(
        "above_the_diagonal", forward_with(visit=mistakes.everything, mask=mistakes.hidden_if_cut)
    ),
    forward_mistake("no_maximum", mistakes.no_maximum),
    forward_mistake("first_head", mistakes.forward_first_head),
    forward_mistake("heads_dealt", forward_with(share=mistakes.dealt)),
    forward_mistake("materialises"),
    forward_mistake("row_of_tiles"),
    forward_mistake("column_of_tiles"),
    forward_mistake("copies_keys"),
    forward_mistake("computes_hidden_tiles"),
    forward_mistake("low_precision"),
)

FORWARD_VARIANTS = (
    *FORWARD_MISTAKES,
    *(forward_mistake(name, forward_on(part, unseen=-math.inf, guard=True)) for name, part in PARTS.items()),
    forward_mistake("empty_row", mistakes.merged_with(mistakes.with_maximum)),
    forward_mistake("no_maximum", mistakes.merged_with(mistakes.without_maximum)),
    forward_mistake("no_maximum", mistakes.merged_with(mistakes.lse_without_maximum)),
    *(
        forward_mistake(name, forward_with(mask=mask, guard=guard))
        for name, mask in (
            ("local_mask", mistakes.hidden_locally),
            ("local_mask", mistakes.in_cut_tiles(mistakes.hidden_locally)),
            ("hides_the_own_token", mistakes.hidden_with_itself),
            ("hides_the_own_token", mistakes.in_cut_tiles(mistakes.hidden_with_itself)),
            ("masks_where_indices_meet", mistakes.in_cut_tiles(mistakes.hidden_with_the_offset)),
        )
        for guard in (False, True)
    ),
)
"""The mistakes, with the other forms that some of them take."""

_ONLY_BEFORE = backward_mistake(
    "queries_before_the_keys",
    backward_with(visit=mistakes.only_before(offset=False), mask=mistakes.hidden_if_cut),
)

BACKWARD_MISTAKES = (
    backward_mistake("tile_delta", backward_with(tile_delta=True)),
    backward_mistake("tile_lse", backward_with(tile_lse=True)),
    backward_mistake("no_delta", backward_with(delta_weight=0.0)),
    backward_mistake("plus_delta", backward_with(delta_weight=-1.0)),
    backward_mistake("delta_outside", backward_with(delta_outside=True)),
    backward_mistake(
        "delta_is_a_mean",
        lambda dout, *rest, **how: backward(dout, *rest, delta_weight=1 / dout.shape[-1], **how),
    ),
    backward_mistake("unscaled_dk", backward_with(k_scale=1.0)),
    backward_mistake("unscaled_dq", backward_with(q_scale=1.0)),
    backward_mistake("scaled_twice", mistakes.scaled_twice),
    backward_mistake("unscaled", backward_with(q_scale=1.0, k_scale=1.0)),
    backward_mistake("overwrites", backward_with(assign="kv")),
    backward_mistake("overwrites_dq", backward_with(assign="q")),
    backward_mistake("overwrites_all", backward_with(assign="qkv")),
    backward_mistake("keys_of_the_queries", _without_mask(backward_on(_first_keys))),
    *(backward_mistake(name, backward_on(part)) for name, part in PARTS.items()),
    backward_mistake(
        "from_the_corner", backward_with(visit=mistakes.without_start, mask=mistakes.hidden_from_the_corner)
    ),
    backward_mistake("stops_too_early", backward_with(visit=mistakes.without_start)),
    backward_mistake("stops_at_the_first_query", backward_with(visit=mistakes.to_the_first_query)),
    backward_mistake("masks_the_last_tile", backward_with(mask=mistakes.hidden_in_the_last)),
    backward_mistake("local_mask", backward_with(mask=mistakes.hidden_locally)),
    backward_mistake("open_diagonal", backward_with(mask=mistakes.nothing_hidden)),
    backward_mistake(
        "causal_ignored", backward_with(visit=mistakes.everything, mask=mistakes.nothing_hidden)
    ),
    backward_mistake("hides_the_own_token", backward_with(mask=mistakes.hidden_with_itself)),
    backward_mistake("offset_in_the_tile", backward_with(mask=mistakes.hidden_with_the_offset)),
    backward_mistake("masks_where_starts_meet", backward_with(mask=mistakes.hidden_where_they_meet)),
    backward_mistake("masks_where_indices_meet", backward_with(mask=mistakes.hidden_where_indices_meet)),
    backward_mistake(
        "above_the_diagonal", backward_with(visit=mistakes.everything, mask=mistakes.hidden_if_cut)
    ),
    _ONLY_BEFORE,
    backward_mistake("first_head", mistakes.backward_first_head),
    backward_mistake("heads_dealt", backward_with(share=mistakes.dealt)),
    backward_mistake("group_averaged", backward_with(gather=lambda heads: heads.mean(2))),
    backward_mistake("last_of_the_group", backward_with(gather=lambda heads: heads[:, :, -1])),
    backward_mistake("calls_autograd"),
    backward_mistake("materialises"),
    backward_mistake("row_of_tiles"),
    backward_mistake("column_of_tiles"),
    backward_mistake("copies_keys"),
    backward_mistake("computes_hidden_tiles"),
    backward_mistake("low_precision"),
)

BACKWARD_VARIANTS = (
    *BACKWARD_MISTAKES,
    *(
        replace(_ONLY_BEFORE, imitate=backward_with(visit=mistakes.only_before(offset), mask=mask))
        for offset in (False, True)
        for mask in (mistakes.hidden, mistakes.hidden_if_cut)
    ),
    backward_mistake("local_mask", backward_with(mask=mistakes.in_cut_tiles(mistakes.hidden_locally))),
    backward_mistake(
        "hides_the_own_token", backward_with(mask=mistakes.in_cut_tiles(mistakes.hidden_with_itself))
    ),
    backward_mistake(
        "masks_where_indices_meet", backward_with(mask=mistakes.in_cut_tiles(mistakes.hidden_with_the_offset))
    ),
)
"""The mistakes, with the other forms that some of them take."""
