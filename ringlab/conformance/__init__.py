"""Checks for anybody's ring attention, and the error bounds that they use: `check(function)`, `Target`.

`suite.py` has `check`, which is short enough to be read as a list of its stages. Each line of this list
imports only from the lines below it:

    kinds      other kinds of functions that are checked: a merge, a decode, a training step,
               linear attention; `layers` finds the layer of a model that differs first on P ranks
    suite.py   all checks of a ring, from its claims to its report
    report     the findings, the first fault, the counterexample; as text, HTML, JUnit XML, or a script
    checks     one file for each subject: the runs that it plans, and its verdict; a run's true results
    run        a run as data, and the code that makes it: virtual ranks, processes, torchrun's ranks
    mutants    wrong rings and wrong steps, which the checks must find; peers: published packages; styles, self_targets,
               plain_distributed: right rings, which the checks must accept
    target     the function that is checked, and how it is called
    cases      the cases that ringlab itself must pass (`ringlab verify`); tolerance: the derived bounds

`plugin.py` makes each check a pytest test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlab.conformance.report.findings import Report as Report
    from ringlab.conformance.suite import check as check
    from ringlab.conformance.target.claims import Target as Target

_HOME = {"check": "suite", "Report": "report.findings", "Target": "target.claims"}
__all__ = ["Report", "Target", "check"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
