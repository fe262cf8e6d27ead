"""The picture of `cachestore bench`: beside plain calls, and where restoring is worth it.

matplotlib is in the extra ``plot``; nothing else needs it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from ..errors import CacheStoreError
from .bench_break_even import Line
from .bench_measure import GB_PER_S, Measured, Restored, Row

_STORE, _PLAIN, _COMPUTED = "#1f5fa8", "#b8c4d0", "#b03a2e"
_MARKS = "os^D"


class NoPictureError(CacheStoreError):
    """It can't be drawn, or not there."""


def check(path: str) -> None:
    """Raise `NoPictureError` where `draw` would fail for want of something."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise NoPictureError(
            f"--plot needs matplotlib ({error}): pip install matplotlib"
        ) from error
    kind = os.path.splitext(path)[1].removeprefix(".").lower()
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if kind not in kinds:
        raise NoPictureError(f"--plot {path}: the name must end with one of .{', .'.join(kinds)}")
    directory = os.path.dirname(os.path.abspath(path))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise NoPictureError(f"--plot {path}: {directory} isn't a directory that can be written")


def draw(
    path: str,
    title: str,
    measured: Measured,
    labels: dict[str, str],
    lines: Sequence[tuple[Restored, Line, int | None]],
    prefill: float | None,
) -> None:
    """Write the picture. ``lines``: what was restored, the line through it, its break-even.

    ``labels``: of operations. ``prefill``: tokens a second that are computed, if known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    _bars(left, [row for row in measured.rows if row.unit == GB_PER_S], labels)
    _prefixes(right, lines, prefill)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: Sequence[Row], labels: dict[str, str]) -> None:
    places = list(range(len(rows)))[::-1]
    height = 0.38
    for shift, name, color in ((height / 2, "store", _STORE), (-height / 2, "plain", _PLAIN)):
        medians = [statistics.median(getattr(row, name)) for row in rows]
        label = "CacheStore" if name == "store" else "plain pwritev, preadv, memcpy"
        bars = axes.barh([p + shift for p in places], medians, height, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(places, [f"{labels[row.op]}, {row.processes} proc." for row in rows])
    axes.set_xlabel("GB/s, all processes together")
    axes.margins(x=0.12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8)
    axes.set_title("beside plain calls on this machine")


def _prefixes(
    axes: Any, lines: Sequence[tuple[Restored, Line, int | None]], prefill: float | None
) -> None:
    longest = max(tokens for restored, _, _ in lines for tokens, _ in restored.points)
    shortest = min(tokens for restored, _, _ in lines for tokens, _ in restored.points)
    span = [shortest * (longest / shortest) ** (i / 100) for i in range(101)] or [shortest]
    for number, (restored, line, even) in enumerate(lines):
        tokens, seconds = zip(*restored.points, strict=True)
        color = (_STORE, "#4a9a5b", "#8a5fb0")[number % 3]
        axes.plot(
            tokens, seconds, _MARKS[number % len(_MARKS)], color=color,
            label=f"restored from the {restored.where}",
        )  # fmt: skip
        axes.plot(span, [line.seconds(n) for n in span], "-", color=color, linewidth=1)
        if even is not None and prefill is not None:
            axes.plot([even], [even / prefill], "*", color=_COMPUTED, markersize=13)
            axes.annotate(
                f"{restored.where}: {even:,} tokens", (even, even / prefill),
                textcoords="offset points", xytext=(8, -12 - 14 * number), fontsize=8,
            )  # fmt: skip
    if prefill is not None:
        computed = [n / prefill for n in span]
        label = f"computed, {prefill:,.0f} tokens/s"
        axes.plot(span, computed, "--", color=_COMPUTED, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.yaxis.set_major_formatter(lambda seconds, _: f"{1000 * seconds:g}")
    axes.set_xlabel("tokens of the prefix")
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    axes.set_title("restoring a prefix" + (" or computing it" if prefill is not None else ""))
