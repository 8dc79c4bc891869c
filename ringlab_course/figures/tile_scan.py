"""The tile scan: which score tile is computed at each step, and the memory in use at that step.

`scan` computes the data of the pictures, a `Scan` of `ScanStep`s, without a plotting library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ringlab.viz.frontend import import_widgets, show_player
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from ipywidgets import Widget
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["skip", "full", "diagonal"]
Pass = Literal["forward", "backward"]

BYTES_PER_KIB = 1024
FAST_KIB = 227
"""The KiB of fast memory that one thread block of an H100 can use."""


@dataclass(frozen=True)
class ScanStep:
    """One score tile: its place in the grid, its kind, and the live tensors with their bytes."""

    q_tile: int
    k_tile: int
    kind: Kind
    live: dict[str, int]

    @property
    def live_bytes(self) -> int:
        """The bytes that exist only because this tile is being computed."""
        return sum(self.live.values())


@dataclass(frozen=True)
class Scan:
    """All steps of one pass over the score matrix, in the order in which they are computed."""

    S: int
    tile: int
    D: int
    causal: bool
    direction: Pass
    kinds: tuple[tuple[Kind, ...], ...]
    steps: tuple[ScanStep, ...]
    whole_bytes: int

    @property
    def n_tiles(self) -> int:
        """The number of tiles along one side of the score matrix."""
        return len(self.kinds)

    @property
    def peak_bytes(self) -> int:
        """The bytes of the largest live set of any step."""
        return max(step.live_bytes for step in self.steps)

    def count(self, kind: Kind) -> int:
        """Return the number of tiles of the grid that are of this kind."""
        return sum(row.count(kind) for row in self.kinds)


def cuts(S: int, tile: int) -> list[tuple[int, int]]:
    """Return (start, stop) of every tile of `S` tokens; the last is shorter if `tile` does not divide S."""
    return [(start, min(start + tile, S)) for start in range(0, S, tile)]


def tile_kind(q_tile: int, k_tile: int, *, causal: bool) -> Kind:
    """Return the kind of the tile in row `q_tile`, column `k_tile` of a square grid under the mask."""
    if not causal or k_tile < q_tile:
        return "full"
    return "diagonal" if k_tile == q_tile else "skip"


def scan(
    S: int, tile: int, D: int, *, causal: bool = True, direction: Pass = "forward", itemsize: int = 4
) -> Scan:
    """Return the steps of a tiled pass over S tokens and one head of dim D, with the live bytes of each step.

    Forward: one query tile stays while the key tiles pass by. Backward: one key tile stays, with its dK and
    dV, while the query tiles pass by.
    """
    spans = cuts(S, tile)
    n = len(spans)
    kinds = tuple(tuple(tile_kind(i, j, causal=causal) for j in range(n)) for i in range(n))
    if direction == "forward":
        order, live_of = [(i, j) for i in range(n) for j in range(n)], _forward_live
    else:
        order, live_of = [(i, j) for j in range(n) for i in range(n)], _backward_live
    lengths = [stop - start for start, stop in spans]
    steps = tuple(
        ScanStep(i, j, kinds[i][j], live_of(lengths[i], lengths[j], D, itemsize))
        for i, j in order
        if kinds[i][j] != "skip"
    )
    return Scan(S, tile, D, causal, direction, kinds, steps, whole_bytes=S * S * itemsize)


def _forward_live(Lq: int, Lk: int, D: int, itemsize: int) -> dict[str, int]:
    floats = {"Q tile": Lq * D, "K tile": Lk * D, "V tile": Lk * D, "scores → weights": Lq * Lk}
    floats |= {"out so far": Lq * D, "lse so far": Lq}
    return {name: count * itemsize for name, count in floats.items()}


def _backward_live(Lq: int, Lk: int, D: int, itemsize: int) -> dict[str, int]:
    floats = {"Q tile": Lq * D, "dO tile": Lq * D, "K tile": Lk * D, "V tile": Lk * D}
    floats |= {"P again": Lq * Lk, "dP → dS": Lq * Lk, "lse, delta": 2 * Lq}
    floats |= {"dQ so far": Lq * D, "dK so far": Lk * D, "dV so far": Lk * D}
    return {name: count * itemsize for name, count in floats.items()}


def cell_states(picture: Scan, index: int) -> list[list[str]]:
    """Return the grid at step `index`, with "now", "done", "skip" or "todo" for every tile."""
    done = {(step.q_tile, step.k_tile) for step in picture.steps[:index]}
    now = (picture.steps[index].q_tile, picture.steps[index].k_tile)

    def state(i: int, j: int) -> str:
        if picture.kinds[i][j] == "skip":
            return "skip"
        return "now" if (i, j) == now else "done" if (i, j) in done else "todo"

    n = picture.n_tiles
    return [[state(i, j) for j in range(n)] for i in range(n)]


def describe(picture: Scan, index: int) -> str:
    """Return the picture of step `index` in words: its alternative text."""
    step = picture.steps[index]
    parts = ", ".join(f"{name} {_kib(count)}" for name, count in step.live.items())
    return (
        f"{picture.direction.capitalize()}, step {index + 1} of {len(picture.steps)}: query tile {step.q_tile}, "
        f"key tile {step.k_tile}, {step.kind}. {index} tiles done, {picture.count('skip')} never computed. "
        f"Live: {parts}; together {_kib(step.live_bytes)}, against {_kib(picture.whole_bytes)} "
        f"for the whole score matrix."
    )


def describe_strip(picture: Scan) -> str:
    """Return the small multiples in words."""
    peak = picture.peak_bytes
    fits = "fits" if peak <= FAST_KIB * BYTES_PER_KIB else "does not fit"
    return (
        " ".join(describe(picture, index) for index in moments(picture))
        + f" The live set of {_kib(peak)} {fits} into the {FAST_KIB} KiB of a thread block of an H100."
    )


def moments(picture: Scan) -> tuple[int, ...]:
    """Return two steps that show the course of the scan: one early, and the last."""
    last = len(picture.steps) - 1
    return tuple(sorted({last // 3, last}))


def strip(picture: Scan, indices: tuple[int, ...] | None = None) -> Figure:
    """Return small multiples: the grid at several steps, above the largest live set of any step."""
    from ringlab.viz.style import new_figure, styled

    indices = indices or moments(picture)
    largest = max(range(len(picture.steps)), key=lambda index: picture.steps[index].live_bytes)
    with styled():
        bars = len(picture.steps[largest].live) + 1
        figure = new_figure((max(3.6 * len(indices), 7.2) + 1.0, 5.0 + 0.22 * bars))
        figure.set_layout_engine("constrained", h_pad=0.1)
        places = figure.add_gridspec(2, len(indices), height_ratios=(3.2, 0.22 * bars))
        for column, index in enumerate(indices):
            draw_grid(figure.add_subplot(places[0, column]), picture, index, names=column == 0)
        draw_live(figure.add_subplot(places[1, :]), picture, largest, names=True, whole=True)
        moments_of = f"{picture.direction.capitalize()} by tiles at {len(indices)} moments"
        title = f"{moments_of}: {picture.S:,} tokens, D = {picture.D}, float32"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        _legend(figure, picture, rows=2)
    return figure


def _heading(picture: Scan) -> str:
    """Return the title of a figure of the whole scan."""
    mask = "Causal attention" if picture.causal else "Attention"
    return f"{mask} over {picture.S:,} tokens by tiles, D = {picture.D}, {picture.direction}"


def still(picture: Scan, index: int) -> Figure:
    """Return a picture of one step: the grid and its live set."""
    from ringlab.viz.style import new_figure, styled

    with styled():
        figure = new_figure((8.4, 4.2))
        left, right = figure.subplots(1, 2)
        draw_grid(left, picture, index, names=True)
        draw_live(right, picture, index, names=True)
        figure.suptitle(_heading(picture), x=0.01, ha="left", fontweight="bold", fontsize=11.5)
        _legend(figure, picture, rows=2)
    return figure


def draw_grid(ax: Axes, picture: Scan, index: int, *, names: bool) -> None:
    """Draw the score matrix at step `index`, tile by tile, with the tiles of Q, K and V along its sides."""
    from ringlab.viz.style import INK

    n, step = picture.n_tiles, picture.steps[index]
    for i, row in enumerate(cell_states(picture, index)):
        for j, state in enumerate(row):
            panel.add_rectangle(ax, (j, i), 1, 1, **_look(state))
            if picture.causal and i == j and state != "skip":
                ax.plot((j, j + 1), (i, i + 1), color=INK, linewidth=0.9)
    panel.add_rectangle(
        ax, (step.k_tile, step.q_tile), 1, 1, fill=False, edgecolor=INK, linewidth=2.2, zorder=4
    )
    for i in range(n):
        panel.add_rectangle(ax, (-1.25, i), 0.8, 1, **_look("held" if i == step.q_tile else "todo"))
        panel.add_rectangle(ax, (i, -1.25), 1, 0.8, **_look("held" if i == step.k_tile else "todo"))
    ax.set(xlim=(-1.4, n + 0.1), ylim=(n + 0.1, -1.4), aspect="equal")
    ax.set_title(f"tile {index + 1} of {len(picture.steps)}: {step.kind}", fontsize=10.5)
    ax.set_xlabel(f"keys (tiles of {picture.tile} tokens)", fontsize=9)
    if names:
        ax.set_ylabel(f"queries (tiles of {picture.tile} tokens)", fontsize=9)
    ax.text(-0.35, -0.8, "Q ↓\nK,V →", fontsize=9, ha="right", va="center")
    ticks = [place + 0.5 for place in range(n)]
    ax.set_xticks(ticks, [str(t) for t in range(n)], fontsize=8)
    ax.set_yticks(ticks, [str(t) for t in range(n)], fontsize=8)
    panel.bare(ax)


def draw_live(ax: Axes, picture: Scan, index: int, *, names: bool, whole: bool = False) -> None:
    """Draw the live tensors at step `index` as bars in KiB.

    whole: the title is about all steps, and a bar of the sum stands beside the fast memory of a GPU.
    """
    from ringlab.viz.style import BLUE, INK, QUIET, RED

    live = {name: count / BYTES_PER_KIB for name, count in picture.steps[index].live.items()}
    square = max(live.values())
    colours = [RED if size == square else BLUE for size in live.values()]
    total = sum(live.values())
    if whole:
        live["together"] = total
        colours.append(QUIET)
        ax.axvline(FAST_KIB, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
        ax.text(FAST_KIB + 3, -0.3, f"{FAST_KIB} KiB: a thread\nblock of an H100", va="top", fontsize=8.5)
    ax.barh(range(len(live)), list(live.values()), color=colours, height=0.65)
    for place, size in enumerate(live.values()):
        ax.text(size, place, f" {size:.4g}", va="center", fontsize=8)
    ax.set_yticks(range(len(live)), list(live) if names else [""] * len(live), fontsize=9)
    most = max(1.1 * total, 1.35 * FAST_KIB) if whole else 1.25 * square
    ax.set(ylim=(len(live) - 0.5, -0.5), xlim=(0, most))
    ax.set_xlabel("KiB", fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    constant = len({step.live_bytes for step in picture.steps}) == 1
    when = ("live at every moment" if constant else "live at most") if whole else "live"
    gap = " " if whole else "\n"
    title = f"{when}: {_kib(picture.steps[index].live_bytes)}{gap}(all scores: {_kib(picture.whole_bytes)})"
    ax.set_title(title, fontsize=9.5)


def player(S: int = 1024, tile: int = 128, D: int = 64, *, causal: bool = True) -> Widget:
    """Return a widget with a slider over the tiles, forward or backward; the words are below the picture."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    scans = {name: scan(S, tile, D, causal=causal, direction=name) for name in ("forward", "backward")}
    which = ipywidgets.ToggleButtons(options=[*scans])
    slider = ipywidgets.IntSlider(min=1, max=len(scans["forward"].steps), description="tile")
    play = ipywidgets.Play(min=1, max=slider.max, interval=700)

    def draw() -> str:
        chosen, index = scans[which.value], slider.value - 1
        return as_html(still(chosen, index), describe(chosen, index))

    ipywidgets.jslink((play, "value"), (slider, "value"))
    return ipywidgets.VBox([which, ipywidgets.HBox([play, slider]), panel.moved_by(draw, slider, which)])


