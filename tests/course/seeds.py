"""A program that runs every submission over many draws of the probes: `python -m tests.course.seeds`.

It runs each right submission and each solution with all its checks, and each wrong submission with the check
that must find it, once per seed, and writes the faults to benchmarks/results/judge/seeds.json. A submission
with an entry in the file is run again only if it or its contract has changed; `--all` runs everything, which
takes about 40 minutes of one processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ringlab_course.checking.code_alone import code
from ringlab_course.checking.loading import exercise_ids, folder_of, load_exercise
from ringlab_course.checking.reports import CheckReport, run_in_process
from ringlab_course.checking.wrong_answers import SOLUTION, right_answers
from tests.course.submissions_of import CHECKOUT, namespace, solution_code, submission, submissions

RESULTS = CHECKOUT / "benchmarks" / "results" / "judge" / "seeds.json"
SEEDS = tuple(int(seed) for seed in np.random.SeedSequence(2026).generate_state(20, np.uint64))
"""Seeds of 64 bits, like those that the judge draws."""
FEWEST = 6
"""The least draws of every entry. `--seeds` makes a quick sweep; a later sweep without it adds the other draws."""


def wants() -> list[str]:
    """Return the names of all submissions, such as 04/wrong_no_scale, and solutions, such as 04/solution."""
    return [each.name for each in submissions()] + [f"{name}/solution" for name in exercise_ids()]


def is_solution(name: str) -> bool:
    """Return whether this is the name of a solution."""
    return name.endswith("/solution")


def source(name: str) -> str:
    """Return a submission or a solution as Python code."""
    return right_answers(name[:2])[SOLUTION] if is_solution(name) else submission(name).source


def digest(name: str) -> str:
    """Return a hash of the code of a submission or of a solution."""
    return hashlib.sha256(code(source(name)).encode()).hexdigest()[:16]


@cache
def contract_digest(exercise_id: str) -> str:
    """Return a hash of the code of the modules that contain an exercise's checks."""
    modules = sorted(set(folder_of(exercise_id).glob("*.py")) - {folder_of(exercise_id) / "exercise.py"})
    return hashlib.sha256("\0".join(code(path.read_text("utf-8")) for path in modules).encode()).hexdigest()[
        :16
    ]


def faults(name: str, seed: int) -> list[str]:
    """Return the failed checks of a right answer, or how a check failed to find a wrong answer."""
    exercise_id, _, stem = name.partition("/")
    if stem.startswith("wrong_"):
        return _wrong_faults(name, seed)
    space = namespace_of(name)
    found = []
    for stage in load_exercise(exercise_id).stages:
        report = run_in_process(stage, space, tier="all", seed=seed)
        found += [f"{stage.id}:{_told(check)}" for check in report.checks if not check.ok]
    return found


def _wrong_faults(name: str, seed: int) -> list[str]:
    expected = submission(name).expected
    stage = load_exercise(name[:2]).stage(expected.stage)
    alone = replace(stage, checks=(replace(stage.check(expected.check), tier="visible", kind="correctness"),))
    (check,) = run_in_process(alone, namespace_of(name), seed=seed).checks
    if check.ok or check.broken or check.misconception != expected.misconception:
        return [f"{stage.id}:{_told(check)}"]
    return []


def _told(check: CheckReport) -> str:
    outcome = "holds" if check.ok else "broken" if check.broken else check.misconception or "no name"
    text = check.counterexample if check.broken or not check.misconception else ""
    return f"{check.id}: {outcome} {check.message[:160]} {text[:300]}".strip()


@cache
def namespace_of(name: str) -> dict[str, Any]:
    """Return the namespace that a submission or a solution defines."""
    return solution_code(name[:2]) if is_solution(name) else namespace(submission(name))


def over_seeds(name: str, seeds: Iterable[int]) -> dict[str, Any]:
    """Return the entry of one submission in the results: its faults with each of these seeds."""
    seeds = list(seeds)
    found = {str(seed): faults(name, seed) for seed in seeds}
    exercise_id = name.partition("/")[0]
    return {
        "submission": digest(name),
        "contract": contract_digest(exercise_id),
        "seeds": len(seeds),
        "faults": {seed: lines for seed, lines in found.items() if lines},
    }


def one_thread() -> None:
    """Limit torch to one thread, because many processes run at the same time."""
    import torch

    torch.set_num_threads(1)


def sweep(
    names: list[str], entry: Callable[[str], dict[str, Any]], output: Path, jobs: int, command: str
) -> None:
    """Compute `entry(name)` for every name, and after each one write all results so far to `output`."""
    known = {name: entry for name, entry in read(output).items() if name in wants()}
    write(output, known, command)
    with ProcessPoolExecutor(jobs, get_context("spawn"), one_thread) as pool:
        for number, (name, found) in enumerate(zip(names, pool.map(entry, names), strict=True), 1):
            known[name] = found
            print(f"{number}/{len(names)} {name} {found['faults'] or ''}", flush=True)
            write(output, {key: known[key] for key in wants() if key in known}, command)


def read(path: Path) -> dict[str, Any]:
    """Return the entries of a file of results, or {} if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else {}


def write(path: Path, entries: dict[str, Any], command: str) -> None:
    """Write one line per entry, in the given order, so that a later sweep changes few lines of the file."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "command": {json.dumps(command)},\n "entries": {{\n{lines}\n }}\n}}\n'
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def is_fresh(name: str, entry: dict[str, Any] | None, seeds: int) -> bool:
    """Return whether an entry has no faults, enough seeds, and the current submission and contract."""
    return (
        entry is not None
        and entry["submission"] == digest(name)
        and entry["contract"] == contract_digest(name.partition("/")[0])
        and entry["seeds"] >= seeds
        and not entry["faults"]
    )


class _Entry:
    """A callable that runs one submission over the first seeds, and that can be pickled."""

    def __init__(self, seeds: int) -> None:
        self.seeds = seeds

    def __call__(self, name: str) -> dict[str, Any]:
        return over_seeds(name, SEEDS[: self.seeds])


def arguments(parser: argparse.ArgumentParser, output: Path) -> argparse.Namespace:
    """Return the command line of a sweep."""
    parser.add_argument("--only", nargs="*", default=[""], help="names or beginnings, as in 04/right")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="run also what has a fresh entry")
    parser.add_argument("--output", type=Path, default=output)
    return parser.parse_args()


def names_of(chosen: argparse.Namespace, fresh: Callable[[str, dict[str, Any] | None], bool]) -> list[str]:
    """Return the names that a sweep has to run: all requested names that have no fresh entry."""
    known = read(chosen.output)
    names = [name for name in wants() if name.startswith(tuple(chosen.only))]
    return [name for name in names if chosen.all or not fresh(name, known.get(name))]


def main() -> None:
    """Run the submissions that have no fresh entry in the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1), metavar="N"
    )
    chosen = arguments(parser, RESULTS)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    names = names_of(chosen, lambda name, entry: is_fresh(name, entry, chosen.seeds))
    sweep(names, _Entry(chosen.seeds), chosen.output, chosen.jobs, "python -m tests.course.seeds")


if __name__ == "__main__":
    from tests.course import (
        seeds,
    )  # other processes find pickled objects by this name; a solution may replace __main__

    seeds.main()
