"""The map of the papers: which builds on which, and those that the lessons have explained so far.

Links of known machines are named as in the cost model's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringlab.viz.style import BLUE, INK, PAPER, QUIET, RULE, new_figure, show, styled
from ringlab_course.catalogue import PAPERS, Paper, lit_papers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from dataclasses import dataclass

from ringlab.cost.hardware import Hardware, Link, hardware

_PLACES = {
    "transformer": (0.0, 1.0), "online-softmax": (1.0, 2.0), "memory-efficient": (2.0, 2.0),
    "flash": (3.0, 3.0), "blockwise": (3.0, 1.8), "ring": (4.0, 2.4), "ulysses": (4.0, 0.6),
    "striped": (5.0, 3.4), "zigzag": (5.0, 2.4), "decode": (5.0, 1.4),
}  # fmt: skip
"""Column and height of each paper; the columns run from the oldest to the newest."""
_NAMES = {
    "transformer": "Transformer", "online-softmax": "Online softmax", "memory-efficient": "No S × S matrix",
    "flash": "FlashAttention", "blockwise": "Blockwise\nTransformer", "ring": "Ring Attention",
    "ulysses": "Ulysses", "striped": "Striped", "zigzag": "Zig-zag\n(Llama 3)", "decode": "Tree decoding",
}  # fmt: skip


def paper_map(lit: Sequence[str] = ()) -> None:
    """Display the map; `lit` names the lessons done so far, as ("01", "02"): their papers are lit.

    Raises: CourseError for a lesson that does not exist.
    """
    show(draw_papers(lit), alt=describe_papers(lit))


def draw_papers(lit: Sequence[str] = ()) -> Figure:
    """Return the map as a figure: filled boxes are lit, arrows lead to what builds on them."""
    keys = lit_papers(tuple(lit))
    with styled():
        figure = new_figure((9.0, 3.9))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-0.5, 5.5), ylim=(0.1, 3.95))
        for paper in PAPERS:
            for source in paper.after:
                _arrow(axes, source, paper.key, both_lit=source in keys and paper.key in keys)
        for paper in PAPERS:
            _box(axes, paper, is_lit=paper.key in keys)
    return figure


def describe_papers(lit: Sequence[str] = ()) -> str:
    """Return the map in words, paper by paper."""
    keys = lit_papers(tuple(lit))
    lines = [f"Map of {len(PAPERS)} papers, {len(keys)} of them lit."]
    for paper in PAPERS:
        sign = "lit" if paper.key in keys else "dark"
        after = f"; builds on {' and '.join(_flat(source) for source in paper.after)}" if paper.after else ""
        lines.append(f"{paper.year} {_flat(paper.key)} (arXiv {paper.arxiv}): {paper.gives}{after} [{sign}]")
    return "\n".join(lines)


def _flat(key: str) -> str:
    return _NAMES[key].replace("\n", " ")


def _box(axes: Axes, paper: Paper, *, is_lit: bool) -> None:
    x, y = _PLACES[paper.key]
    box = {
        "boxstyle": "round,pad=0.35",
        "facecolor": BLUE if is_lit else PAPER,
        "edgecolor": INK if is_lit else QUIET,
        "linestyle": "-" if is_lit else ":",
        "linewidth": 1.4,
    }
    colour = PAPER if is_lit else QUIET
    weight = "bold" if is_lit else "normal"
    text = f"{_NAMES[paper.key]}\n{paper.year}"
    axes.text(
        x, y, text, ha="center", va="center", fontsize=8.8, color=colour, weight=weight, bbox=box, zorder=3
    )


def _arrow(axes: Axes, source: str, target: str, *, both_lit: bool) -> None:
    style = {
        "arrowstyle": "-|>", "color": BLUE if both_lit else RULE, "linewidth": 2.0 if both_lit else 1.2,
        "shrinkA": 34, "shrinkB": 36,
    }  # fmt: skip
    axes.annotate("", xy=_PLACES[target], xytext=_PLACES[source], arrowprops=style, zorder=1)


MACHINES = ("a100", "h100", "b200", "tpu-v4", "tpu-v5e", "laptop")


@dataclass(frozen=True)
class KnownLink:
    """A link of a known machine: `name` as in "A100, NVLink 3", and the dense peak of its ranks in FLOP/s."""

    name: str
    F: float
    link: Link


def known_links(dtype: str = "bfloat16") -> list[KnownLink]:
    """Return the links inside and between nodes of the machines that compute in `dtype`."""
    machines = [hardware(name) for name in MACHINES]
    return [
        KnownLink(f"{short(machine)}, {link.name}", machine.peak(dtype), link)
        for machine in machines
        if dtype in machine.flops_per_s
        for link in (machine.inside, machine.between)
    ]


def short(machine: Hardware) -> str:
    """Return a machine's title without its maker and its form."""
    name = machine.title.split(",")[0].removeprefix("NVIDIA ").removeprefix("Google ")
    return name.split(" of ")[0].removesuffix(" (HGX)").removesuffix(" SXM")
