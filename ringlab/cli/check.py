"""`ringlab check`: the conformance checks of a ring attention."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from ringlab.cli.output import Json, counted, ignored, people, print_json, stderr, typed
from ringlab.errors import BackendError, RinglabError

if TYPE_CHECKING:
    from ringlab.conformance.report.findings import Report
    from ringlab.conformance.run.torchrun.lead import Lead

File = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there too.")]


def check(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A function, or a ringlab.conformance.Target.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer runs: a right ring takes some 20 s on two idle cores, or 40 s on processes. A decode or a step has no large calls then, and 2 and 3 ranks.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first check that fails.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="CHECK", help="Only this check; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all inputs.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds for the import, and for each run.")] = 30.0,
    transport: Annotated[str, typer.Option(help="For functions over ringlab's Comm: virtual, or a transport between processes, such as gloo.")] = "virtual",
    device: Annotated[str, typer.Option(help="Device of the tensors: cpu or cuda.")] = "cpu",
    layouts: Annotated[str, typer.Option(help="Comma-separated layouts that replace the target's claims.")] = "",
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks that replace its claims.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes that replace its claims.")] = "",
    axes: Annotated[str, typer.Option(help="BHLD, BLHD, LBHD, or LHD for sequences without a batch.")] = "",
    schedule: Annotated[Literal["ring", "any"], typer.Option(help="ring: test the messages and the memory of a ring; any: do not test them.")] = "ring",
    ragged: Annotated[bool, typer.Option("--ragged/--no-ragged", help="Whether to test lengths that the ranks do not divide.")] = True,
    grouped: Annotated[bool, typer.Option("--grouped/--no-grouped", help="Whether to test fewer key/value heads than query heads.")] = True,
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Whether to test gradients.")] = True,
    markdown: File = None,
    junit: File = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a page, with pictures of the errors.")] = None,
    script: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the smallest counterexample as a script without ringlab's suite, if that shows the fault.")] = None,
    badge: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON from which shields.io draws a badge; not with --only or --fail-fast.")] = None,
    init: Annotated[Path | None, typer.Option(metavar="FILE", help="Run no check; write a test of the target, for pytest.")] = None,
    kind: Annotated[Literal["attention", "merge", "decode", "step"], typer.Option(help="attention; merge: of partials (out, lse); decode: against a sharded cache; step: a whole training step.")] = "attention",
    lse_base: Annotated[float, typer.Option(help="With --kind merge: the base of lse, e by default.")] = math.e,
    loss: Annotated[Literal["tokens", "sequences", "sums"], typer.Option(help="With --kind step: the loss is a mean over labels, over sequences of their means, or over sequences of their sums.")] = "tokens",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check a ring attention, a merge of partials, a decode or a training step.

    For a ring it also checks messages and memory. Under torchrun, the processes of torchrun are the ranks; with
    --device cuda, each of them has a GPU.
    """
    with _ranks(as_json) as lead:
        files = {"markdown": markdown, "junit": junit, "html": html, "script": script, "badge": badge}
        claims = _claims(
            layouts, ranks, dtypes, axes, as_json, ragged=ragged, grouped=grouped, backward=backward
        )
        claims |= {"schedule": schedule} if typed(context, "schedule") else {}
        _refuse(context, f"--kind {kind}", _IGNORED_BY[kind], as_json)
        if init is not None:
            _refuse(context, "--init", ("only", "seed", *_FILES, *_OF_RUNS), as_json)
        _refuse(context, "--badge", ("only", "fail_fast") if badge else (), as_json)
        _refuse(context, "torchrun", ("transport",) if lead else (), as_json)
        _request(kind, only, limit, transport, device, as_json)
        _writable(files, init, as_json)
        if init is not None:
            return _init(target, init, claims, as_json)
        asked: dict[str, Any] = {"only": only or (), "seed": seed, "limit": limit}
        if kind == "attention":
            make = partial(
                _attention, lead, target, transport, device, claims, **asked, quick=quick, fail_fast=fail_fast
            )
        else:
            make = partial(_other, lead, kind, target, lse_base, loss, claims, quick, **asked)
        found = _made(make, as_json)
        found.options = _options(context)
        if html or script:
            _attach_script(found, kind, target, claims, device, lse_base)
        _tell(found, files, as_json)


