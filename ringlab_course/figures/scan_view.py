"""Pictures of scans over ranks: whose tokens each rank knows after each round, and what a state remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from ringlab.viz.style import BLUE, GREEN, INK, ORANGE, PAPER, RULE, WIDE, new_figure, rank_colour, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Known = Sequence[Sequence[Sequence[int]]]
"""known[round][rank]: the ranks whose tokens are known to this rank after that round, including itself."""


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


def rounds(scans: Mapping[str, Known]) -> Figure:
    """Return a panel for every round of each scan: a row per rank, with a box for each rank that it knows.

    A rank knows another rank if it has received the state of that rank's tokens.
    """
    most = max(len(each) for each in scans.values())
    with styled():
        drawn = new_figure((8.0, 2.5 * len(scans) + 0.3))
        panels = drawn.subfigures(len(scans), squeeze=False)[:, 0]
        for panel, (name, each) in zip(panels, scans.items(), strict=True):
            panel.suptitle(name, x=0.01, ha="left", fontweight="bold")
            row = panel.subplots(1, most, squeeze=False)[0]
            for number, ax in enumerate(row):
                if number >= len(each):
                    ax.set_axis_off()
                    continue
                P = len(each[number])
                for rank, of in enumerate(each[number]):
                    complete = len(of) == rank + 1
                    new = set(of) - set(each[number - 1][rank]) if number else set()
                    for source in of:
                        look = {"color": rank_colour(source), "hatch": "///" if source in new else ""}
                        ax.barh(rank, 1, left=source, edgecolor=PAPER, height=0.9, **look)
                    ax.barh(rank, 1, left=rank, facecolor="none", edgecolor=INK, linewidth=1.4, height=0.9)
                    ax.text(P + 0.35, rank, "✓" if complete else "", va="center", color=INK, fontsize=9)
                title = "at first" if number == 0 else f"round {number}"
                ax.set(
                    xlim=(-0.1, P + 1.2),
                    ylim=(P - 0.5, -0.5),
                    xticks=[],
                    yticks=range(P) if number == 0 else [],
                )
                ax.set_title(title, fontsize=9.5, fontweight="normal")
                ax.grid(False)
            row[0].set_ylabel("rank")
            row[0].set_xlabel("ranks known of", fontsize=9)
        drawn.supxlabel(
            "framed: a rank's own tokens   hatched: heard of in this round   ✓ knows of all ranks before it",
            fontsize=9.5,
        )
    return drawn


def describe(scans: Mapping[str, Known]) -> str:
    """Return the picture of `rounds` in words."""
    parts = [f"{name}: {len(each) - 1} round{'s' * (len(each) > 2)}" for name, each in scans.items()]
    return (
        "The ranks whose tokens each rank knows of, round by round; a check marks ranks that know of all before them. "
        f"{'; '.join(parts)}."
    )


def composition() -> Figure:
    """Return a picture of a state that passes two stretches of tokens, one by one and combined."""
    with styled():
        drawn = new_figure((8.0, 2.6))
        ax = drawn.subplots()
        box = {"boxstyle": "round,pad=0.5", "edgecolor": INK}
        colours = {"first": rank_colour(0), "second": rank_colour(1), "both": "#E8ECF0"}
        # For each box: its centre, half of its width (including the margin), its text and its colour.
        apart = (
            (0.2, 0.4, "S", None),
            (2.6, 0.9, "stretch 1\n$(A_1, B_1)$", "first"),
            (5.2, 1.3, "$A_1 S + B_1$", None),
            (7.8, 0.9, "stretch 2\n$(A_2, B_2)$", "second"),
            (11.4, 1.9, "$A_2(A_1 S + B_1) + B_2$", None),
        )
        as_one = (
            apart[0],
            (5.2, 1.5, "both stretches\n$(A_2 A_1,\\; A_2 B_1 + B_2)$", "both"),
            (11.4, 1.9, "$A_2 A_1 S + (A_2 B_1 + B_2)$", None),
        )
        for y, row in ((1.0, apart), (0.0, as_one)):
            for (left, half, *_), (right, other_half, *_) in pairwise(row):
                ends = (right - other_half, y), (left + half, y)
                ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": INK})
            for x, _, text, colour in row:
                look = {**box, "facecolor": colours[colour]} if colour else None
                ax.text(x, y, text, ha="center", va="center", color=INK, fontsize=10.5, bbox=look)
        ax.text(
            11.4, 0.5, "the same state", ha="center", va="center", color=INK, fontsize=9.5, style="italic"
        )
        ax.set(xlim=(-0.3, 13.6), ylim=(-0.5, 1.5))
        ax.set_axis_off()
    return drawn


def describe_composition() -> str:
    """Return the picture of `composition` in words."""
    return (
        "A state S passes stretch 1, which makes A1 S + B1, and stretch 2, which makes A2 (A1 S + B1) + B2. "
        "Both together are one stretch with the pair (A2 A1, A2 B1 + B2)."
    )


def recall(stored: Sequence[int], errors: Mapping[str, Sequence[float]], D: int) -> Figure:
    """Return the error of a value read back from a state, against the number of stored keys."""
    with styled():
        drawn = new_figure(WIDE)
        ax = drawn.subplots()
        looks = ((ORANGE, "o"), (BLUE, "s"), (GREEN, "^"))
        for (name, values), (colour, mark) in zip(errors.items(), looks, strict=False):
            ax.plot(stored, values, color=colour, marker=mark, label=name)
        ax.axvline(D, color=RULE, linestyle="--")
        ax.annotate(f"D = {D}", (D, ax.get_ylim()[1]), (4, -12), textcoords="offset points", color=INK)
        ax.set(
            xlabel="keys stored in one state",
            ylabel="error / length of the value",
            title="Error of what a state gives back (one random draw)",
        )
        ax.legend()
    return drawn


def describe_recall(stored: Sequence[int], errors: Mapping[str, Sequence[float]]) -> str:
    """Return the curves of `recall` in words."""
    ends = ", ".join(
        f"{name} from {values[0]:.2f} to {values[-1]:.2f}, {max(values):.2f} at most"
        for name, values in errors.items()
    )
    return f"Error of a value read back, with {stored[0]} to {stored[-1]} keys stored: {ends}."


def survival(alphas: Sequence[float]) -> Figure:
    """Return the fractions of the entering state and of each token's write that survive, in a table.

    Each row is the moment when a token reads; the last row is the end of the chunk.
    alphas: the decay factor of each token of the chunk.
    """
    C = len(alphas)
    with styled():
        drawn = new_figure((6.4, 0.55 * (C + 2) + 0.9))
        ax = drawn.subplots()
        for reader, fractions in enumerate(_surviving(alphas)):
            for source, fraction in enumerate(fractions):
                left, top = source + 0.25 * (source > 0), reader + 0.25 * (reader == C)
                face = {"color": BLUE, "alpha": 0.12 + 0.7 * fraction} if fraction else {"color": PAPER}
                ax.barh(top, 0.94, left=left, height=0.94, align="edge", **face)
                ax.text(
                    left + 0.5, top + 0.5, f"{fraction:.3g}", ha="center", va="center", color=INK, fontsize=9
                )
        names = {0.5: "state S\nthat enters", **{j + 1.75: f"write of\ntoken {j + 1}" for j in range(C)}}
        for x, name in names.items():
            ax.text(x, -0.15, name, ha="center", va="bottom", color=INK, fontsize=8.5)
        for i in range(C):
            ax.text(
                -0.2,
                i + 0.5,
                f"token {i + 1} (α = {alphas[i]:g}) reads",
                ha="right",
                va="center",
                color=INK,
                fontsize=8.5,
            )
        ax.text(-0.2, C + 0.75, "state S′ that leaves", ha="right", va="center", color=INK, fontsize=8.5)
        for x, y, letter in ((0.5, C + 1.6, "e"), (C + 1.55, C / 2, "E"), (C + 1.55, C + 0.75, "f")):
            ax.text(x, y, letter, ha="center", va="center", color=INK, fontsize=12, fontweight="bold")
        ax.set(xlim=(-2.9, C + 1.9), ylim=(C + 1.9, -0.9))
        ax.set_axis_off()
    return drawn


def describe_survival(alphas: Sequence[float]) -> str:
    """Return the fractions of `survival` in words."""
    *reads, leaves = _surviving(alphas)
    each = "; ".join(
        f"token {i} reads {state:.3g} of the state and {', '.join(f'{x:.3g}' for x in of[:i])} of the writes so far"
        for i, (state, *of) in enumerate(reads, start=1)
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
