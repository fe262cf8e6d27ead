"""`cachestore top`, on stats files written here by hand, in the form that the backend writes."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest

from cachestore_connector import stats_reader, stats_view
from cachestore_connector.cli import top
from command_line import invoke

COUNTERS = {
    "lookup_pages": 200,
    "lookup_page_hits": 150,
    "load_ok": 90,
    "load_absent": 10,
    "load_bytes": 9 << 30,
    "load_refused": 3,
    "dump_bytes": 1 << 30,
    "dump_refused": 4,
    "load_outstanding": 12,
    "dump_outstanding": 5,
    "cache_hit": 60,
    "cache_waited": 12,
    "cache_slots": 1000,
    "cache_slots_free": 100,
    "cache_slots_dirty": 200,
    "cache_slots_loading": 50,
    "posix_used_bytes": 3 << 38,
    "posix_capacity_bytes": 1 << 40,
    "posix_directories": 2,
    "evicted_blocks": 77,
}
POOL = {"load_ok": 90, "load_absent": 10, "dump_ok": 31, "load_refused": 3, "dump_refused": 4}


class Files:
    """The stats files of one directory."""

    def __init__(self, directory):
        self.directory = directory

    def write(self, name="1", *, uid=None, **changes):
        """A file of this process, just written. ``counters``: changes of `COUNTERS`."""
        uid = os.geteuid() if uid is None else uid
        home = self.directory / f"cachestore-stats-{uid}"
        home.mkdir(mode=0o700, exist_ok=True)
        fields = {
            "version": 1,
            "pid": os.getpid(),
            "pid_start": stats_reader.started_at(os.getpid()),
            "time": time.time(),
            "interval": 1.0,
            "started": 1_700_000_000.0,
            "model": "/models/llama-3",
            "pipeline": "Cache|Posix",
            "directories": ["/nvme/0", "/nvme/1"],
            "identity": "llama-3-0123456789abcdef.kv-fedcba9876543210",
            "ranks": {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
                      "attn_cp_size": 1, "dp_rank": None},
            "counters": COUNTERS | changes.pop("counters", {}),
            "pools": {"kv": POOL},
        } | changes  # fmt: skip
        path = home / f"{fields['pid']}-{name}.json"
        path.write_text(json.dumps(fields))
        for each in (home, path):
            os.chown(each, uid, -1)
        return path


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def run(files, *words, between=lambda: None, monkeypatch=None):
    """`top`, where nothing sleeps: ``between`` is called between the two readings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top.time, "sleep", lambda _: between())
        return invoke("top", "--directory", files.directory, *words)


def shown(files, **options):
    done = run(files, "--json", **options)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_figures_of_one_backend(files):
    """Pinned: counters as written, rates and hit rates of the time between two readings."""
    began = time.time() - 4
    files.write(time=began)
    later = {"lookup_pages": 300, "lookup_page_hits": 225, "load_ok": 130, "load_absent": 20,
             "cache_hit": 90, "cache_waited": 12, "load_bytes": 11 << 30,
             "dump_bytes": (1 << 30) + (512 << 20)}  # fmt: skip
    view = shown(files, between=lambda: files.write(time=began + 2, counters=later))
    (backend,) = view["backends"]
    assert backend["state"] == "live" and backend["pid"] == os.getpid()
    assert backend["counters"] == COUNTERS | later
    assert backend["pools"] == {"kv": POOL}
    assert backend["seconds"] == pytest.approx(2)
    assert backend["per_second"] == pytest.approx({"load_bytes": 1 << 30, "dump_bytes": 1 << 28})
    # Since the first reading: 100 looked up, 75 found; 50 asked for, 30 of them in the buffer, and
    # of the other 20, 10 in files.
    assert backend["hit_rates"]["now"] == pytest.approx(
        {"lookup": 0.75, "cache": 0.6, "files": 0.5}
    )
    since = backend["hit_rates"]["since_attach"]
    assert since == pytest.approx({"lookup": 0.75, "cache": 102 / 150, "files": 28 / 48})
    assert backend["slots"] == {"ready": 650, "dirty": 200, "loading": 50, "free": 100}
    assert backend["queued"] == {"load": 12, "dump": 5}
    assert view["total"]["per_second"] == backend["per_second"]


