"""A learner's page: the learner's own entries, with everything that helps, and nothing about other learners.

The page never contains a probe of a hidden check or the seed that draws probes: `EntryView` has no field for
a seed, and the counterexample of a hidden check is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Exercise, Stage
from ringlab_course.checking.loading import load_exercise
from ringlab_course.gradebook.entry import Entry
from ringlab_course.gradebook.readable import legible, moment, prose, sentence, with_reference
from ringlab_course.notebook.checks import RUNGS

SHOWN_TIERS = ("visible", "stress")
"""Tiers whose counterexamples a learner may see; every other tier, even an unknown one, is hidden."""

_ISO = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)")
_TIER_NAMES = {"visible": "visible", "stress": "larger cases", "held-out": "hidden"}
_STATUS = {"ok": "all holds", "wrong": "something is wrong", "not written": "not written yet"}


@dataclass(frozen=True)
class CheckView:
    """One check with its expectation and, if it fails, the reason.

    repeated: whether an earlier check has given the same message.
    counted: False if the check holds but earns nothing, because a check of an earlier kind fails; `message`
    says so.
    """

    id: str
    title: Markup
    tier: str
    ok: bool
    broken: bool
    earned: float
    points: float
    seconds: float
    message: Markup
    misconception: str
    counterexample: str
    repeated: bool
    counted: bool = True


@dataclass(frozen=True)
class StageView:
    """One stage: its checks, and its hints as pairs (kind, text) if one of the checks fails.

    again: what it earns with the reference's helpers, or "" if it was not graded with these.
    """

    id: str
    function: str
    title: Markup
    status: str
    ok: bool
    written: bool
    checks: tuple[CheckView, ...]
    hints: tuple[tuple[str, Markup], ...]
    again: Markup

    @property
    def earned(self) -> float:
        """The points earned in this stage."""
        return sum(check.earned for check in self.checks)

    @property
    def points(self) -> float:
        """The most points that this stage can earn."""
        return sum(check.points for check in self.checks)


@dataclass(frozen=True)
class EntryView:
    """One exercise of one learner. If the whole submission earns no points, `reason` says why."""

    exercise: str
    title: Markup
    file: str
    digest: str
    graded_at: str
    submitted_at: str | None
    seconds: float
    earned: float
    helped: float
    maximum: float
    penalty: float
    late_s: float
    override: float | None
    override_reason: str
    score: float
    reason: str
    label: str
    notes: tuple[str, ...]
    stages: tuple[StageView, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds and `reason` is empty."""
        return not self.reason and bool(self.stages) and all(stage.ok for stage in self.stages)

    @property
    def first(self) -> tuple[int, StageView, CheckView] | None:
        """The first stage that fails, with its number from 1 and its first failing check, or None."""
        for number, stage in enumerate(self.stages, 1):
            for check in stage.checks:
                if not check.ok:
                    return number, stage, check
        return None


def entry_view(entry: Entry) -> EntryView:
    """Return the parts of `entry` that its learner's page shows."""
    report, contract = entry.report, contract_of(entry.exercise)
    reason = sentence(report.get("reason") or "")
    stages = tuple(
        _stage_view(stage, contract, counts=not reason, reference=entry.counts_reference)
        for stage in report.get("stages") or ()
    )
    return EntryView(
        exercise=legible(entry.exercise, 20),
        title=prose(contract.title if contract else ""),
        file=legible(entry.path.replace("\\", "/").rsplit("/", 1)[-1], 120),
        digest=legible(entry.digest, 12).split(" ")[0],
        graded_at=entry.graded_at,
        submitted_at=entry.submitted_at,
        seconds=entry.seconds,
        earned=entry.earned,
        helped=entry.helped,
        maximum=entry.maximum,
        penalty=entry.penalty,
        late_s=entry.late_s,
        override=entry.override,
        override_reason=legible(_ISO.sub(lambda found: moment(found[0]), entry.override_reason), 1000),
        score=entry.score,
        reason=reason,
        label=legible(report.get("label") or "", 200),
        notes=tuple(legible(note, 500) for note in (report.get("notes") or ())[:20]),
        stages=stages,
    )


def contract_of(exercise: str) -> Exercise | None:
    """Return the exercise's contract, or None if this version of the course has no such exercise."""
    try:
        return load_exercise(exercise)
    except CourseError:
        return None


def _stage_view(
    stage: Mapping[str, Any], contract: Exercise | None, *, counts: bool, reference: bool
) -> StageView:
    known = _stage_of(contract, stage["stage"])
    ok = stage.get("status") == "ok"
    return StageView(
        id=legible(stage["stage"], 40),
        function=known.function if known else "",
        title=prose(known.title if known else ""),
        status=_STATUS.get(stage.get("status", ""), "unknown"),
        ok=ok,
        written=stage.get("status") != "not written",
        checks=tuple(_check_views(stage["checks"], counts=counts)),
        hints=()
        if ok or known is None or not counts
        else tuple(zip(RUNGS, map(prose, known.hints), strict=True)),
        again=prose(sentence(with_reference(stage, counted=reference)) if counts else ""),
    )


def _check_views(checks: Iterable[Mapping[str, Any]], *, counts: bool) -> list[CheckView]:
    """Return the checks as the notebook prints them: a text that was shown above is not repeated."""
    said_before: set[tuple[str, str]] = set()
    views = []
    for check in checks:
        message, example = str(check.get("message") or ""), ""
        counted = bool(check.get("counted", True))
        if not check["ok"] and check.get("tier") in SHOWN_TIERS:
            example = legible(check.get("counterexample") or "")
        misconception = check.get("misconception") or ""
        repeated = bool(message) and any(message == said for said, _ in said_before)
        if repeated and (misconception or (message, example) in said_before):
            example = ""
        said_before.add((message, example))
        views.append(
            CheckView(
                id=legible(check["id"], 60),
                title=prose(check.get("title") or check["id"]),
                tier=_TIER_NAMES.get(check.get("tier", ""), "hidden"),
                ok=bool(check["ok"]),
                broken=bool(check.get("broken")),
                earned=check["points"] if check["ok"] and counted and counts else 0,
                points=check["points"],
                seconds=float(check.get("seconds") or 0.0),
                message=prose("" if check["ok"] and counted else message),
                misconception=legible(misconception, 80).replace("_", " "),
                counterexample=example,
                repeated=repeated,
                counted=counted,
            )
        )
    return views


def _stage_of(contract: Exercise | None, stage_id: str) -> Stage | None:
    found = [stage for stage in contract.stages if stage.id == stage_id] if contract else []
    return found[0] if found else None
