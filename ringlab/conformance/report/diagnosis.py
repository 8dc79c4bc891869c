"""Sentences about a report: the first fault and its place, and the results that are right in the same run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ringlab.conformance.checks import LOADS
from ringlab.conformance.report.counterexample import small
from ringlab.conformance.run.memory_forms import WORDS
from ringlab.conformance.run.run import ENDLESS, GIVEN, HUNG, RAISED, SLOW, in_words
from ringlab.errors import apart

NO_TARGET = "not run: the target could not be imported"
NOT_ASKED = "not run: a plain call is wrong"
STOPPED = "not run: an earlier check failed"
GAVE_UP = "not run: other runs reached the limit"
"""The beginning of the evidence of checks whose runs would reach the limit too."""
NOT_CALLED = "not run: the target cannot be called"
NOT_RUN = (NO_TARGET, NOT_ASKED, STOPPED, NOT_CALLED)
"""The evidence of checks that were not made."""
INVALID = ("BackendError", "CannotCall")
"""Errors which mean that the request or the target cannot be run."""
IGNORED = "accepted and ignored"
"""The words in the evidence of an argument that changes no result."""
_LONGEST = 200  # the most characters that are shown of a fault without a name
_HEADS = re.compile(r"\bheads?\b(?![ -](?:dim|size))", re.IGNORECASE)
_SEVERAL = 3  # the number of checks with refused heads that shows a missing claim
_LISTED = 6  # the most tokens, or stretches of tokens, in a sentence
_DOES = {
    "raised": "The target raises",
    HUNG: "The target hangs",
    SLOW: "The target does not end within the limit",
    "crashed": "The target's process ends",
    "printed without end": "The target prints without end",
    "wrong result": "The target returns no attention",
    "a package is missing": "The target needs a package that is not installed",
}


class _Finding(Protocol):
    """The fields that this module needs of a `ringlab.conformance.report.findings.Finding`."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def evidence(self) -> str: ...
    @property
    def where(self) -> dict[str, Any] | None: ...


def sentences(findings: Sequence[_Finding], right_if: str) -> list[str]:
    """Return sentences on the first fault, a right way to call the target, right results and other faults."""
    left = sum(each.evidence in NOT_RUN for each in findings)
    found = [
        first(findings),
        right_if,
        _in_float32(findings),
        "" if right_if else beside(findings),
        "" if right_if else _silent_backward(findings),
        "" if right_if else _refused_heads(findings),
        "" if right_if else _others(findings),
        f"{left} other check{'s were' if left > 1 else ' was'} not run." if left else "",
    ]
    return [each for each in found if each]


def _in_float32(findings: Sequence[_Finding]) -> str:
    """Return advice for a ring that accepts float64 and computes in float32, or ""."""
    digits = " is float64, and every number of it is one of float32"
    found = [
        each for each in findings if not each.ok and each.name == "precision" and digits in each.evidence
    ]
    claim = "If float64 is not meant, name the dtypes that are, as in --dtypes float32,bfloat16."
    return f"In float64 it gives the digits of float32. {claim}" if found else ""


def _silent_backward(findings: Sequence[_Finding]) -> str:
    """Return advice for a ring with wrong dk or dv whose backward sends nothing, or ""."""
    located, bytes_sent = wrong_values(findings), [each.evidence for each in findings if each.name == "bytes"]
    sent = re.findall(r"backward ([\d,]+) of", bytes_sent[0]) if bytes_sent else []
    wrong = located is not None and any(
        not each["ok"] for each in located["shown"]["results"] if each["name"] in ("dk", "dv")
    )
    if not wrong or {*sent} != {"0"}:
        return ""
    return (
        "Its backward sends nothing, so dk and dv lack what the queries of other ranks add: autograd does not record "
        "messages. A torch.autograd.Function, or differentiable collectives, send these gradients home."
    )


def _refused_heads(findings: Sequence[_Finding]) -> str:
    """Return the claims that would help a target that refuses heads in several checks, or ""."""
    failed = [each.where for each in findings if not each.ok and each.where and "trouble" in each.where]
    runs = [
        each["run"]
        for each in failed
        if each["trouble"]["kind"] == RAISED and _HEADS.search(each["trouble"]["text"])
    ]
    if len(runs) < _SEVERAL:
        return ""
    undivided = any(run["H"] % run["P"] or run["K"] % run["P"] for run in runs)
    claims = ["if its ranks divide the heads, claim Target(split_heads=True)"] if undivided else []
    if any(run["K"] < run["H"] for run in runs):
        claims.append(
            "if it takes as many key/value heads as query heads only, claim Target(grouped=False) or --no-grouped"
        )
    return f"It refuses heads in {len(runs)} checks: {'; '.join(claims)}." if claims else ""