def test_the_table(files):
    """Pinned: every figure is in it, within 80 columns, without colours in a pipe."""
    began = time.time() - 4
    files.write(time=began)
    later = {"load_bytes": 11 << 30, "dump_bytes": (1 << 30) + (512 << 20), "load_ok": 100,
             "cache_hit": 70, "lookup_pages": 210, "lookup_page_hits": 153}  # fmt: skip

    def between():
        files.write(time=began + 2, counters=later)

    done = run(files, "--once", between=between)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    traffic, holdings = (line.split() for line in done.stdout.splitlines() if "tp0" in line)
    pid = str(os.getpid())
    assert traffic == ["llama-3", "tp0", pid, "30", "%", "100", "%", "-", "1.0", "GiB", "256.0",
                       "MiB", "12+5"]  # fmt: skip
    assert holdings == [pid, "tp0", "650", "200", "50", "100", "0.8/1.0", "TiB", "77", "2/2", "7"]
    since = "since attach: found 73 %, cache 75 %, files 64 %, loaded 11.0 GiB, dumped 1.5 GiB"
    assert since in " ".join(done.stdout.split())
    assert run(files, between=between).stdout.split()[:9] == done.stdout.split()[:9]  # a pipe


def test_eight_ranks_and_totals(files):
    """Pinned: a line each in order, at 80 columns; what ranks share counts once in the total."""
    for rank in range(8):
        ranks = {"tp_rank": rank, "tp_size": 8, "pp_rank": 1, "pp_size": 2, "dp_rank": 3}
        files.write(name=str(7 - rank), ranks=ranks, model="x" * 40, counters={
            "load_bytes": 1 << 50, "load_refused": 12_345_678, "load_outstanding": 1024,
            "dump_outstanding": 1024, "evicted_blocks": 1 << 40, "cache_slots_free": 10**7,
            "cache_slots": 4 * 10**7})  # fmt: skip
    alone = shown(files)["total"]
    (files.directory / f"cachestore-region-{os.geteuid()}-fedcba98765432100000").touch()
    shared = shown(files)
    assert alone["slots"]["dirty"] == 8 * 200 and shared["total"]["slots"]["dirty"] == 200
    for total in (alone, shared["total"]):
        assert total["space"]["capacity"] == 1 << 40 and total["space"]["directories"] == 2
        assert total["counters"]["load_ok"] == 8 * 90
        assert total["queued"] == {"load": 8 * 1024, "dump": 8 * 1024}
    assert [each["ranks"]["tp_rank"] for each in shared["backends"]] == list(range(8))
    done = run(files, "--once")
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    assert "dp3 tp7 pp1" in done.stdout
    (everything,) = [line for line in done.stdout.splitlines() if line.startswith("all   ")][:1]
    assert "8192+8192" in everything


def test_pools_are_shown_where_there_are_several(files):
    """Pinned: pages by pool and how they ended, of all ranks together."""
    files.write("1")
    assert "absent" not in run(files, "--once").stdout
    files.write("1", pools={"kv": POOL, "mamba": POOL | {"load_timeout": 2, "load_failed": 1}})
    files.write("2", pools={"kv": POOL, "mamba": POOL})
    lines = run(files, "--once").stdout.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("mamba")]
    assert row == ["mamba", "llama-3", "180", "20", "3", "6", "62", "0", "8"]


def ended_process():
    """A pid that nobody has."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_files_of_processes_that_are_gone_are_left_out(files):
    """Pinned: no such pid; a pid that another process has got since; one that only isn't reaped."""
    files.write("1")
    gone = ended_process()
    files.write("2", pid=gone)
    start = stats_reader.started_at(os.getpid())
    files.write("3", pid_start=start + 1)
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    born = stats_reader.started_at(zombie.pid)
    zombie.stdin.close()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    files.write("4", pid=zombie.pid, pid_start=born)
    view = shown(files)
    zombie.wait()
    assert [each["file"][-6:] for each in view["backends"]] == ["1.json".rjust(6, "-")[-6:]]
    assert {each["pid"] for each in view["gone"]} == {gone, os.getpid(), zombie.pid}
    assert view["total"]["counters"]["load_ok"] == 90
    assert f"{gone}" in run(files, "--once").stdout


