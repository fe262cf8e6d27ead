"""The hybrid controller: its own counter, and bursts with a sidecar pool."""

import threading

import pytest
import torch

from async_load.controllers import HostPool, queue_load, wire


@pytest.fixture
def module(hooked):
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

    return hybrid_cache_controller


@pytest.fixture
def group(device):
    """``group(layers)``: a KV pool and a sidecar that has every second layer."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

    def make(layers):
        def every_second(layer):
            return layer // 2 if layer % 2 == 0 else None

        kv, side = HostPool(device, layers), HostPool(device, layers // 2, name="side")
        return HostPoolGroup(
            [
                PoolEntry(PoolName.KV, kv, object(), lambda layer: layer, True),
                PoolEntry(PoolName.MAMBA, side, object(), every_second),
            ]
        )

    return make


def queue_with_sidecar(controller, burst):
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    queue_load(controller, burst)
    controller.load_queue[-1].pool_transfers = [
        PoolTransfer(
            name=PoolName.MAMBA,
            host_indices=torch.tensor([burst + 100]),
            device_indices=torch.tensor([0]),
        )
    ]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_burst_with_a_sidecar(controller, device, module, group, enabled):
    """Pinned: both pools' copies, layer by layer, and an ack that counts both; on and off."""
    one = controller(enabled, layers=4, cls=module.HybridCacheController, pool=group(4))
    queue_with_sidecar(one, 1)
    one.layer_done_counter.set_consumer(one.start_loading())
    one.layer_done_counter.wait_until(3)
    one._drain_load_enqueue()
    kv, side = (entry.host_pool for entry in one.mem_pool_host.entries)
    assert sorted(kv.copied[1]) == [0, 1, 2, 3]
    assert sorted(side.copied[101]) == [0, 1]
    for place in [*kv.copied[1].values(), *side.copied[101].values()]:
        assert device.default.comes_after(place)
    copies = [call[1:] for call in device.calls() if call[0] == "copy"]
    assert copies == [("kv", 0), ("side", 0), ("kv", 1), ("kv", 2), ("side", 1), ("kv", 3)]
    (ack,) = one.ack_load_queue
    assert ack.num_tokens == 3
    assert ack.num_tokens_by_pool == {"kv": 3, "mamba": 1}
    assert ack.num_bytes == 4 * 7


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("layers", [3, 5])
def test_the_replacement_counter_has_the_handshake(
    module, hooked, device, group, monkeypatch, enabled, layers
):
    """Pinned: the counter that the hybrid controller builds for itself carries what the base's had.

    Its real ``__init__``, over a base one that makes three layers.
    """

    def base_init(self, **_):
        wire(self, device, 3, group(4), hooked)
        self._init_load_enqueue_thread(enabled)

    monkeypatch.setattr(hooked.HiCacheController, "__init__", base_init)
    one = module.HybridCacheController(None, group(4), 1, None, None, transfer_layer_id_max=layers)
    try:
        counter = one.layer_done_counter
        assert counter.num_layers == layers
        assert counter.async_enqueue is enabled
        assert [event.async_enqueue for event in counter.events] == [enabled] * 3
        assert one.async_load_enqueue is enabled
    finally:
        one.stop_load_enqueue_thread()
    assert not one.layer_done_counter.async_enqueue


def test_a_controller_that_fails_to_be_made_leaves_no_thread(
    module, hooked, device, group, monkeypatch
):
    """Pinned: an attach that fails in the constructor doesn't leave a loader behind."""
    made = []

    def base_init(self, **_):
        made.append(wire(self, device, 3, group(4), hooked))
        self._init_load_enqueue_thread(True)

    def attach(self, **_):
        raise ValueError("no such backend")

    monkeypatch.setattr(hooked.HiCacheController, "__init__", base_init)
    monkeypatch.setattr(module.HybridCacheController, "attach_storage_backend", attach)
    with pytest.raises(ValueError, match="no such backend"):
        module.HybridCacheController(None, group(4), 1, None, None, storage_backend="none")
    assert made[0].load_enqueue_thread is None


def test_hybrid_reset_drains_too(controller, module, group):
    """Pinned: the subclass's reset comes to the same one."""
    one = controller(True, layers=4, cls=module.HybridCacheController, pool=group(4))
    one.pp_prefetch_command_group = one.pp_prefetch_command_thread = None
    one.pp_prefetch_state_lock = threading.Lock()
    one.pp_prefetch_states, one.pp_prefetch_decisions = {}, {}
    queue_with_sidecar(one, 1)
    one.start_loading()
    one.reset()
    assert one.ack_load_queue == []
    assert one.outstanding_load_bursts() == 0
