"""Write the generated pages of docs/, or report which are out of date: `python -m tools.docs [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from . import architecture, benchmarks, commands, drawings, names

CHECKOUT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tools.docs"
FOOT = "\n`make docs` writes this page.\n"


def pages(root: Path = CHECKOUT) -> Iterator[tuple[str, str]]:
    """Yield (file, text) for every generated page."""
    yield "docs/cli.md", commands.page() + FOOT
    yield "docs/api.md", names.page(root) + FOOT
    yield "docs/architecture.md", architecture.page(root) + FOOT
    yield "docs/benchmarks.md", benchmarks.page(root) + FOOT
    yield from drawings.drawings()


def main(arguments: list[str]) -> int:
    """Write the pages. With --check, write nothing and return 1 if a page is out of date."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if a page is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for name, text in pages():
        path = CHECKOUT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is out of date: {COMMAND}" if check else f"wrote {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
