"""A process tree that doesn't outlive whoever started it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

# Runs between fork and the command. The kernel kills the command when its parent dies, however it
# dies; SGLang asks the same for its own children. The second check covers a parent gone before the
# first line ran. (A preexec_fn would run Python in the fork of a process that has threads.)
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Tree:
    """A command in a session of its own, with everything it starts."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path):
        with open(log, "ab") as output:
            self._root = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: set[psutil.Process] = set()

    def running(self) -> bool:
        """Whether the command itself still runs."""
        return self._root.poll() is None

    def returncode(self) -> int | None:
        """The command's exit status, negative for a signal."""
        return self._root.poll()

    def members(self) -> list[psutil.Process]:
        """All live processes of the tree, the command's own first.

        Found by parent and by session, so a grandchild whose parent has died is still found;
        what was seen once is remembered, by pid and start time.
        """
        session = self._root.pid
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == session:
                    self._seen.add(process)
        with contextlib.suppress(psutil.Error):
            self._seen.update(psutil.Process(self._root.pid).children(recursive=True))
        self._seen = {process for process in self._seen if _alive(process)}
        return sorted(self._seen, key=lambda process: (process.pid != session, process.pid))

    def end(self, sign: int, timeout: float) -> None:
        """Send ``sign`` and wait for the tree to be gone; at the bound, SIGKILL.

        SIGTERM goes to the command alone, as from an operator or an init system; SIGKILL to all.
        """
        self.members()
        if sign != signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                self._root.send_signal(sign)
            if self._gone(timeout):
                return
        survivors = self.members()
        if survivors:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._root.pid, signal.SIGKILL)  # all at once
        for process in survivors:  # and whoever left the group
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not self._gone(10):
            raise TimeoutError(f"processes survive SIGKILL: {self.members()}")

    def _gone(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            self._root.poll()  # reaps it
            if not self.members():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    """A zombie is dead: it waits for a parent that may not be ours."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
