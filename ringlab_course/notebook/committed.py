"""Diagnoses that a learner has committed in exercise 16's clinic, stored in the progress file.

A diagnosis is final once the patient's source has been opened.
"""

from __future__ import annotations

from typing import Any

from ringlab.errors import CourseError
from ringlab_course.notebook.progressfile import ProgressFile

SECTION = "charts"
_HERE: dict[tuple[str, str], dict[str, Any]] = {}
"""The diagnoses committed in this process, by progress file and patient, if the file cannot be written."""


def committed(name: str) -> dict[str, Any]:
    """Return the committed diagnosis of a patient, or an empty dict.

    `opened`: whether its source was shown.
    """
    file = ProgressFile()
    return file.get(SECTION, name) or _HERE.get((str(file.path), name), {})


def commit(name: str, fault: str, evidence: str) -> None:
    """Keep the diagnosis of a patient.

    Raises: CourseError if the patient's source was already shown and the diagnosis differs from the committed
    one.
    """
    before = committed(name)
    if before.get("opened") and (before["fault"], before["evidence"]) != (fault, evidence):
        raise CourseError(
            f"the chart of {name} as it was when its source was opened: “{before['fault']}”, {before['evidence']}",
            f"“{fault}”, {evidence}",
            "a diagnosis is final once the source was seen; add what the source showed, as `found`",
        )
    _keep(name, fault=fault, evidence=evidence)


def opened(name: str) -> None:
    """Make the diagnosis of a patient final. Raises: CourseError if none was committed."""
    if not committed(name):
        raise CourseError(
            f"a diagnosis of {name} before its source",
            "none that was committed",
            f'commit("{name}", chart("{name}")), then open_source("{name}")',
        )
    _keep(name, opened=True)


def _keep(name: str, **values: Any) -> None:
    file = ProgressFile()
    _HERE[str(file.path), name] = {**committed(name), **values}
    file.update(SECTION, name, **values)