def _others(findings: Sequence[_Finding]) -> str:
    """Return a sentence on the faults that the other sentences do not explain, or "".

    These are faults without wrong values, and results that are wrong in a later check alone; each kind of trouble is
    named once.
    """
    said, kinds = first(findings), dict[str, tuple[str, str]]()
    located = wrong_values(findings)
    wrong = {each["name"] for each in located["shown"]["results"] if not each["ok"]} if located else set()
    for each in (each for each in findings if not each.ok and each.evidence not in NOT_RUN):
        evidence = " ".join(each.evidence.split())
        trouble = each.where["trouble"] if each.where and "trouble" in each.where else None
        values = re.search(r"(?:^|: |; )([a-z, ]+) wrong in \d+ of \d+ runs", evidence)
        if values and wrong and (others := [x for x in values[1].split(", ") if x not in wrong]):
            wrong |= {*others}
            verb = "is" if len(others) == 1 else "are"
            kinds.setdefault(each.name, (each.name, f"{join(others)} {verb} wrong too"))
        told = (
            values is not None
            or evidence.startswith(GAVE_UP)
            or evidence in said
            or (": " in evidence and evidence.partition(": ")[2] in said)
        )
        told = told or (trouble is not None and " ".join(trouble["text"].rstrip(".").split()) in said)
        if not told and not (each.name == "precision" and _in_float32([each])):
            # The table names the run. All ranks are named, because others may wait for the last one.
            short = re.split(r" \((?:rank \d+; )?P=", evidence)[0]
            whole = trouble is not None and trouble["kind"] in ENDLESS
            on = f" (P = {each.where['run']['P']})" if whole and each.where else ""
            short = f"{short if whole else short[:_LONGEST]}{on}"
            kinds.setdefault(trouble["kind"] if trouble else short, (each.name, short))
    listed = [f"“{name}”: {short}" for name, short in list(kinds.values())[:_LISTED]]
    more = f"; {len(kinds) - _LISTED} more below" if len(kinds) > _LISTED else ""
    return f"Other faults: {'; '.join(listed)}{more}." if listed else ""


def first(findings: Sequence[_Finding]) -> str:
    """Return one sentence on the first fault, or "".

    A wrong value comes first, then a run that failed, then any other fault.

    >>> first([])
    ''
    """
    failed = [finding for finding in findings if not finding.ok and finding.evidence not in NOT_RUN]
    return " ".join(_first(failed).split()) if failed else ""


def _first(failed: Sequence[_Finding]) -> str:
    if failed[0].name == LOADS:
        invalid = any(error in failed[0].evidence for error in INVALID)
        cannot = "cannot be checked" if invalid else "could not be imported"
        return f"The target {cannot}: {failed[0].evidence}"
    wrong = _of_wrong_values(failed)
    if wrong is not None and IGNORED in wrong.evidence:
        return wrong.evidence
    if wrong is not None and wrong.where is not None:
        return _of_values(wrong.where["smallest"])
    troubled = next((each.where for each in failed if each.where and "trouble" in each.where), None)
    if troubled:
        return _of_trouble(troubled)
    name, evidence = failed[0].name, failed[0].evidence
    kind, _, text = evidence.partition(": ")
    if kind in _DOES:  # the call raised an error, hung or crashed, so there is nothing to compare
        return f"{_DOES[kind]}, in a call of the check {name!r}: {text}"
    return f"The check {name!r} fails: {evidence}"


def beside(findings: Sequence[_Finding]) -> str:
    """Return sentences on the results that are right in spite of the fault that `first` names, or "".

    The sentences also name the ranks on which other results are wrong.
    """
    located = wrong_values(findings)
    if located is None:
        return ""
    shown = located["shown"]
    sentences = [results_of(shown), relations_of(shown), blocks_of(shown)]
    if located["smallest"]["run"]["P"] == 1:
        sentences.append("One rank alone gives a wrong result too.")
    return " ".join(each for each in sentences if each)


def wrong_values(findings: Sequence[_Finding]) -> dict[str, Any] | None:
    """Return the places of the first check whose values are wrong by more than rounding.

    If there is none, return those of the first check with wrong values, or None.
    """
    wrong = _of_wrong_values(findings)
    return None if wrong is None else wrong.where


def _of_wrong_values(findings: Sequence[_Finding]) -> _Finding | None:
    wrong = [each for each in findings if not each.ok and each.where and "smallest" in each.where]
    return next((each for each in wrong if _gross(each.where)), wrong[0] if wrong else None)


def _gross(where: Mapping[str, Any] | None) -> bool:
    """Return whether an error is larger than a computation in fewer digits can explain."""
    return any(map(_is_gross, where["smallest"]["results"] if where else []))


def _is_gross(result: Mapping[str, Any]) -> bool:
    return not result["ok"] and beyond(result["error"], small(result["bound"]))


