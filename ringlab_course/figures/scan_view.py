"""Pictures of a state that is handed from rank to rank: next to the ring, token by token, and in a scan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringlab.comm.trace import Trace
from ringlab.viz import gantt
from ringlab.viz.gantt_chart import COMPUTATIONS, Chart, chart
from ringlab.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    QUIET,
    RULE,
    WIDE,
    new_figure,
    rank_colour,
    styled,
)
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = Sequence[Sequence[float]]
Known = Sequence[Sequence[Sequence[int]]]
"""known[round][rank]: the ranks whose tokens are known to this rank after that round, including itself."""
LIGHT = "#E8ECF0"
"""The colour of boxes that belong to no rank."""
_MIDDLE: dict[str, Any] = {"ha": "center", "va": "center", "color": INK}


def _ink(rank: int) -> str:
    """Return the colour of text that can be read on the colour of a rank."""
    return PAPER if rank_colour(rank) == BLUE else INK


def beside(ranks: int, block_bytes: int, state_bytes: int) -> Figure:
    """Return a picture of a ring with a K/V block for each rank, next to ranks that hand on a state.

    The areas of the blocks and of the states are to one scale.
    """
    side = 0.62
    small = side * math.sqrt(state_bytes / block_bytes)
    with styled():
        drawn = new_figure((8.0, 4.5))
        ring, chain = drawn.subplots(1, 2)
        _draw_ring(ring, ranks, side)
        _draw_chain(chain, ranks, small)
        ring.text(0, 0, f"a block:\n{_mebibytes(block_bytes)}\n{ranks - 1} hops each", **_MIDDLE)
        hands = f"the state of all heads:\n{_mebibytes(state_bytes)}, handed on once"
        chain.annotate(
            hands,
            _handed(ranks, ranks // 2),
            (-1.05, -1.1),
            ha="center",
            va="center",
            color=INK,
            arrowprops={"arrowstyle": "-", "color": QUIET},
        )
        titles = "Softmax: keys and values go around", "Linear: a state is handed on"
        below = "all ranks compute at the same time", f"rank {ranks - 1} waits for all others"
        for ax, title, text in zip((ring, chain), titles, below, strict=True):
            ax.text(-2.1, 2.62, title, fontweight="bold", fontsize=11, va="center", color=INK)
            ax.text(-2.1, 2.3, text, va="center", color=INK, fontsize=10)
            ax.set(xlim=(-2.15, 2.15), ylim=(-2.05, 2.8), aspect="equal")
            ax.set_axis_off()
        drawn.supxlabel("circle: a rank   coloured: its keys and values   areas to scale", fontsize=9.5)
    return drawn


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.0f} MiB"


def _draw_ring(ax: Axes, ranks: int, side: float) -> None:
    for rank in range(ranks):
        angle = math.pi / 2 - 2 * math.pi * rank / ranks
        x, y = math.cos(angle), math.sin(angle)
        corner = 1.62 * x - side / 2, 1.62 * y - side / 2
        panel.add_rectangle(ax, corner, side, side, facecolor=rank_colour(rank), edgecolor=INK)
        ax.text(1.62 * x, 1.62 * y, f"K, V\nof {rank}", **(_MIDDLE | {"color": _ink(rank)}), fontsize=8)
        _draw_rank(ax, (1.02 * x, 1.02 * y), rank)
        after = angle - 2 * math.pi / ranks
        end, start = ((1.02 * math.cos(each), 1.02 * math.sin(each)) for each in (after + 0.2, angle - 0.2))
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.4})


def _draw_rank(ax: Axes, place: tuple[float, float], rank: int) -> None:
    ax.text(*place, str(rank), **_MIDDLE, fontsize=9, zorder=4)
    ax.plot(*place, marker="o", markersize=15, color=PAPER, markeredgecolor=INK, zorder=3)


def _draw_chain(ax: Axes, ranks: int, small: float) -> None:
    """Draw the ranks from the upper left to the lower right, because each rank gets its state from the rank before."""
    room = 0.17
    places = [_place(ranks, rank) for rank in range(ranks)]
    for rank, place in enumerate(places):
        _draw_rank(ax, place, rank)
    for rank, ((x, y), (right, below)) in enumerate(pairwise(places)):
        ends = (right, below + room), (x + room, y)
        bent = "angle,angleA=0,angleB=90"
        arrow = {"arrowstyle": "->", "color": INK, "connectionstyle": bent}
        ax.annotate("", *ends, arrowprops=arrow)
        across, high = _handed(ranks, rank)
        corner = across - small / 2, high - small / 2
        panel.add_rectangle(ax, corner, small, small, facecolor=INK, linewidth=0, zorder=4)


def _place(ranks: int, rank: int) -> tuple[float, float]:
    step = 3.7 / ranks
    return -1.9 + rank * step, 1.75 - rank * step


def _handed(ranks: int, rank: int) -> tuple[float, float]:
    """Return the place of the state that `rank` hands on."""
    return _place(ranks, rank + 1)[0], _place(ranks, rank)[1]


def describe_beside(ranks: int, block_bytes: int, state_bytes: int) -> str:
    """Return the picture of `beside` in words."""
    return (
        f"Left, a ring of {ranks} ranks: each has a block of keys and values of {_mebibytes(block_bytes)}, which makes "
        f"{ranks - 1} hops. Right, a chain of {ranks} ranks: each hands the next one a state of "
        f"{_mebibytes(state_bytes)}, once. The areas are to scale: a block is {block_bytes / state_bytes:.0f} times as large."
    )


class Token(NamedTuple):
    """A token of the small example: its key, the value that it writes, and what it keeps of the state."""

    name: str
    value: tuple[float, float]
    keeps: float = 1.0

    @property
    def text(self) -> str:
        """Return what the token does, for example "a ← (1, 0)"."""
        forgets = (
            ""
            if self.keeps == 1
            else "forget half\n"
            if self.keeps == 0.5
            else f"forget {1 - self.keeps:.0%}\n"
        )
        return f"{forgets}{self.name} ← {_numbers(self.value)}"


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(_short(value) for value in values)})"


def _short(value: float) -> str:
    return f"{round(value, 2) + 0.0:.3g}".replace("-", "−")


Square = tuple[float, str, Matrix]
"""A matrix of 2 × 2 numbers to draw: the place of its centre in tokens, the text below it, and the numbers."""


def belt(
    tokens: Sequence[Token],
    ranks: int,
    rows: Mapping[str, Sequence[Square]],
    title: str,
    of_old: str = "",
    marked: int | None = None,
) -> Figure:
    """Return a picture of the tokens in the colours of their ranks, and below them squares of 2 × 2 numbers.

    rows: the squares of each row, by the row's name. of_old: the name of the row whose matrices multiply an older
    state. In this row the columns are marked too, and matrices of zeros are pale. marked: the token that gets a
    thick frame.
    """
    each, high = len(tokens) // ranks, 1.4
    first, *_, last = sorted(x for squares in rows.values() for x, _, _ in squares)
    names, right = min(-0.35, first - 1.0), max(len(tokens) + 0.1, last + 0.7)
    with styled():
        drawn = new_figure((8.0, 1.5 + 0.8 * len(rows)))
        ax = drawn.subplots()
        for place, token in enumerate(tokens):
            look = {"facecolor": rank_colour(place // each), "edgecolor": PAPER, "linewidth": 1.5}
            if place == marked:
                look |= {"edgecolor": INK, "linewidth": 2.2, "zorder": 2}
            panel.add_rectangle(ax, (place, 0), 1, 1, **look)
            ax.text(place + 0.5, 0.5, token.text, **_MIDDLE, fontsize=8)
        for rank in range(ranks):
            ax.text((rank + 0.5) * each, 1.12, f"rank {rank}", ha="center", va="bottom", fontsize=9.5)
        for number, (name, squares) in enumerate(rows.items()):
            y = -0.95 - number * high
            ax.text(names, y, name, ha="right", va="center", fontsize=9.5)
            for x, label, matrix in squares:
                _draw_square(ax, x, y, label, matrix, of_old=name == of_old)
                if number == 0 and x % each == 0:
                    ax.plot([x, x], [-0.52, 0], color=INK, linewidth=1, zorder=0)
        ax.set(xlim=(names - 1.25, right), ylim=(-0.25 - high * len(rows), 1.6), title=title)
        ax.set_axis_off()
    return drawn


def _draw_square(ax: Axes, x: float, y: float, label: str, matrix: Matrix, *, of_old: bool = False) -> None:
    """Draw a matrix whose rows are marked with the keys a and b.

    With `of_old`, its columns are marked with the rows of the old state, and a matrix of zeros is pale.
    """
    width, height = 1.24, 0.86
    corner = x - width / 2, y - height / 2
    pale = of_old and _is_zero(matrix)
    look = (
        {"facecolor": PAPER, "edgecolor": QUIET, "linestyle": ":"}
        if pale
        else {"facecolor": LIGHT, "edgecolor": INK}
    )
    panel.add_rectangle(ax, corner, width, height, linewidth=1.2, **look)
    mark: dict[str, Any] = {"color": QUIET, "fontsize": 8.5}
    number = _MIDDLE | {"color": QUIET if pale else INK, "fontsize": 8.5}
    for row, values in enumerate(matrix):
        middle = y + (0.5 - row) * height / 2
        ax.text(x - width / 2 - 0.06, middle, "ab"[row], ha="right", va="center", **mark)
        for column, value in enumerate(values):
            ax.text(x + (column - 0.5) * width / 2, middle, _short(value), **number)
    if of_old:
        for column in range(2):
            place = x + (column - 0.5) * width / 2, y + height / 2 + 0.05
            ax.text(*place, f"old {'ab'[column]}", ha="center", va="bottom", **mark)
    if label:
        ax.text(x, y - height / 2 - 0.05, label, ha="center", va="top", fontsize=9)


def _is_zero(matrix: Matrix) -> bool:
    return not np.any(matrix)


def states(
    tokens: Sequence[Token],
    ranks: int,
    rows: Mapping[str, Sequence[Matrix]],
    note: tuple[int, str] | None = None,
) -> Figure:
    """Return a picture of the tokens, and below them rows of the states that leave the ranks.

    A state is drawn at the end of its rank's tokens. note: a token that gets a thick frame, and a text that is
    written below the state of its rank in the last row.
    """
    each, last = len(tokens) // ranks, list(rows)[-1]
    marked, text = note or (None, "")
    squares = {
        name: [((rank + 1) * each, "", matrix) for rank, matrix in enumerate(matrices)]
        for name, matrices in rows.items()
    }
    if marked is not None:
        x, _, matrix = squares[last][marked // each]
        squares[last][marked // each] = x, text, matrix
    title = "The state after each rank: a sum that grows, or a table that is corrected"
    return belt(tokens, ranks, squares, title, marked=marked)


def describe_states(
    tokens: Sequence[Token],
    ranks: int,
    rows: Mapping[str, Sequence[Matrix]],
    note: tuple[int, str] | None = None,
) -> str:
    """Return the picture of `states` in words."""
    each = len(tokens) // ranks
    owned = "; ".join(
        f"rank {rank}: {', '.join(token.text for token in tokens[rank * each : (rank + 1) * each])}"
        for rank in range(ranks)
    ).replace("\n", ", ")
    left = ". ".join(
        f"{name}: {', then '.join('a ' + _numbers(a) + ' b ' + _numbers(b) for a, b in matrices)}"
        for name, matrices in rows.items()
    )
    said = f" On rank {note[0] // each}, {note[1]}." if note else ""
    return f"Eight tokens on {ranks} ranks, {owned}. The states that leave the ranks, {left}.{said}"


def transitions(tokens: Sequence[Token], pairs: Sequence[tuple[Matrix, Matrix]]) -> Figure:
    """Return a picture of the tokens, and below each rank the A and the B of its transition."""
    each = len(tokens) / len(pairs)
    names = "A", "B: what is left\nof its own writes"
    rows = {
        name: [((rank + 0.5) * each, "", matrix) for rank, matrix in enumerate(matrices)]
        for name, matrices in zip(names, zip(*pairs, strict=True), strict=True)
    }
    title = "A: what each rank leaves of the old rows"
    return belt(tokens, len(pairs), rows, title, of_old=names[0])


def describe_transitions(tokens: Sequence[Token], pairs: Sequence[tuple[Matrix, Matrix]]) -> str:
    """Return the matrices of `transitions` in words."""
    each = "; ".join(
        f"rank {rank}: A {' '.join(map(_numbers, A))}, B {' '.join(map(_numbers, B))}"
        for rank, (A, B) in enumerate(pairs)
    )
    return f"The transitions of {len(tokens)} tokens on {len(pairs)} ranks, row by row. {each}."


def known(hops: Sequence[Sequence[tuple[int, int]]], P: int) -> Known:
    """Return the ranks whose tokens each rank knows, at first and after each round.

    hops: for each round, pairs (source, target). Each hop carries everything that its source knows.
    """
    held = [[rank] for rank in range(P)]
    rounds = [held]
    for hop_round in hops:
        held = [
            sorted({*held[rank], *(of for source, to in hop_round if to == rank for of in held[source])})
            for rank in range(P)
        ]
        rounds.append(held)
    return rounds


def doubling(held: Known, rank: int) -> Figure:
    """Return a picture of the messages in each round of doubling, and of the ranks that each rank knows after it.

    The messages through which data reach `rank` are thick.
    """
    with styled():
        drawn = new_figure((8.0, 4.5))
        title = f"Doubling: after {len(held) - 1} rounds each rank knows all ranks before it"
        drawn.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        _draw_messages(drawn.subplots(), held, rank)
        drawn.supxlabel(
            f"a colour: the tokens of a rank   arrow: a message; thick: it leads to rank {rank}", fontsize=9.5
        )
    return drawn


def kept(held: Known, rank: int) -> Figure:
    """Return a picture of the two compositions that `rank` keeps in doubling, and of what arrives, in each round."""
    with styled():
        drawn = new_figure((8.0, 2.2))
        title = f"What rank {rank} keeps: “before” to use, “all” to send"
        drawn.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        for number, ax in enumerate(drawn.subplots(1, len(held), squeeze=False)[0]):
            _draw_pairs(ax, held, number, rank)
    return drawn


def _draw_messages(ax: Axes, held: Known, rank: int) -> None:
    """Draw the messages, and for each rank and round a strip of P places, filled with the ranks that it knows."""
    P, step, wide, high = len(held[0]), 1.75, 0.86, 0.5
    leads: list[set[int]] = [set() for _ in held]  # after each round, the ranks whose data will reach `rank`
    leads[-1] = {rank}
    for number in range(len(held) - 1, 0, -1):
        distance = 2 ** (number - 1)
        leads[number - 1] = leads[number] | {to - distance for to in leads[number] if to >= distance}
    for number, known_by in enumerate(held):
        y = -step * number
        ax.text(
            -0.62, y, "at first" if number == 0 else f"round {number}", ha="right", va="center", fontsize=9.5
        )
        for owner, of in enumerate(known_by):
            left = owner - wide / 2
            panel.add_rectangle(ax, (left, y - high / 2), wide, high, facecolor=LIGHT, linewidth=0)
            for source in of:
                corner = left + source * wide / P, y - high / 2
                panel.add_rectangle(ax, corner, wide / P, high, facecolor=rank_colour(source), linewidth=0)
            frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8 if owner == rank else 0.8}
            panel.add_rectangle(ax, (left, y - high / 2), wide, high, **frame)
            distance = 2 ** (number - 1) if number else 0
            if distance and owner >= distance:
                thick = owner in leads[number]
                look = {
                    "arrowstyle": "-|>",
                    "color": INK if thick else QUIET,
                    "linewidth": 2.4 if thick else 0.8,
                }
                ends = (owner, y + high / 2), (owner - distance, y + step - high / 2)
                ax.annotate("", *ends, arrowprops={**look, "shrinkA": 0, "shrinkB": 0})
    for owner in range(P):
        weight = "bold" if owner == rank else "normal"
        ax.text(owner, 0.62, f"rank {owner}", ha="center", fontsize=9.5, fontweight=weight)
    ax.set(xlim=(-1.5, P - 0.35), ylim=(-step * (len(held) - 1) - 0.4, 1.0))
    ax.set_axis_off()


def _draw_pairs(ax: Axes, held: Known, number: int, rank: int) -> None:
    P, of = len(held[0]), held[number][rank]
    heard = sorted(set(of) - set(held[number - 1][rank])) if number else []
    rows = {"arrives": heard, "before": [source for source in of if source < rank], "all": of}
    for place, sources in enumerate(rows.values()):
        panel.add_rectangle(ax, (-0.5, place - 0.38), P, 0.76, facecolor=LIGHT, edgecolor=INK, linewidth=0.8)
        for source in sources:
            look = {"facecolor": rank_colour(source), "edgecolor": PAPER, "linewidth": 0.6}
            panel.add_rectangle(ax, (source - 0.5, place - 0.38), 1, 0.76, **look)
            ax.text(source, place, str(source), **(_MIDDLE | {"color": _ink(source)}), fontsize=8)
        if not sources:
            empty = "(I, 0)" if place == 1 else "nothing"
            ax.text(P / 2 - 0.5, place, empty, **(_MIDDLE | {"color": QUIET}), fontsize=8.5)
    ax.set(xlim=(-0.7, P - 0.3), ylim=(2.6, -0.6), xticks=[])
    ax.set_title(
        "at first" if number == 0 else f"round {number}", fontsize=9.5, fontweight="normal", loc="center"
    )
    ax.set_yticks(range(3) if number == 0 else [], list(rows) if number == 0 else [])
    panel.bare(ax)


def describe_doubling(held: Known, rank: int) -> str:
    """Return the picture of `doubling` in words."""
    knows = "; ".join(
        f"after round {number} it knows of {_span(of[rank])}" for number, of in enumerate(held[1:], start=1)
    )
    return (
        f"Doubling on {len(held[0])} ranks in {len(held) - 1} rounds: whose tokens each rank knows. "
        f"Rank {rank} begins with its own; {knows}."
    )


def describe_kept(held: Known, rank: int) -> str:
    """Return the picture of `kept` in words."""
    parts = []
    for number in range(1, len(held)):
        of, had = held[number][rank], held[number - 1][rank]
        heard = sorted(set(of) - set(had))
        parts.append(
            f"in round {number} it hears of {_span(heard)}, so that all is {_span(of)} and before is {_span(of[:-1])}"
        )
    return f"What rank {rank} keeps. At first all is {rank} and before is nothing; {'; '.join(parts)}."


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else "nothing"


def entering(
    tokens: Sequence[Token], pairs: Sequence[tuple[Matrix, Matrix]], relayed: Sequence[Matrix]
) -> Figure:
    """Return a picture of the tokens, and for each round of doubling the B that each rank knows after it.

    A rank's B is drawn at the border before its tokens, where a state enters the rank.
    relayed: for the last row, the state that enters each rank if the state is passed from rank to rank.
    """
    each, rounds = len(tokens) / len(pairs), _doubled(pairs)
    rows: dict[str, list[Square]] = {
        f"round {number}": [(rank * each, _whose(of), B) for rank, (of, B) in enumerate(before)]
        for number, before in enumerate(rounds, start=1)
    }
    same = [np.allclose(state, B) for state, (_, B) in zip(relayed, rounds[-1], strict=True)]
    rows["relay"] = [
        (rank * each, f"{'=' if same[rank] else '≠'} round {len(rounds)}", state)
        for rank, state in enumerate(relayed)
    ]
    title = f"After {len(rounds)} rounds each rank has the state that enters it, as from a relay"
    return belt(tokens, len(pairs), rows, title)


def describe_entering(
    tokens: Sequence[Token], pairs: Sequence[tuple[Matrix, Matrix]], relayed: Sequence[Matrix]
) -> str:
    """Return the matrices of `entering` in words."""
    rows = {f"after round {number}": [B for _, B in of] for number, of in enumerate(_doubled(pairs), start=1)}
    each = "; ".join(
        f"{name} {', '.join(f'rank {rank} ' + ' '.join(map(_numbers, B)) for rank, B in enumerate(matrices))}"
        for name, matrices in {**rows, "from a relay": relayed}.items()
    )
    return f"The B of what each of {len(pairs)} ranks knows of the ranks before it, for {len(tokens)} tokens: {each}."


def _whose(of: Sequence[int]) -> str:
    if len(of) < 2:
        return f"of rank {of[0]}" if of else "zeros"
    return f"of ranks {of[0]} {'and' if len(of) == 2 else 'to'} {of[-1]}"


def _doubled(pairs: Sequence[tuple[Matrix, Matrix]]) -> list[list[tuple[list[int], Matrix]]]:
    """Return, for each round of doubling and each rank, the earlier ranks that it knows and the B of their tokens."""
    P = len(pairs)
    own = [(np.array(A), np.array(B)) for A, B in pairs]
    before: list[tuple[list[int], Any]] = [([], (np.eye(len(A)), np.zeros_like(B))) for A, B in own]
    rounds, distance = [], 1
    while distance < P:
        sent = list(zip([[*of, rank] for rank, (of, _) in enumerate(before)], own, strict=True))
        for rank in range(distance, P):
            of, pair = sent[rank - distance]
            before[rank] = (of + before[rank][0], _after(before[rank][1], pair))
            own[rank] = _after(own[rank], pair)
        rounds.append([(of, B.tolist()) for of, (_, B) in before])
        distance *= 2
    return rounds


def _after(later: tuple[Any, Any], earlier: tuple[Any, Any]) -> tuple[Any, Any]:
    return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]


KINDS = {
    "nothing": "nothing",
    "a number": "one number",
    "a diagonal": "a diagonal",
    "a matrix": "a full matrix",
}
"""The four kinds of A, and the title of each."""


def kinds(models: Mapping[str, Sequence[str]], D: int = 6) -> Figure:
    """Return the four kinds of A as grids of D × D numbers. models: the names of models for each kind."""
    fractions = [0.95, 0.4, 0.75, 0.55, 0.3, 0.85]
    with styled():
        drawn = new_figure((8.0, 3.3))
        drawn.suptitle(
            "How much of A must travel, for each head", x=0.01, ha="left", fontweight="bold", fontsize=11.5
        )
        for ax, (kind, names) in zip(drawn.subplots(1, len(KINDS)), models.items(), strict=True):
            for row in range(D):
                for column in range(D):
                    if kind == "a matrix":
                        shade = 0.3 + 0.7 * ((5 * row + 7 * column + row * column) % 9) / 9
                    elif row != column:
                        shade = 0.0
                    else:
                        shade = {"nothing": 0.7, "a number": 0.6}.get(kind, fractions[row % 6])
                    travels = kind != "nothing" and shade and (kind != "a number" or row == 0)
                    look = (
                        {"facecolor": BLUE if kind != "nothing" else QUIET, "alpha": shade}
                        if shade
                        else {"facecolor": PAPER}
                    )
                    panel.add_rectangle(ax, (column, D - 1 - row), 0.92, 0.92, **look)
                    panel.add_rectangle(
                        ax,
                        (column, D - 1 - row),
                        0.92,
                        0.92,
                        facecolor="none",
                        edgecolor=INK if travels else RULE,
                        linewidth=2.2 if travels else 0.6,
                    )
            ax.set(xlim=(-0.2, D + 0.1), ylim=(-1.6, D + 1.1), aspect="equal")
            ax.text(D / 2, D + 0.5, KINDS[kind], **_MIDDLE, fontweight="bold", fontsize=10)
            ax.text(D / 2, -0.35, "\n".join(names), ha="center", va="top", fontsize=8.5)
            ax.set_axis_off()
        drawn.supxlabel(
            "black frame: a number that travels   grey: known to every rank",
            fontsize=9.5,
        )
    return drawn


def describe_kinds(models: Mapping[str, Sequence[str]]) -> str:
    """Return the kinds of `kinds` in words."""
    each = "; ".join(f"{KINDS[kind]}: {', '.join(names)}" for kind, names in models.items())
    return f"What of A travels in each kind of layer. {each}."


def timeline(traces: Mapping[str, Trace], alone: float | None = None) -> Figure:
    """Return a picture of what the ranks compute and when states travel, for each run, on a common time axis.

    alone: the seconds that one GPU needs for all the work; a line marks them.
    """
    charts = {name: chart(trace) for name, trace in traces.items()}
    end = max(one.makespan for one in charts.values())
    with styled():
        drawn = new_figure((8.0, 1.0 + sum(0.3 * one.world_size + 0.45 for one in charts.values())))
        axes = drawn.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (name, one) in zip(axes, charts.items(), strict=True):
            _draw_work(ax, one, traces[name])
            ax.set_title(f"{name}: done after {one.makespan:g} s")
            if alone is not None:
                ax.axvline(alone, color=INK, linestyle="--", linewidth=1.2, zorder=0)
                ax.text(alone + 0.08, -0.35, f"one GPU alone: {alone:g} s", va="center", fontsize=9)
            ax.set(xlim=(0, 1.02 * end), ylim=(one.world_size - 0.4, -0.75))
            ax.set_yticks(
                range(one.world_size), [f"rank {rank}" for rank in range(one.world_size)], fontsize=9
            )
            ax.tick_params(length=0)
            ax.grid(visible=False, axis="y")
        axes[-1].set_xlabel("time (s)")
        drawn.supxlabel(
            "bar: a rank computes, in its colour   arrow: a message   dotted: a rank waits", fontsize=9.5
        )
    return drawn


def _draw_work(ax: Axes, one: Chart, trace: Trace) -> None:
    words = {"passage": "A, B", "attend": "outputs"}
    begin = min((event.start for event in trace.computes()), default=0.0)
    for bar in one.bars:
        if bar.kind == "wait":
            ax.plot([bar.start, bar.end], [bar.rank] * 2, color=QUIET, linestyle=":", linewidth=1.2, zorder=1)
        elif bar.kind in COMPUTATIONS and bar.end > bar.start:
            look = {"facecolor": rank_colour(bar.rank), "edgecolor": INK, "linewidth": 0.8}
            panel.add_rectangle(ax, (bar.start, bar.rank - 0.36), bar.end - bar.start, 0.72, zorder=2, **look)
            middle = (bar.start + bar.end) / 2
            style = _MIDDLE | {"color": _ink(bar.rank), "fontsize": 8.5, "zorder": 4}
            ax.text(middle, bar.rank, words.get(bar.label, bar.label), **style)
    for event in trace.exchanges():
        if event.source is not None and event.transit:
            start, arrival = (time - begin for time in event.transit[0])
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
            tip, steep = float(event.rank), abs(event.rank - event.source) > 2
            arrow["mutation_scale"] = 7 if steep else 10  # steep arrows are close to each other
            if steep:
                tip -= 0.36  # at the bar's corner, because a steep head at its side would cover the bar
            ax.annotate("", (arrival, tip), (start, event.source), arrowprops=arrow, zorder=3)


def describe_timeline(traces: Mapping[str, Trace]) -> str:
    """Return the charts of `timeline` in words."""
    return gantt.describe_all(traces.values(), traces)


def shares(bars: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return the shares of a layer's time as bars. bars: for each case the seconds of four parts, the scan last."""
    colours = (RULE, BLUE, ORANGE, INK)
    with styled():
        drawn = new_figure((8.0, 0.42 * len(bars) + 1.3))
        ax = drawn.subplots()
        for row, parts in enumerate(bars.values()):
            left, whole = 0.0, sum(parts.values())
            for (name, seconds), colour in zip(parts.items(), colours, strict=True):
                width = 100 * seconds / whole
                label = name if row == 0 else ""
                ax.barh(row, width, left=left, height=0.7, color=colour, edgecolor=PAPER, label=label)
                left += width
            text = f"scan {seconds * 1e3:.2f} of {whole * 1e3:.1f} ms: {seconds / whole:.0%}"
            ax.text(101.5, row, text, va="center", fontsize=9, color=INK)
        ax.set_yticks(range(len(bars)), list(bars), fontsize=9)
        ax.set(xlim=(0, 146), ylim=(len(bars) - 0.4, -0.6), xticks=range(0, 101, 25))
        title = "The more tokens a rank has, the smaller is the scan's share of the layer"
        drawn.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        ax.set_xlabel("share of the layer's time (%)", x=0.34)
        ax.grid(visible=False, axis="y")
        drawn.legend(loc="outside lower center", ncols=4, fontsize=9)
    return drawn


