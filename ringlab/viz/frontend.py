"""Shows a widget if a person can use it, and otherwise a static form of the widget."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringlab.errors import require_package

VARIABLE = "RINGLAB_STATIC"
"""The environment variable that is 1 where notebooks run without a person, as in the builder and tests."""
FRAMES = "application/vnd.ringlab.frames+json"
"""The type of a player's recorded pictures. Notebook readers show the text or image beside them; the website
plays them."""


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def is_live() -> bool:
    """Return whether a person sees this notebook, so that widgets are useful."""
    return in_notebook() and os.environ.get(VARIABLE, "0") != "1"


def import_widgets() -> Any:
    """Return the module ipywidgets. Raises: MissingExtraError if it is not installed."""
    require_package("ipywidgets", "lab", "widgets")
    import ipywidgets

    return ipywidgets


def show_player(player: Callable[[], Any], instead: Callable[[], object]) -> None:
    """Display the widget that `player` makes if a person is there to use it; otherwise call `instead`."""
    if not is_live():
        instead()
        return
    from IPython.display import display

    display(player())


def play_steps(
    pictures: Callable[[], Sequence[str]], step: str, instead: Mapping[str, str], names: Sequence[object] = ()
) -> None:
    """Show HTML pictures as a `step_player` if a person is there to use it; else call `record_frames`."""
    show_player(
        lambda: step_player(pictures(), step, readout=not names),
        lambda: record_frames(pictures(), step, instead, names),
    )


def record_frames(
    pictures: Sequence[str], step: str, instead: Mapping[str, str], names: Sequence[object] = ()
) -> None:
    """Record HTML pictures in the output of this cell.

    instead: display data by MIME type, for viewers that cannot play the pictures.
    step: the name of the slider. names: the slider's values, one for each picture; 0, 1, … if empty.
    """
    from IPython.display import display

    frames = {
        "step": step,
        "names": [str(name) for name in names or range(len(pictures))],
        "pictures": [*pictures],
    }
    alt = {"image/png": {"alt": instead["text/plain"]}} if "image/png" in instead else {}
    display({**instead, FRAMES: frames}, metadata=alt, raw=True)


def step_player(pictures: Sequence[str], step: str, *, readout: bool = True) -> Any:
    """Return a widget that steps through HTML pictures, with a Play button and a slider called `step`."""
    ipywidgets = import_widgets()

    last = len(pictures) - 1
    play = ipywidgets.Play(min=0, max=last, interval=1500)
    slider = ipywidgets.IntSlider(min=0, max=last, description=step, readout=readout)
    picture = ipywidgets.HTML(pictures[0])

    def show_step(change: dict[str, Any]) -> None:
        picture.value = pictures[change["new"]]

    slider.observe(show_step, names="value")
    ipywidgets.jslink((play, "value"), (slider, "value"))
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), picture])
