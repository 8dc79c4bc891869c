"""A worker's sandbox has no rights, network, other processes or files, and ends with its judge."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringlab.errors import SandboxError
from ringlab_course.checking.forbidden import PACKAGES
from ringlab_course.judge import probe, sandbox, seccomp
from ringlab_course.judge.judge import grade
from ringlab_course.judge.process import WorkerProcess
from ringlab_course.judge.removal import HIDDEN, HOME
from ringlab_course.judge.sandbox import Bounds
from tests.course.judge.conftest import asked
from tests.course.judge.small_contract import EXERCISE, RIGHT, led_through, notebook

inside = pytest.mark.needs_bwrap

LOOK = """
import os, socket
def status():
    return dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
def readable(paths):
    found = []
    for path in paths:
        try:
            found.append((os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)) and path)
        except OSError:
            pass
    return [path for path in found if path]
def names(path):
    return os.listdir(path)
def writable(paths, mark):
    found = []
    for path in paths:
        try:
            with open(os.path.join(path, mark), "w") as file:
                file.write("x")
            found.append(path)
        except OSError:
            pass
    return found
def everything():
    return sorted(os.listdir("/")), sorted(os.environ), [int(p) for p in os.listdir("/proc") if p.isdigit()]
def connect(port):
    for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("1.1.1.1", 53))):
        try:
            socket.socket(family).connect(address)
            return "connected"
        except OSError:
            pass
    return "nobody there"
def become_root():
    won = []
    for action in (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.sethostname("x") if hasattr(os, "sethostname") else os.nice(-5)):
        try:
            action()
            won.append("yes")
        except OSError:
            pass
    return won
def begin_processes():
    import ctypes, subprocess, threading
    begun, libc = [], ctypes.CDLL(None, use_errno=True)
    for name, action in {
        "fork": os.fork,
        "spawn": lambda: subprocess.run(["/usr/bin/true"]),
        "posix_spawn": lambda: os.posix_spawn("/usr/bin/true", ["true"], {}),
    }.items():
        try:
            if action() == 0:
                os._exit(0)
            begun.append(name)
        except OSError:
            pass
    for name, number, argument in (("unshare", 272, 0x10000000), ("clone3", 435, 0), ("clone", 56, 17), ("ptrace", 101, 0)):
        if os.uname().machine == "x86_64" and libc.syscall(number, argument, 0, 0, 0, 0) != -1:
            begun.append(name)
    thread = threading.Thread(target=begun.append, args=("thread",))
    thread.start()
    thread.join()
    return begun