def describe_shares(bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return the bars of `shares` in words."""
    each = "; ".join(
        f"{case}: {', '.join(f'{name} {seconds * 1e3:.2f} ms' for name, seconds in parts.items())}"
        for case, parts in bars.items()
    )
    return f"The time of a linear layer's forward, and the share of the scan in it. {each}."


def recall(stored: Sequence[int], errors: Mapping[str, Sequence[float]], D: int) -> Figure:
    """Return a picture of the error of a value read back from a state, against the number of stored keys."""
    with styled():
        drawn = new_figure(WIDE)
        ax = drawn.subplots()
        looks = ((ORANGE, "o"), (BLUE, "s"), (GREEN, "^"))
        for (name, values), (colour, mark) in zip(errors.items(), looks, strict=False):
            ax.plot(stored, values, color=colour, marker=mark)
            ax.text(stored[-1] + 0.03 * stored[-1], values[-1], name, va="center", color=INK, fontsize=9.5)
        ax.axvline(D, color=QUIET, linestyle="--", linewidth=1.2)
        ax.text(D - 0.3, 1.25, f"D = {D}", ha="right", va="center", color=INK, fontsize=9.5)
        ax.plot([0, stored[-1]], [1, 1], color=QUIET, linestyle=":", linewidth=1.2, zorder=1)
        ax.text(0, 1.03, "a state of zeros", color=INK, fontsize=9.5)
        ax.set(
            xlim=(-0.02 * stored[-1], 1.38 * stored[-1]),
            xticks=[1, *(n for n in stored if n >= D / 2 and n != D + 1)],
            xlabel="keys stored in one state",
            ylabel="error / length of the value",
            title=f"The best state of {D} × {D} numbers gives back {D} pairs, and no more",
        )
    return drawn


def describe_recall(stored: Sequence[int], errors: Mapping[str, Sequence[float]], D: int) -> str:
    """Return the curves of `recall` in words."""
    ends = ", ".join(
        f"{name} from {values[0]:.2f} to {values[-1]:.2f}, {max(values):.2f} at most"
        for name, values in errors.items()
    )
    return (
        f"Error of a value read back from a state of {D} × {D} numbers, "
        f"with {stored[0]} to {stored[-1]} keys stored: {ends}."
    )


def survival(alphas: Sequence[float]) -> Figure:
    """Return a table of the surviving fractions of the entering state and of each token's write.

    Each row is the moment when a token reads; the last row is the end of the chunk.
    alphas: the decay factor of each token of the chunk.
    """
    C = len(alphas)
    with styled():
        drawn = new_figure((7.2, 0.55 * (C + 3) + 0.8))
        ax = drawn.subplots()
        for reader, fractions in enumerate(_surviving(alphas)):
            for source, fraction in enumerate(fractions):
                left, top = source + 0.7 * (source > 0), reader + 0.25 * (reader == C)
                face = {"color": BLUE, "alpha": 0.12 + 0.7 * fraction} if fraction else {"color": PAPER}
                ax.barh(top, 0.94, left=left, height=0.94, align="edge", **face)
                ax.text(
                    left + 0.5, top + 0.5, f"{fraction:.3g}", ha="center", va="center", color=INK, fontsize=9
                )
        names = {0.5: "state S\nthat enters", **{j + 2.2: f"write of\ntoken {j}" for j in range(C)}}
        for x, name in names.items():
            ax.text(x, -0.15, name, ha="center", va="bottom", color=INK, fontsize=8.5)
        for i in range(C):
            ax.text(
                -0.2,
                i + 0.5,
                f"token {i} (α = {alphas[i]:g}) reads",
                ha="right",
                va="center",
                color=INK,
                fontsize=8.5,
            )
        ax.text(-0.2, C + 0.75, "state S′ that leaves", ha="right", va="center", color=INK, fontsize=8.5)
        state, writes, above, below = 0.47, 1.67 + C / 2, -1.1, C + 1.55  # the places of the letters
        letters = (
            (state, above, "e"),
            (writes, above, "E"),
            (state, below, f"$e_{{{C - 1}}}$"),
            (writes, below, "f"),
        )
        for x, y, letter in letters:
            ax.text(x, y, letter, ha="center", va="center", color=INK, fontsize=12, fontweight="bold")
        ax.set(xlim=(-2.9, C + 1.75), ylim=(C + 1.85, -1.35))
        ax.set_title("The older a write is, the less of it a token reads")
        ax.set_axis_off()
    return drawn


def describe_survival(alphas: Sequence[float]) -> str:
    """Return the fractions of `survival` in words."""
    *reads, leaves = _surviving(alphas)
    each = "; ".join(
        f"token {i} reads {state:.3g} of the state and {', '.join(f'{x:.3g}' for x in of[: i + 1])} of the writes so far"
        for i, (state, *of) in enumerate(reads)
    )
    kept = ", ".join(f"{x:.3g}" for x in leaves[1:])
    return f"What survives in a chunk: {each}; {leaves[0]:.3g} of the state and {kept} of the writes leave the chunk."


def _surviving(alphas: Sequence[float]) -> list[list[float]]:
    """Return the surviving fractions of the state and of each write, for each token and for the end."""
    C = len(alphas)
    rows = [
        [prod(alphas[: i + 1]), *(prod(alphas[j + 1 : i + 1]) if j <= i else 0.0 for j in range(C))]
        for i in range(C)
    ]
    return [*rows, rows[-1]]
