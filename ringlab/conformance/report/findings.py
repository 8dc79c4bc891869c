"""A report and its findings, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringlab.conformance.checks.check import UNGUARDED
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.diagnosis import NOT_RUN, STOPPED

ALLOWED = "allowed, "
"""The beginning of the evidence of a check that the target allows to fail."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `applies` is False if the target does not claim the checked property.

    where: if values are wrong, {"smallest": …, "shown": …}, their places in the smallest run found, and in a
    run on more ranks (see `ringlab.conformance.report.counterexample.Located`). If a run failed, {"run": …,
    "trouble": …, "rank": …}.
    case: the fields of the call of a merge, a decode or a step that gave a wrong result, or None.
    """

    name: str
    asks: str
    ok: bool
    evidence: str
    seconds: float
    applies: bool = True
    counterexample: str = ""
    where: dict[str, Any] | None = None
    case: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        return dict(self.__dict__)


@dataclass(repr=False)
class Report:
    """The findings about a target, check by check, and the settings of the runs.

    options: the command's options that affect the runs, as typed in a shell. script: the smallest
    counterexample as a separate program, if one was requested and can be written. no_script: the reason why
    there is no script. right_if: a sentence on the axes, layout or mask with which a failing target is right,
    or "". not_asked: the parameters of the target to which no run gave a value, with `*args` and `**kwargs`.

    >>> found = [Finding("lse", "lse", ok=False, evidence="error 0.1, bound 1e-6", seconds=0.2)]
    >>> report = Report("mine:attend", "ring", "virtual", True, 0, 30.0, found)
    >>> report.ok, report.failed
    (False, ['lse'])
    >>> report
    Report(mine:attend: 1 checks, failed: lse)
    """

    target: str
    over: str
    transport: str
    quick: bool
    seed: int
    limit: float
    findings: list[Finding] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0
    options: str = ""
    script: str = ""
    no_script: str = ""
    right_if: str = ""
    not_asked: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the faults in words for a failing test: the first sentences, and the failed checks."""
        if self.ok:
            return repr(self)
        failed = [
            f"{each.name}: {each.evidence}"
            for each in self.findings
            if not each.ok and each.evidence not in NOT_RUN
        ]
        return "\n".join([*self.sentences, "", *failed])

    def __repr__(self) -> str:
        """Return one line, because a notebook shows the last value of a cell."""
        verdict = f"failed: {', '.join(self.failed)}" if self.failed else "none failed"
        said = f"; {left}" if (left := self.left_open) else ""
        return f"Report({self.target}: {len(self.findings)} checks, {verdict}{said})"

    @property
    def sentences(self) -> list[str]:
        """Return sentences on the faults (see `diagnosis.sentences`), or an empty list if nothing failed."""
        return diagnosis.sentences(self.findings, self.right_if)

    @property
    def unasked(self) -> str:
        """Return "not asked: …" with the parameters to which no run gave a value, or "" if there are none."""
        return f"not asked: {', '.join(self.not_asked)}" if self.not_asked else ""

    @property
    def left_open(self) -> str:
        """Return words on the parameters and calls that no verdict covers, or ""."""
        wrong = [each.name for each in self.findings if each.ok and UNGUARDED.split(": ")[1] in each.evidence]
        said = f"accepted with wrong results: {', '.join(wrong)}" if wrong else ""
        return "; ".join(each for each in (self.unasked, said) if each)

    @property
    def ok(self) -> bool:
        """Return whether there are findings and no check failed."""
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    @property
    def failed(self) -> list[str]:
        """Return the names of the checks that failed, without those that fail_fast left out."""
        return [finding.name for finding in self.findings if not finding.ok and finding.evidence != STOPPED]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON.

        It has `ok`, `first` and `beside` (see `diagnosis`), `checks` with name, ok, evidence and seconds, and
        the other fields.
        """
        plain = {key: value for key, value in self.__dict__.items() if key != "findings"}
        said = {"first": diagnosis.first(self.findings), "beside": diagnosis.beside(self.findings)}
        return {"ok": self.ok, **said, **plain, "checks": [finding.as_dict() for finding in self.findings]}
