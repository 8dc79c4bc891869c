"""The smallest counterexample as a separate program, which compares the target with float64 attention.

The program draws the inputs, and imports the target, torch and NumPy. For a target over ringlab's Comm it
also imports ringlab's virtual cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringlab.comm.processes.launch import environment
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.report import diagnosis
from ringlab.conformance.report.counterexample import as_run
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.arguments import window_and_softcap
from ringlab.conformance.run.loading import VIRTUAL, named
from ringlab.conformance.run.memory_forms import AWAY
from ringlab.conformance.run.run import GIVEN, LOSS_SCALE, VALUES, Run
from ringlab.conformance.target.argument_names import (
    CU_PADDED,
    CU_SEQLENS,
    GROUPS,
    IDS,
    MAX_SEQLENS,
)
from ringlab.conformance.target.calling import arguments, parameters
from ringlab.conformance.target.claims import FLEX, RING, Target
from ringlab.conformance.tolerance import NAMES
from ringlab.errors import RinglabError
from ringlab.temporary import TemporaryFolder

_SECONDS = 120.0
"""The seconds that a script may take: one small run, and the import of torch on a busy machine."""


NO_VALUE = "no value is wrong, so there is no counterexample to write"
CALLED_OTHERWISE = "the plain call is wrong, and the target is right if it is called as said above"


_GIVEN = ("window", "softcap", "documents")
"""The arguments that a script can pass."""


class NotWritten(Exception):
    """A counterexample that cannot be written as a script; its text is the reason."""


def attach(report: Report, load: Callable[[], Target], device: str = "cpu") -> None:
    """Set the report's `script`, or set `no_script` to the reason why there is none.

    load: returns the target; if it raises an error, that is the reason.
    """
    where = diagnosis.wrong_values(report.findings)
    if where is None:
        report.no_script = CALLED_OTHERWISE if report.right_if else NO_VALUE
        return
    offer(report, lambda: written(report, where["smallest"], load(), device))


def offer(report: Report, make: Callable[[], str]) -> None:
    """Set the report's `script` to the script that `make` returns, or `no_script` to the reason why there is none.

    The script is first run in its own process, and is offered only if it shows a wrong value. An error of `make`
    is a reason.
    """
    if ":" not in report.target or report.target.startswith("peer:"):
        report.no_script = "the target is no package.module:name that a script could import"
        return
    try:
        text = make()
    except NotWritten as reason:
        report.no_script = str(reason)
    except Exception as error:
        said = error.got if isinstance(error, RinglabError) else str(error)
        report.no_script = f"it failed with {type(error).__name__}: {said}"
    else:
        report.no_script = _lacks(text)
        report.script = "" if report.no_script else text


def _lacks(text: str) -> str:
    """Run the script as a reader would, and return why it shows no wrong value, or "" if it shows one."""
    with TemporaryFolder(prefix="ringlab-script-") as name:
        path = Path(name) / "counterexample.py"
        path.write_text(text, encoding="utf-8")
        surroundings = dict(
            environment(1), PYTHONPATH=os.pathsep.join(each or os.getcwd() for each in sys.path)
        )
        try:
            ran = subprocess.run(
                [sys.executable, str(path)], capture_output=True, text=True, errors="replace",
                env=surroundings, stdin=subprocess.DEVNULL, timeout=_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"run on its own, it did not end within {_SECONDS:g} s"
    if ran.returncode == 0:
        return "run on its own, it shows no wrong value: the target is wrong in some runs only, or needs what other calls leave in the process"
    if "WRONG" in ran.stdout:
        return ""
    last = (ran.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return f"run on its own, it ends with status {ran.returncode} and compares nothing: {last[:300]}"


def written(report: Report, located: Mapping[str, Any], target: Target, device: str) -> str:
    """Return a script that repeats one run whose values were wrong. Raises: NotWritten if no script can repeat it."""
    run = as_run(located["run"])
    _refuse(run, report, target)
    parts = [
        _head(report, run, target, device),
        inputs_text(run),
        truth_text(run),
        _on_rank(run, target, report.target),
    ]
    parts.append((ON_VIRTUAL_RANKS if target.over == RING else ON_PROCESSES) + "\n\n" + MAIN)
    limits = expected(run.plain)[1]
    text = "\n\n\n".join(parts) + '\n\n\nif __name__ == "__main__":\n    main()\n'
    return text.replace(
        "BOUNDS_OF_THE_RUN", str({name: float(f"{limits[name]:.4g}") for name in NAMES}).replace("'", '"')
    )


def _refuse(run: Run, report: Report, target: Target) -> None:
    if run.use not in ("", *CALLS):
        raise NotWritten(f"a script cannot call a target as the run “{run.use}” does ({run})")
    if target.over == RING and report.transport != VIRTUAL:
        raise NotWritten(f"a script has virtual ranks only, not transport {report.transport}")
    if run.strict and target.over != RING:
        raise NotWritten(f"a script cannot watch when messages over torch.distributed are waited for ({run})")
    other = [GIVEN[field] for field in GIVEN if getattr(run, field) and field not in _GIVEN]
    if other:
        raise NotWritten(f"a script cannot give a target {' and '.join(other)} ({run})")
    if mods := {*FLEX} & {*target.takes}:
        raise NotWritten(f"a script cannot give a target its {' and '.join(sorted(mods))}")
    if run.fault:
        raise NotWritten(f"a script cannot make the fault “{run.fault}” ({run})")


def _head(report: Report, run: Run, target: Target, device: str) -> str:
    module, _, name = report.target.partition(":")
    virtual = target.over == RING
    imports = imports_of(virtual)
    needs = [_LAYOUT_IMPORT] if "layout" in parameters(target.function) and layout_of(run, target)[1] else []
    needs += (
        ["from ringlab import Mask"] if "mask" in parameters(target.function) and target.takes_mask else []
    )
    needs += ["from ringlab import Ring, VirtualCluster"] if virtual else []
    needs += ["from ringlab.comm.wrappers.strict import Strict"] if run.strict else []
    positions = [each.tolist() for each in target.positions(run.layout, run.S, run.P, run.documents)]
    lines = [
        *docstring(diagnosis.first(report.findings), f"The run: {run}.", module),
        "",
        *imports,
        *(["", *sorted(needs)] if needs else []),
        "",
        "sys.path.insert(0, os.getcwd())",
        f"from {module} import {name.partition('.')[0]}  # noqa: E402",
        "",
        "P, S, B, H, K, D, SEED = "
        + ", ".join(map(str, (run.P, run.S, run.B, run.H, run.K, run.D, run.seed))),
        f'DTYPE, DEVICE = torch.{run.dtype}, "{device}"',
        f"SCALE = {'D**-0.5' if run.scale is None else run.scale}",
        f"POSITIONS = [torch.tensor(each, dtype=torch.int64) for each in {positions}]",
        *_documents(run),
        "# Of the largest error, as a share of the largest true value: from the plainest implementation's own error.",
        "BOUNDS = BOUNDS_OF_THE_RUN",
    ]
    return "\n".join(lines)


_LAYOUT_IMPORT = "from ringlab.layout import dealt, get_layout"


def docstring(fault: str, run: str, module: str) -> list[str]:
    """Return the lines of a script's docstring: the fault, the run, and where to start the script."""
    said = textwrap.fill(fault, 110), "", textwrap.fill(run, 110)
    lines = "\n".join(said).replace("\\", "\\\\").replace('"""', "'''").splitlines()
    start = f"Start it where {module} can be imported. It exits with 1 while a value is wrong."
    return [f'"""{lines[0]}', *lines[1:], start, '"""']


