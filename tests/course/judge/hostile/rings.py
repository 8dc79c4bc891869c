"""Submissions for a ring exercise of two ranks. They reach the other rank's data, or the judge, past the
ring.

`test_hostile_rings` gives two points for the sum of both ranks' tensors, and three more if one exchange with
the next rank brought the values. A submission that gets the values in another way earns two points.
"""

from __future__ import annotations

from tests.course.judge.hostile.small import CHANNEL

COMMON = f"""{CHANNEL}
import os, socket, struct, threading, time
import torch
from ringlab.comm.virtual.cluster import VirtualCluster
def post(ring, tensors=(), **fields):
    place = {{"index": 0, "to": 1 - ring.rank, "source": 1 - ring.rank, "tag": "", "receive": []}}
    channel().send("exchange", tuple(tensors), **{{**place, **fields}})
def shaped(x):
    return [str(x.dtype).removeprefix("torch."), list(x.shape)]
def by(wire, ring, x):
    tried = [None, None]
    for turn, what in enumerate((x.numpy().tobytes(), None)):
        try: tried[turn] = wire(ring, what)
        except Exception: pass
        ring.barrier()
    other = tried[1]
    ring.shift(x * 0)
    return x if not other else x + torch.frombuffer(bytearray(other), dtype=x.dtype).reshape(x.shape)
"""

FORGING = {
    "answers for the other rank": "def ring_sum(ring, x):\n    channel().send('result', x, rank=1 - ring.rank)\n    return x",
    "sends to a rank below the first": "def ring_sum(ring, x):\n    post(ring, [x], to=-1)\n    return x",
    "sends to a rank far beyond the last": "def ring_sum(ring, x):\n    post(ring, [x], to=10**18)\n    return x",
    "sends to the truth": "def ring_sum(ring, x):\n    post(ring, [x], to=True, receive=[shaped(x)])\n    return x",
    "has a tag without end": "def ring_sum(ring, x):\n    post(ring, [x], tag='x' * 100_000)\n    return x",
    "has a tag that is no text": "def ring_sum(ring, x):\n    post(ring, [x], tag={'tag': 1})\n    return x",
    "has a label without end": "def ring_sum(ring, x):\n    channel().send('begin', label='x' * 100_000)\n    return x",
    "begins to compute twice": """
def ring_sum(ring, x):
    for _ in range(2): channel().send('begin', label='a')
    return x
""",
    "counts its exchanges from below": "def ring_sum(ring, x):\n    post(ring, [x], index=-1)\n    return x",
    "waits for what was never posted": "def ring_sum(ring, x):\n    channel().send('wait', index=10**12)\n    return x",
    "waits for it twice": """
def ring_sum(ring, x):
    post(ring, [x], receive=[shaped(x)])
    for _ in range(2): channel().send('wait', index=0)
    return x
""",
    "wants a tensor of negative length": "def ring_sum(ring, x):\n    post(ring, receive=[['float64', [-4]]])\n    return x",
    "wants a dtype that is none": "def ring_sum(ring, x):\n    post(ring, receive=[['object', [4]]])\n    return x",
    "sends what is no tensor": "def ring_sum(ring, x):\n    post(ring, ['x', 1, None])\n    return x",
    "says that it is done while it waits": """
def ring_sum(ring, x):
    if ring.rank: channel().receive()  # does not wait: if both did, they could be a deadlock before they are done
    post(ring, receive=[shaped(x)])
    channel().send('wait', index=0)
    channel().send('done')
    return x
""",
}

