"""Code in a worker cannot use answers from ringlab or PyTorch, but can use all that an exercise provides."""

from __future__ import annotations

import compileall
import contextlib
from dataclasses import replace

import pytest
import torch

from ringlab.checkout import find_checkout
from ringlab_course.builder.sources import targets
from ringlab_course.checking.contract import ATTENTION
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.forbidden import PACKAGES, OffLimits, makers_of_layouts
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.judge.judge import grade
from ringlab_course.judge.removal import HOME, hidden_paths, rewritten_files
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.borrowed import BORROWED, HONEST
from tests.course.judge.small_contract import EXERCISE, notebook

inside = pytest.mark.needs_bwrap

LAYOUTS = ("ringlab.layout.striped",)


LIMITS = {
    "all": OffLimits(about=LAYOUTS),
    "none": None,
    "some": OffLimits(("ringlab.merge", "ringlab.oracle", ATTENTION)),
    "one block": OffLimits(
        (
            *("ringlab.blocks.__init__", "ringlab.blocks.naive", "ringlab.blocks.protocol"),
            *("ringlab.merge", "ringlab.scores"),
        )
    ),
}
BLOCK = "from ringlab.blocks import get_block\ndef f(x): return get_block({!r}, x).forward(x, x, x, causal=False, scale=1.0).out"
COMPILED = (
    "import torch\n@torch.compile(dynamic=True)\ndef g(y): return y * 2\ndef f(x): return torch.compile(g)(x)"
)
MORE = {
    "compiled": COMPILED,
    "the naive block": BLOCK.format("naive"),
    "another block": BLOCK.format("blockwise"),
}


FROM_THE_DISK = {
    "the file of the layouts": """
def f(x):
    import glob, ringlab.layout as layout
    space = {"__name__": "ringlab.layout"}
    exec(compile(open(layout.__file__).read(), "again", "exec"), space)
    return space["striped"](4, 2).P
""",
    "byte code of the layouts": """
def f(x):
    import glob, marshal, os, ringlab.layout as layout
    space, folder = {"__name__": "ringlab.layout"}, os.path.dirname(layout.__file__)
    exec(marshal.loads(open(glob.glob(folder + "/__pycache__/layout.*.pyc")[0], "rb").read()[16:]), space)
    return space["striped"](4, 2).P
""",
    "another package's files": """
def f(x):
    import glob, sys
    return min(len(open(path).read()) for path in glob.glob(sys.prefix + "/lib/python3*/*-packages/transformers/__init__.py"))
""",
}


@pytest.fixture(scope="module")
def call():
    """Yield a function of (use, limits) that calls one of the sources in a worker with these limits.

    Calls with equal limits share a worker, because torch starts slowly.
    """
    sources = {**BORROWED, **MORE, **FROM_THE_DISK}
    cells = [text.replace("def f(", f"def f{number}(") for number, text in enumerate(sources.values())]
    names = [f"f{number}" for number in range(len(cells))]
    with contextlib.ExitStack() as stack:
        sessions = {}

        def called(use: str, limits: str):
            if limits not in sessions:
                session = Session(
                    cells, names, torch=True, limits=LIMITS[limits], seconds=60, total_seconds=600
                )
                sessions[limits] = stack.enter_context(session)
            name = names[list(sources).index(use)]
            return SandboxedSubject(sessions[limits], name).call(torch.ones(1, 1, 4, 4))

        yield called


@inside
@pytest.mark.parametrize("use", BORROWED)
def test_leaving_the_work_to_others_is_told_as_such(call, use) -> None:
    with pytest.raises(AssertionError, match="leaves the work to") as failure:
        call(use, "all")
    assert "put code of your own in its place" in failure.value.message


@inside
def test_honest_code_is_not_blamed() -> None:
    cells = [source.replace("def f(", f"def f{number}(") for number, source in enumerate(HONEST.values())]
    names = [f"f{number}" for number in range(len(cells))]
    with Session(cells, names, torch=True, limits=LIMITS["all"]) as session:
        for name in names:
            SandboxedSubject(session, name).call(torch.ones(1, 1, 4, 4))


@inside
@pytest.mark.parametrize(
    ("use", "limits"),
    [(use, "none") for use in ("SDPA", "its operator", "a layout", "merge", "MultiheadAttention")]
    + [(use, "some") for use in ("SDPA", "a layout", "merge")]
    + [("the naive block", "one block"), ("merge", "one block")],
)
def test_the_same_code_gets_its_answer_where_that_is_no_answer(call, use, limits) -> None:
    assert call(use, limits) is not None


@inside
@pytest.mark.parametrize("use", FROM_THE_DISK)
def test_what_is_off_limits_is_not_on_the_disk(call, use) -> None:
    if "another package" in use:
        pytest.importorskip("transformers")
    compileall.compile_file(HOME / "ringlab/layout.py", quiet=2)
    assert call(use, "none") > 0
    with pytest.raises(Crashed):
        call(use, "all")


def test_a_module_without_some_functions_has_the_others_and_its_classes() -> None:
    space: dict = {"__name__": "ringlab.layout"}
    text = rewritten_files(OffLimits(about=makers_of_layouts()))["ringlab/layout.py"]
    exec(compile(text, "rewritten", "exec"), space)
    assert space["Layout"](2, 1, "one", ((space["Run"](0, 1, 2),),)).positions(0).tolist() == [0, 1]
    assert not any(space[name.rpartition(".")[2]] for name in makers_of_layouts())
    assert not {"_dealt", "_per_document", "_runs_of_pieces", "_runs_of_offsets"} & space.keys()
    assert hidden_paths(OffLimits(without=("numpy",)))[-1].endswith("numpy")
    assert not rewritten_files(OffLimits())


