"""The `cachestore` command as a whole."""

import subprocess
import sys

import pytest

from cachestore_connector.cli import COMMANDS
from command_line import invoke


def test_help_names_every_command():
    """Pinned: ``--help`` lists the subcommands and the exit statuses."""
    done = invoke("--help")
    assert done.exit_code == 0
    assert "Exit status" in done.output
    for name, what in COMMANDS.items():
        assert name in done.output and what.split()[0] in done.output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_and_json(name):
    """Pinned: each is there, says what it does, and has ``--json``."""
    done = invoke(name, "--help")
    assert done.exit_code == 0, done.output
    assert "--json" in done.output


def test_a_wrong_command_line_is_status_2():
    """Pinned: as everywhere, with a word on what is wrong."""
    done = invoke("no-such-command")
    assert done.exit_code == 2
    assert "no-such-command" in done.output


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_neither_sglang_nor_torch_is_imported(name):
    """Pinned: the command works in an environment that has neither."""
    words = ["--help"] if name is None else [name, "--help"]
    code = (
        "import sys; from cachestore_connector.cli import main\n"
        "sys.modules['torch'] = sys.modules['sglang'] = None\n"
        f"main({words!r}, standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