ENDLESS = {
    "holds more under way than may be": """
def ring_sum(ring, x):
    for index in range(100): post(ring, [torch.zeros(1 << 17)], index=index)
    return x
""",
    "makes exchanges without end": """
def ring_sum(ring, x):
    for index in range(10**9): post(ring, index=index)
""",
    "sends the beginnings of large frames": """
def ring_sum(ring, x):
    spec = '{"dtype":"uint8","shape":[%d],"torch":true,"grad":false}' % (1 << 26)
    header = ('{"kind":"exchange","fields":{"call":1},"value":null,"arrays":[%s]}' % spec).encode()
    channel().socket.sendall(struct.pack("<I", len(header)) + header + bytes(6 << 20))
    time.sleep(60)
""",
    "makes much of little": """
def ring_sum(ring, x):
    form = shaped(x[:0])
    for index in range(900): post(ring, index=index, receive=[form] * 500)
    return x
""",
    "never takes what has arrived": """
def ring_sum(ring, x):
    big = torch.zeros(1 << 17)
    for index in range(100):
        post(ring, [big], index=index, to=ring.rank, source=ring.rank, receive=[shaped(big)])
    return x
""",
}
"""An honest loop that never ends does the same, so these submissions lose the call, but not all points."""

STAYING = {
    "floods itself with what it receives": """
def ring_sum(ring, x):
    big = torch.zeros(1 << 16)
    for index in range(10**9):
        post(ring, [big], index=index, to=ring.rank, source=ring.rank, receive=[shaped(big)])
""",
    "loops while the other waits": "def ring_sum(ring, x):\n    while ring.rank: pass\n    return x + ring.shift(x)",
    "dies in the middle of the ring": "def ring_sum(ring, x):\n    return x + ring.shift(x) if ring.rank else os._exit(0)",
    "kills what it can in the middle of the ring": """
def ring_sum(ring, x):
    if ring.rank: os.kill(-1, 9)
    return x
""",
    "computes without end": """
def ring_sum(ring, x):
    while True: ring.compute("x", torch.add, x, x)
""",
}

