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


LOOKING = {
    "ls": [],
    "du": [],
    "show": ["0" * 64],
    "verify": [],
    "gc": [],
    "clear": ["--identity", "all"],
    "bench": ["--model-shape", "llama-3-70b"],
}


@pytest.mark.parametrize("name", LOOKING)
def test_no_store_yet(name, tmp_path):
    """Pinned: which directory, by which setting, and what to do; before anything else is said."""
    words = [name, *LOOKING[name]]
    settings, file = tmp_path / "settings.yaml", tmp_path / "file"
    settings.write_text(f"storage_backends: [{tmp_path}/none]\n")
    file.touch()
    home = tmp_path / ".cache" / "cachestore"
    for more, env, parts in (
        ([], {}, (f"{home} (the default)", "--store DIR", "--config FILE")),
        (["--config", settings], {}, (f"{tmp_path}/none (storage_backends of {settings})",)),
        ([], {"CACHESTORE_CONFIG": str(settings)}, (f"(storage_backends of {settings})",)),
        (["--store", file], {}, (f"{file} (--store) is not a directory",)),
    ):
        env = {"HOME": str(tmp_path), "CACHESTORE_CONFIG": None, "XDG_CACHE_HOME": None} | env
        done = invoke(*words, *more, env=env)
        assert done.exit_code == 3, done.output
        assert all(part in done.stderr for part in parts), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == [file, settings]  # nothing was made


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
