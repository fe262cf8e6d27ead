"""SGLang's radix tree and hybrid controller over real host pools on the CPU, and our backend.

All that SGLang does between its host pools and a storage backend is its own: the tree's transfers,
the controller's threads and queues, what becomes of a prefetch. There is no device: its pools are
empty objects of the right classes, and pages are put into the host pools where a server copies them
from the device.
"""

import atexit
import contextlib
import dataclasses
import json
import threading
import time
from array import array

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, SidecarPoolSpec
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult as Result
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.runtime_context import get_context, get_memory, get_parallel

import host_pools
import side_pools
from backends import storage_config
from host_pools import PAGE
from pool_stacks import STACKS, WINDOW, Side, Stack
from rig.server import poll

PAGES = 64  # of each host pool
LAYERS = 3
TIMEOUT = 20.0  # of a wait

KV, SWA, MAMBA = PoolName.KV, PoolName.SWA, PoolName.MAMBA

KINDS = {
    "dsa": STACKS["dsa"],
    "mamba": STACKS["mamba"],
    "deepseek_v4": dataclasses.replace(
        STACKS["deepseek_v4"],
        sides=(
            *STACKS["deepseek_v4"].sides,
            Side("deepseek_v4_c4_indexer_state", side_pools.state_pool, {"layers": 2}, WINDOW),
            Side("deepseek_v4_c128", side_pools.paged_pool, {"item": 11}),
        ),
    ),
    "minimax": Stack(host_pools.mha_pool, (Side("indexer", side_pools.key_only_pool),)),
    # All kinds of side pools that MLA's KV may have, of several tensor-parallel ranks: those whose
    # bytes are the same on each, and those of which each has a part.
    "mla_hybrid": Stack(
        host_pools.mla_pool,
        (
            Side("indexer", side_pools.dsa_pool),
            Side("mamba", side_pools.mamba_pool, {}, 1),
            Side("draft", host_pools.mha_pool, {"heads": 1, "layers": 1}),
        ),
        is_mla=True,
    ),
}


def source_of(side):
    """Whose slots a side pool's pages are in, as SGLang's stack strategies have it; None: own."""
    if side.name in (SWA, MAMBA):
        return None
    return SWA if side.window else KV


def sidecar(side):
    """SGLang's description of a side pool that has no slots of its own."""
    source = source_of(side)
    policy = PoolHitPolicy.TRAILING_PAGES if source == SWA else PoolHitPolicy.ALL_PAGES
    return SidecarPoolSpec(PoolName(side.name), source, policy)


def _bare(kind, **attributes):
    """An object of one of SGLang's classes without what its constructor makes."""
    return object.__new__(type(kind.__name__, (kind,), attributes))


def _device_pool(name):
    """What the controller learns of a device pool: its class, its layers, where it is."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    def pool(kind):
        return _bare(kind, device="cpu", layer_num=LAYERS, register_layer_transfer_counter=_ignore)

    if name in ("mamba", "mla_hybrid"):
        mla, mha = memory_pool.MLATokenToKVPool, memory_pool.MHATokenToKVPool
        hybrid = pool(memory_pool.HybridLinearKVPool)
        hybrid.full_kv_pool = pool(mla if KINDS[name].is_mla else mha)
        return hybrid
    kinds = {
        "dsa": memory_pool.DSATokenToKVPool,
        "deepseek_v4": DeepSeekV4TokenToKVPool,
        "minimax": memory_pool.MiniMaxSparseKVPool,
    }
    return pool(kinds[name])


def _ignore(*_):
    pass


@contextlib.contextmanager
def published():
    """SGLang's settings of a server with our backend."""
    settings = {
        "hicache_storage_backend": "cachestore",
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "served_model_name": "served",
        "_mamba_cache_chunk_size": PAGE,  # else of the model's files
    }
    with get_context().override_server_args(**settings):
        yield


