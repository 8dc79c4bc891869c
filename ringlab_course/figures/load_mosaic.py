"""The load mosaic: the score elements that every rank computes in every step, and the busiest ranks.

All numbers come from `ringlab.cost.flops.layout_work`: visible pairs, or the elements of whole tiles if the
caller gives a tile size. The mosaic adds up the work of the busiest rank of each step. The sum is an upper
bound of the time of a ring whose hops cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ringlab.errors import LayoutError
from ringlab.layout import Layout
from ringlab.viz.frontend import record_frames, show_player, step_player
from ringlab.viz.style import INK, PAPER, QUIET, RED, RULE, as_html, new_figure, still_image, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from dataclasses import dataclass

from ringlab.cost.flops import layout_work, slowest_per_step

MOST_RANKS = 64
"""The most ranks in a picture."""


@dataclass(frozen=True)
class Mosaic:
    """The work of one layout in score elements: work[rank, step], and each rank's part of an even split."""

    layout: Layout
    tile: tuple[int, int] | None
    work: np.ndarray
    even: float

    @property
    def slowest(self) -> np.ndarray:
        """The work of the busiest rank of each step: (P,)."""
        return slowest_per_step(self.work)

    @property
    def totals(self) -> np.ndarray:
        """The work of each rank in all steps: (P,)."""
        return self.work.sum(axis=1)

    @property
    def ratio(self) -> float:
        """The sum of the busiest ranks' work over all steps, divided by `even`."""
        return float(self.slowest.sum() / self.even) if self.even else 1.0

    def by_origin(self) -> np.ndarray:
        """Return the work by (rank, owner of the keys) instead of (rank, step)."""
        ranks = np.arange(self.layout.P)
        return self.work[ranks[:, None], (ranks[:, None] - ranks[None, :]) % self.layout.P]


def mosaic(layout: Layout, tile: int | tuple[int, int] | None = None, *, causal: bool = True) -> Mosaic:
    """Return the work of `layout` per rank and step, and the even split of the visible pairs.

    tile: an integer, or rows and keys; every tile that is not wholly masked counts as a whole.
    Raises: LayoutError above 64 ranks; CostError for a tile below one.
    """
    if layout.P > MOST_RANKS:
        raise LayoutError(f"at most {MOST_RANKS} ranks in a picture", f"{layout.P}", "draw a smaller ring")
    sides = (tile, tile) if isinstance(tile, int) else tile
    even = float(layout_work(layout, causal).sum()) / layout.P
    return Mosaic(layout, sides, layout_work(layout, causal, sides), even)


def mosaics(
    layouts: Layout | Sequence[Layout], tile: int | tuple[int, int] | None, causal: bool
) -> list[Mosaic]:
    """Return one mosaic for each layout. Raises: LayoutError without a layout."""
    many = [layouts] if isinstance(layouts, Layout) else list(layouts)
    if not many:
        raise LayoutError("at least one layout", "none")
    return [mosaic(layout, tile, causal=causal) for layout in many]


def describe(
    layouts: Layout | Sequence[Layout], tile: int | tuple[int, int] | None = None, *, causal: bool = True
) -> str:
    """Return the mosaics in words: the alternative text."""
    return " ".join(_sentence(one) for one in mosaics(layouts, tile, causal))


def describe_step(
    layouts: Sequence[Layout], step: int, tile: int | tuple[int, int] | None = None, *, causal: bool = True
) -> str:
    """Return one step of several layouts in one sentence."""
    words = []
    for one in mosaics(layouts, tile, causal):
        work, most = one.work[:, step], int(one.slowest[step])
        if (work == most).all():
            words.append(f"{one.layout.name}, all ranks compute {most:,}")
            continue
        slow = [rank for rank in range(one.layout.P) if work[rank] == most]
        idle = 1 - work.sum() / (most * one.layout.P)
        who = f"rank {slow[0]} computes" if len(slow) == 1 else f"ranks {', '.join(map(str, slow))} compute"
        words.append(
            f"{one.layout.name}, {who} {most:,}, and all ranks together {1 - idle:.0%} of what "
            f"{one.layout.P} ranks as busy would"
        )
    return f"Step {step}: {'; '.join(words)}."


