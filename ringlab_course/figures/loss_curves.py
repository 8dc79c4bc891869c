"""Loss curves in one plot, and the distance of each curve from the first one.

The curves are measured, either by a notebook's own runs or by `ringlab bench`, which also records the
machine. A further picture shows what each kind of parallel training shards.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.style import BLUE, GREEN, INK, ORANGE, QUIET, RED, new_figure, rank_colour, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[float]]
"""Losses by step, by the name of the run. All runs are compared with the first one."""
RECORDED = Path("benchmarks/results/nn/loss-curves.json")
SAME = 1e-5
"""Float32 runs that differ by at most this share count as equal, because they add in different orders."""
FLOOR = 1e-9
"""The height at which the picture draws equal losses, because their difference has no logarithm."""
SHARDS = {"DP": "sequences", "TP": "heads", "CP": "tokens", "PP": "layers"}
"""The quantity that each kind of parallelism divides among the ranks."""
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": INK, "linewidth": 5.0, "alpha": 0.25},
    {"color": BLUE, "linestyle": "-", "linewidth": 1.6},
    {"color": RED, "linestyle": "--", "linewidth": 1.6},
    {"color": GREEN, "linestyle": ":", "linewidth": 2.2},
    {"color": ORANGE, "linestyle": "-.", "linewidth": 1.6},
)


@dataclass(frozen=True)
class Recorded:
    """Curves of an earlier run; `machine` says where, when and with which versions they were measured."""

    curves: Curves
    machine: str


def recorded(path: Path | None = None) -> Recorded:
    """Return the 200-step curves that come with the course. Raises: OSError if the file does not exist."""
    from ringlab.checkout import find_checkout

    recorded = json.loads((path or find_checkout() / RECORDED).read_text(encoding="utf-8"))
    at = recorded["machine"]
    words = f"{at['processor']}, {at['cores']} cores, torch {at['torch']}, Python {at['python']}, {at['date'][:10]}"
    return Recorded(recorded["curves"], words)


def differences(curves: Curves) -> dict[str, list[float]]:
    """Return |loss − first loss| / first loss, step by step, for each run except the first."""
    (_, first), *others = curves.items()
    return {
        name: [abs(one - own) / abs(own) for one, own in zip(losses, first, strict=True)]
        for name, losses in others
    }


ROUNDING = "below 1e-5: rounding"
"""The text at the line of `SAME`. It would be wrong if a mistake caused differences below the line."""


def figure(curves: Curves, title: str, below: str = ROUNDING) -> Figure:
    """Return the curves, and below them the distance of each from the first, on a logarithmic scale.

    below: the text that is written on the line of `SAME`, about the differences below it.
    """
    with styled():
        drawing = new_figure((7.2, 5.0))
        above, lower = drawing.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (name, losses), look in zip(curves.items(), LOOKS, strict=False):
            above.plot(range(1, len(losses) + 1), losses, label=name, **look)
        _draw_distances(lower, curves, below)
        above.set(ylabel="loss (nats per byte)")
        above.set_title(title)
        above.legend(loc="upper right")
    return drawing


def apart(curves: Curves, title: str) -> Figure:
    """Return a picture of only the distances from the first curve, for curves that coincide in a plot of losses."""
    with styled():
        drawing = new_figure((7.2, 3.0))
        ax = drawing.subplots()
        _draw_distances(ax, curves, ROUNDING)
        ax.set_title(title)
        ax.legend(loc="upper right", ncols=len(curves) - 1)
    return drawing


def _draw_distances(ax: Axes, curves: Curves, below: str) -> None:
    for (name, found), look in zip(differences(curves).items(), LOOKS[1:], strict=False):
        ax.semilogy(range(1, len(found) + 1), [max(one, FLOOR) for one in found], label=name, **look)
    ax.axhline(SAME, color=QUIET, linewidth=1.0)
    steps = max(map(len, curves.values()))
    ax.text(steps, SAME * 1.2, below, color=QUIET, fontsize=9, ha="right", va="bottom")
    ax.set(xlabel="step", ylabel=f"relative difference\nfrom {next(iter(curves))}", ylim=(FLOOR / 2, 1.0))


def describe(curves: Curves, title: str) -> str:
    """Return the picture in words, without losses, because these depend on the version of Python."""
    (first, losses), *_ = curves.items()
    course = "falls" if losses[-1] < losses[0] else "does not fall"
    sentences = [f"{title}. The loss of {first} {course} over {len(losses)} steps."]
    for name, found in differences(curves).items():
        if max(found) <= SAME:
            sentences.append(f"The curve of {name} lies on it, nowhere further than 1e-5 from it.")
        else:
            step = next(number for number, one in enumerate(found, 1) if one > SAME)
            sentences.append(f"The curve of {name} leaves it in step {step}.")
    return " ".join(sentences)


def player(cases: Mapping[str, Curves]) -> Any:
    """Return a widget whose buttons (Tab and Space) choose the runs to draw, with picture and words."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    which = panel.buttons([*cases])

    def draw() -> str:
        chosen = cases[which.value]
        return as_html(figure(chosen, which.value), describe(chosen, which.value), widest="44em")

    return ipywidgets.VBox([which, panel.moved_by(draw, which)])


