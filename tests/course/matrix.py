"""The kill matrix of the checks: `python -m tests.course.matrix` runs all checks of a stage on its wrong answers.

It writes to benchmarks/results/judge/kill_matrix.json which checks find a wrong answer, and which of these
name its mistake. The site's page of checks and tests/course/test_kill_matrix.py read the JSON file. A wrong
answer is run again only if the answer, its contract or a text about mistakes has changed, or its last run had
faults; `--all` runs all wrong answers, which takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from functools import cache
from typing import Any

from ringlab_course.checking.loading import load_stage
from ringlab_course.checking.reports import StageReport, run_in_process
from ringlab_course.checking.wrong_answers import WrongAnswer, entries, namespace_of
from tests.course import seeds
from tests.course.submissions_of import submission
from tools.website.kill_matrix import RESULTS

SEED = 1
VALUES = "values"
"""The message that says only that values are wrong, as no mistake explains them."""


@cache
def told_digest(stage: str) -> str:
    """Return a hash of a stage's entries in wrong_answers.md: names of mistakes, checks and messages."""
    told = [
        (each.name, each.fields, each.text)
        for each in entries(stage[:2])
        if each.fields["stage"] in (stage, stage[:2])
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def is_fresh(name: str, known: dict[str, Any] | None) -> bool:
    """Return whether a wrong answer's entry was made with the current answer, contract and texts."""
    return (
        known is not None
        and seeds.is_fresh(name, known, 1)
        and known.get("told") == told_digest(submission(name).expected.stage)
    )


def reported(wrong: WrongAnswer) -> StageReport:
    """Return the reports of all checks of the stage on a wrong answer."""
    space = namespace_of(wrong.source, f"{wrong.submission}.py")
    return run_in_process(load_stage(wrong.stage), space, tier="all", seed=SEED)


def entry(name: str) -> dict[str, Any]:
    """Return the entry of one wrong answer in the results.

    failed: the checks that find the answer. naming: those of them that name its mistake. message: VALUES, or
    a hash of the message of the check that must find the answer. told: a hash of the texts about mistakes.
    faults: checks that broke, and the check that must find the answer if it fails to.
    """
    wrong = submission(name).expected
    checks = reported(wrong).checks
    failed = [check for check in checks if not check.ok]
    message = next((str(check.message) for check in failed if check.id == wrong.check), "")
    faults = [f"{check.id} broke" for check in checks if check.broken]
    faults += [] if any(check.id == wrong.check for check in failed) else [f"{wrong.check} holds"]
    of_values = wrong.misconception is None and "wrong values" in message
    return {
        "submission": seeds.digest(name),
        "contract": seeds.contract_digest(name[:2]),
        "told": told_digest(wrong.stage),
        "seeds": 1,
        "faults": {str(SEED): faults} if faults else {},
        "failed": [check.id for check in failed],
        "naming": [
            check.id for check in failed if check.misconception and check.misconception == wrong.misconception
        ],
        "message": VALUES if of_values else hashlib.sha256(message.encode()).hexdigest()[:16],
    }


def main() -> None:
    """Run the wrong answers that have no fresh entry in the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = seeds.arguments(parser, RESULTS)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    names = [name for name in seeds.names_of(chosen, is_fresh) if "/wrong_" in name]
    seeds.sweep(names, entry, chosen.output, chosen.jobs, "python -m tests.course.matrix")


if __name__ == "__main__":
    from tests.course import matrix  # workers find pickled functions under this module name

    matrix.main()
