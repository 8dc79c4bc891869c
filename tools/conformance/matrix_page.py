"""Writes the kill matrix as a page, and reads the matrix back from the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ringlab.conformance import checks
from ringlab.conformance.checks.check import Measure
from ringlab.conformance.checks.resources import RESOURCE_CHECKS
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.styles import STYLES, Style

SEEDS = {"seeds": 50, "styles": 50}
"""The number of seeds in each sweep."""
KINDS = ("forward", "mask", "backward", "communication", "memory", "precision", "behaviour")
_LOOSE = ("falls to both", "passes the first", "passes both")
LOOSE_TESTS = len(_LOOSE) - 1
"""The number of loose tests that a wrong ring may pass."""
_MARKS = {"": False, "●": True, "◉": True}
_HEAD = """# Which check finds which wrong ring

What each check of the suite asks, and which wrong rings it finds. Every wrong ring is the plain ring of `ringlab.plain_ring`, changed
in one to four places, and claims what that one claims. The plain ring itself passes all checks. Each wrong ring is also a target:
`ringlab check ringlab.conformance.mutants:swaps_dk_and_dv` shows a report on one.
"""
_FOOT = """The goals for the time of a right ring are 60 seconds for the quick tier and ten minutes for the full one, on two idle cores: the
median of three runs of `ringlab check TARGET --json`, whose `seconds` includes the import of torch.

`python -m tools.conformance.evidence matrix docs/conformance-matrix.md` writes this page. A test compares it with the wrong rings and the
checks named for them.
"""
_STYLES = f"""## Right rings that it accepts

A suite that blames a right ring is of no use. These right rings work in other ways than the plain ring, and the suite accepts each
of them. With all of {SEEDS["styles"]} seeds it accepts their values: `python -m tools.conformance.evidence styles
benchmarks/results/conformance/styles.json` writes that sweep. What no seed changes, such as messages and memory, a test asks once.
The last column names the checks that a style leaves out, because
its target does not claim what they ask, or allows them to fail with this reason.
`ringlab check ringlab.conformance.styles:travelling_queries` shows a report on one.
"""
_LEGEND = """## The matrix

● means that the check of that column fails, in as many runs as the quick tier has; ◉ that this check is the one named for
the wrong ring, and must fail. The last column shows two loose tests. **The first** compares out with the truth by
`allclose` with a tolerance of 1e-2, without a mask, on a contiguous layout and four ranks. **The second** adds causal runs,
contiguous and zig-zag.
"""


class Row(NamedTuple):
    """One wrong ring: the checks that fail, in the table's order, and how many loose tests it passes."""

    failed: tuple[str, ...]
    loose: int


def page(rows: Mapping[str, Row]) -> str:
    """Return the whole page."""
    parts = [
        _HEAD,
        _summary(rows),
        _kinds(rows),
        _measures(rows),
        _checks(),
        _styles(),
        _LEGEND,
        _table(rows),
        _FOOT,
    ]
    return "\n".join(parts)


def _summary(rows: Mapping[str, Row]) -> str:
    total = len(rows)
    found = sum(MUTANTS[name].found_by in row.failed for name, row in rows.items())
    first, second = (sum(row.loose >= least for row in rows.values()) for least in (1, 2))
    return (
        f"**{found} of {total} wrong rings are found by the check named for them. {first} of them pass the first loose test, "
        f"a comparison of out by `allclose` without a mask; {second} still pass when causal runs, contiguous and zig-zag, "
        "are added.**\n"
    )


def _kinds(rows: Mapping[str, Row]) -> str:
    counts = Counter(MUTANTS[name].kind for name in rows)
    loose = Counter(MUTANTS[name].kind for name, row in rows.items() if row.loose == LOOSE_TESTS)
    lines = [
        "## By kind\n",
        "| what is wrong | wrong rings | pass both loose tests |",
        "|---|--:|--:|",
    ]
    lines += [f"| {kind} | {counts[kind]} | {loose[kind]} |" for kind in KINDS if counts[kind]]
    return "\n".join(lines) + "\n"


def _measures(rows: Mapping[str, Row]) -> str:
    lines = [
        "## What has to be measured\n",
        "No single comparison finds them all. A wrong ring is counted in the line of its named check. The last column counts "
        "those that no check of another line finds: without this line they would pass.\n",
        "| measured | checks | named for it | found by it alone |",
        "|---|---|--:|--:|",
    ]
    for measure in Measure:
        own = [each.name for each in checks.CHECKS if each.measure is measure]
        named = sum(MUTANTS[name].found_by in own for name in rows)
        alone = sum(bool(row.failed) and set(row.failed) <= set(own) for row in rows.values())
        lines.append(f"| {measure.value} | {', '.join(f'`{each}`' for each in own)} | {named} | {alone} |")
    return "\n".join(lines) + "\n"


def _checks() -> str:
    lines = ["## What each check asks\n", "| check | asks | tier |", "|---|---|---|"]
    return (
        "\n".join([*lines, *(f"| `{each.name}` | {each.asks} | {each.tier} |" for each in checks.CHECKS)])
        + "\n"
    )


def _styles() -> str:
    lines = [_STYLES, "| style | what it does differently | not promised |", "|---|---|---|"]
    lines += [f"| `{name}` | {style.does} | {_lacks(style)} |" for name, style in STYLES.items()]
    return "\n".join(lines) + "\n"


def _lacks(style: Style) -> str:
    """Return the checks that a style leaves out, with the reason."""
    left_out = style.allow
    if style.target().schedule == "any":
        left_out = tuple(each.name for each in RESOURCE_CHECKS)
    named = ", ".join(f"`{each}`" for each in left_out)
    claimed = f"other dtypes than {', '.join(style.dtypes)}" if style.dtypes else ""
    claimed = claimed or (f"ranks but {', '.join(map(str, style.ranks))}" if style.ranks else "")
    return "; ".join(filter(None, [claimed, named and f"{named}: {style.lacks}"])) or "nothing"


def _table(rows: Mapping[str, Row]) -> str:
    columns = [each.name for each in checks.CHECKS if any(each.name in row.failed for row in rows.values())]
    lines = [
        f"| wrong ring | what is wrong | {' | '.join(columns)} | loose tests |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, row in rows.items():
        mutant = MUTANTS[name]
        cells = ["" if c not in row.failed else "◉" if c == mutant.found_by else "●" for c in columns]
        fault = f"{mutant.kind}: {mutant.fault}".replace("|", "\\|")
        lines.append(f"| `{name}` | {fault} | {' | '.join(cells)} | {_LOOSE[row.loose]} |")
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, Row]:
    """Return the rows of a page, by the name of the wrong ring.

    Raises: ValueError for a page without a matrix.
    """
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    lines = [[cell.strip() for cell in line] for line in lines]
    head = next((line for line in lines if line[0] == "wrong ring"), None)
    if head is None:
        raise ValueError("needed a page with a table of wrong rings, got none")
    found = {}
    for line in lines:
        if len(line) == len(head) and line[0].startswith("`"):
            failed = tuple(name for name, cell in zip(head[2:-1], line[2:-1], strict=True) if _MARKS[cell])
            found[line[0].strip("`")] = Row(failed, _LOOSE.index(line[-1]))
    return found