@contextmanager
def _ranks(as_json: bool) -> Iterator[Lead | None]:
    """Yield rank 0's connection to torchrun's other ranks, or None without torchrun.

    The other ranks do not return: they end with rank 0's exit status.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    from ringlab.conformance.run.torchrun.lead import Lead, follow
    from ringlab.conformance.run.torchrun.rendezvous import world

    place = world()
    if place is None:
        yield None
        return
    if place.rank > 0:
        raise typer.Exit(follow(place))
    try:
        lead, status = Lead(place), 1
    except RinglabError as error:
        _bad(error, as_json)
    try:
        yield lead
        status = 0
    except typer.Exit as done:
        status = done.exit_code
        raise
    finally:
        lead.end(status)


def _made(make: Callable[[], Report], as_json: bool) -> Report:
    try:
        return make()
    except RinglabError as error:
        _bad(error, as_json)


def _attention(
    lead: Lead | None, target: str, transport: str, device: str, claims: dict[str, Any], **asked: Any
) -> Report:
    from ringlab.conformance import suite
    from ringlab.conformance.report.diagnosis import NOT_RUN
    from ringlab.conformance.run.loading import TargetSpec

    checks = suite.selected(asked["only"], asked["quick"])
    with counted("check", 1 + len(checks)) as step:
        asked["progress"] = lambda finding: step(
            "" if finding.ok or finding.evidence in NOT_RUN else f"{finding.name} failed"
        )
        if lead is None:
            return suite.check(target, transport=transport, device=device, **asked, **claims)
        source = lead.source(TargetSpec(target, device=device, claims=claims), asked["limit"])
        return suite.report_on(source, source.spec, **asked)


def _other(
    lead: Lead | None, kind: str, target: str, lse_base: float, loss: str, claims: dict[str, Any], quick: bool, limit: float,
    **asked: Any,
) -> Report:  # fmt: skip
    from ringlab.conformance.kinds.decode import check_decode
    from ringlab.conformance.kinds.merge import check_merge
    from ringlab.conformance.kinds.step import check_step

    if kind == "merge":
        return check_merge(target, base=lse_base, **asked)
    if lead is not None:
        remedy = "run it without torchrun: it starts processes of its own"
        raise BackendError("--kind attention or --kind merge under torchrun", f"--kind {kind}", remedy)
    if kind == "decode":
        return check_decode(target, quick=quick, limit=limit, **asked, **claims)
    return check_step(target, loss=loss, quick=quick, limit=limit, **asked, **claims)


def _tell(found: Report, files: dict[str, Path | None], as_json: bool) -> NoReturn:
    """Write the report into the files of the options, print the report, and exit with its status."""
    from ringlab.conformance.report import html, junit, text

    made = (text.markdown, junit.junit, html.html, lambda found: found.script, text.badge)
    for path, make in zip(files.values(), made, strict=True):
        if path is not None and (written := make(found)):
            path.write_text(written, encoding="utf-8")
    if as_json:
        print_json(found.as_dict())
        raise typer.Exit(_status(found))
    for sentence in (*found.sentences, *text.no_script(found)):
        style = "bold yellow" if sentence == found.right_if else "bold"
        people.print(f"{sentence}\n", style=style, highlight=False)
    people.print(_table(found, text.evidence(found)))
    if found.findings[0].ok:
        people.print(text.summary(found), highlight=False)
    raise typer.Exit(_status(found))


def _init(target: str, file: Path, claims: dict[str, Any], as_json: bool) -> None:
    try:
        said = write_test(target, file, claims)
    except RinglabError as error:
        _bad(error, as_json)
    print_json({"ok": True, "file": str(file)}) if as_json else print(said)


TEST = '''\
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
"""The text that `--init` writes: a test of one's own ring, with the claims that its signature and the options show."""
CLAIMS_OF_A_TEST = (
    "over",
    "layouts",
    "causal",
    "dtypes",
    "ranks",
    "grouped",
    "ragged",
    "backward",
    "axes",
    "schedule",
)


