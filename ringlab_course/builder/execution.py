"""Run a notebook and remove times, random ids and widgets, so that every run gives the same file."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

import ringlab
from ringlab.errors import CourseError, require_package
from ringlab.viz import frontend
from ringlab_course.notebook import progressfile

WIDGET = "application/vnd.jupyter.widget-view+json"
KEPT_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"pHYs", b"IDAT", b"IEND")
SECONDS_PER_CELL = 300
LONGEST_FOLDER = 80
"""The longest path, in characters, of a folder for sockets; a socket's own path is limited to about 100."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,16}\b")


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run `notebook` in place with `folder` as its working directory; return it with normalised outputs.

    The notebook runs with an empty temporary progress file and without a person, so that the outputs are
    those of a learner who has done nothing yet.

    Raises: CourseError if a cell raises, or its output would differ from run to run; MissingExtraError
    without nbclient.
    """
    require_package("nbclient", "instructor", "running notebooks")
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
            startup_timeout=SECONDS_PER_CELL,
            extra_arguments=["--log-level=40"],
        )
        _without_ports(client.create_kernel_manager(), Path(scratch))
        try:
            client.execute(env=environment(Path(scratch)))
        except CellExecutionError as error:
            raise CourseError("a notebook that runs from top to bottom", str(error)) from None
        except (RuntimeError, TimeoutError) as error:  # the kernel did not start, died, or took too long
            raise CourseError(
                "a kernel that runs the notebook", f"{type(error).__name__}: {error}"
            ) from error
    return normalise(notebook)


def _without_ports(manager: Any, scratch: Path) -> None:
    """Make the kernel behind `manager` listen on socket files in `scratch` instead of on ports.

    Ports would be chosen before the kernel starts. If another process took one of them in between, the
    kernel would die.
    """
    if os.name == "posix" and len(str(scratch)) <= LONGEST_FOLDER:
        manager.transport, manager.connection_file = "ipc", str(scratch / "kernel.json")


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables for a kernel that runs a notebook without a person."""
    package = str(Path(ringlab.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        progressfile.VARIABLE: str(scratch / "progress.json"),
        frontend.VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR") or str(scratch / "matplotlib"),
    }


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Remove everything from `notebook`, in place, that differs from run to run; return the notebook."""
    notebook.metadata.pop("widgets", None)
    for key in ("kernelspec", "language_info"):
        if key in notebook.metadata:
            from ringlab_course.builder.sources import METADATA

            notebook.metadata[key] = dict(METADATA[key])
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += bool(cell.source.strip())
        cell.execution_count = count if cell.source.strip() else None
        outputs = [_normal(output, count) for output in cell.outputs if not _is_widget(output)]
        cell.outputs = _joined(outputs)
        _refuse_chance(cell)
    return notebook


def plain_png(data: bytes) -> bytes:
    """Return a PNG without the chunks that contain software names and times."""
    signature, rest, kept = data[:8], data[8:], [data[:8]]
    if signature != b"\x89PNG\r\n\x1a\n":
        return data
    while rest:
        size = 12 + int.from_bytes(rest[:4], "big")
        if rest[4:8] in KEPT_CHUNKS:
            kept.append(rest[:size])
        rest = rest[size:]
    return b"".join(kept)


def _is_widget(output: Any) -> bool:
    return WIDGET in output.get("data", {})


def _normal(output: Any, count: int) -> Any:
    if "execution_count" in output:
        output["execution_count"] = count
    if output.output_type == "error":
        # the traceback contains paths and colour codes; keep only the error's name and message
        output["traceback"] = [f"{output.ename}: {output.evalue}"]
    data = output.get("data", {})
    if "image/png" in data:
        png = base64.b64decode("".join(data["image/png"]))
        data["image/png"] = base64.b64encode(plain_png(png)).decode() + "\n"
    return output


def _joined(outputs: list[Any]) -> list[Any]:
    """Join neighbouring pieces of the same stream, because where a stream is split varies from run to run."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def _refuse_chance(cell: Any) -> None:
    first = cell.source.splitlines()[0] if cell.source else ""
    for output in cell.outputs:
        if output.get("name") == "stderr":
            raise CourseError(
                "no warnings in a notebook", f"{output.text.strip()[:400]!r} from the cell {first!r}"
            )
        text = output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
        if _ADDRESS.search(text):
            raise CourseError("outputs that are always the same", f"a memory address from the cell {first!r}")
