"""One ring step inside the kernel: which tiles each program skips, computes whole, or masks.

The pictures are drawn from the launch tables that the kernels get (`ringlab.blocks.triton.visits`), not from
a mask. `step_picture` computes the data of a picture, a `StepPicture`, without a plotting library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from ringlab.layout import Layout, Run
from ringlab.viz.frontend import import_widgets, record_frames, show_player
from ringlab_course.figures import panel
from ringlab_course.figures.layout_tiles import LAYOUTS

if TYPE_CHECKING:
    from ipywidgets import Widget
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Kind = Literal["full", "masked"]
TITLE: dict[str, Any] = {"fontweight": "bold", "fontsize": 11}


@dataclass(frozen=True)
class Visit:
    """One tile that a program computes: keys k_start … k_stop − 1, all visible ("full") or under a mask."""

    k_start: int
    k_stop: int
    kind: Kind


@dataclass(frozen=True)
class Program:
    """Rows row_start … row_stop − 1 of every head, and the tiles that they visit, in the kernel's order."""

    row_start: int
    row_stop: int
    visits: tuple[Visit, ...]

    def count(self, kind: Kind) -> int:
        """Return the number of its tiles that are of this kind."""
        return sum(visit.kind == kind for visit in self.visits)


@dataclass(frozen=True)
class StepPicture:
    """One step of one rank: its programs, the longest first, and the sizes that determine skipped tiles."""

    layout: str
    rank: int
    step: int
    origin: int
    rows: int
    keys: int
    block_m: int
    block_n: int
    programs: tuple[Program, ...]
    S: int
    P: int
    causal: bool = True
    row_runs: tuple[Run, ...] = ()
    key_runs: tuple[Run, ...] = ()

    def count(self, kind: Kind) -> int:
        """Return the number of tiles of this kind that all programs visit."""
        return sum(program.count(kind) for program in self.programs)

    @property
    def skipped(self) -> int:
        """The number of skipped tiles, rounded.

        These are the tiles that would be added if all programs, and all rows without a program, visited all
        keys.
        """
        left = [self.keys - sum(v.k_stop - v.k_start for v in p.visits) for p in self.programs]
        left += [self.keys] * round(self.rows_without_program / self.block_m)
        return sum(round(keys / self.block_n) for keys in left)

    @property
    def rows_without_program(self) -> int:
        """The number of rows whose state is neither read nor written in this step."""
        return self.rows - sum(program.row_stop - program.row_start for program in self.programs)

    def rows_without_tiles(self) -> list[tuple[int, int, str]]:
        """Return runs of rows (start, stop) that visit no key, and whether a program owns them, in words."""
        found, end = [], 0
        for program in sorted(self.programs, key=lambda each: each.row_start):
            if program.row_start > end:
                found.append((end, program.row_start, "no program"))
            end = program.row_stop
            if not program.visits:
                found.append((program.row_start, end, "program without keys"))
        if end < self.rows:
            found.append((end, self.rows, "no program"))
        return found


def step_picture(
    layout: Layout,
    rank: int,
    step: int,
    block_m: int = 64,
    block_n: int = 64,
    *,
    causal: bool = True,
    name: str = "",
) -> StepPicture:
    """Return the programs and tiles of one step of the ring, from the kernels' own launch tables."""
    origin = (rank - step) % layout.P
    rows, keys = layout.length(rank), layout.length(origin)
    ends = step in (0, layout.P - 1)
    programs = tuple(_programs(layout, rank, origin, causal, block_m, block_n, ends))
    shape, setting = (rows, keys, block_m, block_n), (layout.S, layout.P, causal)
    runs = layout.runs(rank), layout.runs(origin)
    return StepPicture(name or layout.name, rank, step, origin, *shape, programs, *setting, *runs)


def _programs(
    layout: Layout, rank: int, origin: int, causal: bool, block_m: int, block_n: int, every_row: bool
) -> Iterator[Program]:
    from ringlab.blocks.triton.visits import row_programs
    from ringlab.plan import tiles

    met = tiles(layout, rank, origin, causal)
    for row_start, row_stop, segments in row_programs(met, layout.length(rank), block_m, block_n, every_row):
        visits: list[Visit] = []
        for begin, split, end, *_ in segments:
            visits += [Visit(key, key + block_n, "full") for key in range(begin, split, block_n)]
            visits += [Visit(key, min(key + block_n, end), "masked") for key in range(split, end, block_n)]
        yield Program(row_start, row_stop, tuple(visits))


