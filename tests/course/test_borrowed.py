"""`check()` says it where a function leaves its work to ringlab or PyTorch, and says nothing of honest code."""

from __future__ import annotations

import json

import pytest

from ringlab_course import check
from ringlab_course.checking.borrowed import borrowed
from ringlab_course.checking.loading import exercise_ids, load_exercise
from tests.course.submissions_of import CHECKOUT, cases, submissions

USES = {
    "by name": "from ringlab import ring_attention\ndef f(x): return ring_attention(x, x, x)",
    "by module": "import ringlab\ndef f(x): return ringlab.oracle.attention(x, x, x)",
    "of the package": "import ringlab\ndef f(x): return ringlab.ring_attention(x, x, x)",
    "by another name": "from ringlab.oracle import attention as mine\ndef f(x): return mine(x, x, x)",
    "in a helper": "from ringlab import oracle\ndef g(x): return oracle.attention(x, x, x)\ndef f(x): return g(x)",
    "in a function inside": "from ringlab import oracle\ndef f(x): return [oracle.attention(y, y, y) for y in x]",
    "in a lambda": "from ringlab import oracle\ndef f(x): return (lambda y: oracle.attention(y, y, y))(x)",
    "imported inside": "def f(x):\n    from ringlab import oracle\n    return oracle.attention(x, x, x)",
    "imported inside, renamed": "def f(x):\n    import ringlab.oracle as o\n    return o.attention(x, x, x)",
    "the course's, imported inside": "def f(x):\n    from ringlab_course.checking.answers import shape\n    return shape(x)",
    "the course's, by its old name": "def f(x):\n    from ringlab.course.answers import shape\n    return shape(x)",
    "as an object": "import torch\nfrom ringlab.blocks import get_block\nBLOCK = get_block('naive', torch.ones(1, 1, 1, 1))\ndef f(x): return BLOCK.forward(x, x, x)",
    "merge": "from ringlab.merge import Partial, merge\ndef f(x): return merge(Partial(x, x), Partial(x, x))",
    "SDPA": "import torch\ndef f(x): return torch.nn.functional.scaled_dot_product_attention(x, x, x)",
    "SDPA by F": "import torch.nn.functional as F\ndef f(x): return F.scaled_dot_product_attention(x, x, x)",
    "SDPA by name": "from torch.nn.functional import scaled_dot_product_attention\ndef f(x): return scaled_dot_product_attention(x, x, x)",
    "an operator": "import torch\ndef f(x): return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)",
    "a module": "import torch\ndef f(x): return torch.nn.MultiheadAttention(4, 1)(x, x, x)[0]",
}  # fmt: skip
HONEST = {
    "a function of that name": "def scaled_dot_product_attention(q, k, v): return q\ndef f(x): return scaled_dot_product_attention(x, x, x)",
    "a layout": "from ringlab import contiguous\ndef f(x): return contiguous(4, 2)",
    "imports that it does not use": "import torch\nfrom ringlab import oracle, ring_attention\ndef f(x): return torch.softmax(x, -1)",
    "what the package has elsewhere": "def f(x):\n    from ringlab import Ring\n    from ringlab.errors import ShapeError\n    return Ring, ShapeError",
    "by an old name": "def f(x):\n    from ringlab.comm.faulty import Fault\n    from ringlab.course import corpus\n    return Fault, corpus.text",
    "calls itself": "def f(x): return f(x) if len(x) else x",
    "no function": "f = 3",
}  # fmt: skip


def told(source: str, exercise: str = "05") -> str:
    namespace: dict = {"__name__": "__main__"}
    exec(source, namespace)
    return borrowed(load_exercise(exercise), ["f"], namespace)


@pytest.mark.parametrize("use", USES)
def test_what_is_borrowed_is_seen(use) -> None:
    assert "about writing it" in told(USES[use])


@pytest.mark.parametrize("code", HONEST)
def test_honest_code_is_not_blamed(code) -> None:
    assert told(HONEST[code]) == ""


def test_exercises_differ_in_what_they_are_about() -> None:
    assert told(USES["merge"], "07") == told(USES["by module"], "10") == told(USES["SDPA"], "06") == ""
    bedside = "def f(x):\n    from ringlab.course.clinic.bedside import attend\n    return attend(x)"
    assert told(bedside, "16") == told(bedside.replace("ringlab.course", "ringlab_course"), "16") == ""
    assert told(bedside, "05") and told(bedside.replace("ringlab.course", "ringlab_course"), "05")
    assert told(USES["merge"], "02") and told(USES["by module"], "07") and told(USES["SDPA"], "03")
    assert told(HONEST["a layout"], "08") and not told(HONEST["a layout"], "07")


@pytest.mark.parametrize("exercise", cases(exercise_ids()))
def test_no_right_submission_and_no_solution_is_blamed(exercise) -> None:
    contract = load_exercise(exercise)
    functions = [name for stage in contract.stages for name in (stage.function, *stage.helpers)]
    sources = [right.source for right in submissions(f"{exercise}/right_*")]
    solution = CHECKOUT / "solutions" / f"{contract.slug}.ipynb"
    cells = [c for c in json.loads(solution.read_text())["cells"] if c["cell_type"] == "code"]
    imports = [line for cell in cells for line in cell["source"] if line.startswith(("import ", "from "))]
    sources.append(
        "".join(imports) + "\n" + "\n".join("".join(c["source"]) for c in cells if "grade" in c["metadata"])
    )
    for source in sources:
        namespace: dict = {"__name__": "__main__"}
        exec(source, namespace)
        assert borrowed(contract, functions, namespace) == ""


def test_check_tells_it(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    exec(
        "from ringlab import oracle\ndef attention(q, k, v, mask=None): return oracle.attention(q, k, v).out",
        namespace,
    )
    stage = load_exercise("01").stages[0]
    namespace[stage.function] = namespace["attention"]
    check(stage.id, namespace)
    said = capsys.readouterr().out
    assert "about writing it" in said and "ringlab.oracle.attention" in said and "✓" not in said
