"""Run the conformance suite on patients: make a report of one patient, or the kill matrix of all patients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.suite import check
from ringlab.conformance.target.claims import Target
from ringlab_course.clinic import sound
from ringlab_course.clinic.patients import SOUND, Patient, patient

CHECKS = (
    "forward", "lse", "dq", "dk", "dv", "masks", "causality", "blind rows", "ragged", "large logits", "sloped logits",
    "error growth", "rounds", "bytes",
)  # fmt: skip
"""The checks of the suite that the clinic uses: those that a sound ring without tiles passes in a second."""


def target(patient: Patient) -> Target:
    """Return the patient as a target of the suite.

    The sound forward runs before a patient that is a backward.
    """
    if patient.is_forward:
        return Target(patient.program, name=patient.name, grouped=False, backward=False).completed()

    def gradients(
        ring: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, positions: Any, causal: bool
    ) -> Any:
        found = patient.program(ring, dout, q, k, v, out, lse, positions, causal)
        return tuple(x.to(q.dtype) for x in found)

    return Target(sound.forward, name=patient.name, grouped=False, gradients=gradients).completed()


def report(patient: Patient, only: Sequence[str] = CHECKS) -> Report:
    """Return the report of the suite's quick tier. Raises: BackendError for a check that does not exist."""
    return check(target(patient), quick=True, only=tuple(only), isolate=False)


@dataclass(frozen=True)
class KillMatrix:
    """A table of which check finds which patient: findings[patient][check]."""

    patients: tuple[str, ...]
    checks: tuple[str, ...]
    findings: dict[str, dict[str, Finding]]

    def finds(self, name: str, check: str) -> bool | None:
        """Return whether the check finds the patient's fault, or None if it does not apply to the patient."""
        finding = self.findings[name][check]
        return None if not finding.applies else not finding.ok

    def found_by(self, name: str) -> list[str]:
        """Return the checks that find this patient's fault."""
        return [check for check in self.checks if self.finds(name, check)]


def kill_matrix(patients: Iterable[Patient], checks: Sequence[str] = CHECKS) -> KillMatrix:
    """Return the suite's findings about each patient."""
    findings = {
        each.name: {finding.name: finding for finding in report(each, checks).findings} for each in patients
    }
    return KillMatrix(tuple(findings), tuple(checks), findings)


@lru_cache(maxsize=256)
def finds(name: str, check: str) -> bool:
    """Return whether this check of CHECKS fails on the patient `name` and passes on a sound ring."""
    ill = patient(name)
    return _fails(ill, check) and not _fails(SOUND[ill.returns], check)


@lru_cache(maxsize=256)
def _fails(patient: Patient, check: str) -> bool:
    (finding,) = (each for each in report(patient, (check,)).findings if each.name == check)
    return finding.applies and not finding.ok