def describe(picture: StepPicture) -> str:
    """Return the picture of one step in words: its alternative text."""
    words = (
        f"{picture.layout}, rank {picture.rank}, step {picture.step}: {picture.rows} rows meet the {picture.keys} keys of "
        f"rank {picture.origin}, in tiles of {picture.block_m} rows by {picture.block_n} keys. "
        f"Rows: {_tokens(picture.row_runs)}. Keys: {_tokens(picture.key_runs)}. "
    )
    if not picture.programs:
        return words + f"No program runs, {picture.skipped} tiles are skipped."
    words += (
        f"{_counted(len(picture.programs), 'program')}: {picture.count('full')} full tiles, "
        f"{picture.count('masked')} masked, {picture.skipped} skipped."
    )
    if empty := sum(not program.visits for program in picture.programs):
        words += f" {_counted(empty, 'program')} without keys."
    if idle := picture.rows_without_program:
        words += f" {_counted(idle, 'row')} {'has' if idle == 1 else 'have'} no program."
    return words


def describe_grid(pictures: Sequence[StepPicture]) -> str:
    """Return several steps in words, after a title."""
    return " ".join([f"{_title(pictures)}.", *(describe(picture) for picture in pictures)])


def layouts_at(
    S: int, P: int, rank: int, step: int, block_m: int = 64, block_n: int = 64
) -> tuple[StepPicture, ...]:
    """Return the same step of the same rank in each of LAYOUTS."""
    return tuple(
        step_picture(make(S, P), rank, step, block_m, block_n, name=name) for name, make in LAYOUTS.items()
    )


def grid(pictures: Sequence[StepPicture]) -> Figure:
    """Return small multiples: each step as a rectangle of rows and keys, tile by tile."""
    from ringlab.viz.style import new_figure, styled

    with styled():
        figure = new_figure((2.6 * len(pictures) + 0.6, 4.1))
        figure.suptitle(_title(pictures), x=0.01, ha="left", **TITLE)
        for number, (ax, picture) in enumerate(
            zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True)
        ):
            heading = f"{picture.layout}, step {picture.step}" if _steps_differ(pictures) else picture.layout
            draw(ax, picture, heading, names=number == 0)
        _legend(figure)
    return figure


def _title(pictures: Sequence[StepPicture]) -> str:
    """Return a title with everything that all of the pictures have in common."""
    first = pictures[0]
    shown = {(each.rank, each.block_m, each.block_n, each.S, each.P, each.causal) for each in pictures}
    if len(shown) > 1:
        return "The scores that a rank's kernel computes in one step"
    setting = f"{first.S:,} tokens, {'causal' if first.causal else 'without a mask'}"
    step = "" if _steps_differ(pictures) else f" in step {first.step}"
    return (
        f"Rank {first.rank} of {first.P}{step}, {setting}: the scores that its kernel computes, "
        f"in tiles of {first.block_m} × {first.block_n}"
    )


def _steps_differ(pictures: Sequence[StepPicture]) -> bool:
    return len({each.step for each in pictures}) > 1


