"""The program in a sandbox that has imported what submissions need, and forks the workers.

It never runs a submission's code, and nothing of one comes to it: each worker is a child with namespaces, mounts, a uid and a
filter of its own, without rights (namespace.py), and serves one submission. It shares no open file with the server or another worker.
Only a process of one thread can be forked safely; if libraries have started others, no worker is made.

The judge sends an order {uid, limits, scratch, filter} as JSON together with the worker's socket. Through that socket comes, before
the worker's greeting, a byte with a pidfd of the first process of the worker's namespace. What goes wrong goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ringlab_course.judge import namespace, seccomp, worker
from ringlab_course.judge.launcher import set_limits

FIRST = b"\0"
ORDER = 1 << 16  # bytes, at most


def main() -> None:
    """Fork workers until the judge hangs up. Arguments as the worker's; the socket is the one for orders."""
    worker.prepare()
    os.set_blocking(2, False)  # a judge that does not read complaints holds nobody up
    orders = socket.socket(fileno=int(sys.argv[2]))
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, ORDER, 1)
        if not text:
            return
        try:
            _carry_out(text, orders, descriptors)
        except (OSError, ValueError, RuntimeError) as error:  # of this worker; the others live
            _complain(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _carry_out(text: bytes, orders: socket.socket, descriptors: Sequence[int]) -> None:
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"a process of one thread is needed to fork; this one has {threads}")
    (descriptor,) = descriptors
    child = os.fork()
    if child == 0:
        orders.close()
        _in_child(descriptor, json.loads(text))
    os.waitpid(child, 0)


def _complain(error: BaseException) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{type(error).__name__}: {error}\n".encode())


def _in_child(descriptor: int, order: dict[str, Any]) -> NoReturn:
    """Become a worker, or the first process of its namespace, or say why not. Nothing of this returns to the server's loop."""
    try:
        _become_worker(descriptor, order)
    except (SystemExit, BrokenPipeError, ConnectionResetError):  # the judge has hung up
        os._exit(0)
    except BaseException as error:
        _complain(error)
    finally:
        os._exit(1)


def _become_worker(descriptor: int, order: dict[str, Any]) -> None:
    namespace.separate(root=order["uid"] is not None)
    if os.fork():  # the namespace of processes begins with the child
        os._exit(0)
    namespace.mount_own(order["scratch"])
    namespace.give_up_rights(order["uid"])
    namespace.open_nothing_shared()
    own = os.pidfd_open(os.getpid())
    with socket.socket(fileno=os.dup(descriptor)) as judge:
        socket.send_fds(judge, [FIRST], [own])
    os.close(own)
    is_first = os.fork() > 0
    if order["filter"] is not None:
        seccomp.install(bytes.fromhex(order["filter"]))
    set_limits(order["limits"])
    if is_first:
        # The first process of a namespace ignores signals from inside that it does not handle.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.closerange(0, 1024)  # the end of the worker is to be the end of its socket
        os.wait()
        os._exit(0)
    namespace.open_to_itself()
    os.setsid()
    _draw_anew()
    worker.warm_up(sys.argv[3])
    worker.serve(descriptor)


def _draw_anew() -> None:
    """Let generators of random numbers differ between workers, as those of processes that were started do."""
    import numpy as np

    random.seed()
    np.random.seed()
