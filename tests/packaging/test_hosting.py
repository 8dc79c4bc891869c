"""Citation, container and Binder name this version and existing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

import ringlab

CHECKOUT = Path(__file__).resolve().parents[2]


def loaded(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_the_citation_is_of_this_version() -> None:
    cited = loaded(CHECKOUT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # required by its schema
    assert cited["cff-version"] == "1.2.0" and cited["type"] in ("software", "dataset")
    assert cited["version"] == ringlab.__version__
    assert set(cited["license"]) == {"Apache-2.0", "CC-BY-4.0"}


def test_the_container_installs_what_make_lab_installs_and_opens_lesson_00() -> None:
    container = json.loads((CHECKOUT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert container["onCreateCommand"] in (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    for name in container["customizations"]["codespaces"]["openFiles"]:
        assert (CHECKOUT / name).exists()
