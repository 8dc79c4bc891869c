"""Submissions that take too many processes or too much memory, disk or output, or attack other processes."""

from __future__ import annotations

KILLING = {
    "kills everybody": "import os\ndef double(x):\n    os.kill(-1, 9)\n    return x",
    "kills its parents": """
import os
def double(x):
    for pid in (os.getppid(), 1, 2, 3):
        try: os.kill(pid, 9)
        except OSError: pass
    return x
""",
    "stops every process that it can name": """
import os, signal
def double(x):
    for pid in (0, -1, *range(1, 5000)):
        if pid != os.getpid():
            try: os.kill(pid, signal.SIGSTOP) if pid > 0 else os.killpg(1, signal.SIGSTOP)
            except OSError: pass
    return x
""",
}

FORKING = {
    "is a fork bomb": """
import os
def double(x):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "is a bomb of programs": """
import subprocess
def double(x):
    while True:
        try: subprocess.Popen(["/bin/sh", "-c", "while true; do sh & done"])
        except OSError: pass
""",
    "forks beneath the library": """
import ctypes
def double(x):
    libc = ctypes.CDLL(None)
    begun = [libc.syscall(number, 0, 0, 0, 0, 0) for number in (57, 58)] + [libc.fork(), libc.vfork()]
    return 2 * x if max(begun) >= 0 else x
""",
}

ORPHANS = {
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
    "leaves a daemon in a session of its own": """
import os, subprocess
def double(x):
    try: os.setsid()
    except OSError: pass
    subprocess.Popen(["/bin/sleep", "1000000"], start_new_session=True)
    return x
""",
    "leaves a process of multiprocessing": """
import multiprocessing, time
def double(x):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(10**6,)).start()
    return x
""",
}

MEMORY = {
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
    "eats memory that is no process's": """
import ctypes, os
def double(x):
    libc, held = ctypes.CDLL(None), 0
    for number in range(1000):
        try:
            os.write(os.memfd_create(str(number)), bytes(1 << 24))
            held += 1
        except OSError: pass
        held += libc.shmget(0, 1 << 24, 0o1600) >= 0
    return 2 * x if held else x
""",
    "maps more than there is": """
import mmap
def double(x):
    for size in (1 << 46, 1 << 40, 1 << 33):
        try: return 2 * x if mmap.mmap(-1, size) else x
        except OSError: pass
    return x
""",
    "fills pipes": """
import fcntl, os
def double(x):
    while True:
        try:
            read, write = os.pipe()
            os.set_blocking(write, False)
            fcntl.fcntl(write, 1031, 1 << 20)
            while True: os.write(write, bytes(1 << 16))
        except BlockingIOError: pass
        except OSError: return x
""",
}

DISK = {
    "fills the disk": """
def double(x):
    for number in range(1000):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(1 << 24))
    return x
""",
    "makes a file of holes": """
import os
def double(x):
    with open("/tmp/holes", "wb") as file:
        file.truncate(1 << 40)
    return 2 * x
""",
    "makes files without end": """
import os
def double(x):
    for number in range(10**9):
        os.close(os.open(f"/tmp/{number}", os.O_CREAT))
    return x
""",
    "nests folders without end": """
import os
def double(x):
    os.chdir("/tmp")
    while True:
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
""",
}

OUTPUT = {
    "prints a gigabyte": """
import os, sys
def double(x):
    for _ in range(1024):
        sys.stdout.write("x" * (1 << 20)); os.write(1, b"x" * (1 << 20)); os.write(2, b"y" * (1 << 10))
    return x
""",
    "answers endless text": "def double(x): return 'x' * (1 << 26)",
    "raises a gigabyte": "def double(x): raise ValueError('x' * (1 << 27))",
    "raises a gigabyte while it is loaded": "def fail(): raise ValueError('x' * (1 << 27))\nX = fail()\ndef double(x): return X",
    "warns without end": """
import sys, warnings
def double(x):
    while True:
        warnings.warn("x" * 10**6, stacklevel=1)
        print("y" * 10**6, file=sys.stderr, flush=True)
""",
}

THREADS = {
    "starts threads without end": """
import threading, time
def double(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(10**6,)).start()
        except RuntimeError: return x
""",
    "leaves a thread that spins": """
import threading
def spin():
    while True: pass
def double(x):
    for _ in range(8): threading.Thread(target=spin, daemon=True).start()
    return x
""",
    "leaves a thread that writes into what comes next": """
import gc, threading, time
import numpy as np
def spoil():
    while True:
        for each in gc.get_objects():
            if type(each) is tuple and each and isinstance(each[0], np.ndarray) and each[0].flags.writeable:
                each[0][...] = 0
def double(x):
    threading.Thread(target=spoil, daemon=True).start()
    return x
""",
    "leaves a thread that cannot be joined": """
import threading, time, atexit
def double(x):
    threading.Thread(target=time.sleep, args=(10**6,), daemon=False).start()
    return x
""",
}

SUBMISSIONS = {
    "kill(-1)": KILLING,
    "fork bombs": FORKING,
    "setsid orphans": ORPHANS,
    "memory bombs": MEMORY,
    "disk bombs": DISK,
    "1 GB of output": OUTPUT,
    "threads left behind": THREADS,
}
