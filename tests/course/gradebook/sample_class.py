"""A made-up class of 30, graded as an instructor would: `python -m tests.course.gradebook.sample_class OUT`.

Writes OUT/submitted/LEARNER/EXERCISE/NOTEBOOK.ipynb out of the course's own right, wrong and hostile
submissions, runs `ringlab grade` and `ringlab gradebook` on them, and leaves OUT/grades.db and the
pages in OUT/reports. Run again, it grades only what is new. `--draw` renders what is graded.

Entries made without a sandbox, from the course's own right and wrong submissions, for tests of pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from ringlab_course.checking.contract import Exercise
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import StageReport, run_in_process
from ringlab_course.gradebook.entry import Entry
from ringlab_course.judge.judge import GradeReport
from tests.course.judge.hostile import HOSTILE
from tests.course.submissions_of import Submission, namespace, submission, submissions

CHECKOUT = Path(__file__).resolve().parents[3]
TITLE = "Ring attention, a made-up class"
DUE = datetime(2026, 11, 2, 23, 59, tzinfo=UTC)
LATE_H = (0, 0, 0, 5, 0, 0, 31)
"""Hours after the deadline; learner n takes n mod 7."""
LEARNERS = (
    "Ada", "Bilal", "Chen Wei", "Dolores O'Brien", "Emeka", "Fatima", "Grete", "Hyun-ju", "Ines", "João",
    "Kofi", "Léa", "Mehmet", "Nadia", "Olumide", "Priya", "Quentin", "Rosa", "Søren", "Thuy",
    "Umar", "Vera", "Wiremu", "Xiomara", "Yusuf", "Zofia",
    "<script>alert(1)", 'q"uo\'te & co', "\u202egpj.exe", "..x",
)  # fmt: skip
ABSENT, SKELETON, BROKEN, HOSTILES = 12, 24, 25, 26
"""The learner who skips all but exercise 01; who hands in the skeleton; broken JSON; and the first of those who cheat."""
TRICKS = (
    "overwrites the checks",
    "writes garbage to the judge",
    "kills everybody",
    "loops with signals ignored",
)


def notebook(exercise_id: str, answers: dict[str, str]) -> dict[str, Any]:
    """Return the solved notebook of an exercise with the graded cells of some stages replaced by `answers`."""
    (path,) = (CHECKOUT / "solutions").glob(f"{exercise_id}_*.ipynb")
    document = json.loads(path.read_text(encoding="utf-8"))
    for cell in document["cells"]:
        stage = cell["metadata"].get("grade")
        if stage in answers:
            cell["source"] = answers[stage]
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    return document


def hand_in(folder: Path, exercise_id: str, learners: Sequence[str] = LEARNERS) -> None:
    """Write one submission for every learner who hands in."""
    contract = load_exercise(exercise_id)
    wrong = submissions(f"{exercise_id}/wrong_*")
    for number, learner in enumerate(LEARNERS):
        if learner not in learners or (number == ABSENT and exercise_id != "01"):
            continue
        path = folder / learner / contract.slug / f"{contract.slug}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(notebook(exercise_id, answers(contract, wrong, number)), indent=1)
        if number == SKELETON:
            (skeleton,) = (CHECKOUT / "exercises").glob(f"{exercise_id}_*.ipynb")
            text = skeleton.read_text(encoding="utf-8")
        elif number == BROKEN:
            text = text[: len(text) // 2]
        path.write_text(text, encoding="utf-8")
        when = (DUE - timedelta(minutes=30) + timedelta(hours=LATE_H[number % 7])).timestamp()
        os.utime(path, (when, when))


def answers(contract: Exercise, wrong: list[Submission], number: int) -> dict[str, str]:
    """Return what learner `number` writes instead of the solution: nothing, one mistake, several, or a trick."""
    if number >= HOSTILES:
        stage = contract.stages[0]
        source = HOSTILE[TRICKS[number - HOSTILES]]
        return {stage.id: re.sub(r"def double\(x\):", f"def {stage.function}(x, *rest, **named):", source)}
    found: dict[str, str] = {}
    for mistake in range((0, 1, 1, 2, 3)[number % 5]):
        chosen = wrong[(number * 7 + mistake * 11) % len(wrong)]
        found[chosen.expected.stage] = chosen.source
    return found


def ringlab(*words: str | Path) -> int:
    """Run a command of ringlab's, and return its exit status."""
    line = ["ringlab", *map(str, words)]
    print("$", shlex.join(line), flush=True)
    program = "import sys; from ringlab.cli import main; sys.argv[0] = 'ringlab'; main()"
    return subprocess.run([sys.executable, "-c", program, *line[1:]], cwd=CHECKOUT, check=False).returncode


