"""The pictures of a lab's report, each with words that say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ringlab.viz.style import BLUE, HATCHES, INK, ORANGE, PAPER, QUIET, RED, new_figure, styled
from ringlab_course.gradebook.inline_svg import inline_svg

SIZE = (5.0, 3.2)
_COLOURS = {"contiguous": RED, "striped": ORANGE, "zigzag": BLUE}


def link(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return bandwidth over message size, both on logarithmic axes."""
    sizes, rates = [each["bytes"] for each in cases], [each["bytes_per_s"] / 1e9 for each in cases]
    said = ", ".join(f"{n:,} bytes {rate:.3g} GB/s" for n, rate in zip(sizes, rates, strict=True))
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        axes.loglog(sizes, rates, marker="o", color=BLUE)
        axes.set(xlabel="message, bytes each way", ylabel="GB/s each way")
    return inline_svg(figure, f"Bandwidth by message: {said}.", prefix)


def overlap(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return the seconds of a block, of its hop and of both over tokens: both is the longer where all is hidden."""
    tokens = [each["tokens"] for each in cases]
    lines = (("compute", BLUE, "s"), ("exchange", ORANGE, "^"), ("both", INK, "o"))
    said = "; ".join(
        f"{each['tokens']} tokens: compute {each['compute_s'] * 1e3:.2f}, exchange {each['exchange_s'] * 1e3:.2f}, both {each['both_s'] * 1e3:.2f} ms"
        for each in cases
    )
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        for name, colour, marker in lines:
            axes.loglog(
                tokens, [each[f"{name}_s"] * 1e3 for each in cases], marker=marker, color=colour, label=name
            )
        axes.set(xlabel="tokens of a block", ylabel="ms")
        axes.legend()
    return inline_svg(figure, said, prefix)


def efficiency(cases: Sequence[Mapping[str, Any]], prefix: str) -> Markup:
    """Return efficiency, forward and backward, by scaling and number of ranks: a bar for each layout."""
    both = [each for each in cases if each["pass"] == "forward_backward"] or list(cases)
    said = "; ".join(
        f"{each['scaling']}, {each['P']} ranks: "
        + ", ".join(f"{name} {one['efficiency']:.2f}" for name, one in each["contenders"].items())
        for each in both
    )
    names = list(dict.fromkeys(name for each in both for name in each["contenders"]))
    width = 0.8 / max(1, len(names))
    with styled():
        figure = new_figure(SIZE)
        axes = figure.subplots()
        for number, name in enumerate(names):
            at = [place + (number - (len(names) - 1) / 2) * width for place in range(len(both))]
            heights = [each["contenders"].get(name, {}).get("efficiency", 0.0) for each in both]
            axes.bar(
                at, heights, width * 0.92, label=name, color=_COLOURS.get(name, QUIET), hatch=HATCHES[number % len(HATCHES)],
                edgecolor=PAPER, linewidth=0,
            )  # fmt: skip
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        places = [f"{each['scaling']}\n{each['P']} ranks" for each in both]
        axes.set_xticks(range(len(both)), places)
        axes.set(ylabel="efficiency, with backward")
        axes.grid(axis="x", visible=False)
        if names:
            axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15), fontsize=9)
    return inline_svg(figure, f"Efficiency with backward: {said}.", prefix)
