"""The programs, packages and devices that some tests need, and whether this machine has them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from tools.browser import chromium_path

REMEDY = "sudo apt-get update && sudo apt-get install -y "


def all_required() -> bool:
    """Return whether no test may be skipped, as in .ci/run."""
    return os.environ.get("RINGLAB_REQUIRE_ALL") == "1"


@cache
def missing_chromium() -> str | None:
    """Return why tests cannot drive a browser on this machine, or None if they can."""
    return None if chromium_path() else f"needs chromium: {REMEDY}chromium"


@cache
def missing_bwrap() -> str | None:
    """Return why the sandbox cannot run on this machine, or None if it can."""
    if shutil.which("bwrap") is None:
        return f"needs bubblewrap: {REMEDY}bubblewrap"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
    command += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "/usr/bin/true"]
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    return f"bubblewrap cannot make namespaces here ({probe.stderr.strip()}); `ringlab doctor` says how to mend it"


@cache
def missing_nbgrader() -> str | None:
    """Return why nbgrader cannot grade on this machine, or None if it can."""
    from ringlab.errors import MissingExtraError
    from ringlab_course.nbgrader import require_nbgrader

    try:
        require_nbgrader()
    except MissingExtraError as error:
        return f"needs nbgrader: {error.remedy}"
    return None


@cache
def missing_jax() -> str | None:
    """Return why JAX programs cannot run on simulated devices on this machine, or None if they can."""
    from ringlab_course.checking.requirements import extra_is_missing

    return extra_is_missing("jax") or None


@cache
def missing_cuda() -> str | None:
    """Return why programs cannot run on a GPU here, in `ringlab doctor`'s words, or None if they can."""
    from ringlab.bench.device import no_cuda  # imported late, because shape checks must be installed first

    return no_cuda()


@cache
def missing_two_gpus() -> str | None:
    """Return why two ranks cannot have a GPU each, in `ringlab doctor`'s words, or None if they can."""
    from ringlab.comm.processes.connect import available

    return available()["nccl"]


@cache
def missing_triton() -> str | None:
    """Return why kernels can be neither compiled nor interpreted on this machine, or None if they can."""
    from ringlab.cli.doctor import no_triton

    return no_triton()


@cache
def missing_interpreter() -> str | None:
    """Return why Triton's kernels cannot be interpreted on this machine, or None if they can."""
    if reason := missing_triton():
        return reason
    from ringlab.blocks.triton.interpreter import interpreting

    return (
        None
        if interpreting()
        else "kernels are compiled here: TRITON_INTERPRET=1 python -m pytest tests/blocks"
    )


MISSING: dict[str, Callable[[], str | None]] = {
    "needs_bwrap": missing_bwrap,
    "needs_chromium": missing_chromium,
    "needs_cuda": missing_cuda,
    "needs_interpreter": missing_interpreter,
    "needs_jax": missing_jax,
    "needs_nbgrader": missing_nbgrader,
    "needs_triton": missing_triton,
    "needs_two_gpus": missing_two_gpus,
}

MAY_BE_ABSENT = ("needs_cuda", "needs_two_gpus")
"""Needs that no package can meet. Their tests may be skipped even if all is required; the summary names them."""


def skip_what_is_missing(items: Iterable[pytest.Item], marks: Iterable[str]) -> None:
    """Skip the items with one of `marks` whose need is not met here, with the remedy as the reason."""
    items = list(items)
    for mark in marks:
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (reason := MISSING[mark]()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
