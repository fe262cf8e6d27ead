"""The `cachestore` command, run as people and scripts do."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cachestore_connector.cli import main


def invoke(*words, env=None, **more):
    """In this process, piped, at 80 columns."""
    environment = {"COLUMNS": "80"} | (env or {})
    return CliRunner().invoke(main, [str(word) for word in words], env=environment, **more)


def as_nobody(*words):
    """As another user, in a process of its own, without ``CACHESTORE_CONFIG``."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # All is imported first: Python may not be that user's to read.
    script = f"""
import os
import concurrent.futures.thread
from cachestore_connector import store
from cachestore_connector.cli import COMMANDS, main
for name in COMMANDS:
    main.get_command(None, name)
"".encode("utf-8-sig")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main({[str(word) for word in words]!r})
"""
    environ = {name: v for name, v in os.environ.items() if name != "CACHESTORE_CONFIG"}
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ)


def on_a_terminal(*words, answer=b""):
    """In a terminal of 80 columns: (exit status, what it printed).

    ``answer`` is typed when it asks.
    """
    code = "import sys; from cachestore_connector.cli import main; main(sys.argv[1:])"
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    said, answered = b"", False
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(mine, 4096):
            said += part
            if not answered and b"[y/N]" in said:
                os.write(mine, answer)
                answered = True
    os.close(mine)
    return process.wait(20), said.decode()
