"""The loss curve of one training run, with the learning rate below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringlab.viz.style import BLUE, GREY, RED, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(losses: Sequence[float], rates: Sequence[float], title: str) -> Figure:
    """Return a figure of the loss of every step, its running mean, and the learning rates.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    numbers = range(1, len(losses) + 1)
    with styled():
        drawing = new_figure((7.2, 4.6))
        above, below = drawing.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        above.plot(numbers, losses, color=GREY, linewidth=1.0, label="each step")
        above.plot(numbers, running_mean(losses), color=BLUE, label="mean of the last steps")
        below.plot(numbers, rates, color=RED)
        above.set(ylabel="loss (nats per byte)")
        above.set_title(title)
        above.legend(loc="upper right")
        below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    return drawing


def running_mean(losses: Sequence[float], width: int = 20) -> list[float]:
    """Return, for each step, the mean of the last `width` losses, or of all if there are fewer.

    >>> running_mean([4.0, 2.0, 1.0], width=2)
    [4.0, 3.0, 1.5]
    """
    windows = (losses[max(0, end - width) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
