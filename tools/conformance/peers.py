"""The quick tier's findings about every peer, as one file with versions, and a page that summarises it.

`python -m tools.conformance.peers benchmarks/results/conformance/peers.json docs/peers.md` runs the installed
packages and writes both files. If names of studies follow the files, only these studies run, and the file
keeps its results of the other studies.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ringlab.conformance.checks import CHECKS
from ringlab.conformance.checks.faults import FAULT_CHECKS
from ringlab.conformance.peers import PEERS, peer
from ringlab.conformance.report.findings import Report
from ringlab.conformance.suite import check
from ringlab.errors import BackendError

LIMIT = 60.0
ASKED = tuple(each.name for each in CHECKS if each.tier == "quick" and each not in FAULT_CHECKS)
HEAD = """\
# What the suite finds about known packages

Each row of the results is one run of `ringlab check peer:NAME --quick` in gloo processes on a CPU. It describes this version
of the package only. Fault checks are excluded, because their outcome depends on gloo and on machine load.
`benchmarks/results/conformance/peers.json` has the full evidence.

```sh
pip install -c requirements.lock -e '.[peers]'
ringlab check peer:ring-attention-pytorch --quick
ringlab bench peers                                 # the same packages and ringlab's ring, timed in turn
```

| `peer:` | what it is | on a CPU |
|---|---|---|
| `ring-attention-pytorch` | its ring in plain torch, contiguous and striped, float32 | unchanged |
| `ring-flash-attn`, `-zigzag`, `-stripe` | three rings over flash-attn's kernels, float16 and bfloat16 | with a stand-in for the kernels |
| `ring-flash-attn-kvpacked`, `-qkvpacked` | the same ring, with k and v, or q, k and v, in one tensor | with a stand-in for the kernels |
| `ring-flash-attn-varlen`, `-llama3` | its rings of packed documents | with a stand-in for the kernels |
| `yunchang`, `-zigzag`, `-stripe`, `-hybrid` | the same three rings, and ring × Ulysses on 2 × 2 ranks | with a stand-in for the kernels |
| `torch-context-parallel` | the ring behind torch's `context_parallel`, contiguous and zig-zag | with torch's operator for CPUs |
| `torch-context-parallel-public` | the public function | does not run: torch has no rule for that operator |

The stand-in (`ringlab/conformance/peers/flash_attn.py`) computes flash-attn's documented contract in float32. Messages, masks
and the sums over blocks are the package's own code. Only torch's ring runs on one rank over gloo. The backward of the others
would send to its own rank.

Two findings matter for any ring. Both are among the suite's wrong rings (`ringlab/conformance/mutants/published.md`):

- If an autograd function returns a gradient with one dimension too many, autograd sums it and raises no error.
- An error bound cannot show that a float16 result was rounded to bfloat16, because plain float16 attention is just as
  inaccurate. The `precision` check therefore inspects the bits.
"""
FOOT = "\n`python -m tools.conformance.peers benchmarks/results/conformance/peers.json docs/peers.md` writes this page.\n"
MADE_FOR = """
## In the dtypes that a package is made for
"""
OUTSIDE = """
## Outside those dtypes

