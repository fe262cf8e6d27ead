"""The cases: which pages, how many, and where they are. Imports neither SGLang nor torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar

PAGE_TOKENS = 64
_ITEM_BYTES = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class Model:
    """The part of a model that decides the bytes of a page.

    ``heads`` and ``dim`` are KV heads and their size, of K and of V; for MLA, one latent row of
    ``dim`` elements a token.
    """

    name: str
    is_mla: bool
    layers: int
    heads: int
    dim: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of `PAGE_TOKENS` tokens."""
        row = self.layers * self.heads * self.dim * _ITEM_BYTES
        return PAGE_TOKENS * row * (1 if self.is_mla else 2)


MHA_1MIB = Model("mha-1MiB", is_mla=False, layers=8, heads=4, dim=128)
MHA_64KIB = Model("mha-64KiB", is_mla=False, layers=2, heads=1, dim=128)
MLA_61 = Model("mla61", is_mla=True, layers=61, heads=1, dim=512 + 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """``pages`` pages of ``model`` on ``medium``, which is ``shm`` or ``disk``.

    With ``direct``, past the page cache; SGLang's `file` backend can't, and is left out.
    """

    medium: str
    model: Model
    pages: int
    direct: bool = False

    @property
    def name(self) -> str:
        """As in ``shm-mha-1MiB-128``."""
        return f"{self.medium}-{self.model.name}-{self.pages}" + ("-direct" if self.direct else "")

    @property
    def payload(self) -> int:
        """Bytes that one dump or load moves."""
        return self.pages * self.model.page_bytes

    def quick(self) -> Self:
        """The same with few pages: to see that it works, not how fast it is."""
        return dataclasses.replace(self, pages=min(self.pages, 8))


@dataclasses.dataclass(frozen=True)
class VerifyCase(Case):
    """The same pages loaded with their checksums checked, and without."""

    @property
    def name(self) -> str:
        """As in ``verify-shm-mha-1MiB-128``."""
        return f"verify-{super().name}"


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """``pages`` pages of ``model`` between the host pool and the cache, by ``workers`` threads."""

    title: str
    model: Model
    pages: int
    workers: int
    direct = False

    @property
    def name(self) -> str:
        """As in ``cache-1MiB-w2``."""
        return f"cache-{self.title}-w{self.workers}"

    @property
    def payload(self) -> int:
        """Bytes that one dump or load moves."""
        return self.pages * self.model.page_bytes

    def with_pages(self, pages: int) -> CacheCase:
        """The same, and the same name, with another number of pages."""
        return dataclasses.replace(self, pages=pages)

    def quick(self) -> CacheCase:
        """The same with few pages."""
        return self.with_pages(min(self.pages, 8))


@dataclasses.dataclass(frozen=True)
class ColdCase:
    """``ranks`` processes that share a buffer load the same ``pages`` pages, none of them in it."""

    title: str
    model: Model
    pages: int
    ranks: int

    @property
    def name(self) -> str:
        """As in ``mla-cold-8proc``."""
        return f"{self.title}-cold-{self.ranks}proc"

    @property
    def payload(self) -> int:
        """Bytes that one process loads."""
        return self.pages * self.model.page_bytes

    def with_pages(self, pages: int) -> ColdCase:
        """The same, and the same name, with another number of pages."""
        return dataclasses.replace(self, pages=pages)

    def quick(self) -> ColdCase:
        """The same with few pages."""
        return self.with_pages(min(self.pages, 8))


CASES = (
    Case("shm", MHA_1MIB, 128),
    Case("shm", MHA_64KIB, 1024),
    Case("shm", MLA_61, 128),
    Case("disk", MHA_1MIB, 128),
    Case("disk", MLA_61, 64),
    Case("disk", MHA_1MIB, 128, direct=True),
)
VERIFY_CASES = (
    VerifyCase("shm", MHA_1MIB, 128),
    VerifyCase("shm", MLA_61, 64),
    VerifyCase("disk", MHA_1MIB, 128),
    VerifyCase("disk", MHA_1MIB, 128, direct=True),
)
CACHE_CASES = tuple(
    CacheCase(title, model, pages, workers)
    for title, model, pages in (("1MiB", MHA_1MIB, 128), ("4.4MiB", MLA_61, 64))
    for workers in (1, 2, 4)
)
COLD_CASES = (ColdCase("mla", MLA_61, 128, 8),)


class Named(Protocol):
    """Anything with a name to select it by."""

    @property
    def name(self) -> str: ...  # noqa: D102


_Any = TypeVar("_Any", bound=Named)


def select(patterns: Sequence[str], cases: Iterable[_Any]) -> tuple[_Any, ...]:
    """Those of ``cases`` whose name matches one of the glob ``patterns``; without any, all.

    Raises ValueError for a pattern that matches none.
    """
    cases = tuple(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"no case matches {pattern!r}; there are {names}")
    return tuple(
        case
        for case in cases
        if not patterns or any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    )


def page_keys(label: str, count: int) -> list[str]:
    """SHA-256 in hex, as SGLang's page keys are."""
    return [hashlib.sha256(f"{label}/{number}".encode()).hexdigest() for number in range(count)]
