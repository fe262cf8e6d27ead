"""Models of several host pools: real pools of SGLang, and the calls that it makes for them."""

import dataclasses
import threading
from typing import Any

import torch

import host_pools
import side_pools

WINDOW = 2  # pages of a sliding window

# Pages' slots: where a chain of six is stored from, and loaded into.
SIX = [7, 0, 3, 1, 6, 4]
OTHERS = [2, 5, 1, 7, 0, 6]


@dataclasses.dataclass(frozen=True)
class Side:
    """A side pool: SGLang's name, how to make it, and how many pages a prefix's end needs of it.

    ``window`` 0: every page of the prefix.
    """

    name: str
    make: Any
    given: dict = dataclasses.field(default_factory=dict)
    window: int = 0


@dataclasses.dataclass(frozen=True)
class Stack:
    """What SGLang builds for a model: the anchor pool, and side pools in its order."""

    anchor: Any
    sides: tuple[Side, ...]
    is_mla: bool = False
    layouts: tuple[str, ...] = host_pools.FLAT_LAYOUTS


STACKS = {
    "dsa": Stack(host_pools.mla_pool, (Side("indexer", side_pools.dsa_pool),), is_mla=True),
    "swa": Stack(
        host_pools.mha_pool,
        (Side("swa", host_pools.mha_pool, {"heads": 1, "layers": 2}, WINDOW),),
    ),
    "mamba": Stack(
        host_pools.mha_pool,
        (Side("mamba", side_pools.mamba_pool, {"states": True}, 1),),
        layouts=("page_first", "page_first_direct"),
    ),
    # No KV but in side pools; the windows come first, as SGLang builds it.
    "deepseek_v4": Stack(
        side_pools.logical_pool,
        (
            Side("swa", side_pools.paged_pool, {"item": 56, "layers": 4}, WINDOW),
            Side("deepseek_v4_c4", side_pools.paged_pool),
            Side("deepseek_v4_c4_indexer", side_pools.paged_pool, {"item": 7}),
            Side("deepseek_v4_c4_state", side_pools.state_pool, {}, WINDOW),
        ),
        is_mla=True,
    ),
}


class Rank:
    """One rank's pools of a stack, and a backend attached to them.

    ``known``: whether the backend is told of all pools before it is attached, as the plugin does.
    ``late``: names that aren't registered with the rest.
    """

    def __init__(self, attach, name, *, layout="page_first", fill=None, known=True, late=(),
                 pages=8, **given):  # fmt: skip
        self.stack = stack = STACKS[name]
        seed = iter(range(fill, fill + 100)) if fill is not None else None

        def make(build, more):
            seeded = None if seed is None else next(seed)
            return build(layout=layout, pages=pages, fill=seeded, **more)

        self.pools = {"kv": make(stack.anchor, {})}
        self.pools |= {side.name: make(side.make, side.given) for side in stack.sides}
        early = {name: pool for name, pool in self.pools.items() if name not in late}
        self.backend = attach(
            self.pools["kv"], is_mla=stack.is_mla, known=list(early.items()) if known else None,
            **given,
        )  # fmt: skip
        for pool_name in early:
            self.register(pool_name)
        self.backend.on_host_pools_registered()

    def register(self, name):
        self.backend.register_mem_host_pool_v2(self.pools[name], _pool_name(name))

    @property
    def sides(self):
        return self.stack.sides

    def transfer(self, side, keys, numbers=None):
        """SGLang's: of a side pool's pages (of these numbers), with its policy."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

        trailing, all_pages = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES
        return PoolTransfer(
            name=_pool_name(side.name),
            keys=keys,
            host_indices=None if numbers is None else self.indices(side.name, numbers),
            hit_policy=trailing if side.window else all_pages,
        )

    def indices(self, name, numbers):
        return host_pools.indices(self.pools[name], numbers)

    def store(self, keys, numbers, ends=None):
        """Store a chain as SGLang does: side pools first, windows only before ``ends``."""
        ends = [len(keys)] if ends is None else ends
        for end in ends:
            transfers = [
                self.transfer(side, keys[end - side.window : end], numbers[end - side.window : end])
                for side in self.sides
                if side.window
            ]
            if transfers:
                yield from self.backend.batch_set_v2(transfers).values()
        transfers = [self.transfer(s, keys, numbers) for s in self.sides if not s.window]
        if transfers:
            yield from self.backend.batch_set_v2(transfers).values()
        yield self.backend.batch_set_v1(keys, self.indices("kv", numbers))

    def exists(self, keys):
        """SGLang's question before a prefetch: window pools are asked for by their length."""
        asked = [
            self.transfer(side, ["__placeholder__"] * side.window if side.window else None)
            for side in self.sides
        ]
        return self.backend.batch_exists_v2(keys, asked)

    def load(self, keys, numbers):
        """Load a prefix: by pool, one bool for each of its pages that a prefix needs."""
        got = {"kv": self.backend.batch_get_v1(keys, self.indices("kv", numbers))}
        for side in self.sides:
            first = len(keys) - side.window if side.window else 0
            transfer = self.transfer(side, keys[first:], numbers[first:])
            got |= self.backend.batch_get_v2([transfer])
        return {str(name): answers for name, answers in got.items()}

    def page(self, name, number):
        return host_pools.page_bytes(self.pools[name], number)

    def same_page(self, name, number, other, there):
        mine, theirs = self.page(name, number), other.page(name, there)
        assert theirs.any() or (name == "kv" and self.stack.anchor is side_pools.logical_pool)
        return torch.equal(mine, theirs)

    def block(self, root, name, key):
        """The file of a page's part."""
        identity = self.backend._pools[name].identity
        (found,) = (root / identity.directory_name / "blocks").rglob(identity.block_id(key).hex())
        return found


def stored(rank, names, numbers=SIX, ends=None):
    """Store a chain; every answer must be True."""
    answers = list(rank.store(names, numbers, ends))
    assert answers and all(all(answer) for answer in answers)
    return rank


def _pool_name(name):
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return PoolName(name)


def at_once(*steps, times=30):
    """Run each step repeatedly, all at the same time; what they raise."""
    failures, barrier = [], threading.Barrier(len(steps))

    def run(step):
        try:
            barrier.wait(10)
            for _ in range(times):
                step()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failures