flash-attn's kernels take float16 and bfloat16 only, so none of these packages promises anything in float32. These runs
give the stand-in float32 all the same. They show where a package's own code relies on 16-bit results. **They
are not findings about the packages**, whose users cannot make such a call.
"""


@dataclass(frozen=True)
class Study:
    """A peer, claims that replace the peer's own, and explanations for the reader of the result.

    note: who is responsible for a finding, and what the package's own documentation says.
    outside: whether the claims include dtypes that the package is not made for.
    """

    name: str
    peer: str
    claims: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    outside: bool = False


_PAIR = """\
`dk` and `dv` are wrong, and all other failures but `bytes` and `work` follow from this. The cause is in the package's own code
for CPUs; its code for CUDA was not run. After the last hop of backward, it takes the pair (received, sent) that its ring pass
returns for the pair (dk, dv). Both gradients are then stacks of dk and dv, and autograd sums over a dimension too many without
an error. Its README lists a check of outputs and gradients on two processes as done. `bytes` and `work` are not faults: the
package promises neither that traffic nor that it skips hidden blocks."""
_ROUNDED = """\
The package's own backward returns dq in bfloat16, whatever the dtype of the inputs, so a float16 dq loses three bits. A
bfloat16 dq loses nothing."""
_LIMITS = """ The README names arithmetic errors as a limit. It supposes that they arise because the kernels return the result
of each block in bfloat16."""
_IN_FLOAT32 = ("ring-flash-attn", "ring-flash-attn-zigzag", "yunchang")
_NOTES = {
    "ring-attention-pytorch": _PAIR,
    "ring-flash-attn": _ROUNDED + _LIMITS,
    **dict.fromkeys(("yunchang", "yunchang-hybrid"), _ROUNDED),
}
STUDIES: dict[str, Study] = {
    **{name: Study(name, name, note=_NOTES.get(name, "")) for name in PEERS},
    **{
        f"{name}-float32": Study(f"{name}-float32", name, {"dtypes": ("float32",)}, outside=True)
        for name in _IN_FLOAT32
    },
}


def study(chosen: Study, run: Callable[..., Report] = check) -> dict[str, Any]:
    """Return the findings about a peer, or why it cannot run here, as data for JSON.

    Raises: BackendError if the peer is not installed.
    """
    of = peer(chosen.peer)
    about = {
        "study": chosen.name, "peer": of.name, "package": of.package, "version": of.version,
        "kernel": of.kernel, "claims": {key: list(value) for key, value in chosen.claims.items()},
        "torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    obstacle = of.without()
    if obstacle is not None:
        return {**about, "cannot_run": f"needs {obstacle.needed}; got: {obstacle.got}"}
    return {**about, **run(f"peer:{of.name}", quick=True, only=ASKED, limit=LIMIT, **chosen.claims).as_dict()}


def page(found: Sequence[dict[str, Any]]) -> str:
    """Return the page: first the studies of each package's intended use, then the others.

    Each part has a table with a row for each study, and then the evidence of each study with a failed check.
    """
    made_for, outside = (
        [one for one in found if STUDIES[one["study"]].outside is its] for its in (False, True)
    )
    lines = [HEAD, MADE_FOR.lstrip("\n"), *_part(made_for)]
    lines += [OUTSIDE, *_part(outside)] if outside else []
    return "\n".join(lines).rstrip() + "\n" + FOOT


def _part(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| study | package | kernel | checks failed | of |", "|---|---|---|---|---|"]
    for each in found:
        package = f"{each['package']} {each['version']}"
        applied = [one for one in each.get("checks", []) if one["applies"]]
        failed = ", ".join(one["name"] for one in applied if not one["ok"]) or "none"
        cell = f"not run: {each['cannot_run']}" if "cannot_run" in each else failed
        name = f"[{each['study']}](#{each['study']})" if _failed(each) else each["study"]
        lines.append(f"| {name} | {package} | {each['kernel']} | {cell} | {len(applied)} |")
    for each in filter(_failed, found):
        note = STUDIES[each["study"]].note
        lines += ["", f"### {each['study']}", "", _run_of(each), "", *([note, ""] if note else [])]
        lines += [f"- **{one['name']}**: {_text(one)}" for one in _failed(each)]
    return lines


def _failed(each: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in each.get("checks", []) if not one["ok"]]


def _run_of(each: dict[str, Any]) -> str:
    claims = "".join(f" --{key} {','.join(value)}" for key, value in each["claims"].items())
    command = f"`ringlab check peer:{each['peer']} --quick{claims}`"
    where = f"torch {each['torch']}, Python {each['python']}, {each['date']}"
    return f"{command}: {each['runs']} runs, seed {each['seed']}, {where}."


def _text(one: dict[str, Any]) -> str:
    smallest = f" Smallest: {one['counterexample']}." if one["counterexample"] else ""
    return f"{one['evidence']}.{smallest}".replace("<", "&lt;").replace("|", "\\|")


def main(file: Path, to: Path, names: Sequence[str]) -> int:
    """Run the studies, all by default, and write their file and the page.

    Return 1 if a package is missing.
    """
    found = read(file) if file.exists() else {}
    missing = 0
    for name in names or STUDIES:
        try:
            result = study(STUDIES[name])
        except BackendError as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing = 1
            continue
        found[name] = result
        file.write_text(json.dumps(list(found.values()), indent=2) + "\n", encoding="utf-8")
        failed = [one["name"] for one in result.get("checks", []) if not one["ok"]]
        print(f"{name}: {result.get('cannot_run') or ', '.join(failed) or 'all passed'}", flush=True)
    to.write_text(page([found[name] for name in STUDIES if name in found]), encoding="utf-8")
    return missing


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the findings in a file, by the study's name."""
    return {each["study"]: each for each in json.loads(file.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