def test_a_file_that_is_renewed_is_alive_whatever_its_pid(files):
    """Pinned: a server in a container has a pid that means nothing here, until it stops writing."""
    gone, began = ended_process(), time.time()
    files.write(pid=gone, time=began)
    (backend,) = shown(files, between=lambda: files.write(pid=gone, time=began + 1))["backends"]
    assert backend["state"] == "live" and backend["pid"] == gone
    watch = stats_view.Watch(str(files.directory))
    assert not watch.read(began + 1).rows
    files.write(pid=gone, time=began + 2)
    assert watch.read(began + 2).rows and watch.read(began + 11).rows
    view = watch.read(began + 13)
    assert not view.rows and len(view.gone) == 1


def test_a_process_that_ends_while_it_is_watched_is_gone(files):
    """Pinned: one whose pid was there is gone with it, also if it wrote until its end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start, now = stats_reader.started_at(process.pid), time.time()
    files.write(pid=process.pid, pid_start=start, time=now)
    watch = stats_view.Watch(str(files.directory))
    assert len(watch.read(now).rows) == 1
    process.communicate(b"\n")
    files.write(pid=process.pid, pid_start=start, time=now + 1)
    assert watch.read(now + 1).rows == []


def test_a_silent_backend_is_marked(files):
    """Pinned: ten intervals without a new file, of a process that is there: no rates, status 1."""
    now = time.time()
    files.write("1", time=now - 9)
    assert run(files, "--once").exit_code == 0
    files.write("1", time=now - 25, interval=2.0)
    done = run(files, "--once")
    assert done.exit_code == 1
    assert f"pid {os.getpid()} (tp0): silent for 25 s" in done.stdout
    (backend,) = shown(files)["backends"]
    assert backend["state"] == "silent" and backend["per_second"]["load_bytes"] is None


def test_directories_out_of_use(files):
    """Pinned: said in red on a terminal, in words everywhere, and by status 1."""
    files.write(counters={"posix_directories_out": 1, "load_corrupt": 4, "dump_no_space": 5})
    done = run(files, "--once")
    assert done.exit_code == 1
    assert "directories out of use: 1" in done.stdout and "1/2" in done.stdout
    assert "4 damaged, 5 without space" in done.stdout


def test_nothing_attached_and_no_such_directory(files, tmp_path):
    """Pinned: none is no error, as on a host where nothing runs; a wrong directory is one."""
    done = run(files, "--once")
    assert done.exit_code == 0 and "no backend is attached" in done.stdout
    assert shown(files)["backends"] == []
    words = ["top", "--once", "--directory", tmp_path / "none"]
    done = invoke(*words)
    assert done.exit_code == 3 and str(tmp_path / "none") in done.stderr
    done = invoke(*words, "--json")
    assert done.exit_code == 3 and json.loads(done.stdout)["error"]


def test_a_directory_from_the_settings(files, tmp_path, monkeypatch):
    """Pinned: without --directory, the cache_buffer_directory of the settings in force."""
    files.write()
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"cache_buffer_directory": str(files.directory)}))
    monkeypatch.setenv("CACHESTORE_CONFIG", str(settings))
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    done = invoke("top", "--json")
    assert [each["pid"] for each in json.loads(done.stdout)["backends"]] == [os.getpid()]


def test_what_isnt_a_stats_file(files):
    """Pinned: damaged, hostile and strange files are named; the others are read; nothing hangs."""
    good = files.write("1")
    home = good.parent

    def changed(**changes):
        return json.dumps(json.loads(good.read_text()) | changes)

    strange = {
        "2-2.json": "{",
        "3-3.json": "[" * 100_000,
        "4-4.json": changed(version=2),
        "5-5.json": changed(counters={"load_ok": -1}),
        "6-6.json": changed(counters={"load_ok": "many"}),
        "7-7.json": changed(pools=[]),
        "8-8.json": changed(model=7),
        "9-9.json": " " * ((1 << 20) + 1),
        "10-1.json": changed(time=float("inf")),
    }
    for name, text in strange.items():
        (home / name).write_text(text)
    os.mkfifo(home / "11-1.json")
    (home / "12-1.json").symlink_to(good)
    (home / ".1.tmp").write_text("")
    (home / "notes.txt").write_text("")
    view = shown(files)
    assert len(view["backends"]) == 1
    told = {os.path.basename(each["path"]) for each in view["problems"]}
    assert told == {*strange, "11-1.json", "12-1.json"}


def test_a_terminal_obeys_nothing_in_a_file(files):
    """Pinned: control characters of a name are not printed."""
    files.write(model="\x1b[2Jname\x9b", pools={"a\x07": POOL, "b": POOL})
    done = run(files, "--once")
    assert "name" in done.stdout
    assert not {"\x1b", "\x9b", "\x07"} & set(done.stdout)


def test_another_users_files():
    """Pinned: read where they can be, named where not; no directory of a false name is believed."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    with tempfile.TemporaryDirectory() as place:  # as /dev/shm is
        os.chmod(place, 0o1777)
        files = Files(Path(place))
        files.write("1")
        files.write("2", uid=65534)
        view = shown(files)
        assert [each["uid"] for each in view["backends"]] == [0, 65534]
        files.write("3", uid=12345)
        os.chown(files.directory / "cachestore-stats-12345", 65534, -1)
        assert [each["path"][-5:] for each in shown(files)["problems"]] == ["12345"]
        code = f"""
import os
from cachestore_connector.cli import main, top
os.setgroups([])
os.setegid(65534)
os.seteuid(65534)
main(["top", "--json", "--interval", "0.1", "--directory", {str(files.directory)!r}])
"""
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        view = json.loads(done.stdout)
        assert [each["uid"] for each in view["backends"]] == [65534]
        assert [each["why"] for each in view["problems"]][:1] == ["Permission denied"]


