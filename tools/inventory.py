"""An inventory of everything that a large change must keep: `python tools/inventory.py > before.json`.

It lists each stage's checks, misconceptions and hints; each right and wrong answer with a digest of its code;
each wrong ring with the check that finds it; the tables of cases; every public function, class and method
with its module and parameters; the commands with their help; the last committed verdict on each wrong answer;
and a digest of each picture.
`--compare before.json` prints each line that differs from an earlier inventory.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def inventory() -> dict[str, str]:
    """Return one line of text for each item, by a name that says to which part it belongs."""
    parts = (
        exercises,
        answers,
        wrong_rings,
        tables,
        public_names,
        commands,
        clinic,
        errata,
        verdicts,
        pictures,
    )
    return dict(item for part in parts for item in part())


def exercises() -> Iterator[tuple[str, str]]:
    """Yield stages, checks, misconceptions and hints."""
    from ringlab_course.checking.loading import exercise_ids, load_exercise

    for exercise_id in exercise_ids():
        exercise = load_exercise(exercise_id)
        yield f"exercise {exercise_id}", f"{exercise.title} · {exercise.points} points"
        for stage in exercise.stages:
            helpers = ", ".join(stage.helpers)
            yield f"stage {stage.id}", f"{stage.function} · {stage.title} · {stage.kind} · {helpers}"
            for number, hint in enumerate(stage.hints):
                yield f"hint {stage.id}:{number}", hint
            for number, check in enumerate(stage.checks):
                line = f"{number} · {check.points} · {check.tier} · {check.kind} · {check.title}"
                yield f"check {stage.id}:{check.id}", line
            for number, mistake in enumerate(stage.misconceptions):
                imitated = "imitated" if mistake.imitate else "not imitated"
                line = f"{number} · {imitated} · {mistake.message}"
                yield f"misconception {stage.id}:{mistake.name}", line


def answers() -> Iterator[tuple[str, str]]:
    """Yield right and wrong answers: the check that has to find each wrong one, and a digest of the code."""
    from ringlab_course.checking.loading import exercise_ids
    from ringlab_course.checking.wrong_answers import right_answers, wrong_answers

    for exercise_id in exercise_ids():
        for name, source in right_answers(exercise_id).items():
            yield f"right {exercise_id}/{name}", code_digest(source)
        for wrong in wrong_answers(exercise_id):
            line = f"{wrong.finder} · {wrong.misconception or '-'} · {code_digest(wrong.source)}"
            yield f"wrong {exercise_id}/{wrong.name}", line


def wrong_rings() -> Iterator[tuple[str, str]]:
    """Yield the mutants of the conformance suite, with the check that finds each mutant."""
    from ringlab.conformance.mutants import MUTANTS

    for name, mutant in MUTANTS.items():
        yield (
            f"mutant {name}",
            f"{mutant.kind} · {mutant.found_by} · {', '.join(mutant.dtypes)} · {mutant.fault}",
        )


def tables() -> Iterator[tuple[str, str]]:
    """Yield layouts, masks and cases of the conformance table."""
    from ringlab.conformance import cases, checks

    for name in cases.LAYOUTS:
        yield f"layout {name}", ""
    for name in cases.MASKS:
        yield f"mask {name}", ""
    for number, case in enumerate(cases.covering()):
        yield f"case {number}", str(case)
    for name in checks.names():
        yield f"conformance check {name}", ""


def public_names() -> Iterator[tuple[str, str]]:
    """Yield the names that `import ringlab` offers, and the signatures of all public definitions."""
    import ringlab

    for name in ringlab.__all__:
        yield f"name ringlab.{name}", ""
    for path in sorted(
        path for package in ("ringlab", "ringlab_course") for path in (CHECKOUT / package).rglob("*.py")
    ):
        if path.name == "exercise.py" or path.parent.name in ("lessons", "right"):
            continue
        module = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
        yield from definitions(ast.parse(path.read_text(encoding="utf-8")).body, module)


def definitions(body: list[ast.stmt], place: str, in_class: bool = False) -> Iterator[tuple[str, str]]:
    """Yield public functions with their parameters, and public classes with bases, fields and methods."""
    for node in body:
        if in_class and isinstance(node, ast.AnnAssign):
            yield f"definition {place}.{ast.unparse(node.target)}", ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"definition {place}.{node.name}", f"({ast.unparse(node.args)})"
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"definition {place}.{node.name}", ", ".join(map(ast.unparse, node.bases))
            yield from definitions(node.body, f"{place}.{node.name}", in_class=True)


def commands() -> Iterator[tuple[str, str]]:
    """Yield every command of the command line with its options and their help."""
    import typer.main

    from ringlab.cli import app

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        yield f"command {' '.join(words)}", " ".join((command.help or "").split())
        for option in command.params:
            yield f"command {' '.join(words)} {option.opts[0]}", str(getattr(option, "help", "") or "")
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield from walk(inner, (*words, name))

    yield from walk(typer.main.get_command(app), ("ringlab",))


def clinic() -> Iterator[tuple[str, str]]:
    """Yield the patients of the clinic with digests of their programs."""
    from ringlab_course.clinic.field import FIELD
    from ringlab_course.clinic.patients import PATIENTS

    for name, patient in (PATIENTS | FIELD).items():
        yield f"patient {name}", f"{patient.complaint} · {code_digest(patient.source)}"


def errata() -> Iterator[tuple[str, str]]:
    """Yield the claims of the errata."""
    from ringlab_course.errata.collection import GROUPS

    for group in GROUPS:
        for entry in group.entries:
            yield f"erratum {entry.title}", " ".join(figure.key for figure in entry.figures)


def verdicts() -> Iterator[tuple[str, str]]:
    """Yield, for each wrong answer in the kill matrix, the checks that found it and their messages."""
    matrix = CHECKOUT / "benchmarks" / "results" / "judge" / "kill_matrix.json"
    for name, entry in json.loads(matrix.read_text(encoding="utf-8"))["entries"].items():
        kept = {
            key: value for key, value in entry.items() if key not in ("submission", "contract", "seconds")
        }
        yield f"verdict {name}", json.dumps(kept, sort_keys=True, ensure_ascii=False)


def pictures() -> Iterator[tuple[str, str]]:
    """Yield a digest of each picture in the notebooks and of each SVG file in docs and tools."""
    for path in sorted(path for folder in ("docs", "tools") for path in (CHECKOUT / folder).rglob("*.svg")):
        yield f"picture {path.relative_to(CHECKOUT)}", hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for folder in ("notebooks", "exercises", "solutions"):
        for path in sorted((CHECKOUT / folder).glob("*.ipynb")):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
            images = [data[kind] for data in outputs for kind in sorted(data) if kind.startswith("image/")]
            for number, image in enumerate(images):
                yield (
                    f"picture {folder}/{path.stem}:{number}",
                    hashlib.sha256("".join(image).encode()).hexdigest()[:16],
                )


def code_digest(source: str) -> str:
    """Return a digest of a program that ignores comments, docstrings and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def main() -> None:
    """Print the inventory, or its differences from an earlier one; exit with status 1 if there are any."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print differences from this inventory")
    before = parser.parse_args().compare
    sys.path.insert(0, str(CHECKOUT))
    now = inventory()
    if before is None:
        print(json.dumps(now, indent=1, ensure_ascii=False))
        return
    then = json.loads(before.read_text(encoding="utf-8"))
    lines = [f"- {name}: {then[name]}" for name in then if name not in now]
    lines += [f"+ {name}: {now[name]}" for name in now if name not in then]
    lines += [
        f"~ {name}\n    {then[name]}\n    {now[name]}"
        for name in then
        if name in now and then[name] != now[name]
    ]
    print("\n".join(lines) or "nothing differs")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
