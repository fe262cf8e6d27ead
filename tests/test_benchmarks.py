"""The benchmark measures what it says: figures, ratios, the result file, each subject for real."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# At the end: what the benchmark imports as cachestore_connector must be the installed package.
sys.path.append(str(ROOT))

from benchmarks import (  # noqa: E402
    cache_copies,
    cases,
    cold,
    command,
    compiled,
    copy_limit,
    raw,
    report,
    room,
    runner,
    traces,
)
from benchmarks.pools import HostPages  # noqa: E402
from benchmarks.subjects import FILE_NAMES, Backend  # noqa: E402

TINY_MHA = dataclasses.replace(cases.MHA_64KIB, name="tiny", layers=1, dim=32)
TINY_MLA = dataclasses.replace(cases.MLA_61, name="tiny-mla", layers=2)
TINY_CACHE = cases.CacheCase("tiny", TINY_MLA, pages=5, workers=2)
TINY_COLD = cases.ColdCase("tiny", TINY_MLA, pages=5, ranks=3)
PLAN = runner.Plan(rounds=1, raw_threads=(2,))


@pytest.fixture
def rows():
    """Made-up rows of one case: CacheStore 4 GB/s, its peers 1 and 5, lookups 2 us and 6 us."""
    case = "shm-mha-1MiB-128"
    return [
        report.row(case, "cachestore", "dump", [9.0, 4.0, 3.0]),
        report.row(case, "sglang-file", "dump", [1.0, 1.0, 1.0]),
        report.row(case, "raw", "dump", [5.0, 5.0, 5.0]),
        report.row(case, "cachestore", "lookup", [2.0]),
        report.row(case, "sglang-file", "lookup", [6.0]),
    ]


def test_row_is_the_median_with_its_extremes(rows):
    """One outlier among the rounds moves min or max, not the median; the unit follows the op."""
    assert (rows[0].median, rows[0].min, rows[0].max) == (4.0, 3.0, 9.0)
    assert (rows[0].unit, rows[3].unit) == ("GB/s", "us/key")


def test_ratio_says_how_many_times_as_fast(rows):
    """More GB/s is faster, fewer microseconds are faster; without a peer there is no ratio."""
    case = rows[0].case
    assert report.ratio(rows, case, "dump", "sglang-file") == 4.0
    assert report.ratio(rows, case, "dump", "raw") == 0.8
    assert report.ratio(rows, case, "lookup", "sglang-file") == 3.0
    assert report.ratio(rows, case, "lookup", "raw") is None


def test_best_variant_is_chosen_by_its_median():
    """A single lucky round doesn't make a variant the best one."""
    variants = {"lucky": [1.0, 1.0, 99.0], "steady": [2.0, 2.0, 2.0]}
    assert report.best(variants, "dump") == "steady"
    assert report.best(variants, "lookup") == "lucky"


def test_table_has_a_line_for_each_row_and_ratios_on_ours(rows):
    """What a person reads: one line a row, aligned, the ratios beside CacheStore's figures."""
    lines = report.table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].split() == [
        "shm-mha-1MiB-128", "dump", "cachestore", "4.00", "3.00", "9.00", "GB/s", "4.00", "0.80",
    ]  # fmt: skip
    assert lines[3].split()[-1] == "GB/s"


def test_verdicts_say_met_or_not_with_the_figure(rows):
    """Each expectation that was measured gives one line; the limit itself is enough."""
    assert report.verdicts(rows) == [
        "expected shm-mha-1MiB-128 dump >= 3.0 x sglang-file: met (4.00)",
        "expected shm-mha-1MiB-128 dump >= 0.8 x raw: met (0.80)",
    ]
    slow = [dataclasses.replace(rows[0], median=2.5), *rows[1:]]
    assert "NOT met (2.50)" in report.verdicts(slow)[0]


def test_copies_are_judged_at_two_threads_only():
    """Each of the four ratios of a -w2 case has its line; the other cases are just shown."""
    rows = [
        report.row(case, subject, op, [speed])
        for case in ("cache-1MiB-w2", "cache-1MiB-w4")
        for op in ("dump", "load")
        for subject, speed in (("cachestore", 9.5), ("memcpy", 7.5), ("streaming", 10.0))
    ]
    assert report.verdicts(rows) == [
        "expected cache-1MiB-w2 dump >= 0.9 x streaming: met (0.95)",
        "expected cache-1MiB-w2 dump >= 1.3 x memcpy: NOT met (1.27)",
        "expected cache-1MiB-w2 load >= 0.9 x streaming: met (0.95)",
        "expected cache-1MiB-w2 load >= 1.3 x memcpy: NOT met (1.27)",
    ]
    assert report.table(rows).splitlines()[2].split()[-3:] == ["GB/s", "1.27", "0.95"]


