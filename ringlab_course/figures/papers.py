"""The map of the papers: what each paper adds, which papers it builds on, and the lesson that explains it.

This file also lists the links of some known machines, with names such as "A100, NVLink 3".
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringlab.cost.hardware import Hardware, Link, hardware
from ringlab.errors import require_package
from ringlab.viz.style import BLUE, INK, PAPER, QUIET, as_html, new_figure, styled
from ringlab_course.catalogue import LESSONS, PAPERS, Paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLACES = {
    "transformer": (1.0, 5.0), "ulysses": (2.0, 4.0), "online-softmax": (1.0, 4.0), "memory-efficient": (1.0, 3.0),
    "flash": (0.0, 2.0), "blockwise": (1.0, 2.0),
    "ring": (0.5, 1.0),
    "striped": (0.0, 0.0), "zigzag": (1.0, 0.0), "decode": (2.0, 0.0),
}  # fmt: skip
"""Column and row of each paper, which is drawn below the papers that it builds on."""
_NAMES = {
    "transformer": "Transformer", "online-softmax": "Online softmax", "memory-efficient": "Memory-efficient attention",
    "flash": "FlashAttention", "blockwise": "Blockwise Transformer", "ring": "Ring Attention",
    "ulysses": "Ulysses", "striped": "Striped Attention", "zigzag": "Zig-zag (Llama 3)", "decode": "Tree Attention",
}  # fmt: skip
_KEY = (
    "An arrow leads from an idea to one that builds on it or answers it. Blue: the subject of this course.\n"
    "New words are explained in the lessons that a box names."
)


def paper_map() -> None:
    """Display the map of the papers in a closed section, because it uses terms from the whole course."""
    require_package("IPython", "lab", "figures in a notebook")
    from IPython.display import display

    words = describe_papers()
    picture = as_html(draw_papers(), words, widest="680px")
    summary = "The papers around ring attention"
    folded = f"<details><summary>{summary}</summary>{picture}</details>"
    display({"text/html": folded, "text/plain": words}, raw=True)


def draw_papers() -> Figure:
    """Return the map as a figure: a box for each paper, and arrows to the papers that build on it."""
    with styled():
        figure = new_figure((7.6, 9.0))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set(xlim=(-0.52, 2.52), ylim=(-0.8, 5.42), title="Ring attention among the papers around it")
        for paper in PAPERS:
            _box(axes, paper)
            for source in PAPERS:
                if source.key in paper.after:
                    _arrow(axes, source, paper)
        axes.text(1.0, -0.63, _KEY, ha="center", va="center", fontsize=9.5, color=QUIET)
    return figure


def describe_papers() -> str:
    """Return the map in words, paper by paper."""
    lines = [f"Map of {len(PAPERS)} papers."]
    for paper in PAPERS:
        after = (
            f"; comes after {' and '.join(_NAMES[source] for source in paper.after)}" if paper.after else ""
        )
        lines.append(
            f"{paper.year} {_NAMES[paper.key]} (arXiv {paper.arxiv}, {explained_in(paper)}): {paper.gives}{after}"
        )
    return "\n".join(lines)


def explained_in(paper: Paper) -> str:
    """Return the one or two lessons that first explain a paper's idea."""
    ids = [lesson.id for lesson in LESSONS if paper.key in lesson.papers][:2]
    return f"lesson {ids[0]}" if len(ids) == 1 else f"lessons {', '.join(ids)}"


def _text(paper: Paper) -> str:
    gives = textwrap.fill(paper.gives, 22)
    return f"{_NAMES[paper.key]}\n{paper.year}, arXiv {paper.arxiv}\n{gives}\n{explained_in(paper)}"


def _box(axes: Axes, paper: Paper) -> None:
    is_goal = paper.key == "ring"
    box = {
        "boxstyle": "round,pad=0.7",
        "facecolor": BLUE if is_goal else PAPER,
        "edgecolor": INK,
        "linewidth": 1.2,
    }
    axes.text(
        *_PLACES[paper.key], _text(paper), ha="center", va="center", fontsize=9.5, bbox=box, zorder=3,
        color=PAPER if is_goal else INK,
    )  # fmt: skip


def _arrow(axes: Axes, source: Paper, target: Paper) -> None:
    """Draw an arrow from the lower edge of one box to the upper edge of another."""
    (x, y), (to_x, to_y) = _PLACES[source.key], _PLACES[target.key]
    begin, end = (0.065 + 0.058 * (_text(paper).count("\n") + 1) for paper in (source, target))
    style = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(to_x, to_y + end), xytext=(x, y - begin), arrowprops=style, zorder=1)


MACHINES = ("a100", "h100", "b200", "tpu-v4", "tpu-v5e", "laptop")


@dataclass(frozen=True)
class KnownLink:
    """A link of a known machine.

    `name` names machine and link, as in "A100, NVLink 3". `F` is the dense peak of a rank in FLOP/s.
    """

    name: str
    F: float
    link: Link


def known_links(dtype: str = "bfloat16") -> list[KnownLink]:
    """Return the links, inside and between nodes, of the known machines that can compute in `dtype`."""
    machines = [hardware(name) for name in MACHINES]
    return [
        KnownLink(f"{short(machine)}, {link.name}", machine.peak(dtype), link)
        for machine in machines
        if dtype in machine.flops_per_s
        for link in (machine.inside, machine.between)
    ]


def short(machine: Hardware) -> str:
    """Return a machine's title without its maker and its form factor."""
    name = machine.title.split(",")[0].removeprefix("NVIDIA ").removeprefix("Google ")
    return name.split(" of ")[0].removesuffix(" (HGX)").removesuffix(" SXM")