def results_of(located: Mapping[str, Any]) -> str:
    """Return a sentence on the results of one run, with the ranks on which each is wrong."""
    right = [each["name"] for each in located["results"] if each["ok"]]
    wrong = [each for each in located["results"] if not each["ok"]]
    gross = [each for each in wrong if _is_gross(each)]
    little = [each for each in wrong if not _is_gross(each)] if gross else []
    most = max((each["error"] for each in little), default=0.0)
    where: dict[str, list[str]] = {}
    for each in gross or wrong:
        where.setdefault(_on(wrong_ranks(each), located["run"]["P"]), []).append(each["name"])
    parts = [f"{_all(right)} right on every rank"] if right else []
    parts += [f"{_all([each['name'] for each in little])} wrong by {most:.1g} at most"] if little else []
    parts += [f"{_all(names)} wrong {place}" for place, names in where.items()]
    return f"With {settings(located['run'])}: {'; '.join(parts)}."


def relations_of(located: Mapping[str, Any]) -> str:
    """Return a sentence on wrong results that equal other true results, or "".

    Such a result may be another true result, the true result of another rank, or a multiple of the true one.
    """
    parts = []
    for each in located["results"]:
        if each["of_name"]:
            parts.append(f"{each['name']} is the true {each['of_name']}")
        elif each["of_rank"] is not None:
            parts.append(
                f"each rank holds the {each['name']} of {_rank_after(each['of_rank'], located['run']['P'])}"
            )
        elif each["factor"] is not None:
            parts.append(_times(each["name"], each["factor"], located["run"]))
    return f"Of the wrong results, {'; '.join(parts)}." if parts else ""


def _rank_after(further: int, P: int) -> str:
    if P == 2:
        return "the other rank"
    names = {1: "the next rank", P - 1: "the rank before it"}
    return names.get(further, f"the rank {further} after it")


def _times(name: str, factor: float, run: Mapping[str, Any]) -> str:
    """Return words for a result that is a multiple of the true one, with the meanings of the factor."""
    if factor == 0:
        return f"{name} is 0 everywhere"
    P, root = run["P"], math.sqrt(run["D"])
    numbers = {"P": P, "1/P": 1 / P, "√D": root, "1/√D": 1 / root, "H/K": run["H"] / run["K"], "−1": -1.0}
    numbers |= {"log₂ e, as in base 2": math.log2(math.e)} if name == "lse" else {}
    meant = [word for word, number in numbers.items() if math.isclose(factor, number, rel_tol=5e-3)]
    return f"{name} is {factor:g} times the true one" + (f" ({' or '.join(meant)})" if meant else "")


def blocks_of(located: Mapping[str, Any]) -> str:
    """Return a sentence on blocks of keys that are missing, count twice, or are seen though hidden; or ""."""
    if located["pairs"] is None:
        return ""
    of = located["pairs"]["name"]
    P, parts = located["run"]["P"], []
    for fault, offsets in located["pairs"]["offsets"].items():
        parts.append(f"{join([_offset(each) for each in offsets])} {_FAULTS_OF_KEYS[fault]}")
    for fault, pairs in located["pairs"]["blocks"].items():
        if not pairs or fault in located["pairs"]["offsets"]:
            continue
        # At each step of a ring that sends to the next rank, a rank holds the block of rank (its own number −
        # step).
        steps = sorted({(q - k) % P for q, k in pairs})
        if len(pairs) == len(steps) * P:
            which = (
                "a rank's own block"
                if steps == [0]
                else f"the block{'' if len(steps) == 1 else 's'} of step{'' if len(steps) == 1 else 's'} {join(steps)}"
            )
            parts.append(f"{which} {_FAULTS[fault][len(steps) > 1]} on every rank")
        else:
            listed = [f"{q} ← {k}" for q, k in pairs[:_LISTED]]
            listed += [f"{len(pairs) - _LISTED} more"] if len(pairs) > _LISTED else []
            parts.append(
                f"{len(pairs)} {_block(pairs)} {_FAULTS[fault][len(pairs) > 1]} (ranks of queries ← keys: {join(listed)})"
            )
    return f"Over (query, key), in {of}: {'; '.join(parts)}." if parts else ""


_FAULTS = {
    "missing": ("is missing", "are missing"),
    "twice": ("counts twice", "count twice"),
    "hidden": ("shows keys that the mask hides", "show keys that the mask hides"),
}


_FAULTS_OF_KEYS = {"missing": "missing", "hidden": "seen, though the mask hides it"}


def _offset(offset: int) -> str:
    """Return words for the keys at one distance from their queries."""
    if not offset:
        return "each query's own key is"
    return f"the key {abs(offset)} {'after' if offset > 0 else 'before'} each query is"


def _block(pairs: Sequence[Any]) -> str:
    return "block" if len(pairs) == 1 else "blocks"