def _sentence(one: Mosaic) -> str:
    P, most, least = one.layout.P, int(one.totals.argmax()), int(one.totals.argmin())
    tile = (
        "visible pairs" if one.tile is None else f"score elements in tiles of {one.tile[0]} × {one.tile[1]}"
    )
    totals = f"rank {most} computes most, {one.totals[most]:,}, rank {least} least, {one.totals[least]:,}"
    if (one.totals == one.totals[0]).all():
        totals = f"all ranks compute {one.totals[0]:,}"
    maxima = ", ".join(f"{value:,}" for value in one.slowest[:16]) + (", …" if P > 16 else "")
    alike = (one.work == one.slowest).all()
    steps = "In every step all ranks compute alike," if alike else "The busiest rank of each step computes"
    return (
        f"{one.layout.name}, {one.layout.S:,} tokens on {P} ranks, counted in {tile}: "
        f"{totals}. {steps} {maxima}: {one.slowest.sum():,} in all, "
        f"{one.ratio:.2f} times an even split of the visible pairs, {one.even:,.0f}."
    )


By = Literal["step", "origin"]
MOST_NUMBERED, MOST_OUTLINED = 8, 16
"""The most ranks for which cells contain numbers, and for which the busiest ranks are outlined."""
SCALES = ((1.0, ""), (1e3, "thousand "), (1e6, "million "), (1e9, "billion "), (1e12, "trillion "))


