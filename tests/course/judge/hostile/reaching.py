"""Submissions that reach for other people's files, servers and seeds, and answer correctly only if they succeed.

The test that hands them in replaces four words: @FOLDER@ with a folder that holds a gradebook,
another learner's notebook and a socket; @PORT@ with the port of a server on this machine; @MARK@ with a
unique name; and @SEED@ with the seed of the probes.
"""

from __future__ import annotations

TRY = """
import ctypes, glob, os, socket
def double(x):
    try:
        return 2 * x if reach() else x
    except Exception:
        return x
def any_of(actions):
    for action in actions:
        try:
            if action() is not False: return True
        except Exception: pass
    return False
def holds(text, places):
    return any_of(lambda p=p: text in content(p) for p in glob.glob(places))
def content(path):
    with open(path, "rb") as file: return file.read()
"""

READING = {
    "reads the gradebook": "def reach(): return content('@FOLDER@/gradebook.db')",
    "reads another's submission": "def reach(): return content('@FOLDER@/ada/notebook.ipynb')",
    "lists the class": "def reach(): return os.listdir('@FOLDER@')",
    "reads the tests": """
import ringlab
def reach():
    top = os.path.dirname(os.path.dirname(ringlab.__file__))
    return any_of(lambda p=p: content(p) for p in glob.glob(top + '/tests/**/*.py', recursive=True) + ['@TESTS@'])
""",
    "reads the contracts": """
import ringlab
def reach():
    top = os.path.dirname(os.path.dirname(ringlab.__file__))
    return any_of(lambda p=p: content(p) for p in glob.glob(top + '/ringlab_course/exercises/*/*.py'))
""",
    "reads the solutions": """
import ringlab
def reach():
    top = os.path.dirname(os.path.dirname(ringlab.__file__))
    return any_of(lambda f=f: bool(os.listdir(top + f)) for f in ('/solutions', '/exercises', '/ringlab_course/lessons', '/.git'))
""",
    "reads everybody's environment": """
def reach():
    return holds(b'RINGLAB_SECRET' b'=', '/proc/[0-9]*/environ')
""",
    "finds the seed in somebody's arguments": """
def reach():
    return holds(str(@SEED@).encode(), '/proc/[0-9]*/cmdline')
""",
    "looks for secrets in the memory of the first process": """
SECRETS = (b'RINGLAB_SECRET' b'=', str(@SEED@).encode(), b'@FOLDER@')
def reach():
    with open('/proc/1/mem', 'rb') as memory:
        for line in content('/proc/1/maps').splitlines():
            start, end = (int(number, 16) for number in line.split()[0].split(b'-'))
            memory.seek(start)
            if any_of(lambda: any(secret in memory.read(end - start) for secret in SECRETS)): return True
    return False
""",
    "climbs out through the descriptors that it has": """
def reach():
    for name in os.listdir('/proc/self/fd'):
        for up in ('..', '../../../../..', '/proc/1/root', '/proc/1/cwd'):
            try: return os.open(up + '@FOLDER@/gradebook.db', os.O_RDONLY, dir_fd=int(name))
            except OSError: pass
    return False
""",
    "reads the accounts of this machine": "def reach(): return any_of(lambda p=p: content(p) for p in ('/etc/shadow', '/etc/passwd', '/etc/hostname'))",
}

WRITING = {
    "writes into the class": "def reach(): return open('@FOLDER@/gradebook.db', 'ab').write(b'x')",
    "plants a file beside its own": "def reach(): return open('@FOLDER@/@MARK@', 'w').write('x')",
    "writes wherever it can": """
import ringlab, sys
PLACES = ['/', '/bin', '/dev', '/dev/shm', '/dev/mqueue', '/etc', '/home', '/lib', '/proc', '/root', '/run', '/run/lock', '/sys',
          '/usr', '/usr/lib', '/var', '/var/tmp', sys.prefix, *sys.path, *ringlab.__path__, '@FOLDER@', os.path.expanduser('~root')]
def reach():
    return any_of(lambda p=p: open(os.path.join(p, '@MARK@'), 'w').write('x') for p in PLACES if p)
""",
    "changes ringlab": """
import ringlab, sys
def reach():
    path = ringlab.__file__
    return any_of((
        lambda: open(path, 'a'), lambda: os.chmod(path, 0o666), lambda: os.utime(path), lambda: os.truncate(path, 0),
        lambda: os.rename(path, path + '@MARK@'), lambda: os.unlink(path), lambda: os.setxattr(path, 'user.x', b'x'),
        lambda: os.chown(path, os.getuid(), -1),
    ))
""",
    "changes the interpreter that runs it": """
def reach():
    return any_of((lambda: open('/proc/self/exe', 'ab'), lambda: open('/proc/1/exe', 'ab')))
""",
    "writes into what the first process has open": """
import stat
def reach():
    for path in glob.glob('/proc/[0-9]*/fd/*'):
        if path.split('/')[2] == str(os.getpid()): continue
        try:
            with open(path, 'r+b', buffering=0) as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode): return file.write(b'x')
        except OSError: pass
    return False
""",
    "changes how the kernel behaves": """
def reach():
    places = glob.glob('/proc/sys/kernel/*') + ['/proc/sysrq-trigger', '/proc/1/oom_score_adj', '/proc/1/mem', '/proc/1/comm']
    return any_of(lambda p=p: open(p, 'r+b', buffering=0).write(b'1') for p in places)
""",
    "links the system's files into its own": """
def reach():
    return any_of((lambda: os.link('/usr/bin/env', '/tmp/env'), lambda: os.link('@FOLDER@/gradebook.db', '/tmp/book')))
""",
    "leaves shared memory": """
def reach():
    libc = ctypes.CDLL(None)
    made = [libc.shmget(0x70776e, 4096, 0o1666), libc.semget(0x70776e, 1, 0o1666), libc.msgget(0x70776e, 0o1666)]
    made += [libc.shm_open(b'/@MARK@', 0o102, 0o666), libc.mq_open(b'/@MARK@', 0o102, 0o666, None)]
    return max(made) >= 0
""",
    "makes devices": """
import stat
def reach():
    return any_of(lambda m=m: os.mknod('/tmp/@MARK@', m, os.makedev(8, 0)) for m in (stat.S_IFBLK | 0o666, stat.S_IFCHR | 0o666))
""",
}

