"""Submissions that never answer, because they exit, crash, loop, or attack while they are loaded.

Other submissions give right answers at first, or leave something behind in their worker, and attack in a
later call.
"""

from __future__ import annotations

from tests.course.judge.hostile.small import CHANNEL

LEAVING = {
    "leaves at once": "import os\ndef double(x): os._exit(0)",
    "leaves while it is loaded": "import os\nX = os._exit(0)\ndef double(x): return X",
    "raises SystemExit": "import sys\ndef double(x): sys.exit(0)",
    "aborts": "import os\ndef double(x): os.abort()",
    "kills itself": "import os\ndef double(x): os.kill(os.getpid(), 9)",
    "stops itself": "import os, signal\ndef double(x): os.kill(os.getpid(), signal.SIGSTOP)",
    "becomes another program": "import os\ndef double(x): os.execv('/bin/sleep', ['sleep', '1000000'])",
    "leaves from another thread": """
import os, threading
def double(x):
    threading.Thread(target=os._exit, args=(0,)).start()
    while True: pass
""",
}

RAISING = {
    "raises an error that cannot be shown": """
class Evil(Exception):
    def __str__(self): raise KeyboardInterrupt
    __repr__ = __str__
def double(x): raise Evil()
""",
    "raises an error named after the probe": """
def double(x): raise type(str(list(x)), (Exception,), {})(str(x))
""",
    "raises an error of errors without end": """
def double(x):
    error = ValueError("a")
    error.__cause__ = error.__context__ = error
    raise error
""",
    "says that it is not written": "def double(x): raise NotImplementedError(str(list(x)))",
    "raises a failure of the judge's own": """
from ringlab_course.checking.contract import Failure
def double(x): raise Failure("right", str(list(x)))
""",
    "recurses without end": "def double(x): return double(x)",
    "recurses below Python": """
import sys, re
sys.setrecursionlimit(1 << 30)
class Evil:
    def __repr__(self): return repr([self])
def double(x):
    sys
    return repr(Evil())
""",
}

LOOPING = {
    "loops with signals ignored": """
import signal
def double(x):
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "loops in C with signals blocked": """
import re, signal
def double(x):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    re.match("(a|a)*b", "a" * 100)
""",
    "counts to a number of a billion digits": "def double(x): return len(str(7 ** 10 ** 8)) * x",
    "waits for itself": """
import threading
def double(x):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
""",
    "answers a tuple that never ends": """
class Endless(tuple):
    def __iter__(self):
        while True: yield 1
def double(x): return Endless((1, 2))
""",
    "answers without end": """
def double(x):
    while True: yield x
""",
}

AT_IMPORT = {
    "sleeps for ever while it is loaded": "import time\nX = time.sleep(10**6)\ndef double(x): return X",
    "loops while it is loaded": """
def spin():
    while True:
        try:
            while True: pass
        except BaseException: pass
X = spin()
def double(x): return X
""",
    "is a constant that cannot be compiled": "X = 9 ** 9 ** 9\ndef double(x): return X",
    "cannot be parsed": "def double(x): return " + "(" * 5000 + "x" + ")" * 5000,
    "is one long sum": "def double(x): return " + "+".join(["x"] * 20_000),
    "has a decorator that leaves": "import os\n@lambda function: os._exit(0)\ndef double(x): return x",
    "has a default that leaves": "import os\ndef double(x, y=os._exit(3)): return x",
    "sets an alarm while it is loaded": """
import signal
X = signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
def double(x):
    X
    while True: pass
""",
    "forges while it is loaded": CHANNEL
    + """
SENT = channel().send("loaded", [])
def double(x):
    SENT
    return 2 * x
""",
    "has a class that strikes when it is made": """
class Meta(type):
    def __new__(*a): raise SystemExit
class Double(metaclass=Meta):
    pass
def double(x): return Double()
""",
}


HOOKS = {
    "traces the worker's own lines": """
import sys
def trace(frame, event, arg):
    if event == "return" and frame.f_code.co_name in ("measure", "call", "_answer"):
        frame.f_locals["ok"] = True
    return trace
def double(x):
    sys.settrace(trace); sys.setprofile(trace)
    frame = sys._getframe()
    while frame:
        frame.f_trace = trace
        frame = frame.f_back
    return x
""",
    "audits everything away": """
import sys
def hook(event, arguments): raise SystemExit
def double(x):
    sys.addaudithook(hook)
    return x
""",
    "strikes when it is collected": """
import gc
class Bomb:
    def __del__(self):
        while True: pass
def double(x):
    bomb = Bomb()
    bomb.me = bomb
    gc.set_threshold(1)
    return x
""",
    "strikes when the worker ends": """
import atexit, signal
def spin():
    while True: pass
def double(x):
    atexit.register(spin)
    signal.signal(signal.SIGTERM, lambda *a: spin())
    return x
""",
    "has its alarm ring in a later call": """
import signal
def ring(*a): raise SystemExit
def double(x):
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    return x
""",
    "has faults written to the judge": CHANNEL
    + """
import faulthandler
def double(x):
    faulthandler.dump_traceback_later(0.001, repeat=True, file=channel().socket.fileno())
    sum(range(10**6))
    return 2 * x
""",
    "takes over the hook for errors": """
import sys, threading
def hook(*a):
    while True: pass
def double(x):
    sys.excepthook = sys.unraisablehook = threading.excepthook = hook
    raise KeyboardInterrupt
""",
}

THREADS = {
    "computes on in a thread": """
import threading
def spin():
    while True: pass
def double(x):
    threading.Thread(target=spin, daemon=True).start()
    return 2 * x
""",
}

BOMBS = {
    "is right once and then loops": """
CALLS = []
def double(x):
    CALLS.append(1)
    while len(CALLS) > 1: pass
    return 2 * x
""",
    "is right once and then leaves": """
import os
CALLS = []
def double(x):
    CALLS.append(1)
    return 2 * x if len(CALLS) == 1 else os._exit(0)
""",
    "is right for what a notebook shows": "def double(x): return 2 * x if x.shape == (5,) else x",
    "is right once and then forges": CHANNEL
    + """
CALLS = []
def double(x):
    CALLS.append(1)
    if len(CALLS) > 1:
        channel().send("verdict", ok=True)
    return 2 * x
""",
    "repeats what was right before": """
CALLS = []
def double(x):
    CALLS.append(2 * x)
    return CALLS[0]
""",
    "knows its judge by the place": """
import os, sys
def double(x):
    judged = "judge" in os.uname().nodename or "ringlab_course.judge.worker" in sys.modules
    return x if judged else 2 * x
""",
}

"""These submissions may earn the first check's points, because their first answer is right."""

SUBMISSIONS = {
    "hooks left behind": HOOKS,
    "time bombs": BOMBS,
    "answers before the end": THREADS,
    "os._exit and other ends": LEAVING,
    "errors": RAISING,
    "infinite loops with signals ignored": LOOPING,
    "time bombs at import": AT_IMPORT,
}
