"""Triton's interpreter computes the same numbers as torch, bit for bit if torch defines the bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from ringlab.blocks.triton import interpreter as repairs
from ringlab.errors import BackendError

pytestmark = pytest.mark.needs_interpreter


@pytest.fixture(scope="module")
def checks() -> dict[str, Callable[[], None]]:
    from tests.blocks.interpreter_checks import CHECKS

    return CHECKS


@pytest.fixture(scope="module")
def interpreter() -> ModuleType:
    import triton.runtime.interpreter as found

    repairs.repair()
    return found


def test_every_repair_has_its_check(checks: dict[str, Callable[[], None]]) -> None:
    assert list(checks) == [entry.why for entry in repairs.REPAIRS]


@pytest.mark.parametrize("why", dict.fromkeys(entry.why for entry in repairs.REPAIRS))
def test_exact(why: str, checks: dict[str, Callable[[], None]]) -> None:
    checks[why]()


def test_again_changes_nothing(interpreter: ModuleType) -> None:
    def functions() -> list[object]:
        return [getattr(e.place(interpreter), e.function) for e in repairs.REPAIRS]

    before = functions()
    assert repairs.repair() and repairs.repair()
    assert functions() == before


def test_a_foreign_interpreter_is_refused_and_left_as_it_is() -> None:
    calls = SimpleNamespace(__call__=lambda self, args_dev: None)
    strange = SimpleNamespace(GridExecutor=calls, _patch_lang=lambda function: None)
    with pytest.raises(BackendError) as failure:
        repairs._replace(strange, "4.1.0")  # type: ignore[arg-type]
    assert "3.6 to 3.9" in failure.value.needed
    assert "Triton 4.1.0" in failure.value.got
    assert "InterpreterBuilder.create_dot" in failure.value.got  # it is gone
    assert "_patch_lang," in failure.value.got  # the parameter has another name
    assert "GridExecutor.__call__" not in failure.value.got
    assert set(vars(strange)) == {"GridExecutor", "_patch_lang"}


def run(code: str, **environment: str) -> str:
    full = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_happens_where_kernels_are_compiled() -> None:
    code = """
from ringlab.blocks.triton.interpreter import repair
import sys
print(repair(), "triton.runtime.interpreter" in sys.modules and hasattr(sys.modules["triton.runtime.interpreter"], "_ringlab_repaired"))
"""
    assert run(code) == "False False"


def test_the_variable_must_be_set_before_triton_is_imported() -> None:
    code = """
import os, triton.language
from ringlab.blocks.triton.interpreter import repair
from ringlab.errors import BackendError
os.environ["TRITON_INTERPRET"] = "1"
try:
    repair()
except BackendError as error:
    print(error.remedy)
"""
    assert "before Python starts" in run(code)
