"""From how long prefixes take to restore: below which length computing them again is faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Line:
    """``fixed`` seconds, and ``per_token`` for each token of the prefix."""

    fixed: float
    per_token: float

    @property
    def tokens_per_second(self) -> float:
        """What long prefixes are restored at: whoever computes faster needs no storage."""
        return 1 / self.per_token

    def seconds(self, tokens: float) -> float:
        """To restore a prefix of so many tokens."""
        return self.fixed + self.per_token * tokens


def fitted(points: Sequence[tuple[int, float]]) -> Line:
    """The line nearest to (tokens, seconds), by their relative errors: no part is below 0."""
    weighed = [(1 / seconds**2, n, seconds) for n, seconds in points]
    total = sum(w for w, _, _ in weighed)
    x = sum(w * n for w, n, _ in weighed) / total
    y = sum(w * s for w, _, s in weighed) / total
    spread = sum(w * (n - x) ** 2 for w, n, _ in weighed)
    along = sum(w * (n - x) * (s - y) for w, n, s in weighed)
    slope = along / spread if spread > 0 else 0.0
    if slope > 0 and y >= slope * x:
        return Line(y - slope * x, slope)
    through_zero = sum(w * n * s for w, n, s in weighed) / sum(w * n * n for w, n, _ in weighed)
    return Line(0.0, through_zero)


def tokens(line: Line, prefill: float, page_size: int) -> int | None:
    """The shortest prefix, in whole pages, that is restored as fast as it is computed.

    ``prefill``: tokens a second that are computed. None where computing is faster at any length.
    """
    gain = 1 / prefill - line.per_token
    if gain <= 0:
        return None
    return max(1, math.ceil(line.fixed / gain / page_size)) * page_size
