"""Print the figures of the project's house: `python -m tools.house`; with --missing, the names behind a count."""

from __future__ import annotations

import argparse
import sys

from . import docstrings, figures


def main(arguments: list[str]) -> None:
    """Print the table, or what one folder of the reference leaves out."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument(
        "--missing", nargs=2, metavar=("KIND", "FOLDER"), help=f"one of {', '.join(docstrings.KINDS)}"
    )
    asked = parser.parse_args(arguments)
    if asked.missing is None:
        print(figures.table(figures.figures()))
        return
    kind, folder = asked.missing
    if kind not in docstrings.KINDS:
        parser.error(f"needed: one of {', '.join(docstrings.KINDS)}; got: {kind}")
    print(*docstrings.missing(docstrings.Package())[kind].get(folder, []), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