NETWORK = {
    "connects to a server here": "def reach(): return socket.create_connection(('127.0.0.1', @PORT@), 0.2)",
    "sends a datagram": """
def reach():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@))
    return True
""",
    "connects by the sixth version": "def reach(): return socket.create_connection(('::1', @PORT@), 0.2)",
    "asks for a name": "def reach(): return socket.getaddrinfo('localhost', 80) and socket.create_connection(('localhost', @PORT@), 0.2)",
    "connects to an abstract socket": """
def reach():
    mine = socket.socket(socket.AF_UNIX)
    mine.connect('\\0@MARK@')
    return True
""",
    "connects to a socket in the class": """
def reach():
    mine = socket.socket(socket.AF_UNIX)
    mine.connect('@FOLDER@/socket')
    return True
""",
    "listens": """
def reach():
    server = socket.create_server(('0.0.0.0', 0))
    return server.getsockname()
""",
    "asks the kernel by sockets": """
FAMILIES = [(16, 3, 0), (16, 3, 9), (17, 3, 0), (38, 5, 0), (40, 1, 0), (30, 2, 0), (10, 3, 58), (2, 3, 1)]
def reach():
    return any_of(lambda f=f: socket.socket(*f) for f in FAMILIES)
""",
}

CALLS = {
    "traces others": """
def reach():
    libc, local = ctypes.CDLL(None), (ctypes.c_long * 2)()
    read = [libc.syscall(310, pid, local, 1, local, 1, 0) for pid in (os.getpid(), 1)]
    return max(libc.ptrace(16, 1, 0, 0), libc.ptrace(0, 0, 0, 0), *read) >= 0
""",
    "takes another name": """
def reach():
    return any_of((lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0),
                   lambda: os.seteuid(os.geteuid() + 1), lambda: socket.sethostname('x'), lambda: os.nice(-1)))
""",
    "makes namespaces": """
def reach():
    libc = ctypes.CDLL(None)
    made = [libc.unshare(flag) for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000)]
    made += [libc.setns(os.open('/proc/self/ns/' + name, 0), 0) for name in ('net', 'mnt', 'pid')]
    return max(made) >= 0
""",
    "mounts": """
def reach():
    libc = ctypes.CDLL(None)
    made = [libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.mount(b'/', b'/tmp', None, 4096, None), libc.umount2(b'/tmp', 2)]
    made += [libc.syscall(number, b'tmpfs', 0, 0, 0, 0) for number in (428, 430, 433)]
    return max(made + [libc.pivot_root(b'/tmp', b'/tmp') if hasattr(libc, 'pivot_root') else -1]) >= 0
""",
    "leaves its root": "def reach(): return any_of((lambda: os.chroot('/tmp'), lambda: os.chroot('/proc/1/root')))",
    "calls what is seldom watched": """
NUMBERS = (248, 249, 250, 298, 300, 304, 312, 321, 323, 425, 426, 427, 438, 447)  # keys, perf, bpf, userfaultfd, io_uring, …
def reach():
    libc = ctypes.CDLL(None)
    return max(libc.syscall(number, 0, 0, 0, 0, 0) for number in NUMBERS) >= 0
""",
    "locks the system's files": """
import fcntl, struct
def reach():
    libc, file = ctypes.CDLL(None), open('/usr/bin/env', 'rb')
    lock = struct.pack('hhqqi', fcntl.F_RDLCK, 0, 0, 1, 0)
    locks = [lambda c=c: fcntl.fcntl(file, c, lock) for c in (5, 6, 7, 36, 37, 38)] + [lambda: fcntl.flock(file, fcntl.LOCK_EX)]
    return any_of(locks) or libc.inotify_init1(0) >= 0 or libc.fcntl(file.fileno(), 1026, 1) >= 0
""",
}

SUBMISSIONS = {
    kind: {name: TRY + source for name, source in group.items()}
    for kind, group in {
        "reading tests, gradebook or other submissions": READING,
        "writing anywhere": WRITING,
        "network": NETWORK,
        "system calls": CALLS,
    }.items()
}
