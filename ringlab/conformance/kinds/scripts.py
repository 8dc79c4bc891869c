"""The failing call of a merge, a decode or a training step as a separate program.

The program makes one call of the first failed check whose call can be written, and compares the results: those of a
merge or a decode with attention in float64, those of a step with the same step on one rank.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.kinds import decode, decode_cases, merge, step, step_cases
from ringlab.conformance.kinds.calls import changed_inputs
from ringlab.conformance.report.findings import Finding, Report
from ringlab.conformance.report.script import (
    MAIN,
    NO_VALUE,
    ON_PROCESSES,
    ON_VIRTUAL_RANKS,
    Code,
    NotWritten,
    body,
    docstring,
    expression,
    imports_of,
    inputs_text,
    offer,
    truth_text,
)
from ringlab.conformance.run.loading import named
from ringlab.conformance.target.argument_names import GROUPS
from ringlab.conformance.target.calling import required
from ringlab.conformance.target.claims import RING


def attach_call(report: Report, kind: str, base: float) -> None:
    """Set the `script` of a report on a merge, decode or step, or set `no_script` to the reason why there is none.

    base: the base of lse, for a merge.
    """
    failed = [each for each in report.findings if not each.ok and each.case is not None]
    if failed:
        offer(report, partial(_first_written, report, kind, failed, base))
    else:
        report.no_script = NO_VALUE


def _first_written(report: Report, kind: str, failed: Sequence[Finding], base: float) -> str:
    """Return the script of the first failed check that has one. Raises: NotWritten with the reason of the first."""
    reasons: list[NotWritten] = []
    for finding in failed:
        try:
            if kind == "merge":
                return _of_merge(report, finding, base)
            return (_of_decode if kind == "decode" else _of_step)(report, finding)
        except NotWritten as reason:
            reasons.append(reason)
    raise reasons[0]


def _script(
    report: Report, finding: Finding, case: Any, lines: list[str], *parts: str, numpy: bool = True
) -> str:
    """Return the script: its docstring and imports, the lines of its constants, its functions, and the call of main."""
    module, _, name = report.target.partition(":")
    said = f"The check {finding.name!r} fails: {finding.evidence}"
    virtual = report.over == RING
    head = [
        *docstring(" ".join(said.split()), f"The call: {case}.", module),
        "",
        *imports_of(virtual or report.transport == "none", numpy),
        *(["", "from ringlab import VirtualCluster"] if virtual else []),
        "",
        "sys.path.insert(0, os.getcwd())",
        f"from {module} import {name.partition('.')[0]}  # noqa: E402",
        "",
        *lines,
    ]
    return "\n\n\n".join(["\n".join(head), *parts]) + '\n\n\nif __name__ == "__main__":\n    main()\n'


def _of_merge(report: Report, finding: Finding, base: float) -> str:
    case = merge.Case(**(finding.case or {}))
    if case.broken:
        raise NotWritten("a script compares a merge with finite numbers")
    name = report.target.partition(":")[2]
    sizes = (case.P, merge.B, merge.H, merge.L, merge.D, report.seed, base)
    lines = [
        f"P, B, H, L, D, SEED, BASE = {', '.join(map(repr, sizes))}",
        f"DTYPE, STATE = torch.{case.dtype}, torch.{'float64' if case.dtype == 'float64' else 'float32'}",
    ]
    empty = [f"lses[{merge.EMPTY[case.empty]}] = -np.inf", f"outs[{merge.EMPTY[case.empty]}] = {merge.UNWRITTEN if case.unwritten else 0.0}"] if case.empty else []  # fmt: skip
    strided = ["outs, lses = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (outs, lses))"]
    inputs = body(
        f'''
        def inputs():
            """Return the partials of all ranks."""
            draw = np.random.default_rng([P, SEED]).standard_normal
            outs, lses = draw((P, B, H, L, D)), {case.shift} + {case.spread} * draw((P, B, H, L))
            EMPTY
            outs, lses = torch.from_numpy(outs).to(DTYPE), torch.from_numpy(lses / math.log(BASE)).to(STATE)
            STRIDED
            return outs, lses
        ''',
        EMPTY=empty,
        STRIDED=strided if case.strided else [],
    )
    call = expression(
        named(report.target), name, {"outs": Code("outs"), "lses": Code("lses")}, (Code("outs"), Code("lses"))
    )
    main = body(
        f'''
        def main():
            """Print the errors beside their bounds; exit with 1 if one is beyond."""
            outs, lses = inputs()
            *true, room, delta = truth(outs, lses, BASE)
            made = {call}
            wrong, made = False, made if isinstance(made, (tuple, list)) else (made, None)
            for name, x, right, allowed in zip(("out", "lse"), made, true, (room, delta)):
                if x is None:
                    continue
                x = x.detach().double().numpy()
                error = np.where(x == right, 0.0, np.abs(x - right))
                share = np.where(error == 0.0, 0.0, error / allowed)  # NaN is not below 1
                ok = bool((share <= 1.0).all())
                wrong |= not ok
                print(f"{{name}}: error {{np.max(error):.6g}}, {{np.max(share):.6g}} times its bound{{'' if ok else '  WRONG'}}")
            sys.exit(wrong)
        '''
    )
    text = _script(report, finding, case, lines, inputs, _copied(merge.truth), main)
    return text.replace("import os\n", "import math\nimport os\n", 1)


def _copied(function: Callable[..., Any]) -> str:
    """Return a function's source without annotations, whose names the script does not import."""
    source = inspect.getsource(function)
    (definition,) = ast.parse(source).body
    begins = definition.body[0].lineno  # type: ignore[attr-defined]
    head = f"def {function.__name__}({', '.join(inspect.signature(function).parameters)}):"
    return "\n".join([head, *source.splitlines()[begins - 1 :]])


