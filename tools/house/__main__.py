"""Print the sizes of the tree, and the public names with incomplete docstrings or annotations.

Run it with `python -m tools.house`.
"""

from __future__ import annotations

from pathlib import Path

from .docstrings import CHECKOUT, missing, read

PARTS = ("ringlab", "ringlab_course", "tools", "tests")
LARGEST = 15
"""The number of largest files that are listed."""


def lines_of(root: Path) -> dict[Path, int]:
    """Return the number of lines of each Python file below a folder."""
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in root.rglob("*.py")}


def report(checkout: Path = CHECKOUT) -> str:
    """Return a text with lines and files of each part and folder, the largest files, and incomplete names."""
    told: list[str] = []
    every: dict[Path, int] = {}
    for part in PARTS:
        lines = lines_of(checkout / part)
        every |= lines
        told += ["", f"{sum(lines.values()):9,} lines in {len(lines):4,} files  {part}"]
        for folder in sorted({path.relative_to(checkout / part).parts[0] for path in lines}):
            inside = [count for path, count in lines.items() if (checkout / part / folder) in path.parents]
            if inside:
                told.append(f"{sum(inside):9,} lines in {len(inside):4,} files  {part}/{folder}")
    told += ["", "The largest files:"]
    largest = sorted(every, key=every.__getitem__, reverse=True)[:LARGEST]
    told += [f"{every[path]:9,} lines  {path.relative_to(checkout)}" for path in largest]
    for kind, names in missing(read(checkout)).items():
        told += ["", f"{len(names)} lack {kind}{':' if names else ''}", *(f"  {name}" for name in names)]
    return "\n".join(told[1:])


if __name__ == "__main__":
    print(report())
