"""Submissions that each use 64 MiB of memory and try to hide this from the judge's measurement."""

from __future__ import annotations

from tests.course.judge.hostile.small import CHANNEL

COMMON = (
    CHANNEL
    + """
import os
import numpy as np
def fill():
    return float(np.ones(1 << 23).sum())
"""
)

HIDING = {
    "hides nothing": "def double(x):\n    fill()\n    return 2 * x",
    "begins its peak anew": """
def double(x):
    fill()
    try:
        with open("/proc/self/clear_refs", "w") as file: file.write("5")
    except OSError: pass
    return 2 * x
""",
    "begins it anew through a thread's files": """
def double(x):
    fill()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/clear_refs", "w") as file: file.write("5")
        except OSError: pass
    return 2 * x
""",
    "computes after it is done": """
def double(x):
    mine = channel()
    mine.send("done")
    mine.expect("deliver")
    fill()
    mine.send("result", 2 * x)
    mine.expect("return")
    mine.send("returned", [[x]], names=["x"])
    mine.send = mine.expect = lambda *a, **k: None
    return None
""",
    "takes it before it says that it is ready": """
import ringlab_course.judge.worker as worker
RESERVE = []
def early(original):
    def wrapped(*arguments):
        if not RESERVE: RESERVE.append(np.ones(1 << 23))
        return original(*arguments)
    return wrapped
for name in ("fingerprints", "arrays_by_argument"):
    if hasattr(worker, name): setattr(worker, name, early(getattr(worker, name)))
def double(x):
    float(RESERVE.pop().sum())
    return 2 * x
""",
    "becomes a new process that answers for it": """
NEXT = '''
import sys; sys.path.insert(0, sys.argv[1])
from ringlab_course.judge.channel import Channel
import numpy as np
mine = Channel(int(sys.argv[2]))
mine.call = int(sys.argv[3])
mine.send("done")
mine.expect("deliver")
x = np.frombuffer(bytes.fromhex(sys.argv[4]))
mine.send("result", 2 * x)
mine.expect("return")
mine.send("returned", [[x]], names=["x"])
'''
def double(x):
    fill()
    mine = channel()
    os.set_inheritable(mine.socket.fileno(), True)
    place = os.path.dirname(os.path.dirname(sys.modules["ringlab"].__file__))
    try: os.execv(sys.executable, ["python", "-I", "-c", NEXT, place, str(mine.socket.fileno()), str(mine.call), x.tobytes().hex()])
    except OSError: return 2 * x
""",
    "holds it in memory of no process": """
def double(x):
    try:
        for number in range(4): os.write(os.memfd_create(str(number)), bytes(1 << 24))
    except OSError: fill()
    return 2 * x
""",
    "holds it in pipes": """
import fcntl
KEPT = []
def double(x):
    try:
        for _ in range(64):
            KEPT.append(os.pipe())
            fcntl.fcntl(KEPT[-1][1], 1031, 1 << 20)
            os.set_blocking(KEPT[-1][1], False)
            os.write(KEPT[-1][1], bytes(1 << 20))
    except OSError: fill()
    return 2 * x
""",
    "holds it in a child": """
def double(x):
    try: child = os.fork()
    except OSError: child = -1
    if child <= 0: fill()
    if child == 0: os._exit(0)
    return 2 * x
""",
    "has a name that says what it holds": """
import ctypes
def double(x):
    ctypes.CDLL(None).prctl(15, b"x\\rVmHWM:0 kB", 0, 0, 0)
    fill()
    return 2 * x
""",
    "has a name that is no text": """
import ctypes
def double(x):
    ctypes.CDLL(None).prctl(15, b"\\xff\\xfe", 0, 0, 0)
    fill()
    return 2 * x
""",
    "ends its first thread and goes on in another": """
import ctypes, threading, time
def double(x):
    mine = channel()
    def rest():
        time.sleep(0.2)
        fill()
        mine.send("done")
        mine.expect("deliver")
        mine.send("result", 2 * x)
        mine.expect("return")
        mine.send("returned", [[x]], names=["x"])
        time.sleep(10**6)
    threading.Thread(target=rest).start()
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(number, 0)
""",
}
KEEPING = {
    "frees what it took in an earlier call": """
RESERVE = []
def double(x):
    RESERVE.clear()
    fill()
    RESERVE.append(np.ones(1 << 23))
    return 2 * x
""",
    "works in what it took in an earlier call": """
WORK = []
def double(x):
    if not WORK: WORK.append(np.ones(1 << 23))
    WORK[0][:] = 1
    return 2 * x
""",
    "takes it while it returns the arguments": """
import ringlab_course.judge.worker as worker
RESERVE = []
def late(original):
    def wrapped(*arguments):
        RESERVE.append(np.ones(1 << 23))
        return original(*arguments)
    return wrapped
worker._return = late(worker._return)
def double(x):
    RESERVE.clear()
    fill()
    return 2 * x
""",
    "takes it in every function of the worker": """
import types
import ringlab_course.judge.worker as worker
RESERVE = []
def early(original):
    def wrapped(*arguments, **keywords):
        if not RESERVE: RESERVE.append(np.ones(1 << 23))
        return original(*arguments, **keywords)
    return wrapped
for name, each in list(vars(worker).items()):
    if isinstance(each, types.FunctionType): setattr(worker, name, early(each))
def double(x):
    RESERVE.clear()
    fill()
    return 2 * x
""",
    "takes it while it is loaded": """
RESERVE = [np.ones(1 << 23)]
def double(x):
    fill() if not RESERVE else RESERVE.clear()
    return 2 * x
""",
    "maps a library's file beforehand": """
import mmap, sys
def mapped():
    with open(sys.modules["numpy._core._multiarray_umath"].__file__, "rb") as file:
        maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for _ in range(16)]
    for each in maps: sum(each[::4096])
    return maps
RESERVE = mapped()
def double(x):
    RESERVE.clear()
    fill()
    return 2 * x
""",
}
SUBMISSIONS = {name: COMMON + source for name, source in {**HIDING, **KEEPING}.items()}
