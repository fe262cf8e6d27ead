"""Load-backs on the loader thread, with the real server: same answers, and nobody runs ahead.

The CPU's streams and events do nothing, so equal answers alone would prove little: a trace of the
rig's fault points says who enqueued which layer, and where the forward stood meanwhile.
"""

import concurrent.futures
import contextlib

import pytest
import requests

from rig.server import Server, ServerError, poll

SWITCH = "SGLANG_HICACHE_ASYNC_LOAD_ENQUEUE"
LOADER = "hicache-load-enqueue"
PREFIX = 640
PAGES = 10
LAYERS = 4
# Small, so that a few prompts push others out of device memory, into host memory.
SIZES = {"max_total_tokens": 2048, "hicache_ratio": 8}


class Loads:
    """The rig's fault points in load-backs of one server."""

    def __init__(self, where):
        self.where = where
        where.mkdir()

    def env(self):
        return {SWITCH: "1", "CACHESTORE_RIG_LOADS": str(self.where)}

    def trace(self):
        """[word, ...] of each line so far."""
        path = self.where / "trace"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @contextlib.contextmanager
    def asked(self, what, layer):
        path = self.where / what
        path.write_text(str(layer))
        try:
            yield
        finally:
            path.unlink()


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """The fault points, by model name."""
    root = tmp_path_factory.mktemp("loads")
    return {name: Loads(root / name) for name in ("llama", "deepseek")}


def _server(name, checkpoint, loads, tmp_path_factory):
    workdir = tmp_path_factory.mktemp(f"server-async-{name}")
    return Server(
        checkpoint(name),
        workdir=workdir,
        env=loads[name].env(),
        served_model_name=f"tiny-{name}",
        **SIZES,
    )


