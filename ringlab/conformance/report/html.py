"""A report as one HTML page that has no scripts and loads nothing, so that it can be mailed or stored."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape as escaped
from typing import Any

import ringlab
from ringlab.conformance.checks import LOADS
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.report.picture import largest_difference, over_pairs, over_tokens
from ringlab.conformance.report.text import SKIPPED, evidence, mark, printable, summary
from ringlab.errors import apart

PICTURES = 3
"""The most checks whose errors are drawn."""
_SIGNS = {"passed": "✓", "failed": "✗", "allowed": "!", "does not apply": "–", "not run": ""}


def html(report: Report) -> str:
    """Return the report as a page: the first fault, its reproduction, pictures of errors, all checks."""
    first, *others = report.sentences or [""]
    unasked = f"; {report.unasked}" if report.not_asked else ""
    verdict = "All checks passed" if report.ok else f"{len(report.failed)} of {_asked(report)} checks failed"
    body = [
        f"<header><p class='kind'>ringlab check, version {ringlab.__version__}</p><h1>{text(report.target or 'a target')}</h1>",
        f"<p class='verdict {'good' if report.ok else 'bad'}'>{_SIGNS['passed' if report.ok else 'failed']} {verdict}{text(unasked)}</p>",
        *([f"<p class='first'>{text(first)}</p>"] if first else []),
        *(f"<p>{text(each)}</p>" for each in others),
        f"<p class='quiet'>{text(_ran(report))}</p></header>",
        *_pictures(report)[:1],
        _reproduce(report) if not report.ok else "",
        *_pictures(report)[1:],
        _table(report),
    ]
    title = f"{'Passed' if report.ok else 'Failed'}: ringlab check {report.target}"
    return _PAGE.format(title=text(title), css=_CSS, body="\n".join(each for each in body if each))


def text(value: object) -> str:
    """Return text for a page: HTML is escaped, and characters that a page cannot contain are replaced."""
    return escaped(printable(str(value)), quote=True)


def _asked(report: Report) -> int:
    return sum(mark(finding) not in SKIPPED for finding in report.findings)


def _ran(report: Report) -> str:
    over = f"Over {report.over}, transport {report.transport}. " if report.over else ""
    return f"{over}{summary(report)}."


def _reproduce(report: Report) -> str:
    """Return the command for the first fault, and the script if there is one."""
    failed = next(finding for finding in report.findings if finding.name in report.failed)
    shown = next(
        (each for each in report.findings if each.where is diagnosis.wrong_values(report.findings)), failed
    )
    shown = shown if not shown.ok else failed
    parts = ["<section><h2>Reproduce it</h2>"]
    if command := command_for(report, shown.name):
        parts.append(f"<pre class='command'><code>{text(command)}</code></pre>")
    if report.script:
        parts.append(
            "<details><summary>The smallest counterexample as a script of its own</summary>"
            f"<pre><code>{text(report.script)}</code></pre></details>"
        )
    elif report.no_script:
        parts.append(f"<p class='quiet'>No script: {text(report.no_script)}.</p>")
    return "".join(parts) + "</section>" if len(parts) > 1 else ""


def command_for(report: Report, check: str) -> str:
    """Return the command that repeats one check, or "" if no command can name the target."""
    if ":" not in report.target or any(c.isspace() for c in report.target):
        return ""
    only = [] if check == LOADS else ["--only", check]
    words = ["ringlab", "check", report.target, *only, "--seed", str(report.seed)]
    return " ".join([shlex.join(words), *([report.options] if report.options else [])])


def _pictures(report: Report) -> list[str]:
    located = [each for each in report.findings if not each.ok and each.where and "shown" in each.where]
    return [
        _picture(finding, finding.where["shown"], said=number == 0)
        for number, finding in enumerate(located[:PICTURES])
        if finding.where
    ]


def _picture(finding: Finding, shown: Mapping[str, Any], said: bool) -> str:
    """Return the errors of one check: by pair of query and key if there is a map, by token, and by rank.

    said: whether the words are already at the top of the page.
    """
    words = f"{diagnosis.results_of(shown)} {diagnosis.blocks_of(shown)}".strip()
    parts = [f"<section><h2>Where <q>{text(finding.name)}</q> fails</h2>"]
    parts += [] if said else [f"<p>{text(words)}</p>"]
    if finding.counterexample:
        parts.append(f"<p class='quiet'>Smallest counterexample: {text(finding.counterexample)}</p>")
    if shown["pairs"]:
        parts.append(_map(shown))
    if shown["positions"]:
        parts.append(
            "<figure><figcaption><h3>Error of each token</h3>Tokens of one rank stand next to each other, in its own order. "
            "Orange: beyond the bound; the darker, the further, in steps of ten.</figcaption>"
            f"{over_tokens(shown, f'Errors by token. {words}')}</figure>"
        )
        parts.append(_by_rank(shown))
    return "".join(parts) + "</section>"


_SHOWS = {
    "out": ("weight", "v is one-hot, so out is the matrix of weights."),
    "dv": ("weight in dv", "dout is one-hot, so dv is the matrix of weights."),
    "dq": ("gradient of the score in dq", "k is one-hot, so dq is the matrix of the scores' gradients."),
    "dk": ("gradient of the score in dk", "q is one-hot, so dk is the matrix of the scores' gradients."),
}
"""The quantity that a map shows, by result, and the reason why it does."""


def _map(shown: Mapping[str, Any]) -> str:
    pairs = shown["pairs"]
    what, why = _SHOWS[pairs["name"]]
    label = f"Error of the {what} over query and key. {diagnosis.blocks_of(shown)}"
    pictures = [("Rank after rank", over_pairs(shown, label))]
    if [t for own in shown["positions"] for t in own] != sorted(t for own in shown["positions"] for t in own):
        pictures.append(("In the order of the sequence", over_pairs(shown, label, in_sequence=True)))
    drawn = "".join(f"<div><h4>{name}</h4>{svg}</div>" for name, svg in pictures)
    most, number = largest_difference(pairs), "number"
    scale = (
        f"<p class='scale'><span class='{number}'>−{most:.2g}</span><span class='bar' aria-hidden='true'></span>"
        f"<span class='{number}'>+{most:.2g}</span></p>"
        "<p class='quiet'>Blue: too little. Orange: too much. Grey: hidden by the mask. Purple: NaN or infinite. "
        f"Uncoloured: within {pairs['bound']:.1g}. The largest true value is {pairs['largest']:.2g}.</p>"
    )
    head = f", head {pairs['head']}" if shown["run"]["H"] > 1 else ""
    return (
        f"<figure><figcaption><h3>Error of the {text(what)} over (query, key){head}</h3>"
        f"{text(why)} Lines are borders between ranks, with their numbers next to them.</figcaption>"
        f"<div class='maps'>{drawn}</div>{scale}</figure>"
    )


def _by_rank(shown: Mapping[str, Any]) -> str:
    """Return a table with the largest error of each result on each rank, and its bound."""
    results: Sequence[Mapping[str, Any]] = shown["results"]
    head = "".join(f"<th scope='col'>{text(each['name'])}</th>" for each in results)
    rows = []
    for rank in range(len(shown["positions"])):
        cells = "".join(_error_cell(each["by_rank"][rank], each["bound"]) for each in results)
        rows.append(f"<tr><th scope='row'>rank {rank}</th>{cells}</tr>")
    bounds = "".join(f"<td>{each['bound']:.2g}</td>" for each in results)
    return (
        "<div class='wide'><table class='errors'><caption>Largest error on each rank, as a share of the largest true value</caption>"
        f"<thead><tr><th scope='col'></th>{head}</tr></thead><tbody>{''.join(rows)}"
        f"<tr class='quiet'><th scope='row'>bound</th>{bounds}</tr></tbody></table></div>"
    )


def _error_cell(error: float | None, bound: float) -> str:
    said = "NaN or ∞" if error is None else apart(error, bound, digits=2)[0]
    if diagnosis.beyond(error, bound):
        return f"<td class='wrong'><strong>{said}</strong></td>"
    return f"<td>{said}</td>"


def _table(report: Report) -> str:
    """Return a table of all findings, the failed ones first."""
    order = {"failed": 0, "allowed": 1, "passed": 2, "does not apply": 3, "not run": 4}
    texts, found = evidence(report), sorted(report.findings, key=lambda each: order[mark(each)])
    rows = [_row(finding, texts[finding.name]) for finding in found]
    return (
        "<section><h2>All checks</h2><table class='checks'><thead><tr><th scope='col'>Check</th>"
        "<th scope='col'>Verdict</th><th scope='col'>Evidence</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _row(finding: Finding, shown: str) -> str:
    verdict = mark(finding)
    small = f"<p class='quiet'>Smallest: {text(finding.counterexample)}</p>" if finding.counterexample else ""
    return (
        f"<tr class='{verdict.replace(' ', '-')}'><th scope='row'>{text(finding.name)}<p class='quiet'>{text(finding.asks)}</p></th>"
        f"<td class='mark'>{_SIGNS[verdict]}&nbsp;{verdict}</td><td>{text(shown)}{small}</td></tr>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
_CSS = """
:root { --page: #fff; --ink: #1b1f24; --quiet: #59636e; --line: #d1d9e0; --panel: #f6f8fa; --hidden: #e4e7eb;
  --less: #1f5fbf; --more: #c2500a; --nan: #8a1bb0; --good: #116329; --bad: #a3330b; --right: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --ink: #e6e9ed; --quiet: #9aa4af; --line: #3a424c;
  --panel: #181e25; --hidden: #2a313a; --less: #6cb0ff; --more: #ff9a4d; --nan: #d58bff; --good: #5fce7d; --bad: #ff9e75;
  --right: #29313a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; line-height: 1.25; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0; } h4 { font-size: .875rem; font-weight: 600; margin: .75rem 0 .25rem; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.kind, .quiet, figcaption { color: var(--quiet); font-size: .875rem; } figcaption h3 { color: var(--ink); }
.verdict { font-weight: 700; font-size: 1.125rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.first { font-size: 1.125rem; border-left: 4px solid var(--bad); padding: .25rem 0 .25rem .75rem; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto;
  font: .8125rem/1.45 ui-monospace, monospace; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .5rem 0; }
figure { margin: 1.25rem 0; } svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 2rem; }
svg .page { fill: var(--page); } svg .hidden { fill: var(--hidden); } svg .right { fill: var(--right); }
svg .more { fill: var(--more); } svg .less { fill: var(--less); } svg .nan { fill: var(--nan); }
svg .border { fill: none; stroke: var(--ink); stroke-width: 1.25; } svg .thin { stroke-width: .75; stroke-dasharray: 3 3; }
.scale { display: flex; align-items: center; gap: .5rem; max-width: 22rem; font-variant-numeric: tabular-nums; }
.bar { flex: 1; height: .875rem; border: 1px solid var(--line);
  background: linear-gradient(to right, var(--less), var(--page), var(--more)); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
caption { text-align: left; color: var(--quiet); padding-bottom: .25rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem .4rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; } th { font-weight: 600; } th p { font-weight: 400; margin: 0; }
.errors { width: auto; min-width: min(100%, 30rem); } .errors th { white-space: nowrap; } .errors td { font-variant-numeric: tabular-nums; white-space: nowrap; }
.wrong { color: var(--more); } .mark { white-space: nowrap; } .failed .mark { color: var(--bad); font-weight: 700; }
.passed .mark { color: var(--good); } .does-not-apply { color: var(--quiet); }
.checks { table-layout: fixed; } .checks th:first-child { width: 26%; } .checks th:nth-child(2) { width: 9rem; }
@media (max-width: 40rem) { .checks thead { position: absolute; clip-path: inset(50%); }
  .checks tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .checks th, .checks td { display: block; width: auto; border: 0; padding: .1rem 0; } }
"""
