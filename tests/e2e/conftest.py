"""End-to-end tests: the real SGLang server on a CPU, shared where a start can be saved.

A server takes about 25 s to start, so the session's servers start without a storage backend and
each test attaches the one it wants over HTTP (``attached``). Tests that need other flags, or that
kill the server, start their own with ``serve``.
"""

import contextlib
import importlib.util
import random
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
# Tests import the rig as `rig`. Appended, not prepended: it must hide nothing that is installed.
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))


def pytest_configure(config):
    """Known to pytest whatever its configuration says."""
    config.addinivalue_line("markers", "soak: takes longer than a run of the suite should")


def pytest_collection_modifyitems(items):
    """End to end last, and there the rig's proof first: what it fails to show, no other can."""

    def turn(item):
        here = Path(item.path)
        if here.parent != TESTS / "e2e":
            return 0
        return 1 if here.name == "test_rig.py" else 2

    items.sort(key=turn)
    for item in items:
        if turn(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))  # a session's server may start in it


@pytest.fixture(scope="session", autouse=True)
def installed_package():
    """Tests are about the installed package: the source tree has no compiled extension."""
    spec = importlib.util.find_spec("cachestore_connector")
    if spec is not None and spec.origin is not None:
        source = REPOSITORY / "cachestore_connector"
        assert not Path(spec.origin).resolve().is_relative_to(source), (
            f"cachestore_connector is imported from {spec.origin}: run pytest as `make test` does "
            "(python -P -m pytest), with the repository root out of sys.path"
        )


@pytest.fixture(scope="session")
def checkpoint():
    """``checkpoint(name, seed=0, dtype="float32")`` gives the path of a tiny model."""
    from rig import checkpoints

    def get(name, **kwargs):
        return checkpoints.checkpoint(name, REPOSITORY / "build" / "checkpoints", **kwargs)

    return get


@pytest.fixture(scope="session")
def prompt():
    """``prompt(n, seed)`` gives ``n`` token ids; another seed, another prompt from token one."""
    from rig.checkpoints import VOCABULARY

    def make(n, seed):
        draw = random.Random(seed)
        return [draw.randrange(2, VOCABULARY) for _ in range(n)]

    return make


@pytest.fixture
def serve(tmp_path, checkpoint):
    """``serve("llama", **Server's arguments)`` starts a server that ends with the test."""
    from rig.server import Server

    with contextlib.ExitStack() as stack:
        count = iter(range(100))

        def start(model, **kwargs):
            path = checkpoint(model) if isinstance(model, str) else model
            kwargs.setdefault("workdir", tmp_path / f"server-{next(count)}")
            return stack.enter_context(Server(path, **kwargs))

        yield start


@pytest.fixture(scope="session")
def file_storage(tmp_path_factory):
    """The directory of SGLang's own ``file`` backend on the shared servers, by model name."""
    return {name: tmp_path_factory.mktemp(f"file-{name}") for name in ("llama", "deepseek")}


def _shared(name, checkpoint, file_storage, tmp_path_factory):
    from rig.server import Server

    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(file_storage[name])}
    workdir = tmp_path_factory.mktemp(f"server-{name}")
    return Server(checkpoint(name), workdir=workdir, env=env, served_model_name=f"tiny-{name}")


@pytest.fixture(scope="session")
def llama_server(checkpoint, file_storage, tmp_path_factory):
    """A running server with the tiny Llama (MHA), tp 1, and no storage backend attached."""
    with _shared("llama", checkpoint, file_storage, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def deepseek_server(checkpoint, file_storage, tmp_path_factory):
    """A running server with the tiny DeepSeek-V2 (MLA), tp 1, and no storage backend attached."""
    with _shared("deepseek", checkpoint, file_storage, tmp_path_factory) as server:
        yield server


@pytest.fixture(params=["llama", "deepseek"])
def shared_server(request):
    """Each of the session's servers in turn."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def attached():
    """Attach for the length of a ``with``: server, name, config; L1 and L2 are empty at first."""

    @contextlib.contextmanager
    def attach(server, storage, extra_config=None, **fields):
        server.flush()
        server.attach(storage, extra_config, **fields)
        try:
            yield server
        finally:
            if server.alive():
                server.flush()
                server.detach()

    return attach
