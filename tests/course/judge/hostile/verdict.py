"""Submissions that attack the verdict itself: the checks, the channel to the judge, or the interpreter."""

from __future__ import annotations

from tests.course.judge.hostile.small import CHANNEL

FORGE = (
    CHANNEL
    + """
import os, socket, struct, threading, time
from ringlab_course.checking.protocol import Frame, pack
def write_everywhere(frame):
    data = b"".join(bytes(part) for part in pack(frame))
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, data)
        except OSError:
            pass
def send_raw(text, rest=b""):
    channel().socket.sendall(struct.pack("<I", len(text)) + text + rest)
"""
)

OVERWRITING = {
    "overwrites the checks": """
import ringlab_course.checking.answers, ringlab_course.checking.reports, ringlab_course.checking.failures, numpy
ringlab_course.checking.answers.compare_with = lambda *a, **k: None
ringlab_course.checking.reports.run_stage = lambda *a, **k: None
ringlab_course.checking.failures.Failure = Warning
numpy.array_equal = numpy.allclose = lambda *a, **k: True
def double(x):
    ringlab, numpy
    return x
""",
    "overwrites NumPy inside a call": """
import numpy as np
def double(x):
    np.ndarray.__eq__ = np.abs = np.max = np.isfinite = lambda *a, **k: True
    return x
""",
    "overwrites the drawing of probes": """
import numpy as np
np.random.default_rng = lambda *a: np.random.Generator(np.random.PCG64(0))
np.random.Generator = type(None)
def double(x):
    return 2 * np.random.RandomState(0).standard_normal(x.shape)
""",
    "overwrites what it finds in memory": """
import gc, types
def double(x):
    gc.unfreeze()
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__module__.startswith("ringlab"):
            each.__code__ = (lambda *a, **k: True).__code__
    return x
""",
    "changes its argument and replaces who would notice": """
import ringlab_course.checking.guard as guard, ringlab_course.judge.worker as worker
guard.prints = guard.fingerprints = worker.fingerprints = worker.changed_argument = lambda *a, **k: None
def double(x):
    guard, worker
    x *= 2
    return x
""",
    "rewrites the worker": """
import ringlab_course.judge.channel as frames, ringlab_course.checking.protocol as protocol
def double(x):
    protocol.pack = frames.pack = lambda frame: [b"passed"]
    return x
""",
}

FORGING = {
    "forges a verdict": """
def double(x):
    write_everywhere(Frame("verdict", {"ok": True, "points": 100}))
    return x
""",
    "forges answers": """
def double(x):
    for call in range(9):
        write_everywhere(Frame("done", {"call": call}))
        write_everywhere(Frame("result", {"call": call}, x))
    return x
""",
    "writes garbage to the judge": """
def double(x):
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, b"\\xff" * 1000)
        except OSError:
            pass
    return 2 * x
""",
    "floods the judge from a thread": """
BEGUN = threading.Event()
def flood():
    while True:
        write_everywhere(Frame("result", {"call": 1}, None))
        BEGUN.set()
def double(x):
    threading.Thread(target=flood, daemon=True).start()
    BEGUN.wait()  # on a busy machine every check may be over before
    return x
""",
    "answers twice": """
def double(x):
    mine = channel()
    mine.send("done")
    mine.expect("deliver")
    mine.send("result", 2 * x)
    return 2 * x
""",
    "greets the judge once more": """
def double(x):
    channel().send("hello")
    return 2 * x
""",
    "sends a header with a verdict": """
def double(x):
    send_raw(b'{"kind":"done","fields":{"call":1},"value":null,"arrays":[],"ok":true}')
    return 2 * x
""",
    "sends a header that names its keys twice": """
def double(x):
    send_raw(b'{"kind":"error","kind":"done","fields":{"call":1},"fields":{"call":1,"ok":true},"value":null,"arrays":[]}')
    return x
""",
    "sends a number of a million digits": """
def double(x):
    send_raw(b'{"kind":"done","fields":{"call":' + b"9" * 1_000_000 + b'},"value":null,"arrays":[]}')
    return 2 * x
""",
    "claims an array of a hundred gigabytes": """
def double(x):
    send_raw(b'{"kind":"done","fields":{},"value":null,"arrays":[{"dtype":"float64","shape":[99999,99999],"to' b'rch":false,"grad":false}]}')
    return 2 * x
""",
    "sends half a frame and leaves": """
def double(x):
    channel().socket.sendall(struct.pack("<I", 100) + b"{")
    os._exit(0)
""",
    "drips its answer byte by byte": """
def double(x):
    size = 100_000_000
    header = b'{"kind":"done","fields":{"call":%d},"value":{"array":0},"arrays":[{"dtype":"uint8","shape":[%d],"to' b'rch":false,"grad":false}]}'
    mine = channel()
    header = header % (mine.call, size)
    mine.socket.sendall(struct.pack("<I", len(header)) + header)
    while True:
        mine.socket.sendall(b"x")
        time.sleep(0.0003)
""",
    "closes the channel and goes on": """
def double(x):
    channel().socket.shutdown(socket.SHUT_RDWR)
    while True:
        pass
""",
    "passes descriptors to the judge": """
def double(x):
    for _ in range(100):
        socket.send_fds(channel().socket, [b"\\0"], [0, 1, 2])
    return 2 * x
""",
    "closes every descriptor": """
def double(x):
    os.closerange(0, 1024)
    return 2 * x
""",
}

