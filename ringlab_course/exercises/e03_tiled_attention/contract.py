"""Exercise 03: tiled attention of the last tokens of a sequence, with grouped heads and linear memory."""

from __future__ import annotations

from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e03_tiled_attention.checks import (
    BACK,
    THERE,
    Case,
    Pass,
    live_set,
    memory_exponent,
    mixed,
    precision,
    skips,
    values,
)

WHOLE_TILES = (Case(2, 4, 2, 2), Case(4, 2, 2, 2), Case(6, 9, 3, 4))
SHORT_TILES = (Case(3, 5, 2, 2), Case(4, 7, 3, 2), Case(3, 4, 8, 2))
LAST_TOKENS = (
    Case(2, 3, 2, 2, True),
    Case(5, 6, 4, 2, True),
    Case(3, 5, 2, 2, True),
    Case(7, 10, 3, 2, True),
    Case(4, 9, 4, 3, True),
)
GROUPS = (
    Case(2, 3, 2, 2, H=2),
    Case(3, 4, 2, 2, H=4, K=2),
    Case(3, 5, 2, 2, True, H=6, K=3, B=2),
    Case(4, 6, 3, 2, True, H=6, K=2),
)
LARGE = (Case(4, 6, 2, 2, reach=900), Case(12, 16, 4, 4, True, reach=900))


def checks_of(which: Pass) -> tuple[Check, ...]:
    """Return the checks that both stages have, for the stage of `which`."""
    exact = "dQ, dK and dV are exact" if which.backward else "tiles merge to exact attention"
    state = "gradients are summed in float32" if which.backward else "the state is float32"
    live = "a few tiles at a time" if which.backward else "one tile of scores at a time"
    return (
        Check(
            "values",
            3 if which.backward else 2,
            "visible",
            f"{exact}, M queries and N keys",
            values(which, *WHOLE_TILES),
        ),
        Check(
            "tail",
            1,
            "visible",
            "a last tile that is shorter, and a tile longer than M and N",
            values(which, *SHORT_TILES),
        ),
        Check(
            "causal", 2, "visible", "causal: the queries are the last M tokens", values(which, *LAST_TOKENS)
        ),
        Check("heads", 1, "visible", "grouped heads", values(which, *GROUPS)),
        Check("precision", 1, "visible", f"{state} for bfloat16 inputs", precision(which)),
        Check("memory", 1, "visible", "peak memory grows like S", memory_exponent(which), kind="cost"),
        Check("live-set", 1, "visible", f"{live}, and no copies of K and V", live_set(which), kind="cost"),
        Check("skips", 1, "visible", "hidden tiles are not computed", skips(which), kind="cost"),
        Check("mixed", 1, "held-out", "all of it together, odd sizes", mixed(which)),
    )


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

FORWARD_STAGE = Stage(
    id="03.forward",
    function="tiled_forward",
    title="Attention by tiles",
    hints=FORWARD_HINTS,
    misconceptions=misconceptions_of("03.forward"),
    checks=(
        *checks_of(THERE),
        Check(
            "large",
            1,
            "visible",
            "large scores overflow nothing",
            values(THERE, *LARGE),
        ),
    ),
)

BACKWARD_STAGE = Stage(
    id="03.backward",
    function="tiled_backward",
    title="The backward from lse and delta",
    hints=BACKWARD_HINTS,
    misconceptions=misconceptions_of("03.backward"),
    checks=checks_of(BACK),
)

EXERCISE = Exercise(
    id="03",
    slug="03_tiled_attention",
    title="Tiled attention, forward and backward",
    stages=(FORWARD_STAGE, BACKWARD_STAGE),
    may_use=(
        *("ringlab.merge", "ringlab.scores"),
        *("ringlab.blocks.__init__", "ringlab.blocks.naive", "ringlab.blocks.protocol"),
    ),
)
