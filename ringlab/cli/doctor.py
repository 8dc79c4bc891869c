"""`ringlab doctor`: the parts of ringlab that work on this machine, and remedies for those that do not.

Triton's interpreter and its offline compiler are each probed in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from rich.table import Table
from rich.text import Text

from ringlab.cli.output import Json, finish, people, print_json
from ringlab.errors import BackendError, MissingExtraError, RinglabError, require_package

INTERPRETER = "from ringlab.blocks.triton.interpreter import repair; assert repair(); import triton; print(triton.__version__)"
ASSEMBLERS = (
    "from triton.backends.nvidia.compiler import get_ptxas; from ringlab.blocks.triton.configs import COMPILED; "
    "print('; '.join(a + ' ' + get_ptxas(int(a.removeprefix('sm_'))).version for a in COMPILED))"
)


def no_triton() -> str | None:
    """Return the reason why kernels can be neither compiled nor interpreted on this machine, or None."""
    if importlib.util.find_spec("triton") is not None:
        return None
    here = f"{platform.system()} on {platform.machine()}, without it"
    return f"needs the package triton: {here}; its packages are for Linux on x86-64"


def ask(code: str, interpret: bool) -> tuple[bool, str]:
    """Return whether `code` ran in a fresh Python process, and the last line of its output or its error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said = done.stdout if done.returncode == 0 else done.stderr
    return done.returncode == 0, next(iter(said.strip().splitlines()[::-1]), "it said nothing")


@dataclass(frozen=True)
class Diagnosis:
    """One finding: `state` is ok, missing (something optional) or broken (something needed)."""

    name: str
    state: str
    found: str
    remedy: str = ""


def doctor(as_json: Json = False) -> None:
    """Report what works on this machine, what does not, and how to fix it.

    Exits 1 only if something needed is broken.
    """
    findings = list(examine())
    ok = all(finding.state != "broken" for finding in findings)
    if as_json:
        print_json({"ok": ok, "checks": [asdict(finding) for finding in findings]})
        finish(ok)
    marks = {"ok": Text("✓", "green"), "missing": Text("–", "yellow"), "broken": Text("✗", "red")}
    table = Table("", "what", "found", "remedy", show_lines=False)
    for finding in findings:
        table.add_row(marks[finding.state], finding.name, finding.found, finding.remedy)
    people.print(table)
    people.print("✓ works   – optional, not here   ✗ needed, does not work")
    finish(ok)


def examine() -> Iterator[Diagnosis]:
    """Yield the findings one by one. If a probe crashes, the crash is a finding."""
    for name, probe in {**PROBES, **_blocks(), **_transports(), **_contributed()}.items():
        try:
            yield probe(name)
        except MissingExtraError as error:
            yield Diagnosis(name, "missing", f"{error.needed}: {error.got}", error.remedy)
        except Exception as error:  # a broken installation must not stop the doctor
            remedy = "install the locked versions: make lab"
            yield Diagnosis(name, "broken", f"{type(error).__name__}: {error}", remedy)


def _python(name: str) -> Diagnosis:
    state = "ok" if (3, 11) <= sys.version_info < (3, 14) else "broken"
    return Diagnosis(
        name, state, platform.python_version(), "" if state == "ok" else "use Python 3.11 to 3.13"
    )


def _machine(name: str) -> Diagnosis:
    return Diagnosis(name, "ok", f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}")