def imports_of(virtual: bool, numpy: bool = True) -> list[str]:
    """Return the lines that import what a script needs besides the target; virtual: on virtual ranks."""
    lines = [
        "import os",
        "import sys",
        *([] if virtual else ["import tempfile", "from datetime import timedelta"]),
    ]
    lines += ["", *(["import numpy as np"] if numpy else []), "import torch"]
    return lines + (
        [] if virtual else ["import torch.distributed as dist", "import torch.multiprocessing as mp"]
    )


def _documents(run: Run) -> list[str]:
    if not run.documents:
        return []
    return [
        f"LENGTHS = torch.tensor({list(run.documents)})",
        "DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)",
    ]


def inputs_text(run: Run) -> str:
    """Return the function that draws the inputs of this run as `ringlab.conformance.run.run.inputs` does."""
    values = [VALUES[run.values]] if VALUES[run.values] else []
    factor = LOSS_SCALE.get(run.dtype, 2.0**16)
    values += {
        "ones": ["dout = np.ones_like(dout)"],
        "large": [f"dout = dout * {factor}"],
        "last token": ["dout[..., :-1, :] = 0.0"],
        "second half": ["dout[..., : S // 2, :] = 0.0"],
    }.get(run.dout, [])
    if run.moved:
        tensors = "(q, k, v)" if run.moved[0] == "token" else "(dout,)"
        values += [
            f"for x in {tensors}:",
            f"    x[..., {run.moved[1]}, :] = 3.0 - 2.0 * x[..., {run.moved[1]}, :]",
        ]
    return body(
        '''
        def inputs():
            """Return q, k, v and dout of the whole sequence."""
            draw = np.random.default_rng([S, H, K, D, B, SEED]).standard_normal
            q, k, v, dout = (draw((B, heads, S, D)) for heads in (H, K, K, H))
            VALUES
            return [torch.from_numpy(x).to(DTYPE) for x in (q, k, v, dout)]
        ''',
        VALUES=values,
    )


