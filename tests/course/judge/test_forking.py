"""Workers that a server forks are isolated and import nothing. Without forking, each worker is started."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from ringlab.errors import SandboxError
from ringlab_course.judge import fork_server, process, sandbox, servers, spawn
from ringlab_course.judge.judge import grade
from ringlab_course.judge.process import WorkerProcess
from ringlab_course.judge.processes import children, descendants, status_text
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.session import SandboxedSubject, Session
from ringlab_course.judge.spawn import Forked, ForkServer
from tests.course.judge.conftest import asked
from tests.course.judge.small_contract import EXERCISE, RIGHT, forked_processes, led_through, notebook

pytestmark = pytest.mark.needs_bwrap
ALONE = """
import glob, os, random, socket, numpy as np
def leave(name):
    with open(f"/tmp/{name}", "w") as file:
        file.write(name)
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0left")
    server.listen()
    globals()["kept"] = server
def find():
    found = [*os.listdir("/tmp"), *os.listdir("/dev/pts"), *glob.glob("/proc/[3-9]*")]
    for name in ("/dev/ptmx", "/dev/shm/x"):
        try:
            found.append(open(name, "r+b"))
        except OSError:
            pass
    try:
        socket.socket(socket.AF_UNIX).connect("\\0left")
        found.append("a socket")
    except OSError:
        pass
    return list(map(str, found))
def mark_open_files():
    import fcntl
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)
            fcntl.fcntl(number, 10, 37)  # F_SETSIG
        except OSError:
            pass
def open_files():
    import fcntl
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found.append((fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND, fcntl.fcntl(number, 11)))  # F_GETSIG
        except OSError:
            pass
    return [marks for marks in found if any(marks)]
def first_process():
    found = []
    for name in ("mem", "environ", "fd", "cwd", "root"):
        try:
            found.append(os.listdir(f"/proc/1/{name}") if name == "fd" else open(f"/proc/1/{name}", "rb"))
        except OSError:
            pass
    for number in (2, 9, 15, 19):
        os.kill(1, number)
    return len(found)
def draws():
    return [random.random(), float(np.random.random())]
def where():
    return os.getcwd(), os.getppid(), os.getsid(0)
