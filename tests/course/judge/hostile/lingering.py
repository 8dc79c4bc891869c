"""Submissions that behave at first, or leave something behind in their worker, to strike in a later call."""

from __future__ import annotations

from tests.course.judge.hostile.snippets import CHANNEL

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

SUBMISSIONS = {"hooks left behind": HOOKS, "time bombs": BOMBS}
"""Of these the first check's points may be earned: its answer is right."""