def truth_text(run: Run) -> str:
    """Return the function for attention in float64, with the mask, scale and soft cap of this run."""
    mask = ["visible = j <= i" if run.causal else "visible = torch.ones(S, S, dtype=torch.bool)"]
    if run.window:
        mask += [f"visible &= (i - j).abs() < {run.window}"]
    if run.documents:
        mask += ["visible &= DOCUMENTS[:, None] == DOCUMENTS"]
    return body(
        '''
        def truth():
            """Return out, lse, dq, dk and dv of the whole sequence in float64, by name."""
            q, k, v, dout = (x.double() for x in inputs())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            scores = SCALE * q @ k.repeat_interleave(H // K, 1).mT
            SOFTCAP
            i, j = torch.arange(S)[:, None], torch.arange(S)
            MASK
            scores = scores.masked_fill(~visible, -torch.inf)
            out, lse = scores.softmax(-1) @ v.repeat_interleave(H // K, 1), scores.logsumexp(-1)
            gradients = torch.autograd.grad((out, lse), leaves, (dout, DLSE))
            return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients)))
        ''',
        SOFTCAP=[f"scores = {run.softcap} * torch.tanh(scores / {run.softcap})"] if run.softcap else [],
        MASK=mask,
    ).replace("DLSE", "dlse().double()" if run.dlse else "torch.zeros_like(lse)") + (
        _DLSE if run.dlse else ""
    )


_DLSE = '''


def dlse():
    """Return the gradient of lse of the whole sequence."""
    draw = np.random.default_rng([S, H, B, SEED, 1]).standard_normal((B, H, S))
    return torch.from_numpy(draw).to(torch.promote_types(DTYPE, torch.float32))'''


def _on_rank(run: Run, target: Target, reference: str) -> str:
    """Return the function for one rank's call of the target; its results have the axes of the truth."""
    name = reference.partition(":")[2]
    given = known(run, target, name)
    stacked = f"torch.stack({{}}, {target.axes.index('H')})"
    given |= {"qkv": Code(stacked.format("(q, k, v)")), "kv": Code(stacked.format("(k, v)"))}
    owner = f"{name}.function" if isinstance(named(reference), Target) else name
    forward = expression(target.function, owner, given)
    state = Code("out.detach()"), Code("None if lse is None else lse.detach()")
    backward = ""
    if target.gradients is not None:
        given = {**known(run, target, name), "dout": Code("dout"), "out": state[0], "lse": state[1]}
        backward = expression(target.gradients, f"{name}.gradients", given)
    template = '''
        def on_rank(rank, ring=None):
            """Return this rank's results, by name."""
            STRICT
            shards = [x[:, :, POSITIONS[rank]]GIVEN.contiguous().to(DEVICE) for x in inputs()]
            STRIDED
            q, k, v, dout = shards
            CALL
            found = {name: x.detach().cpu() for name, x in zip(NAMES, results) if x is not None}
            return {name: x if name == "lse" else xTAKEN for name, x in found.items()}
        '''
    there, back = _AXES[target.axes]
    names = str(names_of(run, target)).replace("'", '"')
    template = template.replace("GIVEN", there).replace("TAKEN", back).replace("NAMES", names)
    strict = ["ring = Ring(Strict(ring.comm))"] if run.strict else []
    return body(
        template,
        STRICT=strict,
        STRIDED=_strided(run, target),
        CALL=call_lines(run, target, forward, backward),
    )


_AXES = {
    "BHLD": ("", ""),
    "BLHD": (".transpose(1, 2)", ".transpose(1, 2)"),
    "LBHD": (".permute(2, 0, 1, 3)", ".permute(1, 2, 0, 3)"),
    "LHD": (".transpose(1, 2)[0]", "[None].transpose(1, 2)"),
}
"""The code that gives (B, H, L, D) the axes of the target, and the code that reverts it."""


def _strided(run: Run, target: Target) -> list[str]:
    if not run.strided:
        return []
    heads = target.axes.index("H")
    if run.strided not in ("heads", "dims"):
        return [_FORMS[run.strided].replace("HEADS", str(heads))]
    a, b = (1, 2) if run.strided == "heads" and target.axes != "LHD" else (-2, -1)
    return [f"shards = [x.transpose({a}, {b}).contiguous().transpose({a}, {b}) for x in shards]"]


