"""The program inside the sandbox: loads a submission's code and answers calls.

It never sees results of checks.
The submission's code may rewrite everything in this process. So the judge itself compares values, and
measures memory, time and traffic. After the call it requests the arguments and looks for changes in them. A
hostile submission can still lie about four things that the worker reports: which exception was raised, which
places a kernel accessed, the outcome of a program in JAX, and an answer's gradient.
Frames from the judge: `read`, `import`, `load`, `call`, `ring`, `arguments`, `go`, `deliver`, `return`, `received`,
`lost`, `begun`, `ended`, `time`, `abort`. Frames to the judge: `hello`, `sources`, `imported`, `loaded`,
`listening`, `ready`, `done`, `result`, `returned`, `error`, `exchange`, `wait`, `begin`, `end`, `now`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import warnings
from typing import Any

from ringlab.errors import OffLimitsError
from ringlab_course.checking.guard import arrays_by_argument, with_gradient
from ringlab_course.checking.protocol import Frame, ProtocolError
from ringlab_course.judge.channel import Abort, Channel
from ringlab_course.judge.records import written_down
from ringlab_course.judge.seccomp import forbid_programs

TEXT = 4000  # an exception's text is cut to this many characters


def main() -> None:
    """Answer the judge's frames until it closes the socket.

    The arguments are a path, the socket's descriptor, the arrays, and the limits as text.
    """
    prepare()
    serve(int(sys.argv[2]))


def prepare() -> None:
    """Import everything that submissions may need, without what is forbidden."""
    if sys.argv[4]:
        from ringlab_course.checking.forbidden import OffLimits
        from ringlab_course.judge.removal import install

        install(OffLimits.from_text(sys.argv[4]))
    gc.disable()  # the imported objects stay, and collecting them again and again takes a tenth of the start
    _import(sys.argv[3])
    warm_up(sys.argv[3])
    gc.freeze()
    gc.enable()
    warnings.simplefilter("ignore")


def serve(descriptor: int) -> None:
    """Answer the frames of the judge about one submission; from now on, errors go only to the judge."""
    channel = Channel(descriptor)
    if "RINGLAB_WORKER" not in os.environ:  # RINGLAB_WORKER is set if there is no sandbox
        forbid_programs()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # so far, the judge has read standard error
    os.close(nothing)
    channel.send("hello")
    namespace: dict[str, Any] = {}
    while True:
        frame = channel.receive()
        channel.call = frame.fields.get("call", 0)
        if frame.kind == "read":  # before any of the learner's code runs, so the judge can trust the answer
            from ringlab_course.judge.loader import sources

            channel.send("sources", sources(frame.value, frame.fields["functions"]))
        elif frame.kind == "load":
            from ringlab_course.judge.loader import load

            namespace, notes = load(frame.value, frame.fields["functions"], frame.fields["seconds"])
            channel.send("loaded", notes)
        elif frame.kind == "import":  # nothing else of the submission runs in this worker
            from ringlab_course.judge.loader import run_imports

            channel.send("imported", run_imports(frame.value, frame.fields["functions"]))
        elif frame.kind in ("call", "ring"):
            _answer(channel, frame, namespace)


def _answer(channel: Channel, frame: Frame, namespace: dict[str, Any]) -> None:
    """Run one call. The judge reads this process's memory from `listening` to `result`."""
    channel.misuse = None
    try:
        function = namespace[frame.fields["function"]]
        ring = (_ring(channel, frame),) if frame.kind == "ring" else ()
        channel.send("listening")
        given, keywords = channel.expect("arguments").value
        arguments = (*ring, *given)
        names, _ = arrays_by_argument(function, arguments, keywords)
        channel.send("ready")
        channel.expect("go")
        with _recording() as accesses:
            answer: Any
            if frame.fields.get("examine"):  # JAX runs the one-device program on all devices of a mesh
                from ringlab_course.mesh.examine import examine

                answer = examine(function, *arguments, **keywords).as_dict()
            elif frame.fields.get("gradient"):
                answer = with_gradient(function)(*arguments, **keywords)
            else:
                answer = function(*arguments, **keywords)
        if channel.misuse is not None:  # the error was lost in a thread of the program
            raise channel.misuse
        channel.send("done")
        channel.expect("deliver")
        channel.send("result", (answer, written_down(accesses)) if frame.fields.get("record") else answer)
        channel.expect("return")
        _return(
            channel, names[len(ring) :], arrays_by_argument(function, arguments, keywords)[1][len(ring) :]
        )
    except ProtocolError as error:
        channel.send("error", type="ProtocolError", text=_bounded(f"the answer holds {error.got}"), own=False)
    except Abort:
        channel.send("error", type="Abort", text="", own=False)
    except BaseException as error:
        _report(channel, error)


