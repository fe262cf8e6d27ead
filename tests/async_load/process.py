"""Run in a process of its own, with the switch on: setting the hooks, ending with bursts queued.

One after another, since importing SGLang takes most of the time; prints one JSON object a line.
"""

import atexit
import functools
import json
import logging
import os
import sys
import threading

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
SWITCH = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"


def say(**values):
    print(json.dumps(values), flush=True)


class Lines(logging.Handler):
    """What is logged under our name."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("cachestore").addHandler(self)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def take(self):
        lines, self.lines = self.lines, []
        return lines


def unknown_code(cc, lines):
    """Change the code in different ways, and try."""
    from cachestore_connector.async_load import known_code
    from cachestore_connector.async_load.install import install

    def wrapped():
        inner = cc.LayerLoadingEvent.wait
        return functools.wraps(inner)(lambda self, layer: inner(self, layer))

    changes = [
        (cc.HiCacheController, "start_loading", lambda self: -1),
        (cc.LayerLoadingEvent, "wait", wrapped()),
        (cc.LayerDoneCounter, "update_producer", None),
    ]
    assert known_code.misfits() == []
    for owner, name, changed in changes:
        saved = owner.__dict__[name]
        if changed is None:
            delattr(owner, name)
        else:
            setattr(owner, name, changed)
        os.environ[SWITCH] = "1"
        wanted = install(), lines.take()
        os.environ[SWITCH] = "0"
        unwanted = install(), lines.take()
        os.environ[SWITCH] = "1"
        untouched = not hasattr(cc.HiCacheController, "_init_load_enqueue_thread")
        setattr(owner, name, saved)
        say(unknown=f"{owner.__name__}.{name}", wanted=wanted, unwanted=unwanted, clean=untouched)


def own_switch(cc, lines):
    """As if SGLang had the switch."""
    from sglang.srt.environ import EnvBool, Envs

    from cachestore_connector.async_load.install import install

    setattr(Envs, SWITCH, EnvBool(False))
    installed = install()
    clean = not hasattr(cc.HiCacheController, "_init_load_enqueue_thread")
    delattr(Envs, SWITCH)
    say(own_switch=installed, lines=lines.take(), clean=clean)


def entry_point(cc, lines):
    """SGLang loads the plugin; another plugin hooks one of the methods too."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = []

    def theirs(original, self):
        calls.append(self)
        return original(self)

    target = "sglang.srt.managers.cache_controller.HiCacheController.start_loading"
    HookRegistry.register(target, theirs, HookType.AROUND)
    load_plugins()
    from sglang.srt.environ import EnvBool, envs, exportable_env_vars

    from cachestore_connector import plugin

    plugin._require_hooks()
    before = dict(vars(cc.HiCacheController))
    plugin.register()
    field = envs.SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE
    with field.override(False):
        overridden = field.get()
    say(
        entry_point=type(field) is EnvBool,
        field=[field.name, field.default, field.get(), overridden],
        exported=exportable_env_vars().get(field.name),
        again_changes_nothing=before == dict(vars(cc.HiCacheController)),
        lines=lines.take(),
    )
    return calls


def end(cc, calls):
    """A controller with two bursts queued, as the process ends."""
    from sglang.srt.mem_cache import l2_transfer

    from async_load.controllers import HostPool, queue_load, wire
    from async_load.device import Device

    device = Device()
    cc.device_module = l2_transfer.device_module = device
    one = wire(object.__new__(cc.HiCacheController), device, 3, HostPool(device, 3), cc)

    def ended():
        say(end=len(one.ack_load_queue), stopped=one.load_enqueue_thread is None)

    atexit.register(ended)  # before the loader's, so it runs after that
    one._init_load_enqueue_thread(True)
    reached, gate = one.mem_pool_host.hold(1, 1)
    for node in (1, 2):
        queue_load(one, node)
        one.start_loading()
    reached.wait(10)
    say(hooked_by_another_too=calls == [one, one], queued=one.outstanding_load_bursts())
    threading.Timer(0.2, gate.set).start()


def main():
    from sglang.srt.managers import cache_controller

    lines = Lines()
    unknown_code(cache_controller, lines)
    own_switch(cache_controller, lines)
    calls = entry_point(cache_controller, lines)
    end(cache_controller, calls)


if __name__ == "__main__":
    main()