def play(cases: Mapping[str, Curves]) -> None:
    """Show the player if a person can use it; otherwise print all cases in words."""
    words = (describe(curves, title) for title, curves in cases.items())
    show_player(lambda: player(cases), lambda: print(*words, sep="\n"))


def distances(tables: Mapping[str, Any]) -> Figure:
    """Return, for each layout, the share of visible pairs at a wrong distance, by rank of query and key.

    tables: for each layout's name a square tensor of shares, NaN where no pair is visible.
    """
    with styled():
        figure = new_figure((8.0, 3.8))
        axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
        for ax, (name, table) in zip(axes, tables.items(), strict=True):
            drawn = ax.imshow(table, vmin=0, vmax=1, cmap="cividis")
            ranks = range(len(table))
            for query, key in itertools.product(ranks, repeat=2):
                share = float(table[query, key])
                words, size = ("none\nvisible", 8) if math.isnan(share) else (f"{share:.0%}", 10)
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
                ax.text(key, query, words, color="white" if share < 0.5 else INK, **look)
            ax.set(title=name, xlabel="rank of the key", xticks=ranks, yticks=ranks)
            ax.grid(visible=False)
        axes[0].set_ylabel("rank of the query")
        figure.colorbar(drawn, ax=list(axes), format="{x:.0%}", label="pairs at a wrong distance")
        figure.suptitle("Each rank counts its tokens from 0: visible pairs at a wrong distance")
    return figure


def describe_distances(tables: Mapping[str, Any]) -> str:
    """Return the picture of `distances` in words."""
    words = (f"{name}, {', '.join(f'{x:.0%}' for x in table.diagonal())}" for name, table in tables.items())
    return (
        "The share of visible pairs whose distance is wrong if each rank counts its tokens from 0, by the ranks of query and "
        f"key. On the diagonal: {'; '.join(words)}."
    )


def shares(parts: int = 4) -> Figure:
    """Return a picture of the work of each of `parts` ranks under DP, TP, CP and PP.

    Each kind of parallelism has its own grid of sequences, tokens, layers and heads.
    """
    with styled():
        figure = new_figure((8.0, 3.2))
        grids = figure.subplots(1, len(SHARDS))
        for number, (ax, (name, cut)) in enumerate(zip(grids, SHARDS.items(), strict=True)):
            _grid(ax, cut, parts)
            ax.set_title(f"{name}: by {cut[:-1]}", fontsize=10.5)
            ax.set_xlabel(f"{parts} sequences,\neach of {parts} token blocks", fontsize=8.5)
            if number == 0:
                ax.set_ylabel(f"{parts} layers,\neach of {parts} heads", fontsize=8.5)
        keys = [panel.patch(facecolor=rank_colour(rank), label=f"rank {rank}") for rank in range(parts)]
        figure.legend(handles=keys, loc="outside lower center", ncols=parts)
        title = "Four ways to cut one training step: the colour is the rank that computes a part"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure


def describe_shares(parts: int = 4) -> str:
    """Return the picture of `shares` in words."""
    ways = "; ".join(
        f"under {name} it has one of the {parts} {'token blocks' if cut == 'tokens' else cut} and all of the rest"
        for name, cut in SHARDS.items()
    )
    return (
        f"Which of {parts} ranks computes what, in a batch of {parts} sequences of {parts} token blocks, in {parts} layers "
        f"of {parts} heads. Of each rank: {ways}."
    )


def _grid(ax: Axes, cut: str, parts: int) -> None:
    """Draw a box for each (layer, sequence), with a cell in its rank's colour per (head, token block)."""
    size = 1.0 / parts
    for layer, sequence, head, token in itertools.product(range(parts), repeat=4):
        at = {"layers": layer, "sequences": sequence, "heads": head, "tokens": token}
        left, top = 1.15 * sequence + token * size, 1.15 * layer + head * size
        look: dict[str, Any] = {"facecolor": rank_colour(at[cut]), "linewidth": 0}
        panel.add_rectangle(ax, (left, top), size, size, **look)
    whole = 1.15 * parts - 0.15
    ax.set(xlim=(-0.05, whole + 0.05), ylim=(whole + 0.05, -0.05), aspect="equal", xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