"""


def session(**options: object) -> Session:
    return Session(
        [ALONE],
        ["leave", "find", "first_process", "draws", "where", "mark_open_files", "open_files"],
        torch=False,
        **options,
    )


def test_workers_of_one_server_find_nothing_of_each_other() -> None:
    with session() as one, session() as other:
        SandboxedSubject(one, "leave").call("mark")
        mounted = led_through().get(Path("/tmp"), set())  # not empty if the checkout is below /tmp
        assert {*SandboxedSubject(one, "find").call()} == {*mounted, "mark", "a socket"}, (
            "what is looked for would be found"
        )
        assert {*SandboxedSubject(other, "find").call()} == mounted
        assert all(each._loaded[0].forked for each in (one, other))
        assert SandboxedSubject(one, "where").call() == ("/tmp", 1, 2)


def test_flags_of_open_files_are_no_wire_between_workers_or_submissions() -> None:
    with session() as one, session() as other:
        SandboxedSubject(one, "mark_open_files").call()
        assert SandboxedSubject(one, "open_files").call(), "what is looked for would be found"
        assert SandboxedSubject(other, "open_files").call() == []
    with session() as next_one:
        assert SandboxedSubject(next_one, "open_files").call() == []


def test_the_first_process_is_closed_to_the_worker_and_outlives_its_signals() -> None:
    with session() as held:
        assert SandboxedSubject(held, "first_process").call() == 0
        assert SandboxedSubject(held, "where").call()[1] == 1


def test_workers_draw_different_random_numbers() -> None:
    with session() as one, session() as other:
        drawn = [SandboxedSubject(each, "draws").call() for each in (one, other)]
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_the_end_of_a_worker_leaves_the_server_and_the_end_of_the_server_no_worker(own_servers) -> None:
    with WorkerProcess() as first, WorkerProcess() as second:
        first.ready()
        second.ready()
        (server,) = own_servers._kept.values()
        first.kill()
        assert not os.path.exists(f"/proc/{first.pid}") and os.path.exists(f"/proc/{second.pid}")
        assert server.alive() and server.workers == 1
        (inside,) = children(server._process.pid)
        assert second.pid in descendants(inside)
        os.kill(inside, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{second.pid}") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{second.pid}")
    with WorkerProcess() as third:
        third.ready()
        assert third.forked, "a server that has ended is started anew"


def test_a_worker_that_is_ended_before_it_is_one_leaves_nothing(own_servers) -> None:
    for _ in range(5):
        WorkerProcess().kill()
    with WorkerProcess() as last:
        last.ready()
        (server,) = own_servers._kept.values()
        deadline = time.monotonic() + 20
        wanted = {last.pid, last._init}
        while (left := forked_processes(server._process.pid)) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == wanted and server.workers == 1


def test_the_end_of_a_server_is_no_loss_of_the_submission(own_servers) -> None:
    with session() as held:
        assert SandboxedSubject(held, "where").call()[1] == 1
        (server,) = own_servers._kept.values()
        (inside,) = children(server._process.pid)
        os.kill(children(inside)[0], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{held._loaded[0].pid}") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(SandboxError, match="grade it again"):
            SandboxedSubject(held, "where").call()
        assert held.losses == 0


def test_an_order_that_fails_costs_no_other_worker(own_servers) -> None:
    with WorkerProcess() as first:
        first.ready()
        (server,) = own_servers._kept.values()
        server.socket.sendall(b"no order, and no descriptor")
        with WorkerProcess() as second:
            second.ready()
            assert second.forked and server.alive() and os.path.exists(f"/proc/{first.pid}")


def test_a_server_with_threads_forks_nothing(monkeypatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process with several threads was forked"))
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, pytest.raises(RuntimeError, match="one thread can be forked"):
            fork_server._carry_out(b"{}", ours, [theirs.fileno()])
    finally:
        over.set()
        thread.join()


def test_a_server_that_hangs_is_given_up(own_servers) -> None:
    with WorkerProcess() as first:
        first.ready()
    (server,) = own_servers._kept.values()
    (inside,) = children(server._process.pid)
    os.kill(children(inside)[0], signal.SIGSTOP)
    with WorkerProcess() as second:
        second.ready(2.0)
        assert server not in own_servers._kept.values()
    assert server._process.returncode is not None


def test_workers_ended_early_leave_no_complaints(own_servers) -> None:
    for _ in range(5):
        WorkerProcess().kill()
    with WorkerProcess() as last:
        last.ready()
        (server,) = own_servers._kept.values()
        assert spawn.last_line(server._complaints) == ""


def test_a_worker_without_its_filter_is_refused(monkeypatch, own_servers) -> None:
    forked = ForkServer.fork

    def unfiltered(server: ForkServer, bounds: Bounds) -> Forked:
        made = forked(server, bounds)
        made.filtered = True
        return made

    monkeypatch.setattr(spawn, "filter_program", lambda **_: None)
    monkeypatch.setattr(ForkServer, "fork", unfiltered)
    if spawn.filters_of("self") == 0 and "Seccomp_filters" not in status_text(Path("/proc/self/status")):
        pytest.skip("this kernel does not count filters")
    with WorkerProcess() as worker:
        worker.ready()
        assert not worker.forked


def test_few_servers_are_kept_and_none_that_has_workers(own_servers) -> None:
    kinds = [process.OffLimits(without=(name,)) for name in ("jax", "torch", "keras")]
    with WorkerProcess(limits=kinds[0]) as busy:
        busy.ready()
        for kind in (*kinds[1:], kinds[1]):
            with WorkerProcess(limits=kind) as worker:
                worker.ready()
        assert len(own_servers._kept) == servers.MOST and ("numpy", kinds[0]) in own_servers._kept
        os.kill(busy.pid, 0)


def test_where_no_worker_can_be_forked_one_is_started(monkeypatch, tmp_path, own_servers) -> None:
    command = sandbox.server_command

    def powerless(*args, **kwargs):
        line = command(*args, **kwargs)
        return [
            *(
                word
                for word, before in zip(line, ["", *line[:-1]], strict=True)
                if "--cap-add" not in (word, before)
            )
        ]

    if os.getuid() == 0:
        monkeypatch.setattr(spawn, "server_command", powerless)
    else:
        monkeypatch.setattr(spawn, "server_command", lambda *_, **__: ["false"])
    assert grade(notebook(tmp_path, RIGHT), EXERCISE).ok
    assert [*process._UNFORKED] == ["numpy"]
    with WorkerProcess() as worker:
        worker.ready()
        assert not worker.forked and worker.unforked


def test_a_single_failure_does_not_end_forking(monkeypatch, own_servers) -> None:
    found = [["it shares the namespace pid"], ["it shares the namespace net"]]
    monkeypatch.setattr(Forked, "openings", lambda self, pid: found.pop() if found else [])
    with WorkerProcess() as worker:
        worker.ready()
        assert worker.forked and not worker.unforked and not found
        assert worker._start.server.workers == 1


def test_a_worker_that_shares_something_is_refused(monkeypatch, own_servers) -> None:
    with WorkerProcess() as worker:
        worker.ready()
        assert worker._start.openings(worker.pid) == []
        (server,) = own_servers._kept.values()
        (first,) = children(server._process.pid)
        (program,) = set(children(first)) - {worker._init}
        found = "; ".join(worker._start.openings(program))
        for word in ("Seccomp", *server.namespaces()):
            assert word in found
        assert ("CapEff" in found) == (os.getuid() == 0)
    monkeypatch.setattr(Forked, "openings", lambda self, pid: ["it shares the namespace pid"])
    with WorkerProcess() as worker:
        worker.ready()
        assert not worker.forked and "namespace pid" in worker.unforked


def test_both_kinds_of_worker_hold_the_same_bounds(forked) -> None:
    code = """
import resource, os
def held():
    names = ("AS", "CPU", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE")
    limits = [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names]
    disk = os.statvfs("/tmp")
    return limits, disk.f_blocks * disk.f_frsize, sorted(os.environ), os.umask(0)
"""
    bounds = Bounds(memory_bytes=1 << 29, scratch_bytes=1 << 20)
    with asked(code, ["held"], forked, bounds=bounds) as ask:
        limits, scratch, environment, umask = ask("held")
    wanted = [1 << 29, bounds.cpu_seconds, 1 << 20, bounds.open_files, 0, 0, 0]
    assert limits == [(most, most) for most in wanted] and umask == 0o077
    assert scratch == 1 << 20 and set(environment) <= {*sandbox.environment(), "PWD", "LC_CTYPE"}
