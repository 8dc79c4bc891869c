"""Pictures of errors as SVG, which a page includes as text: error over (query, key), and error of each token.

Blue means too little and orange means too much, which readers with any colour vision can tell apart. Colours
come from the page's own CSS, so a picture is as light or dark as the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from ringlab.conformance.report.counterexample import as_run
from ringlab.conformance.report.diagnosis import beyond

# sizes in units of a picture: a cell, the space for labels, and a row of the strip
_CELL, _EDGE, _ROW = 10, 34, 26
_ZOOM = 1.5  # the largest scale of a picture, because a small picture at a larger scale has huge letters
_TITLED = 48  # the most tokens for which each cell has its own title
# the most columns of a strip; with more tokens, a column shows the largest error of several tokens
_COLUMNS = 96


def over_pairs(located: Mapping[str, Any], label: str, *, in_sequence: bool = False) -> str:
    """Return the picture of the error over (query, key).

    Tokens are ordered by rank, or in the order of the sequence.
    """
    pairs, positions = located["pairs"], located["positions"]
    order = list(range(located["run"]["S"])) if in_sequence else [token for own in positions for token in own]
    run, whole = as_run(located["run"]), np.asarray(order)
    visible = run.visible(run.S)[0, 0][np.ix_(whole, whole)]
    side = _CELL * len(order)
    rows = [pairs["difference"][query] for query in order]
    most = largest_difference(pairs)
    cells = [
        _cell(column, row, values[key], pairs["bound"], most, f"query {order[row]}, key {key}" if len(order) <= _TITLED else "")
        for row, values in enumerate(rows)
        for column, key in enumerate(order)
    ]  # fmt: skip
    parts = [_hidden(visible), *cells]
    parts += _borders(positions, order, side) if not in_sequence else _owners(positions, side)
    box = f"{-_EDGE} {-_EDGE} {side + _EDGE + 4} {side + _EDGE + 4}"
    return (
        f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}" style="max-width: {round(_ZOOM * (side + _EDGE))}px">'
        f'<rect class="page" width="{side}" height="{side}"/>{"".join(parts)}'
        f'<text x="{side / 2}" y="{-_EDGE + 10}" text-anchor="middle">keys</text>'
        f'<text transform="translate({-_EDGE + 10} {side / 2}) rotate(-90)" text-anchor="middle">queries</text></svg>'
    )


def largest_difference(pairs: Mapping[str, Any]) -> float:
    """Return the largest finite difference of a map."""
    numbers = [abs(x) for row in pairs["difference"] for x in row if x is not None]
    return max(numbers, default=0.0) or 1.0


def _cell(x: int, y: int, value: float | None, bound: float, most: float, title: str) -> str:
    """Return the cell of one error: empty within the bound, coloured beyond it or if not finite."""
    if value is not None and abs(value) <= bound:
        return ""
    colour = "nan" if value is None else "more" if value > 0 else "less"
    share = 1.0 if value is None else 0.2 + 0.8 * abs(value) / most
    inner = (
        f"<title>{title}: {'NaN or infinite' if value is None else f'{value:+.3g}'}</title>" if title else ""
    )
    place = f'x="{x * _CELL}" y="{y * _CELL}" width="{_CELL}" height="{_CELL}"'
    shape = f'<rect class="{colour}" {place} fill-opacity="{share:.2f}"'
    return f"{shape}>{inner}</rect>" if inner else f"{shape}/>"


def _hidden(visible: np.ndarray) -> str:
    """Return grey areas for the pairs that the mask hides, one stretch of a row at a time."""
    steps = []
    for row, seen in enumerate(visible):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], ~seen, [0]]).astype(int)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            steps.append(f"M{start * _CELL} {row * _CELL}H{end * _CELL}v{_CELL}H{start * _CELL}z")
    return f'<path class="hidden" d="{"".join(steps)}"/>' if steps else ""


def _borders(positions: Sequence[Sequence[int]], order: Sequence[int], side: int) -> list[str]:
    """Return lines between ranks, and the ranks' numbers at the rows and above the columns."""
    ends = [0, *np.cumsum([len(own) for own in positions]).tolist()]
    lines = "".join(f"M0 {end * _CELL}H{side}M{end * _CELL} 0V{side}" for end in ends)
    parts = [f'<path class="border" d="{lines}"/>']
    for rank, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            middle = (start + end) / 2 * _CELL
            word = "rank " if (end - start) * _CELL >= 60 else ""
            parts.append(f'<text x="{middle}" y="-6" text-anchor="middle">{word}{rank}</text>')
            parts.append(
                f'<text transform="translate(-6 {middle}) rotate(-90)" text-anchor="middle">{word}{rank}</text>'
            )
    return parts


