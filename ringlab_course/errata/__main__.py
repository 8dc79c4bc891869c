"""`python -m ringlab_course.errata PAGE`: write the page of errata, or with --check print the differences."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

import torch

from ringlab_course.errata import page


def main(arguments: list[str]) -> int:
    """Write or check the page.

    Return 1 if the page differs, or if a computation agrees with a wrong claim.
    """
    parser = argparse.ArgumentParser(prog="python -m ringlab_course.errata", description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", default=Path("docs/errata.md"))
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    computed = page.compute()
    amiss = page.amiss(computed)
    text = page.page(computed)
    if asked.check:
        amiss += difflib.unified_diff(
            asked.page.read_text(encoding="utf-8").splitlines(),
            text.splitlines(),
            str(asked.page),
            "computed",
            n=0,
            lineterm="",
        )
    else:
        asked.page.write_text(text, encoding="utf-8")
    print("\n".join(amiss), end="\n" if amiss else "")
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