class Terminal:
    """`cachestore top` in a terminal of its own, 80 columns wide."""

    def __init__(self, files, *words):
        self._master, slave = pty.openpty()
        self.settings = termios.tcgetattr(slave)
        termios.tcsetwinsize(slave, (24, 80))
        command = shutil.which("cachestore", path=os.path.dirname(sys.executable))
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [command, "top", "--interval", "0.1", "--directory", str(files.directory), *words],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        self._slave = slave
        self.output = b""

    def until(self, text):
        while text not in self.output:
            assert select.select([self._master], [], [], 20)[0], self.output
            self.output += os.read(self._master, 65536)

    def type(self, keys):
        os.write(self._master, keys)

    def end(self):
        """The exit status; the terminal is as it was."""
        while self.process.poll() is None:
            if select.select([self._master], [], [], 0.01)[0]:
                self.output += os.read(self._master, 65536)
        assert termios.tcgetattr(self._slave) == self.settings
        os.close(self._master)
        os.close(self._slave)
        return self.process.returncode


def test_live_in_a_terminal(files):
    """Pinned: drawn in place again and again, with what is new; q ends it."""
    files.write(time=time.time() - 2)
    terminal = Terminal(files)
    terminal.until(b"llama-3")
    terminal.until(b"\x1b[?1049h")  # another screen, as top has
    files.write(model="other-model")
    terminal.until(b"other-model")
    terminal.type(b"xq")
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.output


def test_interrupted_in_a_terminal(files):
    """Pinned: Ctrl-C ends it, and leaves the terminal as it was."""
    files.write()
    terminal = Terminal(files)
    terminal.until(b"llama-3")
    terminal.process.send_signal(2)
    assert terminal.end() == 0


def test_beside_attached_backends(attach, tmp_path):
    """Pinned: two ranks with one buffer: their own counters, exactly; its slots once."""
    import host_pools
    from backends import counters_become, keys

    pool = host_pools.mla_pool(fill=1)
    ranks = [attach(pool, is_mla=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert all(ranks[0].batch_set_v1(keys(3), host_pools.indices(pool, range(3))))
    for backend in ranks:
        assert backend.batch_exists(keys(8)) == 3
        backend.batch_get_v1(keys(4), host_pools.indices(pool, range(4)))
    counters_become(ranks, cache_stored=3, load_ok=6, load_absent=2, cache_slots_dirty=0)
    done = invoke("top", "--json", "--directory", tmp_path)
    view = json.loads(done.stdout)
    assert [each["counters"] for each in view["backends"]] == [
        r.counters() | {"lookup_pages": 8, "lookup_page_hits": 3} for r in ranks
    ]
    assert {each["hit_rates"]["since_attach"]["lookup"] for each in view["backends"]} == {3 / 8}
    assert [each["state"] for each in view["backends"]] == ["live"] * 2
    assert [each["ranks"]["tp_rank"] for each in view["backends"]] == [0, 1]
    slots = view["backends"][0]["slots"]
    assert view["total"]["slots"] == slots and slots["ready"] >= 3
    assert view["total"]["hit_rates"]["since_attach"]["cache"] == pytest.approx(6 / 8)
    assert view["total"]["counters"]["load_ok"] == 6
