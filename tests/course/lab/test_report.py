"""The page of lab results ranks correct entrants by score, can show hostile files, and loads nothing."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from ringlab.checkout import find_checkout
from ringlab.errors import LabError
from ringlab_course.gradebook.plots import inline_svg
from ringlab_course.lab.report import leaderboard, report
from ringlab_course.lab.result import load, load_all
from tests.viz.test_style import illegible

HEADER: dict[str, Any] = {
    "format": 1, "lab": "l3", "title": "make it faster", "label": "2 gloo processes: no GPU took part",
    "transport": "gloo", "settings": {"target": "a:b", "S": 64, "rounds": 2}, "ranks": [{"id": "x"}],
    "machine": {"processor": "a processor", "gpus": []}, "code": {"ringlab": "0"}, "topology": "",
    "preflight": [{"name": "memory", "told": "enough"}],
}  # fmt: skip


def contest(scores: dict[str, float], wrong: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    def one(name: str, score: float) -> dict[str, Any]:
        error = 0.5 if name in wrong else 1e-7
        return {"correct": name not in wrong, "errors": {"out": error}, "bounds": {"out": 1e-6},
                "median_s": 1 / score, "score": score, "times_s": [1 / score]}  # fmt: skip

    return [
        {"case": "contest", "P": 2, "S": 64, "pass": of, "contenders": {n: one(n, s) for n, s in scores.items()}}
        for of in ("forward", "forward_backward")
    ]  # fmt: skip


def result(target: str, cases: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(HEADER) | {"cases": cases, "finished": True, "ended_by": ""} | changes
    made["settings"]["target"] = target
    return made


RESULTS = {
    Path("fast.json"): result("a:fast", contest({"ringlab": 1.0, "a:fast": 1.3})),
    Path("slow.json"): result("a:slow", contest({"ringlab": 1.0, "a:slow": 0.4})),
    Path("wrong.json"): result("a:wrong", contest({"ringlab": 1.0, "a:wrong": 9.0}, wrong=("a:wrong",))),
    Path("dead.json"): result("a:dead", [], finished=False, ended_by="PeerDiedError: rank 1 ended"),
}


def test_places_are_by_score_among_those_that_are_right() -> None:
    (board,) = leaderboard(RESULTS)
    assert [each["name"] for each in board["ranked"]] == ["a:fast", "ringlab", "a:slow"]
    why = {each["name"]: each["why"] for each in board["wrong"]}
    assert set(why) == {"a:wrong", "a:dead"}
    assert "out off by 0.5" in why["a:wrong"] and "rank 1 ended" in why["a:dead"]


def test_one_lucky_run_does_not_rank_an_entrant_that_was_wrong_in_another() -> None:
    lucky = result("a:race", contest({"ringlab": 1.0, "a:race": 2.0}))
    unlucky = result("a:race", contest({"ringlab": 1.0, "a:race": 2.5}, wrong=("a:race",)))
    ended = result("a:race", [], finished=False, ended_by="PeerDiedError")
    for runs in ((lucky, unlucky, ended), (unlucky, ended, lucky)):
        (board,) = leaderboard({Path(f"{number}.json"): run for number, run in enumerate(runs)})
        assert [each["name"] for each in board["ranked"]] == ["ringlab"]
        assert "out off by 0.5" in board["wrong"][0]["why"]
    (board,) = leaderboard({Path("lucky.json"): lucky, Path("ended.json"): ended})
    assert [each["name"] for each in board["ranked"]] == ["a:race", "ringlab"]


@pytest.mark.parametrize("score", ["NaN", "Infinity"])
def test_a_score_that_is_no_number_is_not_ranked(score: str) -> None:
    odd = result("a:odd", contest({"ringlab": 1.0, "a:odd": 2.0}))
    for case in odd["cases"]:
        case["contenders"]["a:odd"]["score"] = score
    (board,) = leaderboard({Path("odd.json"): odd})
    assert [each["name"] for each in board["ranked"]] == ["ringlab"]
    assert board["wrong"][0]["why"] == "its score is no number"


def test_a_file_that_says_of_itself_that_it_is_right_is_not_believed() -> None:
    lies = result("a:lies", contest({"ringlab": 1.0, "a:lies": 9.0}, wrong=("a:lies",)))
    for case in lies["cases"]:
        case["contenders"]["a:lies"]["correct"] = True
    nan = result("a:nan", contest({"ringlab": 1.0, "a:nan": 9.0}))
    for case in nan["cases"]:
        case["contenders"]["a:nan"]["errors"]["out"] = "NaN"
    (board,) = leaderboard({Path("lies.json"): lies, Path("nan.json"): nan})
    assert [each["name"] for each in board["ranked"]] == ["ringlab"]


def test_other_machines_and_other_work_have_boards_of_their_own() -> None:
    other = result("a:fast", contest({"ringlab": 1.0, "a:fast": 2.0}))
    other["machine"]["processor"] = "another"
    longer = result("a:fast", contest({"ringlab": 1.0, "a:fast": 2.0}))
    longer["settings"]["S"] = 128
    assert len(leaderboard({Path("1"): RESULTS[Path("fast.json")], Path("2"): other, Path("3"): longer})) == 3


def test_the_page_shows_all_runs_and_loads_nothing() -> None:
    page, left_out = report(RESULTS)
    assert not left_out
    assert "Not finished" in page and "PeerDiedError" in page and "no GPU took part" in page
    # so a phone scrolls each table
    assert page.count("<table") == len(re.findall(r'<div class="scroll"[^>]*><table', page))
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page) and "<script" not in page


def test_names_cannot_steer_the_page() -> None:
    evil = "<script>alert(1)</script>"
    page, _ = report({Path("e.json"): result(evil, contest({"ringlab": 1.0, evil: 2.0}), label=evil)})
    assert "<script>" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "text",
    ["",'{"lab": "l1", "format": 2}', '{"lab": "l1", "format": 1}',
"[" * 100_000],
)  # fmt: skip
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(LabError):
        load(path)


def change(path: str, value: Any) -> dict[str, Any]:
    """Return a result with one value changed; `path` is its keys joined by dots."""
    made = copy.deepcopy(result("a:odd", contest({"ringlab": 1.0, "a:odd": 2.0})))
    *way, last = path.split(".")
    at: Any = made
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return made


L1 = {**HEADER, "lab": "l1", "finished": True, "ended_by": "", "settings": {}}
L2 = {**L1, "lab": "l2"}
SCALING = {"case": "scaling", "scaling": "weak", "P": 2, "S": 8, "pass": "forward_backward"}
ODD = {
    "no target": change("settings.target", None),
    "GPUs that are numbers": change("machine.gpus", [1]),
"contenders that are a list": change("cases.0.contenders", [1]),
    "a score that is a word": change("cases.1.contenders.a:odd.score", "abc"),
    "a case that is a word": change("cases", ["word"]),
    "too many bytes": {**L1, "cases": [{"case": "bandwidth", "bytes": 10**400, "median_s": 1.0, "bytes_per_s": 1.0}]},
    "mathematics that is none": {**L2, "cases": [{**SCALING, "scaling": "$\\bad$", "contenders": {"a": {
        "median_s": 1.0, "efficiency": 1.0, "tflops_per_rank": 1.0, "correct": True}}}]},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_file_is_named_on_the_page_and_the_others_are_shown(odd: str) -> None:
    page, left_out = report({Path("odd.json"): ODD[odd], **RESULTS})
    assert list(left_out) == [Path("odd.json")] and left_out[Path("odd.json")]
    assert "<b>Left out</b>" in page and "odd.json" in page and "a:fast" in page and "Leaderboard" in page


def overlapped(hidden: float) -> dict[str, Any]:
    times = {"compute_s": 1.0, "exchange_s": 1.0, "both_s": 2 - hidden}
    return {**L1, "cases": [{"case": "overlap", "tokens": 512, "hidden": hidden, **times}]}


def scaled(efficiency: float) -> dict[str, Any]:
    ring = {"median_s": 1.0, "efficiency": efficiency, "tflops_per_rank": 1.0, "correct": True}
    return {**L2, "cases": [{**SCALING, "contenders": {"zigzag": ring}}]}


@pytest.mark.parametrize(
    ("run", "marked"),
    [
        (overlapped(1.96), "1.96 ⚠"),
        (overlapped(-1.37), "-1.37 ⚠"),
        (overlapped(1.0), ""),
        (overlapped(0.0), ""),
        (scaled(1.6), "1.600 ⚠"),
        (scaled(0.98), ""),
    ],
)
def test_figures_that_cannot_be_right_are_marked(run: dict[str, Any], marked: str) -> None:
    page, _ = report({Path("run.json"): run})
    assert ("cannot be right" in page, marked in page) == (bool(marked), True)


def test_each_run_is_named_by_its_file_and_by_the_doubts_of_preflight() -> None:
    """The page shows both, because the runs of several groups may differ in nothing else."""
    doubt = {"name": "nobody else", "told": f"load 9.0 on 2 cores of {'node' * 20}", "doubtful": True}
    doubted = {**overlapped(1.0), "preflight": [*HEADER["preflight"], doubt]}
    page, _ = report(
        {Path("results/group-1/l1.json"): overlapped(1.0), Path("results/group-2/l1.json"): doubted}
    )
    first, second = page.split("<section")[1:]
    assert "results/group-1/l1.json" in first and "Before it began" not in first
    assert "results/group-2/l1.json" in second and f"Before it began: {doubt['told']}" in second


def test_the_words_of_every_plot_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word overlaps another one in the plots of recorded runs, nor in plots whose ticks are a GPU's longer lengths."""
    drawn: list[Figure] = []

    def noted(figure: Figure, *words: str) -> Markup:
        drawn.append(figure)
        return inline_svg(figure, *words)

    monkeypatch.setattr("ringlab_course.lab.report.inline_svg", noted)
    runs = load_all([find_checkout() / "benchmarks/results/lab"])[0]
    l1 = next(found for found in runs.values() if found["lab"] == "l1")
    long = [{**case, "tokens": 4 * case["tokens"]} if "tokens" in case else case for case in l1["cases"]]
    report({Path("l1.json"): l1, Path("gpu.json"): {**l1, "cases": long}, **runs})
    assert len(drawn) == 7 and [illegible(figure) for figure in drawn] == 7 * [[]]
    ticks = [
        [tick.get_text() for tick in figure.axes[0].get_xticklabels(which="both")]
        for figure in (drawn[1], drawn[3])
    ]
    assert ticks == [["256", "512", "1,024", "2,048"], ["1,024", "2,048", "4,096", "8,192"]]