def wrong_ranks(result: Mapping[str, Any]) -> list[int]:
    """Return the ranks on which the error of a result is beyond its bound."""
    return [rank for rank, error in enumerate(result["by_rank"]) if beyond(error, result["bound"])]


def beyond(error: float | None, bound: float) -> bool:
    """Return whether an error is beyond its bound; None means NaN or infinite, which is beyond."""
    return error is None or error > bound


def _of_values(located: Mapping[str, Any]) -> str:
    wrong = [each for each in located["results"] if not each["ok"]]
    result = next(filter(_is_gross, wrong), wrong[0])
    run, P = located["run"], located["run"]["P"]
    tokens = [t for t, error in enumerate(result["by_token"]) if beyond(error, result["bound"])]
    heads = run["K"] if result["name"] in ("dk", "dv") else run["H"]
    of = (
        ""
        if heads == 1
        else " of every head"
        if len(result["heads"]) == heads
        else f" of {_heads(result['heads'])}"
    )
    where = f" {_on(wrong_ranks(result), P)}" if located["positions"] else ""
    error, bound = "NaN or infinite", f"{result['bound']:.2g}"
    if result["error"] is not None:
        error, bound = apart(result["error"], result["bound"], digits=2)
    values = f"error {error}, bound {bound}"
    return (
        f"{result['name']} is wrong{where}: {_tokens(tokens, run['S'])}{of}, with {settings(run)}; {values}."
    )


def _of_trouble(where: Mapping[str, Any]) -> str:
    kind, text, rank = where["trouble"]["kind"], where["trouble"]["text"], where["rank"]
    place = f" on rank {rank}" if rank is not None and where["run"]["P"] > 1 else ""
    if text.startswith("DeadlockError: "):  # virtual ranks notice a hang, and raise an error
        kind = HUNG
    return f"{_DOES.get(kind, f'The target fails ({kind})')}{place}, with {settings(where['run'])}: {text.rstrip('.')}."


_VALUES = {"zeros": "rows of zeros", "equal heads": "equal heads"}
"""The words for values that say nothing about scores."""


def settings(run: Mapping[str, Any]) -> str:
    """Return the main settings of a run in words: ranks, tokens, layout, mask, and anything unusual."""
    mask = "causal" if run["causal"] else "no mask"
    parts = [f"P = {run['P']}", f"S = {run['S']}", str(run["layout"]), mask]
    parts += [run["dtype"]] if run["dtype"] != "float32" else []
    parts += [f"{run['B']} sequences"] if run["B"] > 2 else []
    parts += [_VALUES.get(run["values"], f"{run['values']} scores")] if run["values"] != "normal" else []
    parts += [f"{run['one_hot']} one-hot"] if run["one_hot"] else []
    parts += [f"H/K = {run['H']}/{run['K']}"] if 1 < run["K"] < run["H"] else []
    parts += [f"scale {run['scale']:g}"] if run["scale"] is not None else []
    parts += [f"{name} {in_words(run[field])}" for field, name in GIVEN.items() if run[field]]
    parts += [f"inputs {WORDS[run['strided']]}"] if run["strided"] else []
    parts += [f"call “{run['use']}”"] if run["use"] else []
    return ", ".join(parts)


def _on(ranks: Sequence[int], P: int) -> str:
    if P == 1:
        return "on one rank"
    others = sorted({*range(P)} - {*ranks})
    if not others:
        return "on every rank"
    if P > 2 and len(others) == 1:
        named = {0: "the first", P - 1: "the last"}.get(others[0], f"rank {others[0]}")
        return f"on every rank but {named}"
    return f"on rank {ranks[0]} of {P}" if len(ranks) == 1 else f"on ranks {join(ranks)} of {P}"


def _heads(heads: Sequence[int]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {join(heads)}"


def _tokens(tokens: Sequence[int], S: int) -> str:
    """Return tokens in words: every token, or stretches of tokens."""
    if len(tokens) == S:
        return "the only token" if S == 1 else "every token"
    stretches: list[list[int]] = []
    for token in tokens:
        if stretches and token == stretches[-1][-1] + 1:
            stretches[-1].append(token)
        else:
            stretches.append([token])
    words = [f"{each[0]} to {each[-1]}" if len(each) > 2 else join(each) for each in stretches[:_LISTED]]
    left = sum(len(each) for each in stretches[_LISTED:])
    listed = join([*words, f"{left} more"] if left else words)
    return f"token{'' if len(tokens) == 1 else 's'} {listed}"


def _all(names: Sequence[str]) -> str:
    return f"{join(names)} {'is' if len(names) == 1 else 'are'}"


def join(words: Sequence[Any]) -> str:
    """Return the words joined as a list in a sentence.

    >>> join([1, 2, 3])
    '1, 2 and 3'
    """
    *before, last = map(str, words)
    return f"{', '.join(before)} and {last}" if before else last
