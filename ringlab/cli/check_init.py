"""`ringlab check --init`: a test of one's own ring, with the claims that its signature and the options show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = '''\
"""Hold {reference} to exact attention: `python -m pytest {file}`."""

from ringlab import conformance

from {module} import {owner}

# Only what is claimed is checked. docs/conformance.md of ringlab lists further claims.
target = conformance.Target(
    {name},
{claims})


def test_it_is_attention() -> None:
    report = conformance.check(target, quick=True)
    assert report.ok, str(report)
'''
SHOWN = ("over", "layouts", "causal", "dtypes", "ranks", "grouped", "ragged", "backward", "axes", "schedule")


def write(reference: str, file: Path, claims: dict[str, Any]) -> str:
    """Write a test of the function `reference` to a file that does not exist yet; return what to do next.

    Raises: BackendError if it is no function of a module that can be imported, for an invalid claim, or if there is such a file.
    """
    from ringlab.conformance.run.loading import named
    from ringlab.conformance.target.claims import Target, as_target
    from ringlab.errors import BackendError

    function = named(reference)
    if isinstance(function, Target):
        raise BackendError("a function, for which --init writes the Target", f"the target {reference}")
    if file.exists():
        raise BackendError("--init with a new file", str(file), "delete it first, or choose another name")
    target = as_target(function, **claims)
    target.claims()
    found = {key: getattr(target, key) for key in SHOWN}
    lines = [f"    {key}={value!r},\n".replace("'", '"') for key, value in found.items()]
    module, _, name = reference.partition(":")
    about = {"reference": reference, "file": file, "module": module, "owner": name.partition(".")[0]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXT.format(**about, name=name, claims="".join(lines)), encoding="utf-8")
    return f"{file} is written: read its claims, then run `python -m pytest {file}`, which takes a minute or more"
