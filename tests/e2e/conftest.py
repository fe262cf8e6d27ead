"""End-to-end tests: the real SGLang server on a CPU, shared where a start can be saved.

A server takes about 25 s to start, so the session's servers start without a storage backend and
each test attaches the one it wants over HTTP (``attached``). Tests that need other flags, or that
kill the server, start their own with ``serve``.
"""

import contextlib
import importlib.util
import json
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
        return 1 if here.name in ("test_rig.py", "test_hybrid_rig.py") else 2

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
    names = ("llama", "deepseek", "mellum")
    return {name: tmp_path_factory.mktemp(f"file-{name}") for name in names}


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


@pytest.fixture(scope="session")
def mellum_server(checkpoint, file_storage, tmp_path_factory):
    """A running server with the tiny Mellum (two pools), tp 1, and no storage backend attached."""
    with _shared("mellum", checkpoint, file_storage, tmp_path_factory) as server:
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


def _filler():
    """A prompt of some pages, but fewer than SGLang's least number to ask storage for."""
    draw = random.Random(-1)
    return [draw.randrange(2, 2048) for _ in range(200)]


class Storage:
    """A directory that CacheStore keeps blocks in, seen from outside (docs/format.md)."""

    def __init__(self, root):
        self.root = Path(root)
        self._fillers = set()

    def config(self, **settings):
        """An extra config that stores here; a shared buffer is small, and lies beside it."""
        mine = {
            "storage_backends": str(self.root),
            "cache_buffer_directory": str(self.root.parent),
            "cache_buffer_capacity_gb": 1 / 32,
        }
        return mine | settings

    def regions(self):
        """Shared buffers."""
        return sorted(self.root.parent.glob("cachestore-region-*"))

    def manifests(self):
        """What each identity in it says about itself, by the name of its directory."""
        paths = sorted(self.root.glob("*/identity.json"))
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    def blocks(self, identity="*"):
        """Published block files, but for those of ``restored``'s filler."""
        for name, manifest in self.manifests().items():
            self._fillers.update(self.pages(_filler(), manifest["page_size"], name))
        return sorted(set(self.root.glob(f"{identity}/blocks/*/*")) - self._fillers)

    def temporaries(self):
        """Files being written, and those that a store which is gone left behind."""
        return [path for path in self.root.glob("*/tmp/*/*") if path.name != "lock"]

    def wait(self, count, identity="*", timeout=60):
        """Wait until exactly ``count`` blocks are published."""
        from rig.server import poll

        where = f"{count} blocks in {self.root}/{identity}"
        poll(lambda: len(self.blocks(identity)) >= count, timeout, where)
        assert len(self.blocks(identity)) == count

    def pages(self, ids, page_size=64, identity=None):
        """The block files of a prompt's whole pages, in order; in the only identity, or a named."""
        import cachestore_rig

        from cachestore_connector.identity import Identity

        manifests = self.manifests()
        (name,) = manifests if identity is None else [identity]
        manifest = manifests[name]
        fields = {field: manifest.get(field) for field in Identity.__dataclass_fields__}
        fields["tensor_sizes"] = tuple(fields["tensor_sizes"])
        fields["variant"] = tuple(sorted((fields["variant"] or {}).items()))
        identity = Identity(**fields)
        assert identity.directory_name == name
        whole = len(ids) // page_size * page_size
        keys = cachestore_rig._page_hashes(ids, whole, 1, False, None, page_size)
        names = [identity.block_id(key).hex() for key in keys]
        return [self.root / name / "blocks" / block[:3] / block for block in names]


@pytest.fixture
def storage(tmp_path):
    """An empty place for blocks."""
    return Storage(tmp_path / "storage")


@pytest.fixture(scope="session")
def storage_at():
    """``storage_at(path)`` is the `Storage` there."""
    return Storage


@pytest.fixture(scope="session")
def computed():
    """``computed(server, ids)``: the answer with L1 and L2 empty, which must find nothing."""

    def ask(server, ids):
        server.flush()
        answer = server.generate(ids)
        assert (answer.device, answer.host, answer.storage) == (0, 0, 0)
        return answer

    return ask


@pytest.fixture(scope="session")
def restored():
    """``restored(server, ids, tokens, like)``: the answer with L1 and L2 empty.

    It must find ``tokens`` tokens in CacheStore's storage and nothing elsewhere, and its tokens and
    log-probabilities must be those of ``like``.

    Emptying L2 leaves its bytes as they are, and hands out the same slots again: a load that did
    nothing would find the right pages there. So another prompt takes the first slots.
    """

    def ask(server, ids, tokens, like, digits=4):
        server.flush()
        server.generate(_filler())
        answer = server.generate(ids)
        assert (answer.device, answer.host, answer.storage) == (0, 0, tokens)
        assert answer.storage_backend == ("CacheStore" if tokens else None)
        assert answer.same_output(like, digits), f"{answer}\n{like}"
        return answer

    return ask


@pytest.fixture
def new_log():
    """``new_log(server)`` begins: calling what it returns gives CacheStore's lines since then."""

    def begin(server):
        start = len(server.log_text())

        def lines():
            text = server.log_text()[start:]
            return [line for line in text.splitlines() if "CacheStore: " in line]

        return lines

    return begin


@pytest.fixture(scope="session")
def counted():
    """``counted(lines)``: the counters of each store that was closed, as a log has them."""

    def read(lines):
        marked = [line.partition("counted since attach: ")[2] for line in lines]
        return [
            {name: int(count) for name, count in (pair.split() for pair in text.split(", "))}
            for text in marked
            if text and text != "nothing"
        ]

    return read


@pytest.fixture(scope="session")
def unplugged_server(checkpoint, tmp_path_factory):
    """(server, storage, config): a Llama server that goes without CacheStore's plugin.

    It is started with SGLang's own ``dynamic`` backend and that config, attached unless a test
    has detached it. It isn't like ``llama_server`` in dtype, page size (32), layout and name.
    """
    from rig.server import Server

    storage = Storage(tmp_path_factory.mktemp("unplugged") / "storage")
    config = storage.config(
        backend_name="cachestore",
        module_path="cachestore_connector.backend",
        class_name="CacheStore",
        interface_v1=1,
    )
    with Server(
        checkpoint("llama"),
        workdir=tmp_path_factory.mktemp("server-unplugged"),
        env={"SGLANG_PLUGINS": "cachestore_rig"},
        storage="dynamic",
        extra_config=config,
        dtype="bfloat16",
        page_size=32,
        layout="layer_first",
        served_model_name="unplugged",
    ) as server:
        yield server, storage, config
        server.kill()  # nothing more to be seen of it
