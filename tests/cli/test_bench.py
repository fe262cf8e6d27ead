"""`cachestore bench`: what it measures, what it refuses, and that nothing of it stays behind."""

import contextlib
import json
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cachestore_connector.cli import bench_break_even as break_even
from cachestore_connector.cli import bench_picture, bench_scratch, bench_shapes
from cachestore_connector.cli.bench_measure import Measured, Restored, Row
from cachestore_connector.cli.bench_processes import ProcessFailed, processes
from cachestore_connector.mounts import mount_of
from command_line import as_nobody, invoke
from disks import small_disk
from rig.server import poll
from stored_pages import open_place

SMALL = ["--model-shape", "2,1,128,bfloat16,64", "--size", "1", "--quick"]
PAGE = 64 << 10
_CODE = "import sys; from cachestore_connector.cli import main; main()"


@pytest.fixture
def shm():
    """A directory for shared buffers, in which nothing may be left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cachestore-test-") as path:
        yield Path(path)
        assert os.listdir(path) == []


@pytest.fixture
def run(tmp_path, shm, monkeypatch):
    """``run(words...)``: `bench` in a directory of its own, in which nothing may be left."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"cache_buffer_directory": str(shm)}))
    monkeypatch.setenv("CACHESTORE_CONFIG", str(settings))
    store = tmp_path / "disk"
    store.mkdir()

    def run(*words, home=store):
        return invoke("bench", "--store", home, *words)

    run.store = store
    yield run
    assert os.listdir(store) == []


def command(store, *words):
    return [sys.executable, "-P", "-c", _CODE, "bench", "--store", str(store), *words]


def test_everything_is_measured(run):
    """Pinned: files and buffer, one process and two, beside plain calls; restored prefixes."""
    done = run(*SMALL, "--processes", "2", "--json", "--prefill-tokens-per-second", "50")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # no progress where nobody looks
    result = json.loads(done.stdout)
    assert result["model"]["page_bytes"] == PAGE and result["model"]["bytes_per_token"] == 1024
    on_disk = not mount_of(str(run.store)).is_in_memory
    disk = ["dump_synced", "load_disk"] if on_disk else []
    wanted = {(op, n) for op in ("dump", *disk, "load", "lookup", "cache_hit") for n in (1, 2)}
    assert {(row["op"], row["processes"]) for row in result["rows"]} == wanted | {("cache_dump", 1)}
    for row in result["rows"]:
        for side in ("store", "plain"):
            least, usual, most = (row[side][name] for name in ("min", "median", "max"))
            assert 0 < least <= usual <= most < 1e4
        ratio = row["store"]["median"] / row["plain"]["median"]
        assert row["of_plain"] == pytest.approx(1 / ratio if row["unit"] == "us/key" else ratio)
    sources = ["disk" if on_disk else "page cache", "shared buffer"]
    assert [each["from"] for each in result["restored"]] == sources
    for each in result["restored"]:
        *lengths, longest = (point["tokens"] for point in each["points"])
        assert lengths[:2] == [64, 128] and lengths == [64 << n for n in range(len(lengths))]
        assert lengths[-1] < longest <= 512  # fewer where it is slow
        assert each["processes"] == 2 and each["break_even_tokens"] == 64  # 50 tokens/s: always
    assert result["skipped"] == []