@pytest.fixture(scope="module")
def llama(checkpoint, loads, tmp_path_factory):
    with _server("llama", checkpoint, loads, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def deepseek(checkpoint, loads, tmp_path_factory):
    with _server("deepseek", checkpoint, loads, tmp_path_factory) as server:
        yield server


def ask_all(server, prompts):
    """All at once; the answers in order."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(server.generate, prompts))


def prompts_with_shared_prefixes(prompt, seed):
    """Four prompts, of which two share a prefix, and the two others one of their own."""
    prefixes = [prompt(PREFIX, seed=seed), prompt(PREFIX, seed=seed + 1)]
    return [prefixes[i % 2] + prompt(40 + i, seed=seed + 2 + i) for i in range(4)]


def evict_device(server, prompt, seed):
    """Ask other prompts until what was there before is in host memory only."""
    for i in range(3):
        server.generate(prompt(690, seed=seed + i))


def enqueued(trace):
    return [(int(words[1]), words[2]) for words in trace if words[0] == "enqueued"]


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek", marks=pytest.mark.soak)])
def test_same_answers_on_and_off(name, request, attached, storage, prompt, loads, computed):
    """Pinned: from storage and from host memory, several requests at once with shared prefixes.

    Tokens and log-probabilities are those of the server with the switch off, which computed each
    prompt with nothing cached; and those that it loads itself.
    """
    on = request.getfixturevalue(name)
    off = request.getfixturevalue(f"{name}_server")
    assert "HiCache async load enqueue: enabled (HybridCacheController)" in on.log_text()
    assert "HiCache async load enqueue: disabled (HybridCacheController)" in off.log_text()
    prompts = prompts_with_shared_prefixes(prompt, seed=300)
    cold = [computed(off, ids) for ids in prompts]
    with attached(on, "cachestore", storage.config()):
        for answer, like in zip(ask_all(on, prompts), cold, strict=True):
            assert answer.same_output(like)
        storage.wait(2 * PAGES)
        on.flush()
        for ids in prompts[:2]:  # the longest way: storage, host, device
            answer = on.generate(ids)
            assert answer.storage == PREFIX
        on.flush()
        answers = ask_all(on, prompts)
        assert sum(answer.storage for answer in answers) >= 2 * PREFIX
        for answer, like in zip(answers, cold, strict=True):
            assert answer.same_output(like)
        evict_device(on, prompt, seed=320)
        answers = ask_all(on, prompts)
        assert sum(answer.host for answer in answers) >= PREFIX
        for answer, like in zip(answers, cold, strict=True):
            assert answer.same_output(like)
    done = enqueued(loads[name].trace())
    assert len(done) >= 4 * LAYERS
    assert done == [(i % LAYERS, LOADER) for i in range(len(done))]
    assert "Traceback" not in on.log_text()


def test_the_forward_stands_where_the_loader_is_held(llama, loads, prompt, computed):
    """Pinned (F29): held after layer 1 the forward passes 1 and stands at 2, until it is let go."""
    ids = prompt(690, seed=340)
    cold = computed(llama, ids)
    evict_device(llama, prompt, seed=341)
    points = loads["llama"]
    before = len(points.trace())

    def since():
        return points.trace()[before:]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with points.asked("hold", 1):
            answer = pool.submit(llama.generate, ids)
            poll(lambda: ["held", "1"] in since(), 30, "the loader being held")
            poll(lambda: ["waiting", "2"] in since(), 30, "the forward coming to layer 2")
            assert ["passed", "1"] in since()
            with pytest.raises(concurrent.futures.TimeoutError):
                answer.result(timeout=0.5)
            assert ["passed", "2"] not in since()
        assert answer.result(timeout=30).host == PREFIX
    assert answer.result().same_output(cold)
    trace = since()
    assert trace.index(["enqueued", "2", LOADER]) < trace.index(["passed", "2"])


def test_detach_attach_flush_in_between(llama, attached, storage, loads, prompt, computed):
    """Pinned: the loader serves without a backend, with one, and after a detach and a flush."""
    ids = prompt(690, seed=350)
    cold = computed(llama, ids)
    points = loads["llama"]

    def from_host(seed):
        evict_device(llama, prompt, seed)
        before = len(points.trace())
        answer = llama.generate(ids)
        assert answer.host == PREFIX
        assert answer.same_output(cold)
        assert enqueued(points.trace()[before:]) == [(layer, LOADER) for layer in range(LAYERS)]

    from_host(351)
    with attached(llama, "cachestore", storage.config()):
        assert llama.generate(ids).same_output(cold)
        from_host(360)
    assert computed(llama, ids).same_output(cold)
    from_host(380)
    assert llama.log_text().count("HiCache async load enqueue: stopped") >= 1


@pytest.mark.soak
def test_a_shutdown_with_a_burst_queued(deepseek, loads, prompt, computed):
    """Pinned: SIGTERM while the loader is held: the request is answered, and the server ends."""
    ids = prompt(690, seed=400)
    cold = computed(deepseek, ids)
    evict_device(deepseek, prompt, seed=401)
    points = loads["deepseek"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with points.asked("hold", 0):
            answer = pool.submit(deepseek.generate, ids)
            poll(lambda: points.trace()[-1:] and ["held", "0"] in points.trace(), 30, "the hold")
            ending = pool.submit(deepseek.stop, 40)
            poll(lambda: "SIGTERM received" in deepseek.log_text(), 30, "the signal's arrival")
        assert answer.result(timeout=30).same_output(cold)
        ending.result(timeout=60)
    assert not deepseek.alive()
    assert "Traceback" not in deepseek.log_text()


def test_no_answer_from_a_failed_burst(llama, loads, prompt):
    """Pinned: a load-back fails on the loader: those who need it get an error, and the server ends.

    As with an exception in a load-back on the scheduler thread. Last: the server is gone after it.
    """
    prompts = prompts_with_shared_prefixes(prompt, seed=410)
    llama.flush()
    for ids in prompts:
        llama.generate(ids)
    evict_device(llama, prompt, seed=420)

    def ask(ids):
        try:
            return llama.generate(ids, timeout=60)
        except (ServerError, requests.RequestException) as error:  # the stream may break off
            return error

    with (
        loads["llama"].asked("fail", 2),
        concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool,
    ):
        answers = list(pool.map(ask, prompts))
        poll(lambda: not llama.alive(), 60, "the end of the server")
    assert all(isinstance(answer, Exception) for answer in answers), answers
    log = llama.log_text()
    assert "HiCache async load enqueue: the burst of nodes [" in log
    assert "the rig fails this load-back before layer 2" in log
    assert "a load-back failed, and its KV is stale" in log


@pytest.mark.soak
@pytest.mark.timeout(900)  # three servers, one after another
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_same_answers_as_without_hicache(name, serve, tmp_path, storage, attached, prompt):
    """Pinned: two ranks and one, on and off, against a server that has no HiCache at all."""
    prompts = prompts_with_shared_prefixes(prompt, seed=430)
    plain = serve(name, hicache=False)
    expected = [plain.generate(ids) for ids in prompts]
    plain.kill()
    for tp in (1, 2):
        points = Loads(tmp_path / f"loads-{tp}")
        server = serve(name, tp=tp, env=points.env(), served_model_name=f"tiny-{name}", **SIZES)
        with attached(server, "cachestore", storage.config()):
            first = ask_all(server, prompts)
            for _ in range(3):
                server.flush()
                for answer, like in zip(ask_all(server, prompts), first, strict=True):
                    assert answer.same_output(like)
                evict_device(server, prompt, seed=440)
                for answer, like in zip(ask_all(server, prompts), first, strict=True):
                    assert answer.same_output(like)
        for answer, like in zip(first, expected, strict=True):
            assert answer.tokens == like.tokens
            assert tp == 2 or answer.same_output(like)  # two ranks add up in another order
        assert {thread for _, thread in enqueued(points.trace())} == {LOADER}
        server.kill()