"""
FUNCTIONS = [
    "status",
    "readable",
    "names",
    "writable",
    "everything",
    "connect",
    "become_root",
    "begin_processes",
]


@pytest.fixture(scope="module")
def look(forked):
    """Yield a function that calls code inside a sandbox to look around there."""
    with asked(LOOK, FUNCTIONS, forked) as ask:
        yield ask


@inside
def test_nobody_inside_has_any_rights(look) -> None:
    status = look("status")
    assert status["CapEff"] == status["CapPrm"] == "0" * 16 and status["NoNewPrivs"].strip() == "1"
    assert "0" not in status["Uid"].split() and "0" not in status["Gid"].split()
    # Without root, a process keeps the groups of the user who grades, which its namespace shows as 65534.
    assert {*status["Groups"].split()} <= ({"65534"} if os.getuid() else set())
    assert look("become_root") == []


@inside
def test_only_the_interpreter_and_the_package_are_there(look, tmp_path) -> None:
    own = tmp_path / "secret.txt"
    own.write_text("secret")
    paths = [
        "/etc/passwd",
        "/etc/shadow",
        "/home",
        "/var",
        "/run",
        "/sys",
        str(own),
        os.path.expanduser("~/.ssh"),
        os.path.expanduser("~/.config"),
    ]
    paths += [str(HOME / name) for name in ("tests", "solutions", "tools", ".git", *HIDDEN)]
    assert all((HOME / name).is_dir() for name in HIDDEN)
    frame = led_through()
    assert look("readable", [path for path in paths if Path(path) not in frame]) == []
    for folder in {*frame} - {Path("/"), Path("/tmp")}:  # / also has /proc, /tmp also has learners' files
        assert {*look("names", str(folder))} == frame[folder]
    assert look("readable", [str(HOME / "ringlab/errors.py"), str(HOME / "ringlab_course/judge/worker.py")])


@inside
def test_only_scratch_can_be_written(look) -> None:
    paths = [
        "/",
        "/tmp",
        "/usr",
        "/dev",
        "/dev/shm",
        "/proc",
        "/etc",
        sys.prefix,
        *(str(HOME / package) for package in PACKAGES),
        str(HOME),
        os.path.expanduser("~"),
    ]
    mark = f"mark-{os.getpid()}-written"
    assert look("writable", paths, mark) == ["/tmp"]
    assert not os.path.exists(f"/tmp/{mark}")


@inside
def test_no_other_process_and_no_environment_is_seen(look, monkeypatch) -> None:
    top, environment, processes = look("everything")
    assert len(processes) <= 3 and os.getpid() not in processes
    assert set(environment) <= {*sandbox.environment(), "PWD", "LC_CTYPE"}
    assert not {"home", "var", "run", "sys"} & {*top} - led_through()[Path("/")]


@inside
def test_threads_can_be_begun_and_processes_cannot(look) -> None:
    assert look("begin_processes") == ["thread"]


@pytest.mark.parametrize(
    "alone",
    [
        False,
    ],
)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_jumps_stay_inside_it(machine, alone) -> None:
    program = seccomp.filter_program(machine, alone=alone)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    assert steps[-1][0] == seccomp._RETURN
    assert all(
        at + 1 + max(yes, no) < len(steps)
        for at, (code, yes, no, _) in enumerate(steps)
        if code != seccomp._RETURN
    )
    assert seccomp.filter_program("pdp11") is None


@inside
def test_there_is_no_network(look) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert look("connect", server.getsockname()[1]) == "nobody there"
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@inside
def test_a_worker_dies_with_its_judge() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from ringlab_course.judge.process import WorkerProcess\n"
        "worker = WorkerProcess(); worker.ready(); print(worker.pid, flush=True); time.sleep(1000)"
    )
    judge = subprocess.Popen([sys.executable, "-c", program, str(HOME)], stdout=subprocess.PIPE)
    pid = int(judge.stdout.readline())
    os.kill(pid, 0)
    judge.kill()
    judge.wait()
    judge.stdout.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its judge")


@pytest.fixture
def fresh_probe():
    probe.probe.cache_clear()
    sandbox.find_bwrap.cache_clear()
    yield
    probe.probe.cache_clear()
    sandbox.find_bwrap.cache_clear()


def test_without_bubblewrap_nothing_is_graded_and_the_remedy_is_named(
    tmp_path, monkeypatch, fresh_probe
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        grade(notebook(tmp_path, RIGHT), EXERCISE)
    assert not probe.probe().available


def test_a_bubblewrap_that_may_not_make_namespaces_fails_closed(
    tmp_path, monkeypatch, fresh_probe, own_servers
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError) as error:
        grade(notebook(tmp_path, RIGHT), EXERCISE)
    assert error.value.remedy
    with pytest.raises(SandboxError):
        WorkerProcess().ready()


def test_unsafe_grades_without_and_says_so(tmp_path, monkeypatch, fresh_probe) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = grade(notebook(tmp_path, RIGHT), EXERCISE, unsafe=True)
    assert report.ok and "WITHOUT a sandbox" in report.label
    report = grade(
        notebook(tmp_path, "def double(x):\n    while True: pass"), EXERCISE, unsafe=True, timeout=1
    )
    assert report.earned == 0 and "WITHOUT a sandbox" in report.as_dict()["label"]


@inside
def test_a_python_below_tmp_is_not_covered_by_the_scratch() -> None:
    line = sandbox.command(["-c", "pass"], Bounds(), info_fd=3)
    assert line.index("--tmpfs") < line.index("--ro-bind"), "a later mount hides an earlier one below it"


@inside
def test_without_root_there_is_a_user_namespace_and_no_capability(monkeypatch) -> None:
    assert "--unshare-user" not in sandbox.command(["-c", "pass"], Bounds(), info_fd=3) or os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    line = sandbox.command(["-c", "pass"], Bounds(), info_fd=3)
    assert "--unshare-user" in line and "--cap-add" not in line and '"uid": null' in line[-1]


@inside
def test_what_keeps_a_worker_from_starting_is_told(monkeypatch, own_servers) -> None:
    monkeypatch.setattr(sandbox, "_visible", list)
    with pytest.raises(SandboxError, match="execvp"):
        WorkerProcess().ready()


@pytest.mark.skipif(sys.platform != "linux", reason="names of the abstract kind are Linux's")
def test_judges_side_by_side_give_their_workers_different_uids() -> None:
    tell = "from ringlab_course.judge import sandbox; print(*sandbox._uids()[0], flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", tell], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        theirs = {int(uid) for uid in other.stdout.readline().split()}
        assert len(theirs) == len(sandbox._uids()[0]) and not theirs & set(sandbox._uids()[0])
        other.communicate("\n")
