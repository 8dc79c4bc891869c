"""Probes of `ringlab doctor` for the parts that only the course needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ringlab.cli.doctor import Diagnosis, optional


def _sandbox(name: str) -> Diagnosis:
    from ringlab_course.judge.probe import probe

    found = probe()
    if found.available:
        return Diagnosis(name, "ok", f"bubblewrap {found.version} isolates a worker")
    return Diagnosis(name, "missing", found.got or found.needed, found.remedy)


def _chromium(name: str) -> Diagnosis:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path:
        return Diagnosis(name, "ok", path)
    return Diagnosis(name, "missing", "not found", "for the browser tests only: apt-get install chromium")


PROBES: dict[str, Callable[[str], Diagnosis]] = {
    "jupyterlab": optional("lab", "the notebooks"),
    "nbclient": optional("instructor", "ringlab build"),
    "nbgrader": optional("nbgrader", "ringlab nbgrader"),
    "distributed": optional("cluster", "ringlab grade --scheduler"),
    "jax": optional("jax", "lesson and exercise 17"),
    "sandbox of the judge": _sandbox,
    "chromium": _chromium,
}