WIRES = {
    "writes files in /tmp": """
def wire(ring, mine):
    if mine: return open(f"/tmp/{ring.rank}", "wb").write(mine)
    return open(f"/tmp/{1 - ring.rank}", "rb").read()
""",
    "writes files in shared memory": """
def wire(ring, mine):
    if mine: return open(f"/dev/shm/@MARK@{ring.rank}", "wb").write(mine)
    return open(f"/dev/shm/@MARK@{1 - ring.rank}", "rb").read()
""",
    "writes files beside ringlab's": """
import ringlab
def wire(ring, mine):
    if mine: return open(f"{ringlab.__path__[0]}/@MARK@{ring.rank}", "wb").write(mine)
    return open(f"{ringlab.__path__[0]}/@MARK@{1 - ring.rank}", "rb").read()
""",
    "sends datagrams to abstract sockets": """
MINE = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
MINE.settimeout(0.2)
def wire(ring, mine):
    if not mine: return MINE.recv(10**6)
    MINE.bind(f"\\0@MARK@{ring.rank}")
    ring.barrier()
    MINE.sendto(mine, f"\\0@MARK@{1 - ring.rank}")
""",
    "sends datagrams by the loopback": """
MINE = None
def wire(ring, mine):
    global MINE
    if not mine: return MINE.recv(10**6)
    MINE = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    MINE.settimeout(0.2)
    MINE.bind(("127.0.0.1", 40200 + ring.rank))
    time.sleep(0.05)
    MINE.sendto(mine, ("127.0.0.1", 40200 + 1 - ring.rank))
""",
    "shares memory of System V": """
import ctypes
def wire(ring, mine):
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0x70776e + (ring.rank if mine else 1 - ring.rank), 4096, 0o1666)
    assert number >= 0
    place = libc.shmat(number, None, 0)
    if mine: return ctypes.memmove(place, mine, len(mine))
    return ctypes.string_at(place, 256)
""",
    "leaves it in the queue of messages": """
import ctypes
def wire(ring, mine):
    libc = ctypes.CDLL(None)
    number = libc.msgget(0x70776e + (ring.rank if mine else 1 - ring.rank), 0o1666)
    assert number >= 0
    place = ctypes.create_string_buffer(struct.pack("q", 1) + (mine or bytes(256)))
    assert (libc.msgsnd(number, place, 256, 0) if mine else libc.msgrcv(number, place, 256, 0, 0o4000)) >= 0
    return place.raw[8:264]
""",
    "locks bytes of a file of the system": """
import fcntl
FILE = open("/usr/lib/os-release", "rb")
def wire(ring, mine):
    if mine:
        for at, byte in enumerate(mine):
            fcntl.fcntl(FILE, 37, struct.pack("hhqqi", 0, 0, (ring.rank * 256 + at) * 256 + byte, 1, 0))
        return
    asked = (struct.pack("hhqqi", 1, 0, ((1 - ring.rank) * 256 + at) * 256, 256, 0) for at in range(256))
    return bytes(struct.unpack("hhqqi", fcntl.fcntl(FILE, 36, each))[2] % 256 for each in asked)
""",
    "locks whole files of the system": """
import fcntl, glob
FILES = [open(path, "rb") for path in sorted(glob.glob("/usr/lib/x86_64-linux-gnu/*.so*"))[:32]]
def wire(ring, mine):
    held = (FILES[:16], FILES[16:])
    for file in held[ring.rank] if mine else ():
        fcntl.flock(file, fcntl.LOCK_EX)
    for file in held[1 - ring.rank] if not mine else ():
        try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError: raise SystemExit
""",
    "watches who opens the system's files": """
import ctypes
WATCH = -1
def wire(ring, mine):
    global WATCH
    libc = ctypes.CDLL(None)
    if mine:
        WATCH = libc.inotify_init1(0o4000)
        assert WATCH >= 0 and libc.inotify_add_watch(WATCH, b"/usr/lib", 0x20) >= 0
        return
    return os.read(WATCH, 4096)[:256]
""",
    "wakes who waits at a file of the system": """
import ctypes, glob, mmap
import numpy as np
FILE = open(max(glob.glob("/usr/lib/*-linux-gnu/*.so*"), key=os.path.getsize), "rb")
WORDS = np.frombuffer(mmap.mmap(FILE.fileno(), 1 << 16, mmap.MAP_SHARED, mmap.PROT_READ), np.uint32)
HEARD = []
def futex(place, command, value):
    call, seconds = 202 if os.uname().machine == "x86_64" else 98, (ctypes.c_long * 2)(1, 0)
    at = ctypes.c_void_p(WORDS.ctypes.data + 4 * place)
    return ctypes.CDLL(None).syscall(call, at, command, ctypes.c_uint(value), seconds, None, 0)
def wire(ring, mine):
    for start in range(0, len(mine or b""), 16):
        for at, byte in enumerate(mine[start : start + 16]):
            place = (ring.rank * 16 + at) * 256 + byte
            threading.Thread(target=futex, args=(place, 0, int(WORDS[place])), daemon=True).start()
        time.sleep(0.05)
        ring.barrier()
        for at in range(16):
            first = ((1 - ring.rank) * 16 + at) * 256
            HEARD.append([futex(first + byte, 1, 1) for byte in range(256)].index(1))
        ring.barrier()
    if not mine: return bytes(HEARD)
""",
    "finds the other rank among the processes": """
import glob
def wire(ring, mine):
    if mine: return
    for path in glob.glob("/proc/[0-9]*/mem"):
        if path.split("/")[2] not in (str(os.getpid()), "1"): return open(path, "rb").read(256)
""",
    "keeps it in a global of the module": """
SEEN = {}
def wire(ring, mine):
    if mine: SEEN[ring.rank] = mine
    else: return SEEN.get(1 - ring.rank)
""",
}