class _Stack(assembler.StackStrategy):
    """In the place of one of SGLang's: the pools are small, and of no device."""

    def __init__(self, server):
        self._server = server

    def matches(self, kvcache, components):
        return kvcache is self._server.device_pool

    def build(self, *, cache, kvcache, params, load_cache_event, storage_backend,
              storage_backend_extra_config, prefetch_threshold, model_name,
              enable_storage_metrics, **_):  # fmt: skip
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host import HostPoolGroup

        layers = {layer: layer for layer in range(LAYERS)}
        server, pools = self._server, self._server.pools
        group = HostPoolGroup(
            [
                assembler.build_pool_entry(
                    name=PoolName(name), host_pool=pool, device_pool=kvcache, layer_mapping=layers,
                    transfer_layer_id_max=LAYERS, is_anchor=name == KV,
                )
                for name, pool in pools.items()
            ]
        )  # fmt: skip
        controller = HybridCacheController(
            params.token_to_kv_pool_allocator, group, params.page_size, params.tp_cache_group,
            load_cache_event=load_cache_event, write_policy=get_memory().hicache_write_policy,
            io_backend=get_memory().hicache_io_backend, storage_backend=storage_backend,
            prefetch_threshold=prefetch_threshold, model_name=model_name,
            storage_backend_extra_config=storage_backend_extra_config,
            transfer_layer_id_max=LAYERS, enable_storage_metrics=enable_storage_metrics,
        )  # fmt: skip
        return assembler.StackBuildResult(
            host_pool_group=group,
            cache_controller=controller,
            component_host_pools={kind: pools[own] for kind, own in server.components.items()},
            sidecars=[sidecar(side) for side in server.stack.sides if source_of(side)],
            pool_declarations=(),
        )