def write_test(reference: str, file: Path, claims: dict[str, Any]) -> str:
    """Write a test of the function `reference` to a new file, and return advice on what to do next.

    Raises: BackendError if `reference` is not a function of a module that can be imported, for an invalid
    claim, or if the file exists.
    """
    from ringlab.conformance.run.loading import named
    from ringlab.conformance.target.claims import Target, as_target

    function = named(reference)
    if isinstance(function, Target):
        raise BackendError("a function, because --init writes the Target of one", f"the target {reference}")
    if file.exists():
        raise BackendError("--init with a new file", str(file), "delete it first, or choose another name")
    target = as_target(function, **claims)
    target.claims()
    found = {key: getattr(target, key) for key in CLAIMS_OF_A_TEST}
    lines = [f"    {key}={value!r},\n".replace("'", '"') for key, value in found.items()]
    module, _, name = reference.partition(":")
    about = {"reference": reference, "file": file, "module": module, "owner": name.partition(".")[0]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEST.format(**about, name=name, claims="".join(lines)), encoding="utf-8")
    return f"{file} is written: read its claims, then run `python -m pytest {file}`, which takes a minute or more"


def _attach_script(
    found: Report, kind: str, target: str, claims: dict[str, Any], device: str, lse_base: float
) -> None:
    from ringlab.conformance.kinds.scripts import attach_call
    from ringlab.conformance.report.script import attach
    from ringlab.conformance.run.loading import load

    with redirect_stdout(sys.stderr):  # a module may print on import, but stdout must contain only JSON
        if kind == "attention":
            attach(found, lambda: load(target, **claims), device)
        else:
            attach_call(found, kind, lse_base)


def _options(context: typer.Context) -> str:
    """Return the options on the command line that affect the runs, written as in a shell."""
    words: list[str] = []
    for option in context.command.params:
        value, name = context.params[option.name or ""], option.name or ""
        if typed(context, name) and name not in ("target", "only", "seed", "as_json", *_FILES):
            words += [option.secondary_opts[0]] if value is False else [option.opts[0]]
            words += [str(value)] if not isinstance(value, bool) else []
    return shlex.join(words)


_FILES = ("markdown", "junit", "html", "script", "badge")
_OF_RUNS = ("quick", "fail_fast", "limit", "transport", "device")
_CLAIMS = ("layouts", "ranks", "dtypes", "axes", "schedule", "ragged", "grouped", "backward")
_OF_RINGS = tuple(each for each in _OF_RUNS if each not in ("limit", "quick"))
_IGNORED_BY = {
    "attention": ("lse_base", "loss"),
    "merge": ("init", "loss", *_OF_RUNS, *_CLAIMS),
    "decode": ("init", "lse_base", "loss", *_OF_RINGS, *(each for each in _CLAIMS if each != "ranks")),
    "step": ("init", "lse_base", *_OF_RINGS, *(each for each in _CLAIMS if each not in ("ranks", "ragged"))),
}  # fmt: skip


def _refuse(context: typer.Context, option: str, others: tuple[str, ...], as_json: bool) -> None:
    """Raise an error for options on the command line that would be ignored together with `option`."""
    if given := ignored(context, others):
        _bad(BackendError(f"{option} without {given}", "both", "leave one of them out"), as_json)


def _status(found: Report) -> int:
    """Return the exit status: 1 if a check failed, 2 if the reference names nothing that can be checked."""
    from ringlab.conformance.report.diagnosis import INVALID

    first = found.findings[0]
    return 0 if found.ok else 2 if not first.ok and any(error in first.evidence for error in INVALID) else 1


