"""Commands, including those of other packages, are listed without being imported, and imported when used."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ringlab.cli import app, contributed
from ringlab.cli.contributed import LazyCommands

GROUP = "ringlab.commands"


def one() -> None:
    """Do one thing."""
    typer.echo("one")


apps = {
    "hid": typer.Typer(hidden=True, help="Not for a list."),
    "old": typer.Typer(deprecated=True, help="Do it the old way."),
    "sho": typer.Typer(short_help="Briefly.", help="At length."),
}
for each in apps.values():
    each.command()(one)
    each.command("two")(one)
hid, old, sho = apps.values()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Add another package's entry points; return a list that grows by one when entry points are looked up."""
    names = {name: f"{__name__}:{name}" for name in ("one", *apps)} | {"gone": "no_such_package:main"}
    theirs = [EntryPoint(name, where, GROUP) for name, where in {**names, "plan": f"{__name__}:one"}.items()]
    looked: list[int] = []

    def found(group: str) -> list[Any]:
        looked.append(1)
        return [entry for entry in theirs if entry.group == group]

    monkeypatch.setattr(contributed, "entry_points", found)
    return looked


def test_others_are_looked_for_once_and_only_where_ours_do_not_suffice(added: list[int]) -> None:
    commands = LazyCommands({}, {"doctor": "ringlab.cli.doctor:doctor"}, GROUP)
    assert commands["doctor"].name == "doctor" and "doctor" in commands and not added
    assert "nobody" not in commands and commands.get("nobody") is None
    with pytest.raises(KeyError):
        commands["nobody"]
    assert next(iter(commands)) == "doctor" and len(commands) == 7 and "one" in commands
    assert added == [1]


def test_a_command_of_others_runs_and_takes_the_place_of_none_of_ours(added: list[int]) -> None:
    assert CliRunner().invoke(app, ["one"]).output == "one\n"
    before = CliRunner().invoke(app, ["plan", "--help"]).output
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "Size a cluster" in before and "Size a cluster" in listed and listed.count("Do one thing.") == 1
    commands = LazyCommands({}, {"plan": "ringlab.cli.plan:plan"}, GROUP)
    assert len(commands) > 1 and "Size a cluster" in commands["plan"].help


def test_a_list_hides_marks_and_shortens_as_their_apps_say(added: list[int]) -> None:
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert "Not for a list." not in listed
    assert "Do it the old way." in listed and "(deprecated)" in listed.lower()
    assert "Briefly." in listed and "At length." not in listed
    assert "Cannot be imported here" in listed


def test_one_that_cannot_be_imported_says_so_and_the_others_work(added: list[int]) -> None:
    gone = CliRunner().invoke(app, ["gone", "whatever", "--at", "all"])
    assert gone.exit_code == 1 and "the command gone cannot be imported" in str(gone.exception) + gone.output


def test_a_typing_error_gets_a_suggestion_among_all(added: list[int]) -> None:
    assert "Did you mean 'plan'?" in CliRunner().invoke(app, ["plann"]).output
    assert "Did you mean 'sho'?" in CliRunner().invoke(app, ["shoo"]).output


def test_benches_measure_a_python_that_keeps_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert CliRunner().invoke(app, ["bench", "answers", "--runs", "0"]).exit_code == 2
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