class Server:
    """One rank's tree, controller and pools of a kind of model. `published` settings are needed.

    ``seed``: of the bytes that are in its pools at first, and of the order of their free slots.
    ``rank``, ``size``: tensor-parallel ones, or with ``contexts`` context-parallel ones.
    ``prefix_keys``: whether SGLang tells what comes before a page. ``prepare``: is given the pools.
    ``extra``: of our settings.
    """

    def __init__(self, name, root, *, seed, rank=0, size=1, contexts=False, prefix_keys=False,
                 pages=PAGES, prepare=_ignore, **extra):  # fmt: skip
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.stack = stack = KINDS[name]
        self.device_pool = _device_pool(name)
        fills = iter(range(seed, seed + 100))

        def make(build, given):
            return build(layout="page_first_direct", pages=pages, fill=next(fills), **given)

        self.pools = {"kv": make(stack.anchor, {})}
        self.pools |= {side.name: make(side.make, side.given) for side in stack.sides}
        prepare(self.pools)
        self.pages = pages
        # The tree's components are the pools that have slots of their own.
        kinds = {"kv": ComponentType.FULL, SWA: ComponentType.SWA, MAMBA: ComponentType.MAMBA}
        names = ["kv", *(side.name for side in stack.sides if not source_of(side))]
        self.components = {kinds[name]: name for name in names}
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=_bare(HybridReqToTokenPool),
            token_to_kv_pool_allocator=_bare(
                SWATokenToKVPoolAllocator, device="cpu", get_kvcache=lambda _: self.device_pool
            ),
            page_size=PAGE,
            sliding_window_size=WINDOW * PAGE,
            enable_mamba_extra_buffer=True,
            tree_components=tuple(self.components),
            tree_core_backend="python",
        )
        extra = storage_config(root, extra=extra).extra_config
        extra |= {"prefetch_threshold": PAGE, "hicache_storage_pass_prefix_keys": prefix_keys}
        self._tensor_rank = (0, 1) if contexts else (rank, size)
        self._context_rank = (rank, size) if contexts else (0, 1)
        self.extra_config = json.dumps(extra)
        told = get_memory().override(hicache_storage_backend_extra_config=self.extra_config)
        with self._placed(), told, _strategy(_Stack(self)):
            self.tree = UnifiedRadixCache(params)
            self.tree.init_hicache(get_context().server_args, params)
        atexit.unregister(self.tree.shutdown)  # SGLang's, which would keep it
        self.controller = self.tree.cache_controller
        self._shuffle(seed)

    @contextlib.contextmanager
    def _placed(self):
        """Where this rank is, as SGLang's process groups would say."""
        from sglang.srt.managers.cache_controller import HiCacheController

        (rank, size), (context, contexts) = self._tensor_rank, self._context_rank
        place = {
            "tp_rank": rank + context, "tp_size": size * contexts, "moe_tp_size": size * contexts,
            "attn_tp_rank": rank, "attn_tp_size": size, "attn_cp_size": contexts,
            "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1,
        }  # fmt: skip
        with get_parallel().override(**place), pytest.MonkeyPatch.context() as patch:
            own = self._context_rank
            patch.setattr(HiCacheController, "get_attn_cp_rank_and_size", lambda _: own)
            yield

    def _shuffle(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for pool in (self.pools[name] for name in self.components.values()):
            pages = pool.alloc(pool.available_size()).reshape(-1, pool.page_size)
            pool.free(pages[torch.randperm(len(pages), generator=generator)].ravel())

    def add(self, side, pool):
        """A side pool that comes late, as a draft model's does."""
        entry = assembler.build_pool_entry(
            name=PoolName(side.name), host_pool=pool, device_pool=None, layer_mapping={0: 0},
            transfer_layer_id_max=LAYERS,
        )  # fmt: skip
        self.tree.register_sidecar_pool(sidecar(side), entry)
        self.stack = dataclasses.replace(self.stack, sides=(*self.stack.sides, side))
        self.pools[side.name] = pool

    @property
    def backend(self):
        return self.controller.storage_backend

    @property
    def root(self):
        return self.tree.root_node_handle()

    def store(self, tokens, ends):
        """Have a chain in the host pools, a node up to each of ``ends`` (in pages); back them up.

        Returns SGLang's operations, done.
        """
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        core, node, last = self.tree.tree_core, self.root, None
        for start, end in zip([0, *ends], ends, strict=False):
            key = _key(tokens[start * PAGE : end * PAGE])
            hashes = get_storage_hash_str(key, last, page_size=PAGE)
            parent, last = node, hashes[-1]
            slots = self.controller.mem_pool_host.alloc(len(key))
            inserted = core.insert_host(parent, key, slots, hashes)
            self._commit_sides(parent, key, inserted)
            node = inserted.inserted_host_node
            for each in reversed(self._up(node, parent)):  # windows may have split it
                self.tree.write_backup_storage(each.id)
        ongoing, done = self.tree.ongoing_backup, self.controller.ack_backup_queue
        _wait(lambda: done.qsize() == len(ongoing))
        operations = list(done.queue)
        self.tree.drain_storage_control_queues()
        assert not ongoing
        return operations

    def _commit_sides(self, parent, key, inserted):
        """Slots for what the end of a node needs of windows and states, as after a prefetch."""
        from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

        core, phase, found = self.tree.tree_core, CacheTransferPhase.PREFETCH, {}
        for kind, component in self.tree.components.items():
            if self.components[kind] == "kv":
                continue
            needed = component.prepare_prefetch(parent, prefetch_tokens=len(key)).staging_tokens
            found[kind] = core.build_hicache_transfers(
                kind, parent, phase, token_ids=key.token_ids, prefetch_tokens=len(key),
                staging_tokens=needed,
            )  # fmt: skip
            (transfer,) = found[kind]
            transfer.host_indices = component.alloc_prefetch_staging(needed)
        hits = {each.name: len(each.keys) for (each,) in found.values()}
        actions = []
        core.commit_hicache_transfers(
            parent, phase, found, cache_actions=actions, insert_result=inserted,
            pool_storage_result=Result(len(key) // PAGE, hits),
        )  # fmt: skip
        self.tree._apply_cache_actions(actions)

    def start(self, tokens):
        """Begin a prefetch of a prompt."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle = CacheRequestHandle(f"request {time.monotonic_ns()}", 0)
        keys = [] if self.tree.hicache_storage_pass_prefix_keys else None
        self.tree.prefetch_from_storage(handle, self.root, tokens, prefix_keys=keys)
        assert self.tree.has_ongoing_prefetch(handle)
        self.operation = self.tree.ongoing_prefetch[handle].operation
        return handle

    def step(self, handle):
        """One round of SGLang's scheduler: whether the prefetch is done."""
        self.tree.drain_storage_control_queues()
        return self.tree.check_prefetch_progress(handle)

    def prefetch(self, tokens):
        """Tokens of a prompt that are in the host pools then."""
        return prefetched([self], tokens)[0]

    def _up(self, node, end):
        """The nodes from one up to below another."""
        core, nodes = self.tree.tree_core, []
        node, end = core.node_by_id(node), core.node_by_id(end)
        while node is not end:
            nodes.append(node)
            node = node.parent
        return nodes

    def held(self, tokens):
        """What the tree says is in the host pools of a chain: by pool, number of page: slot."""
        slots = {name: {} for name in self.components.values()}
        for end, node in self._path(tokens):
            for kind, name in self.components.items():
                value = node.component_data[kind].host_value
                if value is not None:
                    rows = value.reshape(-1, self.pools[name].page_size)
                    slots[name] |= {end - len(rows) + i: row for i, row in enumerate(rows)}
        slots |= {s.name: slots[str(source_of(s))] for s in self.stack.sides if source_of(s)}
        return {
            name: {page: self._number(name, row) for page, row in slots[name].items()}
            for name in self.pools
        }

    def _path(self, tokens):
        """The nodes of a chain, each with the number of pages up to its end."""
        node, end = self.tree.tree_core.root_node, 0
        while nodes := [n for n in node.children.values() if n.key.token_ids[0] == tokens[end]]:
            (node,) = nodes
            end += len(node.key)
            yield end // PAGE, node
            if end >= len(tokens):
                break

    def _number(self, name, row):
        number = int(row[0]) // self.pools[name].page_size
        assert torch.equal(row, host_pools.indices(self.pools[name], [number]))
        return number

    def page(self, name, number):
        return host_pools.page_bytes(self.pools[name], number)

    def everything(self):
        """The bytes of all pages of all pools."""
        return {name: [self.page(name, i) for i in range(self.pages)] for name in self.pools}

    def block(self, root, name, key):
        """The file of a pool's part of a page."""
        identity = self.backend._pools[name].identity
        (found,) = (root / identity.directory_name / "blocks").rglob(identity.block_id(key).hex())
        return found

    def hashes(self, tokens):
        """SGLang's keys of a chain's pages."""
        return [key for _, node in self._path(tokens) for key in node.hash_value]

    def attach(self):
        """As SGLang's endpoint does it: whether it worked, and what it says."""
        with self._placed():
            return self.tree.attach_storage_backend("cachestore", self.extra_config, "served")

    def detach(self):
        assert self.tree.detach_storage_backend() == (
            True, "Detached HiCache storage backend successfully.",
        )  # fmt: skip


def prefetched(servers, tokens):
    """What ranks that work together have of a prompt in their host pools then: tokens of each."""
    handles = [server.start(tokens) for server in servers]
    pairs = list(zip(servers, handles, strict=True))
    _wait(lambda: all([server.step(handle) for server, handle in pairs]))
    for server in servers:
        server.tree.drain_storage_control_queues()
    return [server.tree.pop_prefetch_loaded_tokens(handle) for server, handle in pairs]


class Meeting:
    """A process group of ranks that are threads: each waits for all, then has the least."""

    def __init__(self, ranks):
        self._values = []
        self._least = None
        self._barrier = threading.Barrier(ranks, self._reduce, timeout=TIMEOUT)

    def _reduce(self):
        self._least = torch.stack(self._values).amin(0)
        self._values = []

    def minimum(self, tensor):
        self._values.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(self._least)


def joined(servers, monkeypatch):
    """Have the ranks agree as over process groups: on hits, and on what was loaded of them."""
    from sglang.srt.managers.cache_controller import HiCacheController

    def all_reduce(_, tensor, op, groups):
        assert op == torch.distributed.ReduceOp.MIN
        for group in groups:
            group.minimum(tensor)

    monkeypatch.setattr(HiCacheController, "_all_reduce", all_reduce)
    hits, completion = [Meeting(len(servers))], [Meeting(len(servers))]
    for server in servers:
        server.controller.prefetch_hits_sync_groups = hits
        server.controller.prefetch_completion_sync_groups = completion
    return servers


@contextlib.contextmanager
def _strategy(strategy):
    assembler.register_stack_strategy(strategy)
    try:
        yield
    finally:
        assembler._STRATEGIES.remove(strategy)


def _key(tokens):
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens))


def _wait(until):
    poll(until, TIMEOUT, "SGLang's storage threads", interval=0.001)
