"""The picture that other sites show beside a link to the pages, drawn from the simulator."""

from __future__ import annotations

from pathlib import Path

from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.layout import get_layout
from ringlab.viz.style import INK, RULE, new_figure, rank_colour, styled

NAME = "_static/preview.png"
WIDTH, HEIGHT = 1200, 630
"""The usual size of the pictures in link previews, in pixels."""
TOKENS, RANKS = 2**17, 8


def write(site: Path) -> None:
    """Write the picture into the built pages: how long eight GPUs compute and wait, with two layouts."""
    sizes, machine = Attention(H=32, K=8, D=128), hardware("h100")
    runs = {
        name: simulate(sizes, get_layout(name, TOKENS, RANKS), machine) for name in ("contiguous", "zigzag")
    }
    longest = max(run.makespan_s for run in runs.values())
    with styled():
        drawn = new_figure((WIDTH / 100, HEIGHT / 100))
        panels = drawn.subplots(1, 2, sharey=True)
        for ax, (name, run) in zip(panels, runs.items(), strict=True):
            rest = run.makespan_s - run.busy_s
            colours = [rank_colour(rank) for rank in range(RANKS)]
            ax.barh(range(RANKS), 1e3 * run.busy_s, color=colours)
            ax.barh(
                range(RANKS), 1e3 * rest, left=1e3 * run.busy_s, color="none", edgecolor=RULE, hatch="///"
            )
            ax.set(xlim=(0, 1e3 * longest), ylim=(RANKS - 0.5, -0.5), yticks=[], xlabel="milliseconds")
            ax.set_title(f"{name.replace('zigzag', 'zig-zag')}: {1e3 * run.makespan_s:.1f} ms", fontsize=19)
        panels[0].set_ylabel("eight GPUs")
        words = (
            "ringlab · ring attention, built by hand",
            f"One layer over {TOKENS // 1024}Ki tokens; hatched: waiting",
        )
        drawn.suptitle("\n".join(words), x=0.02, ha="left", fontsize=24, color=INK)
        drawn.savefig(site / NAME, dpi=100)
