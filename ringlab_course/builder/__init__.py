"""Build notebooks from the sources of lessons and exercises."""

from __future__ import annotations

from ringlab.errors import require_package

for _name in ("nbformat", "jupytext"):
    require_package(_name, "lab", "notebooks made from their sources")
