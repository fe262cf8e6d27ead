"""The case `async-load-78x2`: a load-back burst, enqueued inline or on the loader thread.

SGLang's own hybrid controller with 78 layers and two pools, whose copies of one layer take 2.4 ms
of the CPU each, as building the descriptors of a batched copy does: a stand-in of that duration,
since the CPU's own copy is faster. It gives the GIL away meanwhile, or in the case whose name ends
in ``-gil`` keeps it. A consumer waits for each layer and then computes for as long as the two
copies of a layer take.

``scheduler_ms``: how long `start_loading` keeps the scheduler thread. ``overlap_share``: of the
copy time, the part that overlaps the consumer, in terms of what is possible in a pipeline of these
durations. ``work_delay_ms``: how much later a fixed piece of Python work, begun on the scheduler
thread when the burst is handed out, is done than it takes alone.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import report
from .runner import Plan, WrongResult, no_garbage_collection

SUBJECTS = ("inline", "loader")
SCHEDULER, OVERLAP, DELAY = "scheduler_ms", "overlap_share", "work_delay_ms"
#: What the loader is for; none of it is promised with the GIL kept.
_MOST_OF_INLINE = 0.01
_LEAST_OVERLAP = 0.9
_WORK_STEPS = 2_000_000  # many times as long as a thread keeps the GIL, 5 ms
_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class AsyncLoadCase:
    """``layers`` layers of ``pools`` pools, ``seconds`` a copy; ``gil``: the copy keeps the GIL."""

    layers: int
    pools: int
    gil: bool = False
    seconds: float = 0.0024

    @property
    def name(self) -> str:
        """As in ``async-load-78x2``."""
        return f"async-load-{self.layers}x{self.pools}" + ("-gil" if self.gil else "")

    def quick(self) -> AsyncLoadCase:
        """The same with shorter copies, of which nothing is expected."""
        return dataclasses.replace(self, seconds=0.0004)


CASES = (AsyncLoadCase(78, 2), AsyncLoadCase(78, 2, gil=True))


def run_case(case: AsyncLoadCase, plan: Plan, say: Callable[[str], None]) -> list[report.Row]:
    """Measure it. Raises `WrongResult` if a layer was computed before its copies."""
    burst = case.layers * case.pools * case.seconds
    kept = "kept" if case.gil else "given away"
    say(f"{case.name}: {burst * 1e3:.0f} ms of copies in a burst, the GIL {kept}")
    samples = {(subject, op): [] for subject in SUBJECTS for op in (SCHEDULER, OVERLAP, DELAY)}
    with no_garbage_collection(), _quiet():
        runs = {subject: _Run(case, subject == "loader") for subject in SUBJECTS}
        try:
            for number in range(1 + plan.rounds):
                for subject, run in runs.items():
                    for op, value in run.round().items():
                        if number:  # the first one warms up
                            samples[subject, op].append(value)
        finally:
            for run in runs.values():
                run.controller.stop_load_enqueue_thread()
    rows = [report.row(case.name, *key, values) for key, values in samples.items()]
    _judge(case, {(row.subject, row.op): row.median for row in rows}, say)
    return [dataclasses.replace(row, unit=_UNITS[row.op]) for row in rows]


_UNITS = {SCHEDULER: "ms", OVERLAP: "share", DELAY: "ms"}


def _judge(case: AsyncLoadCase, medians: dict, say: Callable[[str], None]) -> None:
    if case.gil or case.quick() == case:
        return
    hand_out = medians["loader", SCHEDULER] / medians["inline", SCHEDULER]
    overlap = medians["loader", OVERLAP]
    for what, number, met in (
        (f"scheduler_ms <= {_MOST_OF_INLINE} x inline", hand_out, hand_out <= _MOST_OF_INLINE),
        (f"overlap_share >= {_LEAST_OVERLAP}", overlap, overlap >= _LEAST_OVERLAP),
    ):
        say(f"expected {case.name} {what}: {'met' if met else 'NOT met'} ({number:.4f})")


@contextmanager
def _quiet() -> Iterator[None]:
    """SGLang says of each controller whether its loader is on."""
    logger = logging.getLogger("sglang.srt.managers.cache_controller")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _HostPool:
    """A host pool whose copies take time, and nothing else."""

    layout = "page_first_direct"
    page_size = 1
    device = "cpu"
    size = logical_size = 1 << 20
    size_per_token = 1
    can_use_write_back_jit = False

    def __init__(self, case: AsyncLoadCase):
        self.layer_num = case.layers
        self._wait = _keep_the_gil if case.gil else time.sleep
        self._seconds = case.seconds
        self.done: list[float] = []  # seconds that each layer's copy took

    def prepare_transfer_indices(self, host_indices: Any, device_indices: Any, _: str) -> Any:
        return host_indices, device_indices

    def load_to_device_per_layer_physical(self, *_: Any, **__: Any) -> None:
        began = time.perf_counter()
        self._wait(self._seconds)
        self.done.append(time.perf_counter() - began)


def _keep_the_gil(seconds: float) -> None:
    """Python code: other threads run only when the interpreter takes the GIL away."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class _Allocator:
    """As much of an allocator as a controller uses."""

    def __init__(self, layers: int):
        self._pool = types.SimpleNamespace(
            device="cpu", layer_num=layers, register_layer_transfer_counter=lambda counter: None
        )

    def get_kvcache(self) -> Any:
        return self._pool

    def alloc(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    def set_hicache_transfer_done_event(self, key: Any, event: Any) -> None:
        pass


class _Run:
    """A controller, inline or with its loader, and rounds on it."""

    def __init__(self, case: AsyncLoadCase, loader: bool):
        self._case = case
        self.controller, self._pools = _controller(case, loader)

    def round(self) -> dict[str, float]:
        """One burst with a consumer, and one with the work."""
        one, layers = self.controller, self._case.layers
        self._queue()
        counter = one.layer_done_counter
        began = time.perf_counter()
        slot = one.start_loading()
        handed_out = time.perf_counter() - began
        counter.set_consumer(slot)
        computed = []
        for layer in range(layers):
            counter.wait_until(layer)
            if any(len(pool.done) <= layer for pool in self._pools):
                raise WrongResult(f"{self._case.name}: layer {layer} was computed before its copy")
            started = time.perf_counter()
            time.sleep(self._case.seconds * self._case.pools)
            computed.append(time.perf_counter() - started)
        total = time.perf_counter() - began
        self._settle()
        copied = [sum(parts) for parts in zip(*(pool.done for pool in self._pools), strict=True)]

        before = _timed(_work)
        self._queue()
        began = time.perf_counter()
        one.start_loading()
        _work()
        worked = time.perf_counter() - began
        self._settle()
        delay = worked - (before + _timed(_work)) / 2
        serial = sum(copied) + sum(computed)
        possible = serial - _pipelined(copied, computed)
        return {
            SCHEDULER: handed_out * 1e3,
            OVERLAP: max(0.0, serial - total) / possible,
            DELAY: delay * 1e3,
        }

    def _queue(self) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        for pool in self._pools:
            pool.done.clear()
        indices = torch.arange(_TOKENS)
        others = [
            PoolTransfer(name=name, host_indices=indices, device_indices=indices)
            for name in (PoolName.MAMBA,)[: self._case.pools - 1]
        ]
        self.controller.load(indices, node_id=1, extra_pools=None)
        self.controller.load_queue[-1].pool_transfers = others

    def _settle(self) -> None:
        self.controller._drain_load_enqueue()
        self.controller.ack_load_queue.clear()


def _controller(case: AsyncLoadCase, loader: bool) -> tuple[Any, list[_HostPool]]:
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

    from cachestore_connector.async_load.install import install

    if not install():
        raise WrongResult(f"{case.name}: this SGLang isn't the one the loader was made for")
    pools = [_HostPool(case) for _ in range(case.pools)]
    names = (PoolName.KV, PoolName.MAMBA)
    entries = [
        PoolEntry(name, pool, object(), lambda layer: layer, name == PoolName.KV)
        for name, pool in zip(names, pools, strict=True)
    ]
    with envs.SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE.override(loader):
        controller = HybridCacheController(
            token_to_kv_pool_allocator=_Allocator(case.layers),
            mem_pool_host=HostPoolGroup(entries),
            page_size=1,
            tp_group=None,
            load_cache_event=threading.Event(),
            io_backend="direct",
            transfer_layer_id_max=case.layers,
        )
    return controller, pools


def _pipelined(copied: list[float], computed: list[float]) -> float:
    """Seconds until the last layer is computed, each as soon as its copy and the last one allow."""
    arrived = done = 0.0
    for copy, compute in zip(copied, computed, strict=True):
        arrived += copy
        done = max(done, arrived) + compute
    return done


def _timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _work() -> int:
    total = 0
    for step in range(_WORK_STEPS):
        total += step & 3
    return total
