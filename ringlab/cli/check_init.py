"""`ringlab check --init`: a test of one's own ring, with the claims that its signature and the options show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = '''\
"""Hold {reference} to exact attention: `pytest {file}`."""

from ringlab.conformance import Target, check

from {module} import {owner}

# Only what is claimed is checked. docs/conformance.md of ringlab has the other claims.
target = Target(
    {name},
{claims})


def test_it_is_attention() -> None:
    report = check(target, quick=True)
    assert report.ok, "\\n".join(f"{{each.name}}: {{each.evidence}}" for each in report.findings if not each.ok)
'''
SHOWN = ("over", "layouts", "causal", "dtypes", "ranks", "grouped", "ragged", "backward", "axes", "schedule")


def write(reference: str, file: Path, claims: dict[str, Any]) -> None:
    """Write a test of the function `reference` to a file that does not exist yet.

    Raises: BackendError as `load` does, if it is no function of a module, or if there is such a file; any error of its import.
    """
    from ringlab.conformance.loading import load, resolve
    from ringlab.conformance.target import Target
    from ringlab.errors import BackendError

    target = load(reference, **claims)
    module, _, name = reference.partition(":")
    if module == "peer" or isinstance(resolve(module, name), Target):
        raise BackendError("a function, for which --init writes the Target", f"the target {reference}")
    if file.exists():
        raise BackendError("--init with a new file", str(file), "delete it first, or choose another name")
    found = {key: getattr(target, key) for key in SHOWN}
    lines = [f"    {key}={v!r},\n".replace("'", '"') for key, v in found.items()]
    owner = name.partition(".")[0]
    text = TEXT.format(
        reference=reference, file=file, module=module, owner=owner, name=name, claims="".join(lines)
    )
    file.write_text(text, encoding="utf-8")
