"""The class page's content for one exercise: scores, failing checks, misconceptions, times, missing work."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ringlab_course.gradebook import plots
from ringlab_course.gradebook.entry import Entry, Ungraded
from ringlab_course.gradebook.learner_view import contract_of
from ringlab_course.gradebook.readable import legible, prose, short

SLOWEST = 5


@dataclass(frozen=True)
class CheckCount:
    """One check: of `of` submissions, `fails` fail it, and in `not_written` its stage is not written."""

    stage: str
    id: str
    title: Markup
    tier: str
    points: float
    fails: int
    not_written: int
    of: int


@dataclass(frozen=True)
class MistakeCount:
    """A named mistake, how many learners made it, and the message that the course gives them."""

    stage: str
    name: str
    message: Markup
    learners: int


@dataclass(frozen=True)
class Without:
    """A learner whose submission was not graded or counts for nothing, with the reason."""

    learner: str
    reason: str


@dataclass(frozen=True)
class ClassView:
    """One exercise of a class.

    `entries` are sorted by learner; `judged` are the entries that could be graded.
    """

    exercise: str
    title: Markup
    maximum: float
    entries: tuple[Entry, ...]
    judged: tuple[Entry, ...]
    percents: tuple[float, ...]
    checks: tuple[CheckCount, ...]
    mistakes: tuple[MistakeCount, ...]
    broken: tuple[tuple[str, str, str], ...]
    failed_by_us: tuple[Without, ...]
    nothing_counts: tuple[Without, ...]
    absent: tuple[str, ...]
    unsafe: tuple[str, ...]
    older_checks: tuple[str, ...]
    slowest: tuple[Entry, ...]
    seconds: float
    pictures: tuple[Markup, ...]

    @property
    def median(self) -> float:
        """The median score in percent of the maximum."""
        return statistics.median(self.percents)

    @property
    def full(self) -> int:
        """The number of learners with every point."""
        return sum(percent >= 100 for percent in self.percents)

    @property
    def late(self) -> int:
        """The number of submissions that were handed in late."""
        return sum(entry.late_s > 0 for entry in self.entries)

    @property
    def overridden(self) -> int:
        """The number of scores that an instructor has set."""
        return sum(entry.override is not None for entry in self.entries)


def class_view(
    exercise: str, entries: Iterable[Entry], ungraded: Iterable[Ungraded], learners: Iterable[str]
) -> ClassView:
    """Return the view of `exercise` from its `entries` and `ungraded`; `learners` are the whole class."""
    here = tuple(sorted(entries, key=lambda entry: entry.learner))
    judged = tuple(entry for entry in here if entry.report.get("stages") and not entry.report.get("reason"))
    percents = tuple(100 * entry.score / entry.maximum if entry.maximum else 0.0 for entry in here)
    contract = contract_of(exercise)
    failures = tuple(Without(each.learner, legible(each.reason, 300)) for each in ungraded)
    handed_in = {entry.learner for entry in here} | {each.learner for each in failures}
    return ClassView(
        exercise=exercise,
        title=prose(contract.title if contract else ""),
        maximum=max((entry.maximum for entry in here), default=0.0),
        entries=here,
        judged=judged,
        percents=percents,
        checks=tuple(_check_counts(judged)),
        mistakes=tuple(_mistake_counts(judged, exercise)),
        broken=tuple(_broken(judged)),
        failed_by_us=failures,
        nothing_counts=tuple(
            Without(entry.learner, legible(entry.report["reason"], 300))
            for entry in here
            if entry.report.get("reason")
        ),
        absent=tuple(sorted(set(learners) - handed_in)),
        unsafe=tuple(entry.learner for entry in here if entry.report.get("label")),
        older_checks=tuple(entry.learner for entry in here if entry.older_checks),
        slowest=tuple(sorted(here, key=lambda entry: -entry.seconds)[:SLOWEST]),
        seconds=sum(entry.seconds for entry in here),
        pictures=tuple(_pictures(exercise, percents, judged)),
    )


def _checks(entry: Entry) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (stage id, state, check) for every check of an entry."""
    for stage in entry.report["stages"]:
        for check in stage["checks"]:
            wrong = plots.NOT_WRITTEN if stage.get("status") == "not written" else plots.FAILS
            yield stage["stage"], plots.HOLDS if check["ok"] else wrong, check