_KNOWN = {"P", "S", "new", "dealt", "B", "H", "K", "D", "dtype", "values", "uncleared", "rolled"}
"""The fields of a decode's case that a script can give."""


def _of_decode(report: Report, finding: Finding) -> str:
    case = decode_cases.Case(**(finding.case or {}))
    check = next(each for each in decode.CHECKS if each.name == finding.name)
    if check.wrong is changed_inputs:
        raise NotWritten(f"a script compares results, and the check “{finding.name}” compares arguments")
    usual = vars(decode_cases.Case(case.P))
    if case.uncleared == "NaN":
        raise NotWritten("a script fills unused slots with numbers")
    if case.S > decode.WHOLE:
        raise NotWritten(
            f"a script computes the whole sequence's attention, which is too much for {case.S:,} tokens"
        )
    if len(case.new) > 1:
        raise NotWritten(f"a script makes one call of a decode ({case})")
    if other := [name for name, value in vars(case).items() if name not in _KNOWN and value != usual[name]]:
        raise NotWritten(f"a script cannot give a decode {' and '.join(other)} ({case})")
    run, name = case.run(report.seed), report.target.partition(":")[2]
    tokens = [case.tokens(rank) for rank in range(case.P)]
    limits = {
        name: float(f"{bound:.4g}")
        for name, bound in expected(run.plain)[1].items()
        if name in ("out", "lse")
    }
    sizes = (case.P, case.S, case.new[0], run.B, case.H, case.K, run.D, report.seed)
    lines = [
        f"P, S, N, B, H, K, D, SEED = {', '.join(map(str, sizes))}",
        f"DTYPE, SCALE = torch.{case.dtype}, D**-0.5",
        f"TOKENS = {[each.tolist() for each in tokens]}  # of each rank's cache",
        f"UNUSED, VALUE = {decode_cases.SLOTS if case.uncleared else 0}, {decode_cases.UNCLEARED['10,000']}  # slots of each cache, and what they hold",
        "POSITIONS = [torch.arange(S - N, S)] * P  # of the queries, which are the same on every rank",
        "# Of the largest error, as a share of the largest true value: from the plainest implementation's own error.",
        f"BOUNDS = {limits}".replace("'", '"'),
    ]
    virtual = report.over == RING
    known = {
        **{letter: Code(letter) for letter in "qkv"},
        "length": Code("len(TOKENS[rank])"),
        "lengths": Code("[len(each) for each in TOKENS]"),
        "positions": Code("torch.tensor(TOKENS[rank], dtype=torch.int64)"),
        **dict.fromkeys(
            decode_cases.LOCAL_LENGTHS, Code("torch.tensor([len(TOKENS[rank])] * B, dtype=torch.int32)")
        ),
        **dict.fromkeys(decode_cases.TOTAL_LENGTHS, Code("torch.tensor([S] * B, dtype=torch.int32)")),
        **dict.fromkeys(decode_cases.SCALES, Code("SCALE")),
        **_around(virtual, Code("P")),
    }
    if missing := required(named(report.target)) - known.keys():
        raise NotWritten(f"a script cannot give a decode {' and '.join(sorted(missing))}")
    call = _call(report, name, known)
    on_rank = body(
        f'''
        def on_rank(rank, ring=None):
            """Return this rank's results, by name."""
            q, k, v, _ = inputs()
            q = q[:, :, S - N :].contiguous()
            k, v = (torch.nn.functional.pad(x[:, :, TOKENS[rank]], (0, 0, 0, UNUSED), value=VALUE) for x in (k, v))
            made = {call}
            out, lse, *_ = (*made, None) if isinstance(made, (tuple, list)) else (made, None)
            return {{name: x.detach().cpu() for name, x in (("out", out), ("lse", lse)) if x is not None}}
        '''
    )
    ranks = (ON_VIRTUAL_RANKS if virtual else ON_PROCESSES).rstrip()
    return _script(report, finding, case, lines, inputs_text(run), truth_text(run), on_rank, ranks, MAIN)


