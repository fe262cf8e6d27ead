"""Fault points in load-backs from host memory: hold them, fail them, see who waits for them.

With ``CACHESTORE_RIG_LOADS`` naming a directory, a running server is steered by files in it:

- ``hold`` holds a load-back after the layer whose number it contains, until the file is gone;
- ``fail`` makes it fail before that layer.

What happened is appended to ``trace``: ``enqueued LAYER THREAD`` and ``held LAYER``, by whoever
enqueues the copies; ``waiting LAYER`` and ``passed LAYER``, by the forward that needs them.
"""

import os
import threading
import time
from pathlib import Path

_POLL_S = 0.005


def install() -> None:
    """Hook SGLang, if asked."""
    where = os.environ.get("CACHESTORE_RIG_LOADS")
    if not where:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    points = _Points(Path(where))
    HookRegistry.register(
        "sglang.srt.managers.cache_controller.LayerDoneCounter.wait_until",
        points.wait_until,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device",
        points.submit_host_to_device,
        HookType.AROUND,
    )


class _Points:
    def __init__(self, where: Path):
        self._where = where

    def wait_until(self, original, counter, threshold):
        if counter.consumer_index < 0:
            return original(counter, threshold)
        self._trace("waiting", threshold)
        result = original(counter, threshold)
        self._trace("passed", threshold)
        return result

    def submit_host_to_device(self, original, engine, transfers, *, on_layer_done=None, **kwargs):
        def layer_done(layer):
            if self._asked("fail", layer):
                raise RuntimeError(f"the rig fails this load-back before layer {layer}")
            self._trace("enqueued", layer, threading.current_thread().name)
            if on_layer_done is not None:
                on_layer_done(layer)
            if self._asked("hold", layer):
                self._trace("held", layer)
                while self._asked("hold", layer):
                    time.sleep(_POLL_S)

        return original(engine, transfers, on_layer_done=layer_done, **kwargs)

    def _asked(self, what, layer):
        try:
            return (self._where / what).read_text() == str(layer)
        except FileNotFoundError:
            return False

    def _trace(self, *words):
        with open(self._where / "trace", "a") as file:  # one write of one line
            file.write(" ".join(map(str, words)) + "\n")
