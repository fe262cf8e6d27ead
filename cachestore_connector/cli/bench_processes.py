"""The processes of `cachestore bench`, which do each command at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import CacheStoreError
from .bench_shapes import Shape

# As this process finds the package, whatever the current directory.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cachestore_connector.cli.bench_worker import main; main()"
)
_PATIENCE = 300.0  # seconds: a disk that doesn't answer is no reason to wait for ever


class ProcessFailed(CacheStoreError):
    """A process reported an error, ended, or didn't answer."""


class Processes:
    """``count`` processes with ``pages`` pages each. Not for use from several threads."""

    def __init__(self, shape: Shape, count: int, pages: int) -> None:
        self._processes: list[subprocess.Popen] = []
        try:
            for _ in range(count):
                self._processes.append(_started())
            jobs = [
                {
                    "rank": rank,
                    "processes": count,
                    "pages": pages,
                    "tensor_sizes": shape.tensor_sizes,
                    "page_size": shape.page_size,
                    "dtype": shape.dtype,
                    "layout": shape.layout,
                    "is_mla": shape.is_mla,
                }
                for rank in range(count)
            ]
            self._all(jobs)
        except BaseException:
            self.end()
            raise

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._processes)

    def do(self, what: str, **given: Any) -> list[dict[str, Any]]:
        """Have each do it; their answers. Raises `ProcessFailed`."""
        return self._all([{"do": what, **given}] * self.count)

    def each(self, what: str, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Likewise, but each is given something else."""
        return self._all([{"do": what, **one} for one in given])

    def first(self, what: str, **given: Any) -> dict[str, Any]:
        """Have the first alone do it."""
        return self._all([{"do": what, **given}])[0]

    def end(self) -> None:
        """End them at once, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
        self._processes = []

    def _all(self, commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        asked = self._processes[: len(commands)]
        for process, command in zip(asked, commands, strict=True):
            try:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise _ended(process) from None
        until = time.monotonic() + _PATIENCE
        answers = [_answer(process, until) for process in asked]
        for answer in answers:
            if "error" in answer:
                raise ProcessFailed(answer["error"])
        return answers


def _started() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # a Ctrl-C is ours to see to
    )


def _answer(process: subprocess.Popen, until: float) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise ProcessFailed(f"a process hasn't answered for {_PATIENCE:.0f} s")
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            raise _ended(process)
        line += piece
    return json.loads(line)


def _ended(process: subprocess.Popen) -> ProcessFailed:
    status = process.wait()
    why = f"by signal {-status}, as when memory is short" if status < 0 else f"with {status}"
    return ProcessFailed(f"a process of the benchmark ended {why}")


@contextlib.contextmanager
def processes(shape: Shape, count: int, pages: int) -> Iterator[Processes]:
    """Have them; they end with the block."""
    group = Processes(shape, count, pages)
    try:
        yield group
    finally:
        group.end()