def draw(ax: Axes, picture: StepPicture, heading: str, *, names: bool = True) -> None:
    """Draw one step: rows down, keys across, and one box for each tile that a program visits."""
    from ringlab.viz.style import INK, PAPER

    panel.add_rectangle(ax, (0, 0), picture.keys, picture.rows, **_look("skip"))
    for program in picture.programs:
        height = program.row_stop - program.row_start
        for visit in program.visits:
            box = (visit.k_start, program.row_start), visit.k_stop - visit.k_start, height
            panel.add_rectangle(ax, *box, **_look(visit.kind))
        edges = ((row, row) for row in (program.row_start, program.row_stop))
        for edge in edges:
            ax.plot((0, picture.keys), edge, color=INK, linewidth=1.3, clip_on=False)
    for start, stop, words in picture.rows_without_tiles():
        if stop - start >= picture.rows / 8:
            # if there is no room for a label, the text below the picture gives the number of rows
            look: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 2.0}
            ax.text(
                picture.keys / 2, (start + stop) / 2, words, ha="center", va="center", fontsize=8.5, bbox=look
            )
    ax.set(xlim=(0, picture.keys), ylim=(picture.rows, 0), aspect="equal")
    ax.set_title(
        f"{heading}\n{picture.count('full')} full, {picture.count('masked')} masked, {picture.skipped} skipped",
        fontsize=9.5,
    )
    ax.set_xlabel(f"keys of rank {picture.origin}, by token", fontsize=9)
    if names:
        ax.set_ylabel(f"rows of rank {picture.rank}, by token", fontsize=9)
    _name_runs(ax.xaxis, picture.key_runs, picture.keys)
    _name_runs(ax.yaxis, picture.row_runs, picture.rows)
    ax.tick_params(which="minor", length=0, labelsize=8)
    for label in ax.get_yticklabels(minor=True):
        label.set(rotation=90, va="center")
    ax.grid(visible=False)


def _name_runs(axis: Axis, runs: Sequence[Run], length: int) -> None:
    """Label one or two runs of tokens in their middle, with a tick between them. If there are more, give their number."""
    few = 0 < len(runs) <= 2
    edges = [0, *accumulate(run.length for run in runs)] if few else [0, length]
    axis.set_ticks(edges[1:-1], [""] * len(edges[1:-1]))
    names = [_run(run) for run in runs] if few else [_tokens(runs)]
    axis.set_ticks([(a + b) / 2 for a, b in pairwise(edges)], names, minor=True)


def _run(run: Run) -> str:
    if run.step == 1 or run.length < 3:
        return f"{run.start} … {run.last}"
    return f"{run.start}, {run.start + run.step}, … {run.last}"


def _tokens(runs: Sequence[Run]) -> str:
    return (
        "tokens " + ", then ".join(map(_run, runs)) if 0 < len(runs) <= 2 else f"{len(runs)} runs of tokens"
    )


def player(S: int = 512, P: int = 4, block_m: int = 64, block_n: int = 64) -> Widget:
    """Return a widget with sliders for step and rank; the four layouts are side by side, with words below."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    step = ipywidgets.IntSlider(value=min(2, P - 1), min=0, max=P - 1, description="step")
    rank = ipywidgets.IntSlider(value=min(1, P - 1), min=0, max=P - 1, description="rank")

    def draw() -> str:
        pictures = layouts_at(S, P, rank.value, step.value, block_m, block_n)
        return as_html(grid(pictures), describe_grid(pictures))

    return ipywidgets.VBox([ipywidgets.HBox([step, rank]), panel.moved_by(draw, step, rank)])


def play(S: int = 512, P: int = 4) -> None:
    """Show the player if a person can use it, otherwise record the steps of rank 1."""
    from ringlab.viz.style import as_html

    at = [layouts_at(S, P, 1, step) for step in range(P)]
    still = "Run this cell to move step and rank; step 1 of rank 1 is above."
    show_player(
        lambda: player(S, P),
        lambda: record_frames(
            [as_html(grid(each), describe_grid(each)) for each in at], "step", {"text/plain": still}
        ),
    )


def _look(kind: str) -> dict[str, Any]:
    """Return fill and hatch of a tile; no two kinds differ by colour alone."""
    from ringlab.viz.style import ORANGE, PAPER, QUIET, RULE, SKY

    looks: dict[str, dict[str, Any]] = {
        "full": {"facecolor": SKY, "edgecolor": PAPER, "linewidth": 1.0},
        "masked": {"facecolor": ORANGE, "edgecolor": PAPER, "hatch": "//", "linewidth": 1.0},
        "skip": {"facecolor": PAPER, "edgecolor": RULE, "hatch": "xx", "linewidth": 0.5},
    }
    return {"edgecolor": QUIET, **looks[kind]}


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    from ringlab.viz.style import INK

    words = {
        "full": "full: computed without a mask",
        "masked": "masked: computed under a mask",
        "skip": "skipped: not read",
    }
    handles: list[Any] = [panel.patch(label=label, **_look(kind)) for kind, label in words.items()]
    handles.append(
        Line2D([], [], color=INK, linewidth=1.3, label="between two lines: the rows of one program")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