def _of_step(report: Report, finding: Finding) -> str:
    case = step_cases.Case(**(finding.case or {}))
    check = next(each for each in step.CHECKS if each.name == finding.name)
    if check.calls(case) != [case.plain, case]:
        raise NotWritten(
            f"a script compares a step with the same step on one rank, and the check “{finding.name}” does not"
        )
    if case.memory:
        raise NotWritten(f"a script gives dense tensors ({case})")
    function, name, virtual = named(report.target), report.target.partition(":")[2], report.over == RING
    packed_only = not required(function).isdisjoint(step_cases.PACKED)
    given = step_cases.given(case, report.seed, packed_only)
    calls = []
    for each, P in ((case.plain, "1"), (case, "P")):
        options = {
            name: getattr(each, option) for option, names in step_cases.OPTIONS.items() for name in names
        }
        tensors = {name: Code(f'GIVEN["{name}"].clone()') for name in given}
        calls.append(_call(report, name, {**tensors, **options, **_around(virtual, Code(P))}))
    used = [name for name in given if f'GIVEN["{name}"]' in calls[1]]
    lines = [
        f"P = {case.P}",
        "GIVEN = {",
        *(line for name in used for line in _literal(name, given[name])),
        "}",
    ]
    gradients = [] if case.evaluate else [
        "if isinstance(gradients, torch.nn.Module):",
        "    gradients = {name: weight.grad for name, weight in gradients.named_parameters()}",
        "elif isinstance(gradients, (tuple, list)):",
        '    gradients = {f"gradient {number}": x for number, x in enumerate(gradients)}',
        "found |= {name: x.detach().to_dense().cpu() for name, x in gradients.items() if x is not None}",
    ]  # fmt: skip
    on_rank = body(
        f'''
        def on_rank(rank, alone, ring=None):
            """Return this rank's loss and gradients, by name; alone: on one rank, and at once."""
            if alone:
                made = {calls[0]}
            else:
                made = {calls[1]}
            loss, gradients = made[:2] if isinstance(made, tuple) and len(made) in (2, 3) else (made, {{}})
            found = {{"the loss": torch.tensor(float(loss), dtype=torch.float64)}}
            GRADIENTS
            return found
        ''',
        GRADIENTS=gradients,
    )
    ranks = (ON_VIRTUAL_RANKS if virtual else ON_PROCESSES).rstrip()
    return _script(report, finding, case, lines, on_rank, ranks, _MAIN_OF_STEP.rstrip(), numpy=False)


_MAIN_OF_STEP = '''\
def main():
    """Print each rank's errors beside their bounds; exit with 1 if one is beyond."""
    (true,), wrong = results(1, True), False
    gradients = {name: x for name, x in true.items() if name != "the loss"}
    epsilon = max([torch.finfo(x.dtype).eps for x in gradients.values()], default=torch.finfo(torch.float32).eps)
    largest = max([x.abs().max().item() for x in gradients.values() if x.numel()], default=0.0)
    for rank, found in enumerate(results(P, False)):
        for name in {**true, **found}:
            right, x = (each.get(name, torch.zeros(())).double() for each in (true, found))
            error, size = (y.abs().max().item() if y.numel() else 0.0 for y in (x - right, right))
            bound = epsilon**0.5 * size + 64 * epsilon * largest
            if name == "the loss":
                bound = 64 * epsilon * max(size, 1e-3)
            ok = error <= bound  # NaN is not
            wrong |= not ok
            print(f"rank {rank}, {name}: error {error:.6g}, bound {bound:.6g}{'' if ok else '  WRONG'}")
    sys.exit(wrong)
'''


def _around(virtual: bool, P: Code) -> dict[str, Any]:
    """Return the expressions of the arguments in `calls.around`, by name."""
    over = (
        {"ring": Code("ring"), "comm": Code("ring.comm")}
        if virtual
        else dict.fromkeys(GROUPS, Code("dist.group.WORLD"))
    )
    return {**over, "rank": Code("rank"), "world_size": P}


def _call(report: Report, name: str, known: dict[str, Any]) -> str:
    function: Callable[..., Any] = named(report.target)
    return expression(function, name, known, ())


def _literal(name: str, tensor: Tensor) -> list[str]:
    """Return the lines of a dict's entry for a tensor of whole numbers, one line for each row."""
    rows = tensor.tolist()
    if tensor.ndim < 2:
        return [f'    "{name}": torch.tensor({rows}, dtype={tensor.dtype}),']
    return [
        f'    "{name}": torch.tensor([',
        *(f"        {row}," for row in rows),
        f"    ], dtype={tensor.dtype}),",
    ]
