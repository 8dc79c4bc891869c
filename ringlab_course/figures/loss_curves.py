"""Loss curves on top of each other, and how far each is from the first.

The curves are measured: by a notebook's own runs, or by `ringlab bench` and then recorded with their machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets, show_player
from ringlab.viz.style import BLUE, GREEN, INK, ORANGE, QUIET, RED, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[float]]
"""Losses by step, by the name of the run; the others are compared with the first."""
RECORDED = Path("benchmarks/results/nn/loss-curves.json")
SAME = 1e-5
"""Relative difference up to which two float32 runs are one: they add up the same terms in another order."""
FLOOR = 1e-9
"""Where the picture draws equal bits, whose difference has no logarithm."""
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": INK, "linewidth": 5.0, "alpha": 0.25},
    {"color": BLUE, "linestyle": "-", "linewidth": 1.6},
    {"color": RED, "linestyle": "--", "linewidth": 1.6},
    {"color": GREEN, "linestyle": ":", "linewidth": 2.2},
    {"color": ORANGE, "linestyle": "-.", "linewidth": 1.6},
)


@dataclass(frozen=True)
class Recorded:
    """Curves of an earlier run; `machine` says where, when and with what they were made."""

    curves: Curves
    machine: str


def recorded(path: Path | None = None) -> Recorded:
    """Return the 200-step curves that come with the course. Raises: OSError where the file is not there."""
    from ringlab.checkout import find_checkout

    recorded = json.loads((path or find_checkout() / RECORDED).read_text(encoding="utf-8"))
    at = recorded["machine"]
    words = f"{at['processor']}, {at['cores']} cores, torch {at['torch']}, Python {at['python']}, {at['date'][:10]}"
    return Recorded(recorded["curves"], words)


def differences(curves: Curves) -> dict[str, list[float]]:
    """Return, for each run but the first, |loss − first's loss| / first's loss, step by step."""
    (_, first), *others = curves.items()
    return {
        name: [abs(one - own) / abs(own) for one, own in zip(losses, first, strict=True)]
        for name, losses in others
    }


def figure(curves: Curves, title: str) -> Figure:
    """Return the curves above, and below how far each is from the first, on a logarithmic scale."""
    with styled():
        drawing = new_figure((7.2, 5.0))
        above, below = drawing.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (name, losses), look in zip(curves.items(), LOOKS, strict=False):
            above.plot(range(1, len(losses) + 1), losses, label=name, **look)
        for (name, found), look in zip(differences(curves).items(), LOOKS[1:], strict=False):
            below.semilogy(range(1, len(found) + 1), [max(one, FLOOR) for one in found], label=name, **look)
        below.axhline(SAME, color=QUIET, linewidth=1.0)
        below.text(1, SAME * 1.5, "1e-5", color=QUIET, fontsize=9, va="bottom")
        below.set(
            xlabel="step", ylabel=f"relative difference\nfrom {next(iter(curves))}", ylim=(FLOOR / 2, 1.0)
        )
        above.set(ylabel="loss (nats per byte)")
        above.set_title(title)
        above.legend(loc="upper right")
    return drawing


def describe(curves: Curves, title: str) -> str:
    """Return the picture in words, without a value of the loss: texts differ from one Python to the next."""
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
    """Return a widget whose buttons (Tab and Space) choose the runs to be drawn, with picture and words."""
    ipywidgets = import_widgets()

    from ringlab.viz.style import as_html

    which = ipywidgets.ToggleButtons(options=list(cases))
    which.style.button_width = "auto"
    picture = ipywidgets.HTML()

    def redraw(_: object = None) -> None:
        chosen = cases[which.value]
        picture.value = as_html(figure(chosen, which.value), describe(chosen, which.value), widest="44em")

    which.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([which, picture])


def play(cases: Mapping[str, Curves]) -> None:
    """Show the player to a person; tell all cases in words where nobody is there to press a button."""
    words = (describe(curves, title) for title, curves in cases.items())
    show_player(lambda: player(cases), lambda: print(*words, sep="\n"))
