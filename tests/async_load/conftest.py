"""SGLang's own classes with the hooks set, over a fake device."""

import importlib.util
import sys
import types

import pytest

from async_load.controllers import HostPool, wire
from async_load.device import Device


@pytest.fixture(scope="session")
def hooked():
    """SGLang's controller module, with the hooks set."""
    from sglang.srt.managers import cache_controller

    from cachestore_connector.async_load.install import install

    assert install()
    return cache_controller


@pytest.fixture(scope="session")
def unhooked(hooked):
    """The same module once more, as SGLang ships it."""
    spec = importlib.util.spec_from_file_location("unhooked_cache_controller", hooked.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    assert not hasattr(module.HiCacheController, "_enqueue_load_burst")
    return module


@pytest.fixture
def device(hooked, unhooked, monkeypatch):
    """A fake device module in the place of SGLang's."""
    from sglang.srt.mem_cache import l2_transfer

    fake = Device()
    for module in (hooked, unhooked, l2_transfer):
        monkeypatch.setattr(module, "device_module", fake)
    # Which asks the real device once, and keeps the answer.
    l2_transfer._timing_events_supported.cache_clear()
    yield fake
    l2_transfer._timing_events_supported.cache_clear()


@pytest.fixture
def controller(hooked, device):
    """``controller(enabled, layers=3)``: one that can load; its loader ends with the test."""
    made = []

    def make(enabled, layers=3, cls=None, pool=None):
        one = object.__new__(cls or hooked.HiCacheController)
        wire(one, device, layers, pool or HostPool(device, layers), hooked)
        one._init_load_enqueue_thread(enabled)
        made.append(one)
        return one

    yield make
    for one in made:
        for pool in pools(one):
            for gate in pool.gates.values():
                gate.set()
        one.stop_load_enqueue_thread()
        assert one.load_enqueue_thread is None


def pools(controller):
    """The host pools of a controller."""
    entries = getattr(controller.mem_pool_host, "entries", None)
    return [entry.host_pool for entry in entries] if entries else [controller.mem_pool_host]


@pytest.fixture
def tree():
    """``tree(controller)``: as much of a UnifiedRadixCache as its methods here use."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def make(controller, **attributes):
        one = object.__new__(UnifiedRadixCache)
        one.cache_controller = controller
        one.pp_rank = 0
        one.linker = one.metrics_collector = one.host_pool_group = None
        one.buffer_pipeline = types.SimpleNamespace(
            finished=[], try_finish_load_back=lambda node: finished(one, node)
        )
        for name, value in attributes.items():
            setattr(one, name, value)
        return one

    def finished(one, node):
        one.buffer_pipeline.finished.append(node)
        return True

    return make
