"""The benchmark of load-backs: it measures what it says."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks import async_load  # noqa: E402
from benchmarks.runner import Plan, WrongResult  # noqa: E402

PLAN = Plan(subjects=["inline", "loader"], rounds=2, raw_threads=(2,), settings={}, profile=False)


@pytest.mark.parametrize("gil", [False, True])
def test_it_runs_for_real(gil, hooked):
    """Pinned: both subjects, on a real controller; inline keeps the scheduler for the whole burst.

    Nothing overlaps inline, by construction; how much does on the loader is the benchmark's to say.
    """
    case = async_load.AsyncLoadCase(5, 2, gil=gil, seconds=0.002)
    said = []
    rows = async_load.run_case(case, PLAN, said.append)
    figures = {(row.subject, row.op): row for row in rows}
    assert set(figures) == {
        (subject, op)
        for subject in ("inline", "loader")
        for op in ("scheduler_ms", "overlap_share", "work_delay_ms")
    }
    assert {row.case for row in rows} == {"async-load-5x2" + ("-gil" if gil else "")}
    assert figures["inline", "scheduler_ms"].min >= 20
    assert figures["inline", "overlap_share"].max == 0
    assert figures["loader", "overlap_share"].min >= 0
    assert len([line for line in said if "expected" in line]) == (0 if gil else 2)


def test_the_case_is_the_one_that_was_reported():
    """Pinned: 78 layers of two pools, 2.4 ms each."""
    case, gil = async_load.CASES
    assert (case.name, gil.name) == ("async-load-78x2", "async-load-78x2-gil")
    assert (case.layers, case.pools, case.seconds) == (78, 2, 0.0024)
    assert dataclasses.replace(gil, gil=False) == case


def test_the_ideal_pipeline():
    """Pinned: what is possible is bounded by both, layer by layer."""
    assert async_load._pipelined([1, 1, 1], [1, 1, 1]) == 4
    assert async_load._pipelined([3, 1, 1], [1, 1, 1]) == 6
    assert async_load._pipelined([1, 1, 1], [0, 0, 5]) == 8


def test_a_consumer_that_runs_ahead_is_a_wrong_result(hooked, monkeypatch):
    """Pinned: overlap that comes from not waiting is no figure."""
    case = async_load.AsyncLoadCase(3, 2, seconds=0.02)
    monkeypatch.setattr(hooked.LayerLoadingEvent, "wait", lambda self, layer: None)
    with pytest.raises(WrongResult, match="layer 0"):
        async_load.run_case(case, PLAN, print)
