"""Files for hosts that are not reached here are at least well formed, and name what is there.

Citation, issue forms, workflows and the container have never been used on a host; their own schemas are looked at as far as
they are written down here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import ringlab

CHECKOUT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


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


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_the_keys_that_forms_have(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", each) for each in ids)
    for field in form["body"]:
        assert field["type"] in FIELDS and field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}
        if field["type"] == "dropdown":
            options = field["attributes"]["options"]
            assert len(options) == len(set(options)) > 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_asks_for_little_and_runs_what_is_there(path: Path) -> None:
    flow = loaded(path)
    assert "Never run yet" in path.read_text(encoding="utf-8").splitlines()[0]
    assert flow[True], "its `on:`, which YAML reads as true"
    assert flow["permissions"]["contents"] == "read"
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    for job in flow["jobs"].values():
        assert job["runs-on"] and job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"])
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for script in re.findall(r"^\.ci/\w+", step.get("run", "")):
                assert (CHECKOUT / script).exists()


def test_the_container_installs_what_make_lab_installs_and_opens_lesson_00() -> None:
    container = json.loads((CHECKOUT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert container["onCreateCommand"] in (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    for name in container["customizations"]["codespaces"]["openFiles"]:
        assert (CHECKOUT / name).exists()


def test_binder_finds_the_learners_install_at_the_root() -> None:
    """It prefers a folder binder or .binder to the root, where `-e .` would be another place."""
    assert not (CHECKOUT / "binder").exists() and not (CHECKOUT / ".binder").exists()
    environment = loaded(CHECKOUT / "environment.yml")
    (pip,) = [each["pip"] for each in environment["dependencies"] if isinstance(each, dict)]
    assert "-e .[lab]" in pip


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"])
def test_a_text_that_visitors_look_for_has_no_dead_link(name: str) -> None:
    text = (CHECKOUT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (CHECKOUT / target).exists(), target
