"""A device module with streams and events in virtual time, that logs calls with their threads.

Every stream has a position and a vector clock: which position of every other stream comes before
its next operation. So a test can ask not only what was called, but whether one operation is ordered
after another, and when, on the device's clock, it ends.
"""

import contextlib
import threading


class Stream:
    """What is enqueued runs in order; ``seen`` are the other streams' positions it comes after."""

    def __init__(self, device, name):
        self.device, self.name = device, name
        self.position = 0
        self.time = 0.0
        self.seen = {}

    def __repr__(self):
        return self.name

    def clock(self):
        return {**self.seen, self.name: self.position}

    def operate(self, seconds):
        """Enqueue work; its place: (stream, position)."""
        with self.device.lock:
            self.position += 1
            self.time = max(self.time, self.device.now) + seconds
            return self.name, self.position

    def comes_after(self, place):
        """Whether what is enqueued next runs after the work at ``place``."""
        name, position = place
        return self.clock().get(name, 0) >= position

    def _merge(self, clock, time):
        for name, position in clock.items():
            self.seen[name] = max(self.seen.get(name, 0), position)
        self.time = max(self.time, time)

    def wait_event(self, event):
        with self.device.lock:
            self.device.note("wait_event", self.name, event.name)
            self._merge(event.clock, event.time)

    def synchronize(self):
        with self.device.lock:
            self.device.note("stream_synchronize", self.name)
            self.device.now = max(self.device.now, self.time)

    def wait_stream(self, stream):
        with self.device.lock:
            self.device.note("wait_stream", self.name, stream.name)
            self._merge(stream.clock(), stream.time)


class Event:
    """Not recorded, it is done and orders nothing, as a device's."""

    def __init__(self, device, enable_timing=False):
        self.device = device
        self.name = f"e{device.count_event()}" + ("t" if enable_timing else "")
        self.clock, self.time = {}, 0.0
        self.records = 0

    def __repr__(self):
        return self.name

    def record(self, stream=None):
        with self.device.lock:
            stream = stream or self.device.current_stream()
            if self.device.record_error is not None:
                raise self.device.record_error
            self.device.note("record", self.name, stream.name)
            self.clock, self.time = stream.clock(), stream.time
            self.records += 1

    def wait(self, stream=None):
        with self.device.lock:
            stream = stream or self.device.current_stream()
            self.device.note("event_wait", self.name, stream.name)
            stream._merge(self.clock, self.time)

    def query(self):
        with self.device.lock:
            self.device.note("query", self.name)
            return self.time <= self.device.now

    def synchronize(self):
        with self.device.lock:
            self.device.note("synchronize", self.name)
            self.device.now = max(self.device.now, self.time)

    def elapsed_time(self, other):
        return (other.time - self.time) * 1000


class Device:
    """Stands for ``torch.cuda``; ``log`` has (call, ..., thread name)."""

    __name__ = "fake_device"

    def __init__(self):
        self.lock = threading.RLock()
        self.now = 0.0
        self.log = []
        self.record_error = None
        self._events = 0
        self._streams = 0
        self._local = threading.local()
        self.default = Stream(self, "compute")
        self.device_of_thread = {threading.current_thread().name: 3}

    def count_event(self):
        self._events += 1
        return self._events

    def note(self, *call):
        self.log.append((*call, threading.current_thread().name))

    def calls(self, start=0):
        """The log without thread names."""
        return [entry[:-1] for entry in self.log[start:]]

    # -- what SGLang uses --------------------------------------------------------------------------

    def Event(self, enable_timing=False):
        with self.lock:
            return Event(self, enable_timing)

    def Stream(self):
        with self.lock:
            self._streams += 1
            return Stream(self, ("d2h", "h2d", "s3", "s4", "s5", "s6")[self._streams - 1])

    def current_stream(self):
        return getattr(self._local, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._local.stream = stream
        self.note("enter", stream.name)
        try:
            yield
        finally:
            self.note("leave", stream.name)
            self._local.stream = before

    def current_device(self):
        return self.device_of_thread[threading.current_thread().name]

    def set_device(self, device):
        self.note("set_device", device)
        self.device_of_thread[threading.current_thread().name] = device