WALKING = {
    "walks the stack to the channel": """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ == "Channel":
                value.send("done")
                value.send("result", x, ok=True, points=5)
        frame = frame.f_back
    return x
""",
    "walks the frames of every thread": """
import sys
def double(x):
    for frame in sys._current_frames().values():
        while frame:
            frame.f_globals["grade"] = frame.f_globals["run_stage"] = lambda *a, **k: None
            frame = frame.f_back
    return x
""",
    "looks for the right answer in memory": """
import gc, numpy as np
def double(x):
    gc.unfreeze()
    for each in gc.get_objects():
        for part in each if type(each) in (list, tuple) else each.values() if type(each) is dict else ():
            if isinstance(part, np.ndarray) and part is not x and part.shape == x.shape and part.ravel()[0] == x.ravel()[0] * 2:
                return part
    return x
""",
    "reads the frames of an error": """
def double(x):
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame.f_back
        while frame:
            for name, value in frame.f_locals.items():
                if name in ("truth", "expected", "right", "seed"):
                    return value
            frame = frame.f_back
    return x
""",
}

HOOKING = {
    "hooks imports": """
import sys, builtins
class Hook:
    def find_spec(self, *a): raise SystemExit
def double(x):
    sys.meta_path.insert(0, Hook())
    builtins.__import__ = lambda *a, **k: sys
    sys.modules.clear()
    return x
""",
    "plants modules on the path": """
import sys
def double(x):
    for name in ("numpy", "ringlab", "json", "struct"):
        with open(f"/tmp/{name}.py", "w") as file:
            file.write("raise SystemExit")
        sys.modules.pop(name, None)
    sys.path.insert(0, "/tmp")
    return x
""",
    "hooks the path": """
import sys
def double(x):
    sys.path_hooks.insert(0, lambda path: exec("raise SystemExit"))
    sys.path_importer_cache.clear()
    sys.audit = sys.exit = None
    return x
""",
}

CTYPES = {
    "crashes the interpreter": "import ctypes\ndef double(x): ctypes.string_at(0)",
    "changes what two is": """
import ctypes
def double(x):
    ctypes.memset(id(2) + 24, 1, 1)
    return 1 * x
""",
    "writes over its own memory": """
import ctypes
def double(x):
    ctypes.memset(id(double), 0xff, 1 << 20)
    return x
""",
    "writes into its arguments' memory": """
import ctypes
def double(x):
    ctypes.memset(x.ctypes.data, 0, x.nbytes)
    return x
""",
}

SUBMISSIONS = {
    "overwriting check functions and NumPy": OVERWRITING,
    "forging replies on the pipe": {name: FORGE + source for name, source in FORGING.items()},
    "walking stacks, frames and memory": WALKING,
    "import hooks": HOOKING,
    "ctypes": CTYPES,
}