def _return(channel: Channel, names: list[str], arrays: list[Any] | None) -> None:
    """Send the arguments back, or None if they have become something that cannot be sent."""
    try:
        channel.send("returned", arrays, names=[_bounded(name) for name in names])
    except ProtocolError:
        channel.send("returned", None, names=[])


def _recording() -> contextlib.AbstractContextManager[list[Any]]:
    """Return a context that records every load and store of a kernel, if this worker runs Triton's kernels.

    In this context, an access outside of its tensor is an error instead of a crash.
    """
    if sys.argv[3] != "triton":
        return contextlib.nullcontext([])
    from ringlab_course.checking.accesses import record_accesses

    return record_accesses()


def _report(channel: Channel, error: BaseException) -> None:
    import builtins

    import ringlab.errors
    from ringlab_course.checking.failures import cause_of, own_lines

    error = cause_of(error)
    name = type(error).__name__
    known = getattr(builtins, name, getattr(ringlab.errors, name, None)) is type(error)
    try:
        text = own_lines(error)
    except BaseException:  # methods of the exception may raise, too
        text = name
    channel.send("error", type=name if known else "", text=_bounded(text), own=True)


def _bounded(text: str) -> str:
    text = text if len(text) <= TEXT else text[:TEXT] + " …"
    return text.encode("utf-8", "replace").decode("utf-8")


def _ring(channel: Channel, frame: Frame) -> Any:
    from ringlab.comm.ring import Ring
    from ringlab.comm.wrappers.strict import Strict
    from ringlab_course.judge.judge_comm import JudgeComm, sealed

    fields = frame.fields
    comm = JudgeComm(channel, fields["rank"], fields["world_size"], fields.get("late", ()))
    return Ring(sealed(Strict(comm)))


def _eager(model: Any = None, **options: Any) -> Any:
    """Replaces torch.compile, which would start a compiler, and returns the model unchanged."""
    return model if model is not None else functools.partial(_eager, **options)


def _import(arrays: str) -> None:
    """Import what the first call would import, so that the time and memory for it are not counted."""
    names = ["ringlab_course.judge.loader"]
    if arrays == "jax":
        names += ["jax.numpy", "ringlab_course.mesh.examine", "ringlab_course.mesh.blocks"]
    elif arrays != "numpy":
        names += [
            "torch",
            "ringlab.comm.wrappers.strict",
            "ringlab_course.judge.judge_comm",
        ]
    for name in names:
        importlib.import_module(name)
    if arrays in ("torch", "triton"):
        import torch

        torch.compile = _eager
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)
    if arrays == "triton":
        from ringlab.blocks.triton import interpreter

        interpreter.repair()


def warm_up(arrays: str) -> None:
    """Use the libraries as the first call would, because their code counts as memory once it has been used.

    Nothing is computed in JAX, because its first computation fixes the number of devices.
    """
    import numpy as np

    square = np.ones((64, 64), np.float32)
    np.exp(square @ square * 1e-3).sum()
    if arrays in ("numpy", "jax"):
        return
    import torch

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(1, 2, 64, 16, dtype=dtype, requires_grad=True)
        scores = (x @ x.transpose(-1, -2)).float()
        scores = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        (scores.softmax(-1).to(dtype) @ x).sum().backward()
        torch.logaddexp(scores, torch.logsumexp(scores, -1, keepdim=True))
        with contextlib.suppress(OffLimitsError):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
