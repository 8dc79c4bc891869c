"""A reference to a target that is not there says which part of it, and what comes near; another's missing package is that."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlab import plain_ring
from ringlab.conformance.loading import resolve
from ringlab.errors import BackendError


@pytest.mark.parametrize(
    ("module", "name", "got", "remedy"),
    [
        ("ringlab.plain_rings", "attend", "no plain_rings in ringlab", "plain_ring"),
        ("ringlab.conformence.own", "attend", "no conformence in ringlab", "there is conformance"),
        ("rinlab.attention", "ring_attention", "no rinlab: neither in ", "there is ringlab"),
        ("qqqqqqqqqqqq", "ring", "no qqqqqqqqqqqq: neither in ", "begin in the folder that it lies in"),
        ("my_fodler.ring", "attend", "no my_fodler: neither in ", "there is my_folder"),
        ("ringlab.attention.ring_attention", "x", "ringlab.attention is one", "as in ringlab.attention:ring_attention"),
        ("ringlab.plain_ring", "atend", "nothing of that name", "there is attend"),
        ("my_folder/ring.py", "attend", "'my_folder/ring.py'", "as in my_folder.ring:function"),
        ("ring.py", "attend", "'ring.py'", "as in ring:function"),
        ("../ring", "attend", "'../ring'", "as in ring:function"),
        (".ring", "attend", "'.ring'", "as in package.module:function"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named_with_what_comes_near(
    module: str, name: str, got: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError) as caught:
        resolve(module, name)
    assert got in caught.value.got and remedy in caught.value.remedy


def test_what_is_there_is_found_in_a_class_too() -> None:
    assert resolve("ringlab.plain_ring", "attend") is plain_ring.attend
    assert resolve("pathlib", "Path.cwd")() == Path.cwd()


@pytest.mark.parametrize("imports", ["a_package_that_is_not_there", "wanting.sister"])
def test_a_package_that_the_target_needs_is_no_missing_target(
    imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanting").mkdir()
    (tmp_path / "wanting" / "__init__.py").write_text(f"import {imports}\n")
    (tmp_path / "wanting" / "ring.py").write_text("def attend(q, k, v):\n    return q\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=imports):
        resolve("wanting.ring", "attend")
