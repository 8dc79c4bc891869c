"""The program in a sandbox that has imported what submissions need, and forks the workers.

It never runs a submission's code and receives no part of a submission. Each worker is a child process with
its own namespaces, mounts, uid and system-call filter, without privileges (namespace.py), and serves one
submission. It shares no open file with the server or with another worker. Only a process with a single thread
can be forked safely, so if libraries have started other threads, no worker is made.

The judge sends an order {uid, limits, scratch, filter} as JSON together with the worker's socket. Through
that socket, before the worker's greeting, the judge receives a byte and a pidfd of the first process in the
worker's namespace. Errors are written to standard error.
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
    """Fork workers until the judge closes the socket.

    The arguments are the same as the worker's, except that the socket is for orders.
    """
    worker.prepare()
    os.set_blocking(2, False)  # do not block if the judge does not read error messages
    orders = socket.socket(fileno=int(sys.argv[2]))
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, ORDER, 1)
        if not text:
            return
        try:
            _carry_out(text, orders, descriptors)
        except (OSError, ValueError, RuntimeError) as error:
            # the error concerns this worker only, so the server goes on
            _complain(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _carry_out(text: bytes, orders: socket.socket, descriptors: Sequence[int]) -> None:
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"only a process with one thread can be forked safely; this one has {threads}")
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
    """Become a worker or the first process of its namespace, or report an error.

    Never return to the server.
    """
    try:
        _become_worker(descriptor, order)
    except (SystemExit, BrokenPipeError, ConnectionResetError):  # the judge has closed the socket
        os._exit(0)
    except BaseException as error:
        _complain(error)
    finally:
        os._exit(1)


def _become_worker(descriptor: int, order: dict[str, Any]) -> None:
    namespace.separate(root=order["uid"] is not None)
    if os.fork():  # the child is process 1 of the new process namespace
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
        # Process 1 of a namespace ignores signals that it does not handle, if they come from inside.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.closerange(0, 1024)  # so that the socket closes when the worker ends
        os.wait()
        os._exit(0)
    namespace.open_to_itself()
    os.setsid()
    _draw_anew()
    worker.warm_up(sys.argv[3])
    worker.serve(descriptor)


def _draw_anew() -> None:
    """Seed the random number generators, so that workers differ as separately started processes do."""
    import numpy as np

    random.seed()
    np.random.seed()
