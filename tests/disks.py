"""File systems mounted for a test."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def mounted(path, *options, source="tmpfs"):
    """A mount for the length of a ``with``; skips the test, saying why, where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("not root: a file system can't be mounted, and root's files have no mode bits")
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


def small_disk(path, *options):
    """A tmpfs as `mounted`; ``options``: of the file system, as ``size=1m``."""
    return mounted(path, "-t", "tmpfs", "-o", ",".join(options))


def fill(disk):
    """Take all the room that a mounted file system has; the file that has it."""
    path = disk / "filler"
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return path
