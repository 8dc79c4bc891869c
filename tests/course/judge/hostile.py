"""Submissions that try to get points, or to do harm, by other means than a right answer."""

from __future__ import annotations

FORGE = """
import os
from ringlab.course.judge.protocol import Frame, pack
def write_everywhere(frame):
    data = b"".join(bytes(part) for part in pack(frame))
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, data)
        except OSError:
            pass
"""

HOSTILE = {
    "overwrites the checks": """
import ringlab.course.answers, ringlab.course.reports, ringlab.course.contract, numpy
ringlab.course.answers.compare_with = lambda *a, **k: None
ringlab.course.reports.run_stage = lambda *a, **k: None
ringlab.course.contract.Failure = Warning
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
    "forges a verdict": FORGE
    + """
def double(x):
    write_everywhere(Frame("verdict", {"ok": True, "points": 100}))
    return x
""",
    "forges answers": FORGE
    + """
def double(x):
    for call in range(9):
        write_everywhere(Frame("done", {"call": call}))
        write_everywhere(Frame("result", {"call": call}, x))
    return x
""",
    "writes garbage to the judge": FORGE
    + """
def double(x):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"\\xff" * 1000)
        except OSError:
            pass
    return 2 * x
""",
    "floods the judge from a thread": FORGE
    + """
import threading
def flood():
    while True:
        write_everywhere(Frame("result", {"call": 1}, None))
def double(x):
    threading.Thread(target=flood, daemon=True).start()
    return x
""",
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
    "answers an evil array": """
import numpy as np
class Evil(np.ndarray):
    __eq__ = __le__ = __lt__ = lambda *a: True
    __sub__ = __rsub__ = lambda a, b: np.zeros(a.shape)
    def __array__(self, *a, **k): return np.zeros(self.shape)
    def __reduce__(self): return (print, ("pwned",))
def double(x):
    return x.view(Evil)
""",
    "answers an array that lies about its shape": """
import numpy as np
class Evil(np.ndarray):
    shape = (10**9,)
    dtype = np.dtype("float64")
def double(x):
    return x.view(Evil)
""",
    "answers a pickle": """
class Bomb:
    def __reduce__(self):
        import os
        return os.system, ("touch /tmp/pwned",)
def double(x):
    return Bomb()
""",
    "answers an array of objects": "import numpy as np\ndef double(x): return np.array([print, len], dtype=object)",
    "answers two gigabytes": "import numpy as np\ndef double(x): return np.zeros(1 << 28)",
    "answers a deep list": "def double(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "answers a list of itself": "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "answers endless text": "def double(x): return 'x' * (1 << 26)",
    "leaves at once": "import os\ndef double(x): os._exit(0)",
    "leaves while it is loaded": "import os\nX = os._exit(0)\ndef double(x): return X",
    "raises SystemExit": "import sys\ndef double(x): sys.exit(0)",
    "raises an error that cannot be shown": """
class Evil(Exception):
    def __str__(self): raise KeyboardInterrupt
    __repr__ = __str__
def double(x): raise Evil()
""",
    "raises an error named after the probe": """
def double(x): raise type(str(list(x)), (Exception,), {})(str(x))
""",
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
    "sleeps for ever while it is loaded": "import time\nX = time.sleep(10**6)\ndef double(x): return X",
    "recurses without end": "def double(x): return double(x)",
    "crashes the interpreter": "import ctypes\ndef double(x): ctypes.string_at(0)",
    "eats memory": "def double(x):\n    hoard = []\n    while True: hoard.append(bytearray(b'x' * (1 << 24)))",
    "eats memory in children": """
import os
def double(x):
    while True:
        try:
            if os.fork() == 0:
                hoard = []
                while True: hoard.append(bytearray(b'x' * (1 << 20)))
        except OSError: return x
""",
    "is a fork bomb": """
import os
def double(x):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "starts threads without end": """
import threading, time
def double(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(10**6,)).start()
        except RuntimeError: return x
""",
    "leaves an orphan": """
import os, time
def double(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(10**6)
        os._exit(0)
    return x
""",
    "kills everybody": "import os\ndef double(x):\n    os.kill(-1, 9)\n    return x",
    "kills its parents": """
import os
def double(x):
    for pid in (os.getppid(), 1, 2, 3):
        try: os.kill(pid, 9)
        except OSError: pass
    return x
""",
    "prints a gigabyte": """
import os, sys
def double(x):
    for _ in range(1024):
        sys.stdout.write("x" * (1 << 20)); os.write(1, b"x" * (1 << 20)); os.write(2, b"y" * (1 << 10))
    return x
""",
    "fills the disk": """
def double(x):
    for number in range(1000):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(1 << 24))
    return x
""",
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
    "rewrites the worker": """
import ringlab.course.judge.worker as worker, ringlab.course.judge.protocol as protocol
def double(x):
    protocol.pack = worker.pack = lambda frame: [b"passed"]
    return x
""",
}
