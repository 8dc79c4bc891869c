"""Fixtures for the two kinds of workers: forked by a server, the usual kind, or started in a new sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from ringlab_course.judge import probe, process, servers
from ringlab_course.judge.session import SandboxedSubject, Session

Ask: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="module", params=[True, False], ids=["forked", "started"])
def forked(request: pytest.FixtureRequest) -> bool:
    """Return True for a test with a forked worker, and False for a test with a started one."""
    return request.param


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[servers._Servers]:
    """Yield fork servers for this test alone, and forget the failures to fork that other tests recorded."""
    own = servers._Servers()
    monkeypatch.setattr(servers, "_servers", lambda pid: own)
    monkeypatch.setattr(process, "_UNFORKED", {})
    probe.probe.cache_clear()
    yield own
    own._end()
    probe.probe.cache_clear()


@contextmanager
def asked(source: str, functions: Sequence[str], forked: bool, **options: Any) -> Iterator[Ask]:
    """Yield a function of (name, *args) that calls the function `name` of `source` in a worker.

    forked: whether the worker is forked or started.
    """
    with Session([source], functions, torch=False, **options) as session:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_UNFORKED", {} if forked else {"numpy": "a test"})
            (worker,) = session.workers(1)
        assert worker.forked == forked
        yield lambda name, *args: SandboxedSubject(session, name).call(*args)
