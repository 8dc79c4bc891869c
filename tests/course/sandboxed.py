"""A program that grades every submission with the judge in its sandbox: `python -m tests.course.sandboxed`.

It grades each right and wrong submission and each solution as a notebook, and writes to
benchmarks/results/judge/sandboxed.json the checks on which the judge and the notebook's own `check()` differ
at one seed. A submission is graded again only if it or its contract has changed; `--all` grades everything,
which takes about 40 minutes of one processor.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import StageReport, run_in_process
from ringlab_course.judge import grade
from tests.course.seeds import (
    arguments,
    contract_digest,
    digest,
    is_fresh,
    is_solution,
    names_of,
    namespace_of,
    source,
    sweep,
)
from tests.course.submissions_of import CHECKOUT, submission

RESULTS = CHECKOUT / "benchmarks" / "results" / "judge" / "sandboxed.json"
SEED = 1


def contract_for(name: str) -> Exercise:
    """Return the contract of a submission. For a wrong answer, it has only the answer's stage."""
    contract = load_exercise(name[:2])
    if "/wrong_" not in name:
        return contract
    return replace(contract, stages=(contract.stage(submission(name).expected.stage),))


def notebook(name: str, folder: Path) -> Path:
    """Return the path of a submission as a notebook. A Python file becomes a notebook of one cell."""
    if is_solution(name):
        return CHECKOUT / "solutions" / f"{contract_for(name).slug}.ipynb"
    cell = {
        "cell_type": "code",
        "id": "x",
        "metadata": {"grade": contract_for(name).stages[0].id},
        "source": source(name),
        "outputs": [],
    }
    path = folder / f"{submission(name).stem}.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


def differences(name: str, seed: int = SEED) -> list[str]:
    """Return the differences between the reports of the judge and of `check()` in the notebook, check by check."""
    contract = contract_for(name)
    with tempfile.TemporaryDirectory() as folder:
        # With patience, because a slow processor would end an answer that is slow on purpose before its last checks.
        graded = grade(
            notebook(name, Path(folder)), contract, seed=seed, timeout=120, total_timeout=1200, patience=4
        )
    found = [f"the judge: {graded.reason}"] if graded.reason else []
    for theirs in graded.stages:
        stage = contract.stage(theirs.stage)
        ours = run_in_process(stage, namespace_of(name), tier="all", seed=seed)
        found += _between(ours, theirs)
    return found


def _between(ours: StageReport, theirs: StageReport) -> list[str]:
    found = [] if ours.status == theirs.status else [f"{ours.stage}: {ours.status}, judge {theirs.status}"]
    for mine, judged in zip(ours.checks, theirs.checks, strict=True):
        said, heard = ("holds" if c.ok else c.misconception or "fails" for c in (mine, judged))
        if said != heard:
            words = f"{judged.message[:160]} {judged.counterexample[:200]}".strip()
            found.append(f"{ours.stage}:{mine.id}: {said}, judge {heard} {words}".strip())
    return found


def entry(name: str) -> dict[str, Any]:
    """Return the entry of one submission in the results."""
    found = differences(name)
    return {
        "submission": digest(name),
        "contract": contract_digest(name[:2]),
        "seeds": 1,
        "faults": {str(SEED): found} if found else {},
    }


def main() -> None:
    """Grade the submissions that have no fresh entry in the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = arguments(parser, RESULTS)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    names = names_of(chosen, lambda name, entry: is_fresh(name, entry, 1))
    sweep(names, entry, chosen.output, chosen.jobs, "python -m tests.course.sandboxed")


if __name__ == "__main__":
    main()
