"""File systems of a test's own, where the machine lets it mount any."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def mounted(path, *options, source="tmpfs"):
    """A mount for the length of a ``with``; skips the test, saying why, where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("not root: a file system can't be mounted")
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", *options, str(source), str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting isn't permitted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