@inside
def test_what_torch_would_compile_runs_as_it_is(call) -> None:
    assert float(call("compiled", "all").sum()) == 32


@inside
def test_torch_is_closed_where_it_is_imported_late() -> None:
    source = (
        "def f(x):\n    torch = __import__('importlib').import_module('torch')\n    x = torch.ones(1, 1, 4, 4)\n"
        "    return float(torch.nn.functional.scaled_dot_product_attention(x, x, x).sum())"
    )
    for limits in (None, LIMITS["all"]):
        with Session([source], ["f"], torch=False, limits=limits, seconds=60) as session:
            subject = SandboxedSubject(session, "f")
            if limits is None:
                assert subject.call(1) == 16
            else:
                with pytest.raises(AssertionError, match="leaves the work"):
                    subject.call(1)


@inside
def test_a_grade_says_why_and_earns_nothing(tmp_path) -> None:
    source = "from ringlab import oracle\ndef double(x):\n    return oracle.attention(x, x, x)"
    report = grade(notebook(tmp_path, source), EXERCISE)
    assert report.earned == 0 and "about writing it" in report.stages[0].checks[0].message
    report = grade(notebook(tmp_path, source), EXERCISE, unsafe=True)
    assert report.earned == 0 and "about writing it" in report.stages[0].checks[0].message


@inside
@pytest.mark.parametrize(("answer", "points"), [("np.add(x, x)", "all"), ("torch.add(x, x)", "none")])
def test_a_package_to_do_without_may_be_imported_and_not_used(tmp_path, answer, points) -> None:
    exercise = replace(EXERCISE, stages=EXERCISE.stages[:1], without=("torch",))
    source = f"import numpy as np\nimport torch\ntorch.manual_seed(0)\ndef double(x):\n    return {answer}"
    report = grade(notebook(tmp_path, source), exercise)
    assert report.earned == (exercise.points if points == "all" else 0), report
    assert points == "all" or "about writing it" in report.stages[0].checks[0].message


READS = """
import glob, os
def f(packages):
    found = []
    for package in packages:
        for path in glob.glob(package + "/**/*.*", recursive=True):
            try:
                found += [os.path.relpath(path, os.path.dirname(package))] * bool(open(path, "rb").read())
            except OSError:
                pass
    return found
"""


ANSWERS = (
    *(f"ringlab/{name}" for name in ("oracle", "attention", "plain_ring", "plan", "schedules", "blocks", "conformance")),
    *(f"ringlab_course/{name}" for name in ("exercises", "lessons", "checking/answers", "checking/reports", "clinic")),
    *(f"ringlab_course/{name}" for name in ("errata", "builder", "gradebook", "notebook/capstone", "notebook/visit")),
)  # fmt: skip


@inside
def test_neither_source_nor_byte_code_of_answers_is_there() -> None:
    # Byte code is written now, because a fresh checkout has none, and byte code that is written after the
    # worker's start would not be hidden.
    for package in PACKAGES:
        compileall.compile_dir(HOME / package, quiet=2)
    answers = {path.parent.name for path in (HOME / "ringlab_course/exercises").glob("*/wrong_answers.md")}
    assert len(answers) == len(exercise_ids())
    limits = OffLimits(("ringlab.merge",))
    with Session([READS], ["f"], torch=False, limits=limits) as session:
        found = SandboxedSubject(session, "f").call([str(HOME / package) for package in PACKAGES])
    modules = {path.replace("__pycache__/", "").partition(".")[0] for path in found}
    assert {"ringlab/merge", "ringlab/errors", "ringlab/layout", "ringlab_course/judge/worker"} <= modules
    assert not [module for module in modules if module.startswith(ANSWERS)]


@inside
@pytest.mark.parametrize("kernels", [True])
def test_a_worker_needs_nothing_that_is_hidden(kernels) -> None:
    source = "import sys\ndef f(): return sorted(n for n, m in sys.modules.items() if type(m).__name__ == '_Absent')"
    limits = OffLimits(kernels=kernels)
    with Session([source], ["f"], torch=True, kernels=kernels, limits=limits) as session:
        absent = SandboxedSubject(session, "f").call()
    assert absent == (
        ["ringlab.blocks"] if kernels else []
    )  # of `ringlab.blocks`, only `triton` is in the sandbox


@pytest.mark.parametrize("exercise", exercise_ids())
def test_what_exercises_name_exists(exercise) -> None:
    contract = load_exercise(exercise)
    for module in set(contract.may_use) - {ATTENTION}:
        path = HOME.joinpath(*module.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    for name in contract.about:
        module = __import__(name.rpartition(".")[0], fromlist=["x"])
        assert hasattr(module, name.rpartition(".")[2])
    limits = OffLimits(contract.may_use, contract.about)
    hidden = {
        "ringlab_course/exercises",
        "ringlab_course/lessons",
        "ringlab_course/checking/answers.py",
        "ringlab/schedules",
        "ringlab/attention.py",
    }
    assert hidden <= set(hidden_paths(limits)) and all((HOME / path).exists() for path in hidden)


MAY_USE = [each for each in exercise_ids() if load_exercise(each).may_use]


@pytest.mark.needs_bwrap
@pytest.mark.sweep(3)
@pytest.mark.parametrize("exercise_id", MAY_USE)
def test_what_an_allowed_module_imports_is_allowed(exercise_id: str) -> None:
    """A solution's notebook loads in the judge without a note, and passes the first check of each stage."""
    contract = load_exercise(exercise_id)
    stages = tuple(replace(stage, checks=stage.checks[:1]) for stage in contract.stages)
    (target,) = targets(find_checkout(), (f"solutions/{exercise_id}",))
    report = grade(target.path, replace(contract, stages=stages), seed=1)
    assert report.notes == () and all(check.ok for stage in report.stages for check in stage.checks)