def figure(
    layouts: Layout | Sequence[Layout],
    tile: int | tuple[int, int] | None = None,
    *,
    causal: bool = True,
    by: By = "step",
    step: int | None = None,
) -> Figure:
    """Return a picture of the mosaics of one or several layouts with the same scale of colour.

    With up to 8 ranks, cells contain numbers. With by="step", the busiest rank of a step has a red outline
    if it computes more than others, and the last row is its work. With by="origin", there is a column for
    each owner of the keys. If `step` is given, later steps are left out, and this step is marked.
    Raises: LayoutError for no layout, too many ranks, another `by`, or a step out of range.
    """
    many = mosaics(layouts, tile, causal)
    if by not in ("step", "origin") or (by == "origin" and step is not None):
        raise LayoutError('by="step", or by="origin" without a step', f"by={by!r}, step={step}")
    if step is not None and not all(0 <= step < one.layout.P for one in many):
        raise LayoutError("a step from 0 to P − 1", f"step={step}")
    P = max(one.layout.P for one in many)
    numbered = P <= MOST_NUMBERED
    cell = 0.37 if P <= 4 else 0.33 if numbered else 2.1 / P
    wide = cell * (P + 1.3) if numbered else 2.1
    columns = max(1, min(len(many), int(7.4 / (wide + 0.05))))
    rows = -(-len(many) // columns)
    cell = min(0.48, 7.3 / columns / (P + 1.35)) if numbered else min(0.2, 6.4 / columns / P)
    largest = max(int(one.work.max(initial=0)) for one in many)
    scale, prefix = _scale(largest)
    with styled():
        drawn = new_figure((8.0, rows * (cell * (P + 1.05 * numbered) + 0.9) + 0.95))
        drawn.set_layout_engine("compressed")  # needed for axes of fixed aspect
        axes = drawn.subplots(rows, columns, squeeze=False).ravel()
        for number, (ax, one) in enumerate(zip(axes, many, strict=False)):
            draw(ax, one, largest, scale, by=by, step=step, names=number % columns == 0)
        for ax in axes[len(many) :]:
            ax.axis("off")
        drawn.suptitle(_heading(many, by), fontsize=11, fontweight="bold")
        _legend(drawn, axes, prefix + _unit(many[0]), largest / scale, by, P)
    return drawn


def _heading(many: Sequence[Mosaic], by: By) -> str:
    """Return the quantity that the cells count, and the size of the sequence if all layouts have the same size."""
    count = _unit(many[0]).capitalize()
    cells = "that each rank computes in each step" if by == "step" else "of queries (rows) and keys (columns)"
    sizes = {f"{one.layout.S:,} tokens on {one.layout.P} rank{'s' * (one.layout.P > 1)}" for one in many}
    return f"{count} {cells}" + (f": {sizes.pop()}" if len(sizes) == 1 else "")


def _unit(one: Mosaic) -> str:
    return "visible pairs" if one.tile is None else "score elements"


def draw(
    ax: Axes,
    one: Mosaic,
    largest: int,
    scale: float,
    *,
    by: By = "step",
    step: int | None = None,
    names: bool = True,
) -> None:
    """Draw one mosaic, with totals in its margins; `largest` is the work of the darkest colour."""
    P, cells = one.layout.P, one.by_origin() if by == "origin" else one.work
    shades, seen = _shades(), P if step is None else step + 1
    if P > MOST_OUTLINED:
        shown = np.where(cells > 0, cells, np.nan)[:, :seen]
        ax.imshow(shown, cmap=shades, vmin=0, vmax=max(largest, 1), extent=(0, seen, P, 0), aspect="auto")
    for rank, column in np.ndindex((P, P) if P <= MOST_OUTLINED else (0, 0)):
        work = float(cells[rank, column]) if column < seen else None
        _draw_cell(ax, rank, column, work, largest, scale, shades, P)
    if by == "step" and P <= MOST_OUTLINED:
        _mark(ax, one, step)
    if P <= MOST_NUMBERED:
        below = one.slowest if by == "step" else cells.sum(axis=0)
        _margins(ax, cells[:, :seen].sum(axis=1), below[:seen], scale, P)
    ax.set(xlim=(-0.05, P + (1.3 if P <= MOST_NUMBERED else 0.05)), aspect="equal")
    ax.set_ylim(P + (1.0 if P <= MOST_NUMBERED else 0.05), -0.05)
    _label(ax, one, by, names)


def _margins(ax: Axes, totals: np.ndarray, below: np.ndarray, scale: float, P: int) -> None:
    """Write every rank's total, the cost of each step, and in the corner the sum of all steps."""
    bold: Any = {"fontsize": 8.5, "fontweight": "bold", "ha": "center", "va": "center", "color": INK}
    for place, total in enumerate(totals):
        ax.text(P + 0.75, place + 0.5, _short(total, scale), **bold)
    for place, cost in enumerate(below):
        ax.text(place + 0.5, P + 0.55, _short(cost, scale), **bold)
    box = {"facecolor": PAPER, "edgecolor": INK, "linewidth": 1.0, "pad": 2.0}
    ax.text(P + 0.75, P + 0.55, _short(below.sum(), scale), bbox=box, **bold)


def pictures(layouts: Sequence[Layout], tile: int | None = None, *, causal: bool = True) -> list[str]:
    """Return the mosaics as HTML, one picture for each step, with its words."""
    steps = min(one.layout.P for one in mosaics(layouts, tile, causal))
    return [
        as_html(
            figure(layouts, tile, causal=causal, step=step), describe_step(layouts, step, tile, causal=causal)
        )
        for step in range(steps)
    ]


def play(layouts: Layout | Sequence[Layout], tile: int | None = None, *, causal: bool = True) -> None:
    """Show the steps in a player with a Play button and a slider, or else the whole mosaics."""
    many = [layouts] if isinstance(layouts, Layout) else list(layouts)
    show_player(
        lambda: step_player(pictures(many, tile, causal=causal), "step"),
        lambda: record_frames(
            pictures(many, tile, causal=causal),
            "step",
            still_image(figure(many, tile, causal=causal), describe(many, tile, causal=causal)),
        ),
    )


def _draw_cell(
    ax: Axes, rank: int, column: int, work: float | None, largest: int, scale: float, shades: Any, P: int
) -> None:
    """Draw one cell: darker for more work, hatched for no work, empty for a later step."""
    share = (work or 0.0) / largest if largest else 0.0
    look: dict[str, Any] = {"facecolor": PAPER, "edgecolor": RULE, "linewidth": 0.8}
    if work == 0:
        look["hatch"] = "xxx"
    elif work is not None:
        look |= {"facecolor": shades(share), "edgecolor": PAPER}
    panel.add_rectangle(ax, (column, rank), 1, 1, gid=f"cell {rank} {column}", **look)
    if P <= MOST_NUMBERED and work is not None:
        plate = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0} if not work else None
        place: Any = {"ha": "center", "va": "center", "fontsize": 8.5, "bbox": plate}
        ink = PAPER if share > 0.7 else INK
        ax.text(column + 0.5, rank + 0.5, _short(work, scale), color=ink, **place)


