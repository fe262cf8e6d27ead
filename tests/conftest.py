"""Fixtures shared by the Python tests."""

import dataclasses
import signal

import hypothesis
import pytest

import pool_table

# How long an example takes is the machine's matter.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


def pytest_configure():
    """Let the processes that tests start be interrupted.

    A script's background job (`make test &`) ignores SIGINT, and so do those that it starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter, config):
    """Print what came of SGLang's host pools, at the end of the run."""
    pool_table.write(terminalreporter, config)


@pytest.fixture
def options(tmp_path):
    """``options(**changes)``: StoreOptions of a small Posix store in the test's own directory."""
    from cachestore_connector.store import StoreOptions

    base = StoreOptions(
        pipeline="Posix",
        storage_backends=[str(tmp_path / "store")],
        identity_name="model-0123456789abcdef",
        identity_manifest="{}\n",
        identity_fingerprint=bytes(range(32)),
        tensor_sizes=[100, 37],
        shard_size=137,
        block_size=137,
        posix_load_worker_number=4,
        posix_dump_worker_number=2,
        posix_queue_depth=128,
        io_direct=False,
        posix_zero_copy="auto",
        timeout_ms=20000,
    )

    def make(**changes):
        return dataclasses.replace(base, **changes)

    return make


@pytest.fixture
def attach(tmp_path):
    """``attach(pool, **storage_config changes)``: an attached backend, closed after the test.

    ``known``: (name, pool) of all pools, as the plugin tells them.
    """
    from backends import storage_config
    from cachestore_connector.backend import CacheStore

    opened = []

    def make(pool, *, root=None, known=None, **changes):
        config = storage_config(root or tmp_path / "store", **changes)
        backend = CacheStore(config, host_pools=known)
        opened.append(backend)
        backend.register_mem_pool_host(pool)
        return backend

    yield make
    for backend in opened:
        backend.close()