_AWAY = f"torch.cat((x.new_full(({AWAY},), 10_000), x.flatten()))[{AWAY}:].view(x.shape)"
_FORMS = {
    "offset": f"shards = [{_AWAY} for x in shards]",
    "one buffer": "shards = [*torch.cat(shards[:3], HEADS).split([x.shape[HEADS] for x in shards[:3]], HEADS), shards[3]]",
    "expanded": "shards[1:3] = [x.narrow(HEADS, 0, 1).expand_as(x) for x in shards[1:3]]",
}
"""The line that gives the inputs each form of `ringlab.conformance.run.memory_forms`."""


ON_VIRTUAL_RANKS = '''\
def results(P=P, *given):
    """Return the results of all ranks."""
    return VirtualCluster(P, memory=False).run(lambda ring: on_rank(ring.rank, *given, ring=ring)).results
'''
"""The function of a script that calls `on_rank` on each of P ranks; `given` are further arguments of `on_rank`."""


ON_PROCESSES = '''\
def process(rank, folder, P, *given):
    """Leave the results of one rank in the folder."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=P, timeout=timedelta(seconds=60))
    torch.save(on_rank(rank, *given), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def results(P=P, *given):
    """Return the results of all ranks, each of which is a gloo process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (folder, P, *given), nprocs=P)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(P)]
'''
"""The same over torch.distributed."""


MAIN = '''\
def main():
    """Print each rank's errors with their bounds; exit with 1 if one is beyond."""
    true, wrong = truth(), False
    for rank, found in enumerate(results()):
        for name, x in found.items():
            right = true[name][:, :, POSITIONS[rank]]
            largest = true[name].abs().max().item() or 1.0
            error = (x.double() - right).abs().max().item() / largest if x.numel() else 0.0
            ok = error <= BOUNDS[name]  # NaN is not
            wrong |= not ok
            print(f"rank {rank} {name:>3}: error {error:.6g}, bound {BOUNDS[name]:.6g}{'' if ok else '  WRONG'}")
    sys.exit(wrong)'''


def body(template: str, **blocks: list[str]) -> str:
    """Return the template without indent; a line that is only a name is replaced by that block's lines."""
    lines: list[str] = []
    for line in textwrap.dedent(template).strip("\n").rstrip().splitlines():
        indent, word = line[: len(line) - len(line.lstrip())], line.strip()
        lines += [indent + each for each in blocks[word]] if word in blocks else [line]
    return "\n".join(lines)


class Code(str):
    """An expression of the script that takes the place of a value."""

    def __repr__(self) -> str:
        """Return the expression unchanged."""
        return str(self)


def known(run: Run, target: Target, owner: str) -> dict[str, Any]:
    """Return the expression of every argument that `RankPart` knows in such a run, by name.

    owner: the expression of the object that has the target's options.
    """
    ring = Code("ring") if target.over == RING else None
    group = None if ring else Code("dist.group.WORLD")
    found: dict[str, Any] = {
        "ring": ring, "comm": Code("ring.comm") if ring else None, **dict.fromkeys(GROUPS, group), "rank": Code("rank"),
        "world_size": Code("P"), "causal": run.causal, "is_causal": run.causal, "layout": layout_of(run, target)[0],
        "positions": Code("[each.to(DEVICE) for each in POSITIONS]"), "scale": run.scale, "softmax_scale": run.scale, "return_lse": True,
    }  # fmt: skip
    found |= window_and_softcap(run)
    found |= {name: x for name, x in _packing(run).items() if run.documents or name in target.required}
    if (run.window or run.documents) and target.takes_mask:
        found |= {
            "mask": Code(f"Mask(causal={run.causal}, window={run.window or None}, documents={run.documents})")
        }
        for name in {"causal", "is_causal"} - target.required:
            del found[name]  # the mask includes this flag
    return found | {name: Code(f"{owner}.options[{name!r}]") for name in target.options}


def _packing(run: Run) -> dict[str, Any]:
    lengths = run.documents or (run.S,)
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    own = "torch.tensor({})[POSITIONS[rank]].to(DEVICE)"
    return {
        **dict.fromkeys(CU_SEQLENS, Code(f"torch.tensor({ends}, dtype=torch.int32, device=DEVICE)")),
        **dict.fromkeys(CU_PADDED, Code(f"torch.tensor({ends}, dtype=torch.int32, device=DEVICE)")),
        **dict.fromkeys(MAX_SEQLENS, max(lengths)),
        **dict.fromkeys(IDS, Code(own.format(ids))),
        "position_ids": Code(own.format(places)),
    }