def _check_counts(judged: Sequence[Entry]) -> list[CheckCount]:
    """Return the counts of every check, sorted so that the checks that fail most often come first."""
    seen: Counter[tuple[str, str]] = Counter()
    states: Counter[tuple[str, str, str]] = Counter()
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in judged:
        for stage, state, check in _checks(entry):
            key = stage, check["id"]
            seen[key] += 1
            states[*key, state] += 1
            newest[key] = check
    counts = [
        CheckCount(
            stage=legible(key[0], 40),
            id=legible(key[1], 60),
            title=prose(check.get("title") or key[1]),
            tier=legible(check.get("tier", ""), 20),
            points=check["points"],
            fails=states[*key, plots.FAILS],
            not_written=states[*key, plots.NOT_WRITTEN],
            of=seen[key],
        )
        for key, check in newest.items()
    ]
    return sorted(counts, key=lambda count: -count.fails / count.of)


def _mistake_counts(judged: Sequence[Entry], exercise: str) -> list[MistakeCount]:
    """Return the named mistakes, sorted so that the most common one comes first."""
    made: Counter[tuple[str, str]] = Counter()
    said: dict[tuple[str, str], str] = {}
    for entry in judged:
        mine = {
            (stage, check["misconception"]): check.get("message") or ""
            for stage, state, check in _checks(entry)
            if state == plots.FAILS and check.get("misconception")
        }
        made.update(mine.keys())
        said |= mine
    return [
        MistakeCount(legible(stage, 40), legible(name, 80).replace("_", " "), prose(said[stage, name]), count)
        for (stage, name), count in made.most_common()
    ]


def _broken(judged: Sequence[Entry]) -> Iterator[tuple[str, str, str]]:
    """Yield (learner, check, error) for each failure whose cause is the check and not the answer."""
    for entry in judged:
        for stage, _, check in _checks(entry):
            if check.get("broken"):
                yield entry.learner, legible(f"{stage}: {check['id']}", 80), legible(check["message"], 300)


def _pictures(exercise: str, percents: Sequence[float], judged: Sequence[Entry]) -> Iterator[Markup]:
    prefix = "".join(character for character in exercise if character.isalnum()) or "x"
    if percents:
        yield plots.distribution(percents, f"d{prefix}")
    if judged:
        yield plots.times(_parts(judged), f"t{prefix}")
        columns = [(stage, check["id"]) for stage, _, check in _checks(judged[0])]
        best = sorted(judged, key=lambda entry: -entry.earned)
        states = [{(stage, check["id"]): state for stage, state, check in _checks(entry)} for entry in best]
        rows = [[row.get(column, plots.NOT_WRITTEN) for column in columns] for row in states]
        labels = [short(f"{stage.partition('.')[2] or stage} · {check}", 60) for stage, check in columns]
        yield plots.matrix(labels, rows, f"m{prefix}")


def _parts(judged: Sequence[Entry]) -> list[tuple[str, list[float]]]:
    """Return the seconds of every submission for each stage, and the seconds outside of all checks."""
    parts: dict[str, list[float]] = {"outside checks": []}
    for entry in judged:
        inside = 0.0
        for stage in entry.report["stages"]:
            took = sum(float(check.get("seconds") or 0.0) for check in stage["checks"])
            inside += took
            parts.setdefault(legible(stage["stage"], 40), []).append(took)
        parts["outside checks"].append(max(0.0, entry.seconds - inside))
    return list(parts.items())