def test_bounds_of_the_cold_case():
    """One page read twice in one round counts; of the times the median does."""
    rows = [
        report.row("mla-cold-8proc", "cachestore", "storage_reads_per_page", [1.0, 1.0, 1.008]),
        report.row("mla-cold-8proc", "cachestore", "wall_over_copies", [1.1, 1.2, 1.5]),
    ]
    assert [row.unit for row in rows] == ["reads/page", "ratio"]
    assert report.verdicts(rows) == [
        "expected mla-cold-8proc storage_reads_per_page <= 1.0: NOT met (1.01)",
        "expected mla-cold-8proc wall_over_copies <= 1.3: met (1.20)",
    ]


def test_names_and_page_sizes_are_those_of_the_issue():
    """Case names are what readers of latest.json look for, and tell the page's size truly."""
    assert [case.name for case in cases.CASES] == [
        "shm-mha-1MiB-128", "shm-mha-64KiB-1024", "shm-mla61-128",
        "disk-mha-1MiB-128", "disk-mla61-64", "disk-mha-1MiB-128-direct",
    ]  # fmt: skip
    assert [case.name for case in cases.CACHE_CASES] == [
        "cache-1MiB-w1", "cache-1MiB-w2", "cache-1MiB-w4",
        "cache-4.4MiB-w1", "cache-4.4MiB-w2", "cache-4.4MiB-w4",
    ]  # fmt: skip
    assert [(case.name, case.pages) for case in cases.COLD_CASES] == [("mla-cold-8proc", 128)]
    assert cases.MHA_1MIB.page_bytes == 1 << 20
    assert cases.MHA_64KIB.page_bytes == 1 << 16
    assert cases.MLA_61.page_bytes == 4497408


def test_case_patterns_are_globs_and_must_match():
    """A typo in --case is an error, not an empty run."""
    every = (*cases.CASES, *cases.CACHE_CASES)
    assert [case.name for case in cases.select(["*-direct"], every)] == ["disk-mha-1MiB-128-direct"]
    assert cases.select([], every) == every
    with pytest.raises(ValueError, match="shm-mha-1MiB-128"):
        cases.select(["shm-mha-1MB"], every)