def _claims(layouts: str, ranks: str, dtypes: str, axes: str, as_json: bool, **has: bool) -> dict[str, Any]:
    """Return the claims on the command line. The target itself states all other claims."""
    claims: dict[str, Any] = {}
    if layouts or dtypes:
        from ringlab.conformance.cases import LAYOUTS
        from ringlab.conformance.target.claims import DTYPES

        for name, text, known in (("layouts", layouts, tuple(LAYOUTS)), ("dtypes", dtypes, DTYPES)):
            claims |= {name: tuple(text.split(","))} if text else {}
            if unknown := [each for each in claims.get(name, ()) if each not in known]:
                _bad(BackendError(f"--{name} among {', '.join(known)}", ", ".join(unknown)), as_json)
    if axes:
        from ringlab.conformance.target.calling import AXES

        if axes not in AXES:
            _bad(BackendError(f"--axes among {', '.join(AXES)}", repr(axes)), as_json)
        claims["axes"] = axes
    if ranks:
        if not all(each.isdigit() and int(each) > 0 for each in ranks.split(",")):
            _bad(BackendError("--ranks 1,2,4", repr(ranks)), as_json)
        claims["ranks"] = tuple(int(each) for each in ranks.split(","))
    return claims | {name: False for name, claimed in has.items() if not claimed}


def _request(
    kind: str, only: list[str] | None, limit: float, transport: str, device: str, as_json: bool
) -> None:
    """Raise an error for an invalid request before anything is run."""
    from ringlab.comm.processes import connect
    from ringlab.conformance import checks

    try:
        if kind == "attention":
            checks.chosen(tuple(only or ()))
        if not 0 < limit < float("inf"):
            _bad(BackendError("--limit above 0 seconds", repr(limit)), as_json)
        if transport != "virtual":
            connect.check(transport, 1)
        if device != "cpu":
            _device(device)
    except RinglabError as error:
        _bad(error, as_json)


def _writable(files: Mapping[str, Path | None], init: Path | None, as_json: bool) -> None:
    """Raise an error for files that cannot be written, and make the folder of --init."""
    from ringlab.cli.output import check_writable

    try:
        for name, path in files.items():
            if path is not None:
                check_writable(f"--{name}", path)
        if init is not None:
            check_writable("--init", init, make_folder=True)
    except RinglabError as error:
        _bad(error, as_json)


def _device(device: str) -> None:
    import torch

    if device.partition(":")[0] != "cuda" or not torch.cuda.is_available():
        raise BackendError("--device cpu, or cuda where there is a GPU", repr(device), "leave --device out")


def _bad(error: RinglabError, as_json: bool) -> NoReturn:
    """Exit with status 2, because the request itself is invalid."""
    if as_json:
        fields = {"needed": error.needed, "got": error.got, "remedy": error.remedy}
        print_json({"ok": False, "error": {"kind": type(error).__name__, **fields}})
    stderr.print(f"{type(error).__name__}\n{error}", style="red", highlight=False)
    raise typer.Exit(2)


def _table(found: Report, texts: dict[str, str]) -> Table:
    from ringlab.conformance.report.diagnosis import NOT_RUN

    table = Table(title=f"conformance of {found.target}", title_justify="left")
    for column in ("", "check", "evidence"):
        table.add_column(column, no_wrap=column != "evidence")
    for finding in (each for each in found.findings if each.evidence not in NOT_RUN):
        sign = Text("✓", "green") if finding.ok else Text("✗", "red")
        sign = sign if finding.applies else Text("–", "dim")
        evidence = Text(texts[finding.name])
        if finding.counterexample:
            evidence.append(f"\nsmallest: {finding.counterexample}", "yellow")
        table.add_row(sign, Text(finding.name), evidence)
    return table