def test_the_table_and_progress(run):
    """Pinned: a bar on standard error, where that is a terminal, and none of it elsewhere.

    The table has 80 columns and no colours in a pipe, and says its units.
    """
    master, slave = pty.openpty()
    words = [*SMALL, "--processes", "1", "--prefill-tokens-per-second", "1e9"]
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(
        command(run.store, *words), stdout=subprocess.PIPE, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([master], [], [], 30)[0]:
            shown += os.read(master, 65536)
    printed = process.communicate(timeout=30)[0].decode()
    os.close(master)
    assert process.returncode == 0, shown
    assert b"Posix, 1 process" in shown and b"Cache|Posix, 1 process" in shown
    lines = [line for line in printed.splitlines() if str(run.store) not in line]
    assert all(len(line) <= 80 for line in lines), printed
    assert "\x1b" not in printed
    for label in ("dump", "lookup", "cache hit", "us/key", "GB/s", "computing is faster"):
        assert label in printed
    assert "pages of 64 tokens, 64.0 KiB in 2 tensors" in printed


def test_without_a_buffer(run, tmp_path):
    """Pinned: where there is no room for one, the files are measured, and the reason is said."""
    settings = tmp_path / "other.json"
    given = {"cache_buffer_directory": str(tmp_path / "none"), "verify": "never"}
    settings.write_text(json.dumps(given))
    done = run(*SMALL, "--processes", "1", "--json", "--config", str(settings))
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert "none isn't a directory" in result["skipped"][0]
    assert not any(row["op"].startswith("cache") for row in result["rows"])
    assert len(result["restored"]) == 1


def test_a_picture(run, tmp_path):
    """Pinned: one is drawn, of figures and prefixes; another kind of file is refused at once."""
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: no picture is drawn")
    points = [(64, 0.002), (128, 0.003), (1024, 0.011)]
    rows = [Row("dump", 1, "GB/s", [1.0, 2.0], [2.0]), Row("lookup", 1, "us/key", [1.0], [2.0])]
    measured = Measured(rows, [Restored("disk", 2, points)])
    line = break_even.fitted(points)
    for name, prefill in (("with.png", 5000.0), ("without.png", None)):
        even = None if prefill is None else break_even.tokens(line, prefill, 64)
        lines = [(measured.restored[0], line, even)]
        path = tmp_path / name
        bench_picture.draw(str(path), "title", measured, {"dump": "dump"}, lines, prefill)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000
    for wrong in ("out.doc", "none/out.png"):
        done = run(*SMALL, "--plot", str(tmp_path / wrong))
        assert done.exit_code == 3 and wrong in done.stderr


def test_no_matplotlib(run, monkeypatch, tmp_path):
    """Pinned: said before anything is measured, with what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--plot", str(tmp_path / "out.png"), "--json")
    assert done.exit_code == 3
    assert "pip install matplotlib" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 3), (signal.SIGTERM, 143)])
def test_interrupted(run, shm, number, status):
    """Pinned: Ctrl-C and SIGTERM leave no files, no buffer and no process."""
    words = ["--model-shape", "8,4,128,bfloat16,64", "--size", "64", "--processes", "2"]
    process = subprocess.Popen(command(run.store, *words), stderr=subprocess.PIPE, text=True)
    poll(
        lambda: next(run.store.glob(".cachestore-bench-*/store/*/blocks/*/*"), None),
        30,
        "a block",
        interval=0.01,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert children and not any(os.path.exists(f"/proc/{child}") for child in children)
    assert os.listdir(run.store) == [] == os.listdir(shm)


def test_what_a_killed_one_has_left_is_removed(tmp_path):
    """Pinned: by the next one; what another holds, or has just made, stays."""
    with bench_scratch.scratch([str(tmp_path)]) as (held,):
        left, fresh, other = (
            tmp_path / (bench_scratch.PREFIX + "left"),
            tmp_path / (bench_scratch.PREFIX + "fresh"),
            tmp_path / "other",
        )
        for path in (left, fresh, other):
            (path / "store").mkdir(parents=True)
        for path in (held, left, other):
            os.utime(path, (1, 1))
        with bench_scratch.scratch([str(tmp_path)]) as (second,):
            assert {*tmp_path.iterdir()} == {Path(held), Path(second), fresh, other}
    assert {*tmp_path.iterdir()} == {fresh, other}


def test_no_such_directory(run, tmp_path):
    """Pinned: it isn't made, and is named."""
    done = run(*SMALL, home=tmp_path / "none")
    assert done.exit_code == 3 and str(tmp_path / "none") in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_directory_of_somebody_else(run):
    """Pinned: one that can't be written is an error, before anything is started."""
    with open_place() as place:
        done = as_nobody("bench", "--store", place, *SMALL)
        assert done.returncode == 3
        assert "Permission denied" in done.stderr and str(place) in done.stderr
        assert os.listdir(place) == []


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MiB, in which nothing may be left."""
    with small_disk(tmp_path / "small", "size=3m", "nosuid", "nodev") as path:
        yield path
        assert os.listdir(path) == []


def test_too_small_a_disk(run, disk, monkeypatch):
    """Pinned: refused at once; one that fills up all the same is an error, and is left empty."""
    done = run(*SMALL, "--processes", "1", home=disk)
    assert done.exit_code == 3
    assert str(disk) in done.stderr and "smaller --size" in done.stderr
    monkeypatch.setattr(bench_scratch, "lack_of_room", lambda directory, needed: None)
    done = run(*SMALL, "--processes", "1", "--size", "8", "--json", home=disk)
    assert done.exit_code == 3
    assert "NO_SPACE" in json.loads(done.stdout)["error"]


def test_too_little_memory(run, monkeypatch):
    """Pinned: refused before processes are started that would be killed for it."""
    done = run("--model-shape", "320,1024,1024,float32,65536", "--layout", "page_first")
    assert done.exit_code == 3 and "needed" in done.stderr
    monkeypatch.setattr(bench_scratch, "lack_of_room", lambda directory, needed: None)
    done = run("--model-shape", "320,1024,1024,float32,65536")
    assert done.exit_code == 3 and "of memory are free" in done.stderr


def shape(text, page_size=None, tp=1, layout="page_first"):
    return bench_shapes.parse(text, page_size=page_size, tp=tp, layout=layout)


def test_shapes():
    """Pinned: the bytes of pages, by model, page size, ranks and layout."""
    assert shape("llama-3-70b").page_bytes == 2 * 80 * 8 * 128 * 2 * 64
    assert shape("llama-3-70b", tp=8).page_bytes == 2 * 80 * 128 * 2 * 64
    assert shape("llama-3-70b", tp=16).page_bytes == 2 * 80 * 128 * 2 * 64  # no less than a head
    assert shape("deepseek-v3", page_size=1, tp=8).tensor_sizes == (61 * 576 * 2,)
    assert shape("DeepSeek-V3").page_size == 64
    assert shape("mla:3,10,6,fp8,4", layout="layer_first").tensor_sizes == (16 * 4,) * 3
    assert shape("3, 2, 5, float32, 7", layout="layer_first").tensor_sizes == (2 * 5 * 4 * 7,) * 6
    assert shape("3,2,5,bf16,7").tensor_sizes == (3 * 2 * 5 * 2 * 7,) * 2
    for name in bench_shapes.PRESETS:
        assert shape(name, layout="layer_first").page_bytes == shape(name).page_bytes


@pytest.mark.parametrize(
    "words",
    [
        ["--model-shape", "llama-9"],
        ["--model-shape", "1,2,3,bfloat16"],
        ["--model-shape", "1,2,3,int4,64"],
        ["--model-shape", "0,2,3,bf16,64"],
        ["--model-shape", "a,2,3,bf16,64"],
        ["--model-shape", "mla:1,2,3,bf16,64,5"],
        ["--model-shape", "llama-3-8b", "--tp", "3"],
        ["--model-shape", "200,2,3,bf16,64", "--layout", "layer_first"],
        ["--prefill-tokens-per-second", "0"],
    ],
)
def test_what_isnt_a_shape(run, words):
    """Pinned: a wrong command line, with a word on what would be right."""
    assert run(*words).exit_code == 2


@pytest.mark.parametrize("fixed", [0.0, 0.002, 0.5])
@pytest.mark.parametrize("per_token", [1e-6, 1e-4])
def test_break_even(fixed, per_token):
    """Pinned: the first whole page from which restoring isn't slower than computing."""
    points = [(n, fixed + per_token * n) for n in (64, 128, 512, 4096)]
    line = break_even.fitted(points)
    assert line.fixed == pytest.approx(fixed, abs=1e-9)
    assert line.tokens_per_second == pytest.approx(1 / per_token)
    for prefill in (100, 5000, 0.9 / per_token):
        found = break_even.tokens(line, prefill, 64)
        assert found % 64 == 0
        assert line.seconds(found) <= found / prefill * (1 + 1e-9)
        before = found - 64
        assert before == 0 or line.seconds(before) > before / prefill
    assert break_even.tokens(line, 1.1 / per_token, 64) is None


def test_lines_through_noise():
    """Pinned: no negative start, no negative speed, whatever was measured."""
    for points in ([(64, 0.1)], [(64, 0.1), (128, 0.05)], [(64, 0.01), (128, 0.03), (256, 0.08)]):
        line = break_even.fitted(points)
        assert line.fixed >= 0 and line.per_token > 0
        assert line.seconds(64) == pytest.approx(statistics.median(s for _, s in points), rel=1)


def test_wrong_bytes_are_noticed(tmp_path):
    """Pinned: what is loaded is compared; codes that aren't OK are errors."""
    small = shape("2,1,128,bfloat16,64")
    with processes(small, 1, 4) as group:
        given = {"storage_backends": [str(tmp_path / "store")]}
        group.do("open", pipeline="Posix", given=given, shared=False)
        group.do("dump", label="a", count=4)
        with pytest.raises(ProcessFailed, match="page 0 was loaded other"):
            group.do("compare", count=4)
        group.do("load", label="a", count=4)
        group.do("compare", count=4)
        for what in ("load", "restore", "lookup"):
            with pytest.raises(ProcessFailed):
                group.do(what, label="b", count=4)
        for path in (tmp_path / "store").glob("*/blocks/*/*"):
            path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ProcessFailed, match=r"4 ended with (CORRUPT|NOT_FOUND)"):
            group.do("load", label="a", count=4)


def test_a_process_that_dies():
    """Pinned: it is noticed, and none of them is left."""
    with (
        pytest.raises(ProcessFailed, match="signal 9"),
        processes(shape("2,1,128,bfloat16,64"), 2, 4) as group,
    ):
        pids = [process.pid for process in group._processes]
        os.kill(pids[1], signal.SIGKILL)
        group.do("spoil")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