def _torch(name: str) -> Diagnosis:
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Diagnosis(name, "broken", torch.__version__, "pip install 'torch>=2.11'")
    return Diagnosis(name, "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _package(name: str) -> Diagnosis:
    return Diagnosis(name, "ok", importlib.metadata.version(name))


def optional(extra: str, user: str) -> Callable[[str], Diagnosis]:
    """Return a probe for the package `name`, which the extra `extra` installs and which `user` needs."""

    def probe(name: str) -> Diagnosis:
        require_package(name, extra, user)
        return _package(name)

    return probe


def _triton(name: str) -> Diagnosis:
    if reason := no_triton():
        return Diagnosis(name, "missing", reason, "lessons 04 and 12 and their tests need it")
    return Diagnosis(name, "ok", importlib.metadata.version(name))


def _interpreter(name: str) -> Diagnosis:
    if reason := no_triton():
        return Diagnosis(name, "missing", reason, "kernels cannot run on this CPU")
    works, said = ask(INTERPRETER, interpret=True)
    if not works:
        return Diagnosis(name, "missing", said, "install the locked versions: make lab")
    return Diagnosis(
        name, "ok", f"runs kernels on this CPU, exactly (triton {said}), under TRITON_INTERPRET=1"
    )


def _assemblers(name: str) -> Diagnosis:
    if reason := no_triton():
        return Diagnosis(name, "missing", reason, "`ringlab kernels --offline` cannot run")
    works, said = ask(ASSEMBLERS, interpret=False)
    if not works:
        return Diagnosis(
            name, "missing", said, "reinstall triton, or name the assembler in TRITON_PTXAS_PATH"
        )
    return Diagnosis(name, "ok", f"ptxas for {said}")


def _gpus(name: str) -> Diagnosis:
    import torch

    from ringlab.bench.device import no_cuda

    if reason := no_cuda():
        skipped = "tests/gpu, `ringlab bench kernels`, `bench ring` and `tune` are skipped"
        return Diagnosis(name, "missing", reason, f"{skipped}; every lesson runs on a CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Diagnosis(name, "ok", ", ".join(names))


def _hour(name: str) -> Diagnosis:
    import torch

    from ringlab.bench.device import no_cuda
    from ringlab.bench.hour import available
    from ringlab.checkout import find_checkout

    if reason := no_cuda():
        return Diagnosis(name, "missing", reason, "not needed: it tests and measures on GPUs")
    try:
        find_checkout()
    except RinglabError as error:
        return Diagnosis(name, "missing", error.got, error.remedy)
    can, others = available(torch.cuda.device_count())
    found = f"{len(can)} of {len(can) + len(others)} steps"
    if others:
        found += f"; not {', '.join(step.name for step in others)}, which need {others[0].gpus} GPUs"
    # An optional step has the name of the block that it tests.
    absent = [step.name for step in can if step.optional and _block(_BLOCK + step.name).state != "ok"]
    if absent:
        found += f"; skipped: {', '.join(absent)}, whose libraries are not here or do not support this GPU"
    return Diagnosis(name, "ok", found)


def _fonts(name: str) -> Diagnosis:
    require_package("matplotlib", "figures", "figures")
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans", fallback_to_default=False))
    absent = [sign for sign in "→×−·∞Σ" if font.get_char_index(ord(sign)) == 0]
    if absent:
        return Diagnosis(name, "broken", f"DejaVu Sans lacks {' '.join(absent)}", "reinstall matplotlib")
    return Diagnosis(name, "ok", "DejaVu Sans, with the signs that figures use")


def _peers(name: str) -> Diagnosis:
    modules = ("ring_attention_pytorch", "ring_flash_attn", "yunchang")
    for module in modules:
        require_package(module, "peers", "ringlab check peer:NAME")
    return Diagnosis(name, "ok", ", ".join(modules))


def _blocks() -> dict[str, Callable[[str], Diagnosis]]:
    """Return a probe for each block backend that needs a GPU. The probes of triton are more thorough."""
    return {_BLOCK + name: _block for name in ("cudnn", "flash", "flex")}


def _block(name: str) -> Diagnosis:
    import torch

    from ringlab.bench.device import no_cuda
    from ringlab.blocks import get_block
    from ringlab.blocks.flash import VERSIONS

    remedy, versions = "not needed: block='auto' runs everywhere", {block.name: block for block in VERSIONS}
    if reason := no_cuda():
        return Diagnosis(name, "missing", reason, remedy)
    try:
        q = torch.empty(1, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
        named = name.removeprefix(_BLOCK)
        chosen = get_block(versions.get(named, named), q)
    except BackendError as error:
        return Diagnosis(name, "missing", error.needed, remedy)
    return Diagnosis(name, "ok", f"{chosen.name} can run here")


def _transports() -> dict[str, Callable[[str], Diagnosis]]:
    """Return a probe for each transport between processes except gloo, which has a more thorough probe."""
    try:
        from ringlab.comm.processes.connect import available
    except ImportError:
        return {}

    def probe(name: str) -> Diagnosis:
        reason = available()[name.removeprefix(_TRANSPORT)]
        if reason is None:
            return Diagnosis(name, "ok", "can run here")
        return Diagnosis(name, "missing", reason, "not needed: transport='gloo' runs everywhere")

    return {_TRANSPORT + name: probe for name in available() if name != "gloo"}


def _contributed() -> dict[str, Callable[[str], Diagnosis]]:
    """Return the probes of other packages.

    Such packages are optional, so one that fails to import is "missing".
    """
    found: dict[str, Callable[[str], Diagnosis]] = {}
    for entry in importlib.metadata.entry_points(group="ringlab.probes"):
        try:
            found |= entry.load()
        except ImportError as error:
            found[f"probes of the {entry.name}"] = partial(_absent, error)
    return found


def _absent(error: ImportError, name: str) -> Diagnosis:
    return Diagnosis(name, "missing", str(error), "install ringlab anew")


def _operators(name: str) -> Diagnosis:
    import torch

    from ringlab.blocks import get_block

    q = torch.ones(1, 1, 4, 16)
    get_block("native", q).forward(q, q, q, causal=True, scale=0.25)
    return Diagnosis(name, "ok", "returns out and lse")


def _gloo(name: str) -> Diagnosis:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Diagnosis(name, "broken", "torch was built without gloo", "install torch from PyPI")
    with socket.create_server(("127.0.0.1", 0)):
        return Diagnosis(name, "ok", "available, and 127.0.0.1 can be listened on")


_BLOCK, _TRANSPORT = "block ", "transport "
PROBES: dict[str, Callable[[str], Diagnosis]] = {
    "Python": _python,
    "machine": _machine,
    "torch": _torch,
    "numpy": _package,
    "triton": _triton,
    "interpreter of triton": _interpreter,
    "compiler for absent GPUs": _assemblers,
    "GPUs": _gpus,
    "make gpu": _hour,
    "flash operators of torch": _operators,
    "gloo": _gloo,
    "fonts": _fonts,
    "transformers": optional("hf", "ringlab.hf"),
    "peers": _peers,
}
