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

from benchmarks import cases, raw, report, runner  # noqa: E402
from benchmarks.pools import HostPages  # noqa: E402

TINY_MHA = dataclasses.replace(cases.MHA_64KIB, name="tiny", layers=1, dim=32)
TINY_MLA = dataclasses.replace(cases.MLA_61, name="tiny-mla", layers=2)
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


def test_names_and_page_sizes_are_those_of_the_issue():
    """Case names are what readers of latest.json look for, and tell the page's size truly."""
    assert [case.name for case in cases.CASES] == [
        "shm-mha-1MiB-128", "shm-mha-64KiB-1024", "shm-mla61-128",
        "disk-mha-1MiB-128", "disk-mla61-64", "disk-mha-1MiB-128-direct",
    ]  # fmt: skip
    assert cases.MHA_1MIB.page_bytes == 1 << 20
    assert cases.MHA_64KIB.page_bytes == 1 << 16
    assert cases.MLA_61.page_bytes == 4497408


def test_case_patterns_are_globs_and_must_match():
    """A typo in --case is an error, not an empty run."""
    assert [case.name for case in cases.select(["*-direct"])] == ["disk-mha-1MiB-128-direct"]
    assert cases.select([]) == cases.CASES
    with pytest.raises(ValueError, match="shm-mha-1MiB-128"):
        cases.select(["shm-mha-1MB"])


@pytest.mark.parametrize("model", [TINY_MHA, TINY_MLA], ids=lambda model: model.name)
def test_every_subject_runs_for_real_and_leaves_nothing(tmp_path, model):
    """Each subject dumps, loads (compared byte by byte) and looks up; its files are gone after."""
    case = cases.Case("disk", model, pages=5)
    rows = runner.run_case(case, str(tmp_path), PLAN, print)
    figures = {(row.case, row.subject, row.op) for row in rows}
    assert figures == {
        (case.name + suffix, subject, op)
        for subject in runner.NAMES
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
    assert {row["subject"] for row in result["rows"]} == set(runner.NAMES)
    assert {row["op"] for row in result["rows"]} == {"dump", "load", "lookup"}
    assert str(tmp_path) not in out.read_text()
    assert str(ROOT) not in out.read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_share_of_other_processes_is_a_share():
    """It goes into the result file, to tell figures of a busy machine from others."""
    others = report.OtherProcesses()
    assert 0.0 <= others.share() <= 1.0
