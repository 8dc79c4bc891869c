"""One fork server serves many launches, and gives each rank the environment of its launch.

The server survives failing forks and unwanted ranks, and ends with its parent, even if a fork of the parent
lives on.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringlab import launch
from ringlab.comm.processes import fork_server
from ringlab.errors import CommError, RankFailedError
from tests.substrates.test_launch import alive, environment

pytestmark = pytest.mark.skipif(not fork_server.AVAILABLE, reason="ranks are forked on Linux only")


def parent(ring):
    return os.getppid()


def drawn(ring):
    return np.random.random(), random.random(), os.environ["LOCAL_RANK"]


def surroundings(ring):
    mask = os.umask(0)
    os.umask(mask)
    return os.getcwd(), os.environ.get("RINGLAB_TEST_VARIABLE"), os.environ["OMP_NUM_THREADS"], mask


def leaves_late(ring, folder):
    atexit.register(lambda: Path(folder, f"exit-{ring.rank}").touch())
    threading.Timer(0.2, Path(folder, f"thread-{ring.rank}").touch).start()
    print("the last line, without its end", end="")


def ends_the_server(ring):
    os.kill(os.getppid(), 9)
    threading.Event().wait(60)


def test_launches_share_a_server_also_from_threads_that_end() -> None:
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.extend(launch(parent, 2, memory=False).results))
        thread.start()
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0] != os.getpid()


def test_ranks_draw_different_numbers() -> None:
    first, second = launch(drawn, 2, memory=False).results
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert (first[2], second[2]) == ("0", "1")


def test_a_rank_has_the_directory_the_environment_and_the_mask_of_files_of_its_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(surroundings, 1, memory=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGLAB_TEST_VARIABLE", "new")
    before = os.umask(0o077)
    try:
        found = launch(surroundings, 1, threads=2, memory=False).results
    finally:
        os.umask(before)
    assert found == [(str(tmp_path), "new", "2", 0o077)]


def test_a_rank_ends_like_any_python_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    launch(leaves_late, 2, str(tmp_path), memory=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit-0", "exit-1", "thread-0", "thread-1"]
    assert capfd.readouterr().out.count("the last line, without its end") == 2


def test_ranks_end_with_their_server_and_the_next_launch_has_another() -> None:
    [before] = launch(parent, 1, memory=False).results
    with pytest.raises(RankFailedError, match="killed by signal SIGKILL"):
        launch(ends_the_server, 2, memory=False)
    [after] = launch(parent, 1, memory=False).results
    assert after not in (before, os.getpid())


def test_a_server_ends_when_nothing_refers_to_it() -> None:
    server = fork_server.ForkServer(dict(os.environ))
    process = server.process
    assert server.serves(dict(os.environ))
    assert not server.serves({**os.environ, "RINGLAB_TEST_VARIABLE": "new"})
    del server
    assert process.poll() is not None


FAILING = """
import errno, os
fork, calls = os.fork, []
def failing():
    calls.append(1)
    if len(calls) == 2:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = failing
from ringlab.comm.processes import fork_server
fork_server.main()
"""


def test_a_fork_that_fails_ends_its_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(fork_server, "_server", None)
    with monkeypatch.context() as patch:
        patch.setattr(
            fork_server.subprocess, "Popen", lambda _, **how: start([sys.executable, "-c", FAILING], **how)
        )
        [before] = launch(parent, 1, memory=False).results
    with pytest.raises(CommError, match="Resource temporarily unavailable"):
        launch(parent, 1, memory=False)
    assert launch(parent, 1, memory=False).results == [before]


def test_a_rank_that_nobody_wants_is_killed_and_its_server_serves_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "path.json")  # the rank would wait for ever for the other end of this pipe
    server = fork_server.running(dict(os.environ))
    rank = fork_server.ForkedProcess(server, tmp_path, 0)
    number = rank.pid
    assert alive(number)
    del rank
    deadline = time.monotonic() + 30
    while alive(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(number)
    assert server.serves(dict(os.environ))


ORPHANED = """
import os, signal, threading
from ringlab import launch
from ringlab.comm.processes import fork_server
def nothing(ring):
    pass
launch(nothing, 1, memory=False)
print(fork_server._server.process.pid, flush=True)
if os.fork() == 0:
    threading.Event().wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_server_ends_with_its_parent_also_if_a_fork_of_the_parent_lives_on(tmp_path: Path) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment(), text=True, stdout=subprocess.PIPE, start_new_session=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        server = int(process.stdout.readline())
        deadline = time.monotonic() + 30
        while alive(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = not alive(server)
        os.killpg(process.pid, signal.SIGKILL)
        assert ended
