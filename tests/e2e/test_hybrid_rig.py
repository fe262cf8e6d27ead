"""The rig proves itself for a model with two pools: full attention's KV, and a sliding window's.

SGLang stores a window (SWA pages) only where a prefix ended when it was computed: the last two
pages here. A prefix is restored up to where both its KV and its window are there, so a prompt that
shares only the beginning of another restores nothing of it.
"""

from concurrent.futures import ThreadPoolExecutor

import cachestore_rig
import pytest

PAGE = 64
PAGES = 10
PROMPT = PAGES * PAGE + 50  # and the 8 tokens of an answer fill no eleventh page


class Files:
    """What SGLang's ``file`` backend keeps of a prompt, by pool (``kv``, ``swa``) and page."""

    def __init__(self, directory, ids, ranks):
        self._directory, self._ranks = directory, ranks
        self._keys = cachestore_rig._page_hashes(ids, len(ids) // PAGE * PAGE, 1, False, None, PAGE)

    def of(self, pool, page):
        """One file for each rank."""
        name = self._keys[page] + ("" if pool == "kv" else f".{pool}")
        return sorted(self._directory.glob(f"{name}_*.bin"))

    def pages(self, pool):
        """Pages that are there, from every rank."""
        return [i for i in range(len(self._keys)) if len(self.of(pool, i)) == self._ranks]

    def read(self, pool, page):
        """What they hold."""
        return [path.read_bytes() for path in self.of(pool, page)]

    def write(self, pool, page, contents):
        """Replace what they hold."""
        for path, content in zip(self.of(pool, page), contents, strict=True):
            path.write_bytes(content)


def asked(server, ids, storage):
    """The answer with L1 and L2 empty; it must find ``storage`` tokens stored."""
    server.flush()
    answer = server.generate(ids)
    assert (answer.device, answer.host, answer.storage) == (0, 0, storage)
    return answer


def stored(server, directory, prompt, seed, ranks=1):
    """Two prompts, of which one begins the other, stored: (prompt, answer, files) of the longer.

    The window of the shorter is stored too: a page that the longer has outside its window.
    """
    from rig.server import poll

    short = prompt(PROMPT, seed)
    ids = short[: PAGES * PAGE] + prompt(PROMPT, seed + 1)
    files = Files(directory, ids, ranks)

    def wait(kv, swa):
        here = f"pages {kv} and windows {swa} in {directory}"
        poll(lambda: (files.pages("kv"), files.pages("swa")) == (kv, swa), 30, here)

    asked(server, short, 0)
    window = [PAGES - 2, PAGES - 1]
    wait(list(range(PAGES)), window)
    answer = server.generate(ids)
    assert (answer.device, answer.storage) == (PAGES * PAGE, 0)
    wait(list(range(2 * PAGES)), [*window, 2 * PAGES - 2, 2 * PAGES - 1])
    return ids, answer, files


def prove(server, ids, cold, files):
    """Restored, from pages that hold another's bytes, and from the right ones again."""
    hit = 2 * PAGES * PAGE
    assert asked(server, ids, hit).same_output(cold)
    last = 2 * PAGES - 1
    for pool, page, other, seen in [
        ("kv", 0, last, True),
        ("kv", last, 0, True),
        ("swa", last, PAGES - 1, True),
        ("swa", last - 1, PAGES - 1, True),
        ("swa", PAGES - 1, last, False),  # the longer prompt's window is past it
    ]:
        right = files.read(pool, page)
        files.write(pool, page, files.read(pool, other))
        answer = asked(server, ids, hit)
        changed = answer.tokens != cold.tokens or not answer.same_output(cold, digits=2)
        print(f"{pool} {page:2} {answer.tokens} {answer.logprobs}")
        assert changed if seen else answer.same_output(cold), f"{pool} page {page}"
        files.write(pool, page, right)
    assert asked(server, ids, hit).same_output(cold)


def test_two_host_pools(mellum_server):
    """Pinned: SGLang serves the tiny Mellum with a stack of two pools in host memory."""
    lines = mellum_server.log_text().splitlines()
    (stack,) = [line for line in lines if "Attached hybrid pool stack" in line]
    assert "pools=Full + SWA" in stack


def test_the_output_is_transformers(mellum_server, checkpoint, prompt):
    """Pinned: tokens and log-probabilities are those of transformers' own Mellum, without a cache.

    One after another without emptying L1, so that a token's slots in the two pools come apart;
    shorter than the window, longer, beginning with what is cached, and several at once.
    """
    import torch
    from transformers import MellumForCausalLM

    model = MellumForCausalLM.from_pretrained(checkpoint("mellum"), dtype=torch.float32)

    def check(ids, answer):
        assert len(answer.tokens) == 8
        text = torch.tensor([[*ids, *answer.tokens]])
        with torch.no_grad():
            logits = model(text, use_cache=False).logits[0, len(ids) - 1 : -1]
        best, tokens = logits.log_softmax(-1).max(-1)
        assert tuple(tokens.tolist()) == answer.tokens
        assert best.tolist() == pytest.approx(answer.logprobs, abs=5e-5)

    server = mellum_server
    server.flush()
    first = prompt(PROMPT, seed=1)
    for ids in [first, prompt(100, seed=2), prompt(1500, seed=3)]:
        check(ids, server.generate(ids))
    longer = first[: PAGES * PAGE] + prompt(200, seed=4)
    answer = server.generate(longer)
    assert answer.device == PAGES * PAGE
    check(longer, answer)
    several = [prompt(400 + 100 * i, seed=5 + i) for i in range(3)]
    with ThreadPoolExecutor(len(several)) as threads:
        for ids, answer in zip(several, threads.map(server.generate, several), strict=True):
            check(ids, answer)


def test_a_swapped_page_of_either_pool_changes_the_output(
    mellum_server, attached, file_storage, prompt
):
    """Pinned: the output depends on the bytes of both pools that storage gives back.

    A page of the full layers counts wherever it is, one of the others inside the window only.
    """
    with attached(mellum_server, "file"):
        prove(mellum_server, *stored(mellum_server, file_storage["mellum"], prompt, seed=20))


def test_a_prefix_without_its_window_is_not_restored(mellum_server, attached, file_storage, prompt):
    """Pinned: SGLang falls back to a prefix whose window is there, and stores what was missing.

    Where there is none it computes all, with every page of the other pool at hand.
    """
    from rig.server import poll

    server, last = mellum_server, 2 * PAGES - 1
    with attached(server, "file"):
        ids, cold, files = stored(server, file_storage["mellum"], prompt, seed=30)
        for pages, storage in [([last], PAGES * PAGE), ([last - 1, PAGES - 2], 0)]:
            for page in pages:
                for path in files.of("swa", page):
                    path.unlink()
            assert asked(server, ids, storage).same_output(cold)
            poll(lambda: files.pages("swa")[-2:] == [last - 1, last], 30, "the window's pages")
        assert asked(server, ids, 2 * PAGES * PAGE).same_output(cold)


@pytest.mark.soak
@pytest.mark.parametrize("tp", [1, 2])
def test_restored_by_another_server(tp, serve, tmp_path, prompt):
    """Pinned: what a server that was killed has stored is restored by the next; also two ranks."""
    storage = tmp_path / "file"
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
    server = serve("mellum", tp=tp, storage="file", env=env)
    assert len(server.pids()) == tp
    ids, cold, files = stored(server, storage, prompt, seed=40, ranks=tp)
    server.kill()
    server.start()
    prove(server, ids, cold, files)
