"""Whatever 32 MiB of JSON hold, reading them takes seconds and less than a gigabyte: both ended by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringlab_course.judge import submission
from ringlab_course.judge.submission import FILE_BYTES, UnreadableError, read_submission

CPU_SECONDS, MEMORY = 10, 1 << 30
N = FILE_BYTES - 64
HEAD = b'{"nbformat":4,"cells":[],"x":['


def filled(unit: bytes, count: int = N, head: bytes = HEAD, tail: bytes = b"0]}") -> bytes:
    return head + unit * min(count, (N - len(head) - len(tail)) // len(unit)) + tail


# What the reader must not even begin to take apart: the parsed file would be fifty times as large.
TOO_MANY = {
    "brackets": lambda: b'{"cells":' + b"[" * N,
    "empty lists": lambda: filled(b"[],"),
    "empty objects": lambda: filled(b"{},"),
    "objects of one": lambda: filled(b'{"":0},'),
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b","),
    "two letters": lambda: filled(b'"ab",'),
    "decimals": lambda: filled(b"1.1,"),
    "lines of code": lambda: filled(b'"",', head=b'{"nbformat":4,"cells":[{"source":[', tail=b'""]}]}'),
    "a format of numbers": lambda: filled(b"1,", head=b'{"cells":[],"nbformat":['),
}
# The most that passes the counts, of each kind.
JUST_SO = {
    "objects of one": lambda: filled(b'{"":0},', 400_000),
    "nested objects": lambda: filled(b'{"":' * 900 + b"0" + b"}" * 900 + b",", 500),
    "other letters": lambda: filled('"ä\U0001f600",'.encode(), 3_900_000),
    "decimals": lambda: filled(b"1.1,", 3_900_000),
    "long integers": lambda: filled(b"9" * 4300 + b","),
    "a number of megabytes": lambda: b'{"nbformat":4,"cells":[],"x":' + b"1" * (N - 40) + b".5}",
    "an exponent of megabytes": lambda: b'{"nbformat":4,"cells":[],"x":1e' + b"1" * (N - 40) + b"}",
    "text of four bytes each": lambda: HEAD + b'"' + "\U0001f600".encode() * (N // 4 - 20) + b'"]}',
    "escaped text": lambda: HEAD + b'"' + b"\\u0000" * (N // 6 - 20) + b'"]}',
    "escaped code": lambda: b'{"nbformat":4,"cells":[{"cell_type":"code","source":"' + b"\\u0001" * (N // 6 - 40) + b'"}]}',
    "the same key": lambda: filled(b'"aaaaaaaa":0,', head=b'{"nbformat":4,"cells":[],"x":{', tail=b'"z":0}}'),
    "white space": lambda: b'{"nbformat":4,' + b" " * (N - 40) + b'"cells":[]}',
}  # fmt: skip
CHILD = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
sys.path.insert(0, sys.argv[3])
from ringlab_course.judge.submission import UnreadableError, read_submission
try:
    read_submission(sys.argv[1])
except UnreadableError:
    pass
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_file_of_too_many_parts_is_refused_unread(tmp_path, monkeypatch, name) -> None:
    path = tmp_path / "n.ipynb"
    path.write_bytes(TOO_MANY[name]())
    monkeypatch.setattr(submission.json, "loads", None)
    with pytest.raises(UnreadableError, match="too many small parts"):
        read_submission(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", JUST_SO)
def test_what_may_be_read_stays_within_its_bounds(tmp_path, name) -> None:
    path = tmp_path / "n.ipynb"
    path.write_bytes(JUST_SO[name]())
    root = str(Path(submission.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(CPU_SECONDS), root], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MEMORY


def test_large_honest_notebooks_are_read(tmp_path) -> None:
    picture, table = b"A" * (8 << 20), b"[" + b"0.12345678," * 1_000_000 + b"0]"
    path = tmp_path / "n.ipynb"
    path.write_bytes(
        b'{"nbformat":4,"metadata":{},"cells":[{"cell_type":"code","source":"x = 1","metadata":{},"outputs":['
        b'{"data":{"image/png":"' + picture + b'","application/json":' + table + b"}}]}]}"
    )
    assert read_submission(path).code == ["x = 1"]


@pytest.mark.parametrize("form", ["[" * 980 + "]" * 980, '{"a":' * 980 + "1" + "}" * 980, "4" * 4299])
def test_a_strange_format_is_named_briefly(tmp_path, form) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(f'{{"cells":[],"nbformat":{form}}}')
    with pytest.raises(UnreadableError) as error:
        read_submission(path)
    assert len(error.value.got) < 60