def _mark(ax: Axes, one: Mosaic, step: int | None) -> None:
    """Outline the busiest ranks of every step in which others compute less, and mark the chosen step."""
    P = one.layout.P
    for column in range(P if step is None else step + 1):
        slow = one.work[:, column] == one.slowest[column]
        for rank in np.flatnonzero(slow) if not slow.all() else ():
            box = panel.rectangle(
                (column + 0.05, rank + 0.05), 0.9, 0.9, fill=False, edgecolor=RED, linewidth=1.8
            )
            box.set_gid(f"slowest {rank} {column}")
            ax.add_patch(box)
    if step is not None:
        panel.add_rectangle(ax, (step, 0), 1, P, fill=False, edgecolor=INK, linewidth=2.4, gid="step")


def _label(ax: Axes, one: Mosaic, by: By, names: bool) -> None:
    """Write the steps above the columns, the title and, if `names`, the ranks beside the rows."""
    P = one.layout.P
    places = [place + 0.5 for place in range(0, P, 1 if P <= MOST_NUMBERED else max(2, P // 8))]
    ranks, steps = [f"rank {place:.0f}" for place in np.floor(places)], [f"{np.floor(p):.0f}" for p in places]
    corner = "step" if by == "step" else "keys of"
    if P <= MOST_NUMBERED:
        ax.set_xticks([*places, P + 0.75], [*steps, "total"], fontsize=8.5)
        ax.set_yticks([*places, P + 0.55], [*ranks, "busiest" if by == "step" else "total"], fontsize=8.5)
    else:
        ax.set_xticks(places, steps, fontsize=8.5)
        ax.set_yticks(places, ranks, fontsize=8.5)
    if names:
        ax.annotate(
            corner,
            (0, 1),
            (-6, 5),
            "axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=QUIET,
        )
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelleft=names)
    ratio = f"\n{one.ratio:.2f} × an even split" if by == "step" else ""
    ax.set_title(one.layout.name + ratio, fontsize=10, y=1.0, pad=19)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def _scale(largest: int) -> tuple[float, str]:
    """Return the scale at which the largest cell has at most four digits, and its name."""
    return next((scale for scale in SCALES if largest < 1e4 * scale[0]), SCALES[-1])


def _short(value: float, scale: float) -> str:
    scaled = value / scale
    return f"{scaled:.0f}" if scaled >= 100 or scaled == round(scaled) else f"{scaled:.3g}"


def _shades() -> Any:
    """Return colours from near white to dark blue, which differ only in lightness."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("work", ["#EAF4FB", "#56B4E9", "#00507F"])


def _legend(drawn: Figure, axes: Any, unit: str, largest: float, by: By, P: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.legend_handler import HandlerTuple

    hatch = "xxx" if P <= MOST_OUTLINED else None
    handles: dict[str, Any] = {"computes nothing": panel.patch(facecolor=PAPER, edgecolor=RULE, hatch=hatch)}
    if by == "step" and P <= MOST_OUTLINED:
        handles["busiest of its step, others compute less"] = panel.patch(
            facecolor=PAPER, edgecolor=RED, linewidth=1.8
        )
    if P <= MOST_NUMBERED:
        shades = tuple(panel.patch(facecolor=_shades()(share)) for share in (0.15, 0.5, 1.0))
        handles = {f"{unit}: darker is more": shades, **handles}
        handles["sum of the bottom row" if by == "step" else "sum of all"] = panel.patch(
            facecolor=PAPER, edgecolor=INK
        )
    else:
        bar = drawn.colorbar(
            ScalarMappable(Normalize(0, largest), _shades()), ax=list(axes), shrink=0.6, aspect=25
        )
        bar.set_label(unit, fontsize=9)
    look: Any = {"ncols": 2 if len(handles) > 3 else 3, "fontsize": 8.5}
    together = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
    drawn.legend(
        list(handles.values()), list(handles), loc="outside lower center", handler_map=together, **look
    )
