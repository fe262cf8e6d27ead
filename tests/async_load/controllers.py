"""Controllers built without ``__init__``, over pools that log, hold and fail."""

import threading
import types

import torch

TIMEOUT = 10.0  # of any wait in these tests


class HostPool:
    """A host pool whose copies take ``seconds`` on the device; held or failing at a layer.

    ``copied``: for each operation, by its first host index, the place on the device of each layer's
    copy.
    """

    layout = "page_first_direct"
    page_size = 1
    device = "cpu"
    size = logical_size = 1000
    size_per_token = 7
    can_use_write_back_jit = False
    storage_format_tag = None

    def __init__(self, device, layers, name="kv", seconds=1.0):
        self._device, self.layer_num, self.name, self.seconds = device, layers, name, seconds
        self.copied = {}
        self.failures = {}  # (first host index, layer) -> exception
        self.gates = {}  # (first host index, layer) -> threading.Event
        self.reached = {}  # (first host index, layer) -> threading.Event

    def hold(self, burst, layer):
        """Hold the copy of this layer; returns (it has come there, let it go on)."""
        reached, gate = threading.Event(), threading.Event()
        self.reached[burst, layer], self.gates[burst, layer] = reached, gate
        return reached, gate

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def load_to_device_per_layer_physical(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ):
        burst = int(host_indices[0])
        if (burst, layer_id) in self.gates:
            self.reached[burst, layer_id].set()
            assert self.gates[burst, layer_id].wait(TIMEOUT)
        if (burst, layer_id) in self.failures:
            raise self.failures[burst, layer_id]
        self._device.note("copy", self.name, layer_id)
        place = self._device.current_stream().operate(self.seconds)
        self.copied.setdefault(burst, {})[layer_id] = place


class Allocator:
    """Remembers the events it was given."""

    def __init__(self, device):
        self._device = device
        self.done_events = []

    def set_hicache_transfer_done_event(self, key, event):
        self._device.note("done_event", key[1])
        self.done_events.append(event)


class DeviceIndices:
    """Indices that the allocator writes on the compute stream; read earlier, they are garbage."""

    is_cuda = False

    def __init__(self, device, values):
        self._device, self._values = device, values
        self._written = device.default.operate(0.0)
        self.device = types.SimpleNamespace(type="cuda")
        self.kept_for = []

    def record_stream(self, stream):
        self.kept_for.append(stream)

    def __len__(self):
        return len(self._values)

    def cpu(self):
        self._device.note("move")
        if self._device.current_stream().comes_after(self._written):
            return torch.tensor(self._values)
        return torch.full((len(self._values),), -1)


def wire(controller, device, layers, pool, module):
    """The attributes that loading uses."""
    controller.io_backend = "direct"
    controller.device = "cpu"
    controller.mem_pool_device = object()
    controller.mem_pool_host = pool
    controller.mem_pool_device_allocator = Allocator(device)
    controller.load_queue, controller.write_queue = [], []
    controller.ack_load_queue, controller.ack_write_queue = [], []
    controller.load_fence_stream = controller.write_fence_stream = None
    controller.enable_storage = False
    controller.storage_stop_event = threading.Event()
    controller.transfer_layer_id_max = layers
    controller.l2_transfer_engine = module.L2TransferEngine("direct")
    controller.layer_done_counter = module.LayerDoneCounter(layers)
    return controller


def queue_load(controller, burst, tokens=3, device_indices=None, module=None):
    """What ``load`` does, but for the allocation; ``burst`` is its first host index."""
    if module is None:
        from sglang.srt.managers import cache_controller as module
    host = torch.arange(burst, burst + tokens)
    device = torch.arange(tokens) if device_indices is None else device_indices
    controller.load_queue.append(module.CacheOperation(host, device, node_id=burst))


def in_thread(function, *args):
    """Start a thread; returns (thread, results): one result, or an exception."""
    results = []

    def run():
        try:
            results.append(function(*args))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def blocked(thread, seconds=0.1):
    """Whether a thread is still running after a while in which it could have ended."""
    thread.join(seconds)
    return thread.is_alive()


def ended(thread):
    thread.join(TIMEOUT)
    return not thread.is_alive()
