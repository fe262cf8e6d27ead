"""How much of a prefix can be restored, from which pages each pool has: SGLang's rules, in words.

Pure functions of presence bits. Source: SGLang 0.5.23, `HiCacheFile.batch_exists_v2` and its
Mooncake store's, which agree. BLOCK_GROUPS is by its docstring (`PoolHitPolicy`) alone, as nothing
in SGLang asks for it yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

# SGLang's PoolHitPolicy, whose members are these strings.
ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"


@dataclasses.dataclass(frozen=True)
class PoolPages:
    """What a pool is asked for, and which pages it has.

    ``present``: a bool per page of the chain; pages after its end are missing. ``window``: of
    TRAILING_PAGES, the pages before a prefix's end that it needs, 1 at least. ``block_pages``,
    ``group_pages``: of BLOCK_GROUPS, pages of a block, and how many keys at its end name its group.
    """

    name: str
    policy: str
    present: Sequence[bool] | np.ndarray
    window: int = 1
    block_pages: int = 0
    group_pages: int = 0


@dataclasses.dataclass(frozen=True)
class PrefixHits:
    """SGLang's PoolTransferResult: its fields, names and order.

    ``kv_hit_pages``: the longest restorable prefix. ``extra_pool_hit_pages``: each pool's own
    verdict, KV's too; one of 0 is left out, and so are pools after nothing was left to restore.
    ``restorable_prefix_pages``: every length that all pools can serve, growing.
    """

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int]


def leading_run(present: Sequence[bool] | np.ndarray) -> int:
    """How many of the first are there without a gap."""
    missing = np.flatnonzero(~np.asarray(present, dtype=bool))
    return int(missing[0]) if len(missing) else len(present)


def prefix_hits(kv_pages: int, pools: Iterable[PoolPages], kv_name: str = "kv") -> PrefixHits:
    """The restorable prefixes of a chain whose first ``kv_pages`` pages have their KV.

    With a logical anchor, which has no bytes, that is the whole chain. ``pools``: in the order in
    which SGLang asks for them; one is taken only while something is left to restore, so that
    a generator looks up no more pools than count.
    Raises ValueError for a policy that isn't known.
    """
    # Bit p: the first p + 1 pages can be restored.
    left = np.ones(kv_pages, dtype=bool)
    verdicts = {kv_name: kv_pages} if kv_pages else {}
    if kv_pages:
        for pool in pools:
            there = np.zeros(kv_pages, dtype=bool)
            known = np.asarray(pool.present, dtype=bool)[:kv_pages]
            there[: len(known)] = known
            verdict, serves = _VERDICTS[_policy(pool)](pool, there)
            if verdict:
                verdicts[pool.name] = verdict
            left &= serves
            if not left.any():
                break
    lengths = (np.flatnonzero(left) + 1).tolist()
    return PrefixHits(lengths[-1] if lengths else 0, verdicts, lengths)


def _policy(pool: PoolPages) -> str:
    policy = str(getattr(pool.policy, "value", pool.policy))
    if policy not in _VERDICTS:
        raise ValueError(f"pool {pool.name}: hit policy {policy!r} is not one of {[*_VERDICTS]}")
    return policy


# Each: the pool's own verdict in pages, and which prefixes it can serve.


def _all_pages(_: PoolPages, there: np.ndarray) -> tuple[int, np.ndarray]:
    run = leading_run(there)
    return run, np.arange(len(there)) < run


def _trailing_pages(pool: PoolPages, there: np.ndarray) -> tuple[int, np.ndarray]:
    missing = np.concatenate(([0], np.cumsum(~there)))  # among the first so many
    ends = np.arange(1, len(there) + 1)
    serves = missing[ends] == missing[np.maximum(0, ends - max(1, pool.window))]
    served = np.flatnonzero(serves)
    return int(served[-1]) + 1 if len(served) else 0, serves


def _block_groups(pool: PoolPages, there: np.ndarray) -> tuple[int, np.ndarray]:
    """Pages of the leading blocks whose groups are complete; every prefix is served anyway.

    A group's keys are the last ``group_pages`` of its block: a page's key names the tokens up to
    it, so that only the last ones name the whole block.
    """
    everything = np.ones(len(there), dtype=bool)
    block, group = pool.block_pages, pool.group_pages
    if not 0 < group <= block:
        return 0, everything
    blocks = there[: len(there) // block * block].reshape(-1, block)
    return leading_run(blocks[:, block - group :].all(axis=1)) * block, everything


_VERDICTS = {
    ALL_PAGES: _all_pages,
    TRAILING_PAGES: _trailing_pages,
    BLOCK_GROUPS: _block_groups,
}