@pytest.mark.parametrize("model", [TINY_MHA, TINY_MLA], ids=lambda model: model.name)
def test_every_subject_runs_for_real_and_leaves_nothing(tmp_path, model):
    """Each subject dumps, loads (compared byte by byte) and looks up; its files are gone after."""
    case = cases.Case("disk", model, pages=5)
    rows = runner.run_case(case, str(tmp_path), PLAN, print)
    figures = {(row.case, row.subject, row.op) for row in rows}
    assert figures == {
        (case.name + suffix, subject, op)
        for subject in FILE_NAMES
        for suffix, op in (("", "dump"), ("", "load"), ("", "lookup"), ("-absent", "lookup"))
    }
    assert all(0 < row.min <= row.median <= row.max for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail_the_run(tmp_path, monkeypatch):
    """A subject that answers well but loads nothing is found out."""
    monkeypatch.setattr(raw.RawProbe, "load", lambda self, keys: len(keys))
    plan = dataclasses.replace(PLAN, subjects=["raw"])
    with pytest.raises(runner.WrongResult, match="5 of 5 loaded pages are wrong"):
        runner.run_case(cases.Case("disk", TINY_MHA, pages=5), str(tmp_path), plan, print)
    assert list(tmp_path.iterdir()) == []


def test_a_miss_fails_the_run(tmp_path, monkeypatch):
    """Figures of a subject that didn't store what it was given would mean nothing."""
    monkeypatch.setattr(raw.RawProbe, "dump", lambda self, keys: len(keys) - 1)
    plan = dataclasses.replace(PLAN, subjects=["raw"])
    with pytest.raises(runner.WrongResult, match="answered 4, not 5"):
        runner.run_case(cases.Case("disk", TINY_MHA, pages=5), str(tmp_path), plan, print)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_cache_case_runs_for_real_and_leaves_nothing(tmp_path, shared):
    """CacheStore and plain copies move the same pages, compared byte by byte in the warm-up."""
    plan = dataclasses.replace(PLAN, settings={"share_buffer_enable": shared})
    said = []
    rows = cache_copies.run_case(TINY_CACHE, str(tmp_path), plan, said.append)
    assert [(row.case, row.op, row.subject) for row in rows] == [
        ("cache-tiny-w2", op, subject)
        for op in ("dump", "load")
        for subject in ("cachestore", "memcpy", "streaming")
    ]
    assert all(row.unit == "GB/s" and 0 < row.min <= row.median <= row.max for row in rows)
    assert any("with the checksum" in line for line in said)
    assert list(tmp_path.iterdir()) == []


def test_a_dump_past_the_cache_fails_the_run(tmp_path, monkeypatch):
    """What the counters don't confirm as a dump into the cache isn't a figure of one."""
    monkeypatch.setattr(Backend, "dump", lambda self, keys: len(keys))
    monkeypatch.setattr(cache_copies, "_PATIENCE_SECONDS", 0.1)
    plan = dataclasses.replace(PLAN, subjects=["cachestore"])
    with pytest.raises(runner.WrongResult, match="dumped past the cache"):
        cache_copies.run_case(TINY_CACHE, str(tmp_path), plan, print)


def test_copies_that_dont_arrive_fail_the_run(tmp_path, monkeypatch):
    """The limit is of copies that were made."""
    monkeypatch.setattr(copy_limit.CopyProbe, "load", lambda self, way: None)
    plan = dataclasses.replace(PLAN, subjects=["memcpy"])
    with pytest.raises(runner.WrongResult, match="5 loaded pages are wrong"):
        cache_copies.run_case(TINY_CACHE, str(tmp_path), plan, print)


def test_cold_ranks_share_one_read_of_each_page(tmp_path):
    """Real processes on one buffer: the storage is read once a page, and all bytes are right."""
    rows = cold.run_case(TINY_COLD, str(tmp_path), PLAN, print)
    reads, wall = rows
    assert (reads.case, reads.op, reads.max) == ("tiny-cold-3proc", "storage_reads_per_page", 1.0)
    assert (wall.op, wall.unit, wall.median > 0) == ("wall_over_copies", "ratio", True)
    assert list(tmp_path.iterdir()) == []


def test_cold_ranks_without_a_shared_buffer_read_for_themselves(tmp_path):
    """The reads are counted over all processes."""
    plan = dataclasses.replace(PLAN, settings={"share_buffer_enable": False})
    rows = cold.run_case(TINY_COLD, str(tmp_path), plan, print)
    assert rows[0].median == 3.0


def test_a_rank_that_ends_early_fails_the_run(tmp_path, monkeypatch):
    """Nobody waits for it, and nothing is left of the run."""
    monkeypatch.setattr(cold, "_START", "import sys; sys.exit(3)")
    with pytest.raises(runner.WrongResult, match="a rank ended with 3"):
        cold.run_case(TINY_COLD, str(tmp_path), PLAN, print)
    assert list(tmp_path.iterdir()) == []


def test_pages_are_halved_until_they_fit(tmp_path, monkeypatch):
    """The reason is that of the whole case; what doesn't fit at all is left out."""
    case = dataclasses.replace(cases.CACHE_CASES[1], pages=64)
    monkeypatch.setattr(room, "available_memory", lambda: (1 << 28) + (200 << 20))
    fitted, reason = room.fitted(case, str(tmp_path))
    assert (fitted.pages, fitted.name) == (32, "cache-1MiB-w2")
    assert "MB of memory" in reason
    monkeypatch.setattr(room, "available_memory", lambda: 0)
    assert room.fitted(case, str(tmp_path))[0] is None


def test_traces_are_found_by_option_then_variable_then_beside_the_repository(tmp_path):
    """The first that says something wins; a directory that was given must have some."""
    root = tmp_path / "repository"
    for directory in ("given", "named", "shared/traces"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "a_trace.jsonl").write_text("")
    variable = {traces.VARIABLE: str(tmp_path / "named")}

    def found(given, environ):
        return [path.parent.name for path in traces.find(given, environ, root)]

    assert found(str(tmp_path / "given"), variable) == ["given"]
    assert found(None, variable) == ["named"]
    assert found(None, {}) == ["traces"]
    assert traces.find(None, {}, tmp_path / "shared" / "elsewhere") == []
    with pytest.raises(ValueError, match="--traces"):
        traces.find(str(root.parent / "shared"), {}, root)


def test_replay_becomes_rows_and_a_table(tmp_path, monkeypatch):
    """A line of the replay for each capacity; worse than LRU by a little is not met."""
    path = tmp_path / "talk_trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n')

    def replay(sources, program):
        rates = '"slots": 4, "cachestore": 0.0779, "lru": 0.0778'
        worse = '"slots": 9, "cachestore": 0.1999, "lru": 0.2'
        script = f"#!/bin/sh\necho '{{{rates}}}'\necho '{{{worse}}}'\n"
        Path(program).write_text(script)
        Path(program).chmod(0o700)

    monkeypatch.setattr(compiled, "program", replay)
    chosen = cases.select(["trace-talk-2", "trace-talk-5"], traces.cases([path]))
    results = traces.run(chosen, print, quick=False)
    assert [dataclasses.astuple(row) for row in results[0].rows()] == [
        ("trace-talk-2", "cachestore", "hit_rate", "hits/block", 0.0779, 0.0779, 0.0779),
        ("trace-talk-2", "lru", "hit_rate", "hits/block", 0.0778, 0.0778, 0.0778),
    ]
    lines = traces.table(results).splitlines()
    assert lines[2].split() == ["talk", "cache", "2%", "4", "0.0779", "0.0778", "met"]
    assert lines[3].split() == ["talk", "cache", "5%", "9", "0.1999", "0.2000", "NOT", "met"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_replay_for_real(tmp_path):
    """Compiled, and counted by hand: a request twice is all hits the second time, if it fits."""
    path = tmp_path / "twice_trace.jsonl"
    request = json.dumps({"hash_ids": list(range(10))}) + "\n"
    path.write_text(2 * request + json.dumps({"hash_ids": list(range(10, 200))}) + "\n")
    chosen = cases.select(["trace-twice-20", "trace-twice-posix-20"], traces.cases([path]))
    results = traces.run(chosen, print, quick=False)
    expected = (40, round(10 / 210, 4), round(10 / 210, 4))
    assert [(each.slots, each.cachestore, each.lru) for each in results] == 2 * [expected]


def test_no_room_for_the_replays_files_is_said(tmp_path, monkeypatch):
    """What was replayed before it is kept."""
    path = tmp_path / "talk_trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n')

    def replay(sources, program):
        line = '{"slots": 4, "cachestore": 0.5, "lru": 0.5}'
        script = f"#!/bin/sh\necho '{line}'\ncase $1 in posix*) echo full >&2; exit 3; esac\n"
        Path(program).write_text(script)
        Path(program).chmod(0o700)

    monkeypatch.setattr(compiled, "program", replay)
    chosen = cases.select(["trace-talk-posix-[25]"], traces.cases([path]))
    said = []
    results = traces.run(chosen, said.append, quick=False, shm=str(tmp_path))
    assert [each.case.name for each in results] == ["trace-talk-posix-2"]
    assert f"request traces: posix: skipped the rest: {tmp_path}: full" in said


def test_without_traces_it_says_how_to_give_them(tmp_path, monkeypatch, capsys):
    """No trace is in the repository: a line tells, and the rest is run."""
    monkeypatch.setattr(traces, "find", lambda *_: [])
    monkeypatch.setattr(command, "_measure", lambda *_: [])
    arguments = ["--quick", "--disk-dir", str(tmp_path), "--out", str(tmp_path / "latest.json")]
    assert command.main(arguments) == 0
    assert "--traces or CACHESTORE_TRACES" in capsys.readouterr().out


def test_one_wrong_byte_is_a_wrong_page():
    """The comparison sees every byte of every tensor of a page."""
    pages = HostPages(cases.Case("disk", TINY_MHA, pages=3))
    pages.spoil_target()
    assert pages.wrong_pages() == [0, 1, 2]
    for source, target in zip(pages.source_tensors, pages.target_tensors, strict=True):
        for from_bytes, to_bytes in zip(source, target, strict=True):
            to_bytes[:] = from_bytes
    assert pages.wrong_pages() == []
    pages.target_tensors[1][-1][-1] ^= 1
    assert pages.wrong_pages() == [1]


def test_profile_names_the_parts_of_each_call(tmp_path):
    """--profile-python splits every call into native time and the connector's own."""
    said = []
    plan = runner.Plan(subjects=["cachestore"], rounds=1, profile=True)
    runner.run_case(cases.Case("disk", TINY_MHA, pages=5), str(tmp_path), plan, said.append)
    assert all(
        part in "\n".join(said)
        for part in ("batch_set_v1: 1 batches", "native cs_wait", "block ids", "addresses")
    )


@pytest.mark.timeout(180)
def test_command_line_writes_the_result_file(tmp_path):
    """`python -m benchmarks` from the root measures the installed package, and tells no path."""
    out = tmp_path / "latest.json"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    command = [
        sys.executable, "-m", "benchmarks", "--quick", "--case", "disk-mha-1MiB-128",
        "--disk-dir", str(tmp_path), "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert sorted(result) == ["machine", "rows"]
    fields = {"case", "subject", "op", "unit", "median", "min", "max"}
    assert all(set(row) == fields for row in result["rows"])
    assert {row["subject"] for row in result["rows"]} == set(FILE_NAMES)
    assert {row["op"] for row in result["rows"]} == {"dump", "load", "lookup"}
    assert str(tmp_path) not in out.read_text()
    assert str(ROOT) not in out.read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_share_of_other_processes_is_a_share():
    """It goes into the result file, to tell figures of a busy machine from others."""
    others = report.OtherProcesses()
    assert 0.0 <= others.share() <= 1.0