def _owners(positions: Sequence[Sequence[int]], side: int) -> list[str]:
    """Return the frame, with lines and numbers at changes of the tokens' owner if there are few changes."""
    owner = np.zeros(side // _CELL, dtype=int)
    for rank, own in enumerate(positions):
        owner[list(own)] = rank
    ends = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    frame = f'<path class="border" d="M0 0H{side}V{side}H0z"/>'
    if len(ends) - 1 > 2 * len(positions):
        return [frame]
    lines = "".join(f"M0 {end * _CELL}H{side}M{end * _CELL} 0V{side}" for end in ends[1:-1])
    parts = [frame, f'<path class="border thin" d="{lines}"/>']
    for start, end in pairwise(ends):
        middle = (start + end) / 2 * _CELL
        parts.append(f'<text x="{middle}" y="-6" text-anchor="middle">{owner[start]}</text>')
        parts.append(
            f'<text transform="translate(-6 {middle}) rotate(-90)" text-anchor="middle">{owner[start]}</text>'
        )
    return parts


def over_tokens(located: Mapping[str, Any], label: str) -> str:
    """Return the picture of each result's errors by token, ordered by rank, relative to the bounds."""
    positions, results = located["positions"], located["results"]
    parts, left = [], 0
    each = max(1, -(-located["run"]["S"] // _COLUMNS))
    for rank, own in enumerate(positions):
        stretches = [own[start : start + each] for start in range(0, len(own), each)]
        width = _CELL * max(1, len(stretches))
        word = "rank " if width >= 60 else ""
        parts.append(f'<text x="{left + width / 2}" y="-6" text-anchor="middle">{word}{rank}</text>')
        for row, result in enumerate(results):
            for column, tokens in enumerate(stretches):
                parts.append(_token(left + column * _CELL, row * _ROW, tokens, result))
        parts.append(f'<path class="border" d="M{left} 0V{_ROW * len(results) - 4}"/>')
        left += width + 4
    names = [
        f'<text x="-8" y="{row * _ROW + 15}" text-anchor="end">{escape(result["name"])}</text>'
        for row, result in enumerate(results)
    ]
    height = _ROW * len(results)
    return (
        f'<svg viewBox="{-_EDGE} -20 {left + _EDGE} {height + 20}" role="img" aria-label="{escape(label)}" '
        f'style="max-width: {round(_ZOOM * (left + _EDGE))}px">{"".join(parts)}{"".join(names)}</svg>'
    )


def _token(x: int, y: int, tokens: Sequence[int], result: Mapping[str, Any]) -> str:
    errors = [result["by_token"][token] for token in tokens]
    worst = None if None in errors else max(errors)
    place = f'x="{x}" y="{y}" width="{_CELL - 1}" height="{_ROW - 4}"'
    named = f"token {tokens[0]}" if len(tokens) == 1 else f"tokens {tokens[0]} to {tokens[-1]}"
    if not beyond(worst, result["bound"]):
        return f'<rect class="right" {place}/>'
    # Colours change in tenfold steps; an error of 1 is about six steps beyond a bound in float32.
    decades = 6.0 if worst is None else np.log10(worst / max(result["bound"], 1e-30))
    title = f"<title>{result['name']}, {named}: {'NaN or infinite' if worst is None else f'error {worst:.2g}'}</title>"
    return f'<rect class="{"nan" if worst is None else "more"}" {place} fill-opacity="{min(1.0, 0.3 + decades / 8):.2f}">{title}</rect>'