def play(S: int = 1024, tile: int = 128, D: int = 64, *, causal: bool = True) -> None:
    """Show the player if a person can use it; otherwise print that the cell has to be run."""
    steps = len(scan(S, tile, D, causal=causal).steps)
    still = f"{steps} tiles forward, {steps} backward: run this cell to play them"
    show_player(lambda: player(S, tile, D, causal=causal), lambda: print(still))


def _look(state: str) -> dict[str, Any]:
    """Return fill and hatch of a tile.

    No two states in the grid differ by colour alone. Only tiles at the sides of the grid can be "held".
    """
    from ringlab.viz.style import BLUE, PAPER, QUIET, RED, RULE, SKY

    looks: dict[str, dict[str, Any]] = {
        "now": {"facecolor": RED},
        "held": {"facecolor": BLUE},
        "done": {"facecolor": SKY},
        "todo": {"facecolor": PAPER},
        "skip": {"facecolor": RULE, "hatch": "xxx"},
    }
    return {"edgecolor": QUIET, "linewidth": 0.5, **looks[state]}


def _legend(figure: Figure, picture: Scan, rows: int = 1) -> None:
    from matplotlib.lines import Line2D

    from ringlab.viz.style import INK

    words = {
        "now": "being computed",
        "held": "held during this tile",
        "done": "done and released",
        "todo": "to come",
        "skip": "hidden, never computed",
    }
    handles: list[Any] = [panel.patch(label=label, **_look(state)) for state, label in words.items()]
    if picture.causal:
        handles.append(Line2D([], [], color=INK, linewidth=0.9, label="edge of the causal mask"))
    columns = -(-len(handles) // rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8.5, columnspacing=1.2)


def _kib(count: int) -> str:
    """Return a number of bytes in KiB, with one decimal for small numbers that are not whole."""
    size = count / BYTES_PER_KIB
    return f"{size:,.0f} KiB" if size == round(size) or size >= 1000 else f"{size:.1f} KiB"