def main() -> None:
    """Generate, grade and render the class."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--exercises", nargs="+", default=["01", "05"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="grade nothing; render what is graded")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    book = out / "grades.db"
    if not chosen.draw:
        for exercise_id in chosen.exercises:
            hand_in(out / "submitted", exercise_id)
        late = ("--due", DUE.isoformat(), "--late", "10%/day, max 50%")
        ringlab("grade", out / "submitted", "--book", book, "--jobs", str(chosen.jobs), *late)
        reason = "handed in on paper after the laptop broke; seen by the examiner"
        ringlab("gradebook", "override", book, LEARNERS[BROKEN], "01", "34", "--reason", reason)
    ringlab("gradebook", "report", book, out / "reports", "--title", TITLE)


if __name__ == "__main__":
    main()


SEED = 918273645
WRONG = ("wrong_no_scale", "wrong_strict", "wrong_mixes_heads", "wrong_cap_ignored")
HIDDEN = "THE PROBE OF A HIDDEN CHECK"


@cache
def graded(stem: str, exercise_id: str = "01") -> dict[str, Any]:
    """Return the report of a submission, as a judge would that forgot to take hidden counterexamples out."""
    exercise = load_exercise(exercise_id)
    space = namespace(submission(f"{exercise_id}/{stem}"))
    stages = tuple(_marked(run_in_process(stage, space, "all", seed=1)) for stage in exercise.stages)
    return GradeReport(
        f"{stem}.ipynb", exercise_id, stages, exercise.points, seed=SEED, seconds=1.5
    ).as_dict()


def entry(learner: str, stem: str = "right_looped", exercise_id: str = "01", **fields: Any) -> Entry:
    """Return the entry of `learner` who handed in the submission `stem`."""
    report = fields.pop("report", None) or graded(stem, exercise_id)
    made = Entry(
        learner, exercise_id, f"submitted/{learner}/{exercise_id}/x.ipynb", "0123456789abcdef" * 4,
        "2026-11-03T08:00:00+00:00", report["seconds"], report, report["earned"], report["points"], seed=SEED,
    )  # fmt: skip
    return replace(made, **fields)


def a_class() -> list[Entry]:
    """Return the entries of a class with one of everything."""
    late = {"late_s": 9000.0, "penalty": 2.5, "submitted_at": "2026-11-02T23:59:00+00:00"}
    reason = "the projector caught fire (grace, 2026-11-21T20:37:41.632594+00:00)"
    return [
        entry("Ada"),
        *(entry(f"Learner {number}", stem) for number, stem in enumerate(WRONG)),
        entry("Late", WRONG[0], **late),
        entry("Set", WRONG[1], override=33.0, override_reason=reason),
        entry("Unreadable", report=saying(reason="broken JSON", stages=[])),
        entry("Ada", "right_looped", "02"),
    ]


def saying(message: str = "wrong", counterexample: str = "", **more: Any) -> dict[str, Any]:
    """Return a report of one stage with one failing visible check that says this."""
    check = {
        "id": "small", "title": "weights and lse of a few scores", "tier": "visible", "points": 2, "ok": False,
        "message": message, "counterexample": counterexample, "misconception": None, "broken": False, "seconds": 0.1,
    }  # fmt: skip
    report = asdict(GradeReport("x.ipynb", "01", (), 36, seed=SEED, seconds=0.2))
    stages = [{"stage": "01.softmax", "status": "wrong", "checks": [check]}]
    return {**report, "stages": stages, "earned": 0, "ok": False, **more}


def _marked(report: StageReport) -> StageReport:
    return replace(
        report,
        checks=tuple(
            replace(c, counterexample=HIDDEN) if c.tier == "held-out" and not c.ok else c
            for c in report.checks
        ),
    )