def layout_of(run: Run, target: Target) -> tuple[Any, bool]:
    """Return the expression of the layout, and whether it is one of ringlab's layouts."""
    if target.known_layout(run.layout, run.S, run.P) is None:
        return run.layout, False
    meant = target.layouts.get(run.layout, run.layout) if isinstance(target.layouts, Mapping) else run.layout
    dealing = {
        "token-fold": "chunk=1, folded=True",
        "chunk-3": "chunk=3",
        "chunk-5-folded": "chunk=5, folded=True",
    }
    made = f"dealt(S, P, {dealing[meant]})" if meant in dealing else f"get_layout({meant!r}, S, P)"
    return Code(made), True


def expression(
    function: Callable[..., Any],
    text: str,
    known: Mapping[str, Any],
    tensors: Sequence[str] = (Code("q"), Code("k"), Code("v")),
) -> str:
    """Return the source text of a call of `function` with the suite's arguments.

    text: the expression that names the function. tensors: the expressions of q, k and v; those in `known`
    take precedence.
    """
    positional, by_name = arguments(function, tensors, known)
    listed = [*map(repr, positional), *(f"{name}={value!r}" for name, value in by_name.items())]
    return f"{text}({', '.join(listed)})"


CALLS = ("summed loss", "loss scale", "loss of the last token", "loss of the second half", "loss on lse", "backward again", "no_grad", "inference_mode", "q trained", "q and v trained", "k trained")  # fmt: skip
"""The call patterns that a script can show; see `ringlab.conformance.run.call_patterns`."""


_TURNED = [
    "if lse is not None and lse.shape == (B, length, H) and length != H:",
    "    lse = lse.transpose(1, 2)",
]


_LSE_OF = {
    "BHLD": [],
    "BLHD": _TURNED,
    "LBHD": [
        *_TURNED,
        "elif lse is not None and lse.shape == (length, B, H):",
        "    lse = lse.permute(1, 2, 0)",
    ],
    "LHD": ["if lse is not None and lse.ndim == 2:", "    lse = (lse if lse.shape[0] == H else lse.T)[None]"],
}
"""The lines that give lse the axes (B, H, L), by the axes of the target."""


def names_of(run: Run, target: Target) -> tuple[str, ...]:
    """Return the names of the run's results, in the order in which the script's call returns them."""
    if run.use.endswith("trained"):
        return tuple(f"d{name}" for name in _trained(run))
    if run.use in ("loss on lse", "backward again"):
        return NAMES[2:]
    return NAMES if run.backward and run.use not in ("no_grad", "inference_mode") else NAMES[:2]


def _trained(run: Run) -> tuple[str, ...]:
    return tuple(name for name in "qkv" if name in run.use.removesuffix(" trained").split(" and "))


def call_lines(run: Run, target: Target, forward: str, backward: str) -> list[str]:
    """Return the lines of one call, which compute (out, lse), and the gradients by the run's call pattern."""
    if run.use in ("no_grad", "inference_mode"):
        lines = [f"with torch.{run.use}():", f"    made = {forward}"]
    else:
        trained = _trained(run) if run.use.endswith("trained") else tuple("qkv")
        lines = (
            [
                f"leaves = [x.requires_grad_() for x in ({', '.join(trained)}{',' if len(trained) == 1 else ''})]"
            ]
            if run.backward
            else []
        )
        lines += [f"made = {forward}"]
    lines += ["out, lse, *_ = (*made, None) if isinstance(made, (tuple, list)) else (made, None)"]
    lines += ["lse = lse if isinstance(lse, torch.Tensor) else None"]
    lines += ["length = len(POSITIONS[rank])", *_LSE_OF[target.axes]] if _LSE_OF[target.axes] else []
    names = names_of(run, target)
    if names == NAMES[:2]:
        return [*lines, "results = out, lse"]
    if run.use == "summed loss":
        lines += ["dout = torch.ones((), dtype=dout.dtype, device=dout.device).expand(dout.shape)"]
    if run.use == "backward again":
        lines += ["torch.autograd.grad(out, leaves, dout, retain_graph=True)"] if not backward else []
    if run.use == "loss on lse":
        own = "dlse()[..., POSITIONS[rank]].to(DEVICE)"
        return [*lines, f"results = torch.autograd.grad((out, lse), leaves, (dout, {own}))"]
    gradients = backward or "torch.autograd.grad(out, leaves, dout)"
    if backward:
        lines = [*lines, "q, k, v = q.detach(), k.detach(), v.detach()"]
    return [*lines, f"results = {gradients}" if names[0] != "out" else f"results = out, lse, *{gradients}"]
