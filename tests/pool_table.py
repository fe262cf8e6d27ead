"""The table of host pools that the test run prints: what was built, and what came of it."""

import itertools

import pytest

ROWS = pytest.StashKey[dict]()


def add(config, pool_class, layout, dtype, outcome):
    """Add a row; of several with the same first columns, the last one stays."""
    config.stash.setdefault(ROWS, {})[pool_class, layout, dtype] = outcome


def write(reporter, config):
    """Print the table, if a test added to it: one line for what has one outcome."""
    lines = _merged([(*key, outcome) for key, outcome in config.stash.get(ROWS, {}).items()])
    if not lines:
        return
    reporter.section("host pools of SGLang: class, layout, dtype, outcome")
    for kind, of_kind in itertools.groupby(lines, lambda line: line[0]):
        reporter.write_line(kind)
        for _, layouts, dtypes, outcome in of_kind:
            reporter.write_line(f"    {layouts} | {dtypes}: {outcome}")


def _merged(rows):
    """Rows whose outcome is the same become one: first of several dtypes, then of layouts."""
    for column in (2, 1):
        merged = {}
        for row in rows:
            rest = row[:column] + row[column + 1 :]
            merged.setdefault(rest, []).append(row[column])
        rows = [
            (*rest[:column], " / ".join(values), *rest[column:]) for rest, values in merged.items()
        ]
    return sorted(rows)