DODGING = {
    "speaks for the other rank": (
        "def ring_sum(ring, x):\n    post(ring, [x], rank=1 - ring.rank, to=ring.rank)\n    return x",
        0,
    ),
    "sends data as control": (
        """
def ring_sum(ring, x):
    into = torch.empty_like(x)
    ring.comm.exchange(send=(x,), to=ring.next, receive=(into,), source=ring.previous, tag="control:x").wait()
    ring.shift(x * 0)
    return x + into
""",
        2,
    ),
    "sends data as a barrier": (
        """
def ring_sum(ring, x):
    bytes_of = x.reshape(-1).view(torch.uint8)
    into = torch.empty_like(bytes_of)
    ring.comm.exchange(send=(bytes_of,), to=ring.next, receive=(into,), source=ring.previous, tag="control:barrier").wait()
    ring.shift(x * 0)
    return x + into.view(x.dtype).reshape(x.shape)
""",
        2,
    ),
    "sends data in the tags of messages that do not match": (
        """
import base64, re
def ring_sum(ring, x):
    mine = base64.b64encode(bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())).decode()
    heard = ""
    for start in range(0, len(mine), 180):
        tag = f"<{mine[start:start + 180]}>"
        try: ring.comm.exchange(send=(torch.zeros(1),), to=ring.next, receive=(torch.empty(2),), source=ring.previous, tag=tag).wait()
        except Exception as error: heard += next(each for each in re.findall("<(.*?)>", str(error)) if f"<{each}>" != tag)
    theirs = torch.tensor(list(base64.b64decode(heard)), dtype=torch.uint8).view(x.dtype).reshape(x.shape)
    ring.shift(x * 0)
    return x + theirs
""",
        2,
    ),
    "sends data as ticks of the clock between messages of no bytes": (
        """
NOTHING = torch.empty(0, dtype=torch.uint8)
def tick(ring, number, listens):
    begin = ring.comm.now() if listens else 0
    for _ in range(number): ring.compute("tick", int)
    ring.comm.exchange(
        send=(NOTHING,), to=ring.next, receive=(NOTHING.clone(),), source=ring.previous, tag="control:tick"
    ).wait()
    return int(ring.comm.now() - begin) if listens else 0
def ring_sum(ring, x):
    mine, heard = x.reshape(-1).view(torch.uint8).tolist(), []
    for turn in range(2):
        speaks = turn == ring.rank
        for byte in mine:
            parts = [tick(ring, (byte >> place & 3) * speaks, not speaks) for place in (0, 2, 4, 6)]
            if not speaks: heard.append(sum(part << 2 * place for place, part in enumerate(parts)))
    ring.shift(x * 0)
    return x + torch.tensor(heard, dtype=torch.uint8).view(x.dtype).reshape(x.shape)
""",
        2,
    ),
    "takes the rules of its ring off": (
        """
def ring_sum(ring, x):
    comm, sent, into = ring.comm, x.clone(), torch.empty_like(x)
    while hasattr(comm, "inner"): comm = comm.inner
    work = comm.exchange(send=(sent,), to=ring.next, receive=(into,), source=ring.previous)
    sent.zero_()
    work.wait()
    return x + into
""",
        0,
    ),
    "sends data in pieces": (
        """
def ring_sum(ring, x):
    return x + torch.cat([ring.shift(part.contiguous()) for part in x.split(1, dim=-2)], dim=-2)
""",
        2,
    ),
    "sends half of it": ("def ring_sum(ring, x):\n    return x + ring.shift(x.bfloat16()).to(x.dtype)", 0),
    "has more ranks than there are": (
        "def ring_sum(ring, x):\n    ring.comm.world_size = 3\n    return x + ring.shift(x)",
        5,
    ),
    "takes itself for the other rank": (
        "def ring_sum(ring, x):\n    ring.comm.rank = 1 - ring.rank\n    return x + ring.shift(x)",
        5,
    ),
    "tags its messages with control characters": (
        "def ring_sum(ring, x):\n    return x + ring.shift(x, tag='\\x1b[2J%s{}')",
        5,
    ),
    "runs a cluster of its own": (
        "def ring_sum(ring, x):\n    return VirtualCluster(2).run(lambda own: own.shift(x) + x).results[ring.rank]",
        0,
    ),
}

FORGERS = {name: COMMON + source for name, source in FORGING.items()}
BOUNDED = {name: COMMON + source for name, source in ENDLESS.items()}
LIVE = ("waits for it twice", "has a tag without end")
"""The forgers that also run in the sandbox; all of them would start a hundred workers."""
SUBMISSIONS = {
    **{name: (FORGERS[name], 0) for name in LIVE},
    **{name: (COMMON + source, 0) for name, source in STAYING.items()},
    **{
        name: (COMMON + source + "def ring_sum(ring, x):\n    return by(wire, ring, x)\n", 0)
        for name, source in WIRES.items()
    },
    **{name: (COMMON + source, earned) for name, (source, earned) in DODGING.items()},
}
"""name → (source, points that its honest part earns)"""
