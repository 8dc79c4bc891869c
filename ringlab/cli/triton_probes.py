"""What Triton can do on this machine: its interpreter, and its compiler without a GPU. Each asked in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys

INTERPRETER = "from ringlab.blocks.triton.interpreter import repair; assert repair(); import triton; print(triton.__version__)"
ASSEMBLERS = (
    "from triton.backends.nvidia.compiler import get_ptxas; from ringlab.blocks.triton.configs import COMPILED; "
    "print('; '.join(a + ' ' + get_ptxas(int(a.removeprefix('sm_'))).version for a in COMPILED))"
)


def no_triton() -> str | None:
    """Return why kernels can neither be compiled nor interpreted here, None if they can."""
    if importlib.util.find_spec("triton") is not None:
        return None
    here = f"{platform.system()} on {platform.machine()}, without it"
    return f"needs the package triton: {here}; its packages are for Linux on x86-64"


def ask(code: str, interpret: bool) -> tuple[bool, str]:
    """Return whether `code` ran in a fresh Python, and the last line it printed or the error it ended with."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said = done.stdout if done.returncode == 0 else done.stderr
    return done.returncode == 0, next(iter(said.strip().splitlines()[::-1]), "it said nothing")
