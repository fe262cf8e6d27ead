"""SGLang's /metrics under a scripted run: its own numbers, and ours, are what the script caused."""

import contextlib
import json
import subprocess
import sys

PROMPT = 690
STORED = 640
PAGES = 10
PAGE = 64
FILLER = 3  # pages that `restored` asks for first: stored, but too few for SGLang to look up
SIZE = PAGE * (64 + 16) * 4 * 4  # of a page: latent and rope, float32, of four layers
DAMAGED = 5  # the number of the page that will be
MODEL = "tiny-deepseek"

# Counters of ours, by the label that tells their series apart; all others are summed over.
OURS = {
    "cachestore_lookup_pages_total": "result",
    "cachestore_lookup_seconds_count": None,
    "cachestore_load_pages_total": "result",
    "cachestore_load_bytes_total": None,
    "cachestore_load_errors_total": None,
    "cachestore_dump_pages_total": "result",
    "cachestore_dump_bytes_total": None,
    "cachestore_dump_blocks_total": "result",
    "cachestore_hit_blocks_total": "tier",
    "cachestore_checksum_failures_total": None,
    "cachestore_evicted_blocks_total": None,
}
THEIRS = ("sglang:prefetch_pgs_sum", "sglang:backup_pgs_sum", "sglang:prefetched_tokens_total")


def counters(server):
    """What the page says of the above, by short names: ``load_pages ok``."""
    found = {}
    for name, labels, value in server.samples():
        if name in OURS and labels["model_name"] == MODEL:
            told = labels.get(OURS[name] or "", "")
            short = f"{name.removeprefix('cachestore_').removesuffix('_total')} {told}".strip()
        elif name in THEIRS:
            short = name
        else:
            continue
        found[short] = found.get(short, 0) + int(value)
    return found


class Script:
    """Steps on a server: each adds to its page's counters exactly what it says."""

    def __init__(self, server):
        self._server = server
        self._last = counters(server)

    def added(self):
        now = counters(self._server)
        changes = {name: value - self._last.get(name, 0) for name, value in now.items()}
        return {name: change for name, change in changes.items() if change}

    @contextlib.contextmanager
    def adds(self, **changes):
        """Inside, a step that adds this; ``theirs``: of SGLang's three."""
        from rig.server import poll

        theirs = dict(zip(THEIRS, changes.pop("theirs", ()), strict=False))
        wanted = {name.replace("__", " "): value for name, value in changes.items()} | theirs
        wanted = {name: value for name, value in wanted.items() if value}
        yield
        # Blocks are brought up about once a second, and backups go on behind the answer.
        with contextlib.suppress(TimeoutError):
            poll(lambda: self.added() == wanted, 20, "the counters")
        assert self.added() == wanted
        self._last = counters(self._server)


def restoring(found, loaded, stored=FILLER, **more):
    """What a prompt adds that is asked again: pages found, loaded, and stored with the filler."""
    return {
        "lookup_seconds_count": 1,
        "lookup_pages__hit": found,
        "lookup_pages__miss": PAGES - found,
        "load_pages__ok": loaded,
        "load_bytes": loaded * SIZE,
        "dump_pages__ok": stored,
        "dump_bytes": stored * SIZE,
    } | more


def damage(path):
    """Flip a bit of a block's first byte."""
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def test_what_a_script_causes_is_what_the_page_shows(
    deepseek_server, attached, storage, prompt, computed, restored
):
    """Pinned (F34): absent, present but failed, and loaded are told apart, and hits by tier.

    In each step every counter grows by what the step did, SGLang's own among them, also across
    attaches; `cachestore top` says the same of this attach.
    """
    server, ids = deepseek_server, prompt(PROMPT, seed=90)
    script = Script(server)
    with attached(server, "cachestore", storage.config()):
        with script.adds(
            lookup_seconds_count=1,
            lookup_pages__miss=PAGES,
            dump_pages__ok=PAGES,
            dump_blocks__written=PAGES,
            dump_bytes=PAGES * SIZE,
            theirs=(0, PAGES, 0),
        ):
            cold = computed(server, ids)
        told = restoring(PAGES, PAGES, hit_blocks__cache=PAGES, dump_blocks__written=FILLER)
        with script.adds(**told, theirs=(PAGES, FILLER, STORED)):
            restored(server, ids, STORED, cold)
        agrees_with_top(server, storage)
    with script.adds():  # to the last one by then
        pass
    # Without a cache: every page comes out of its file.
    with attached(server, "cachestore", storage.config(store_pipeline="Posix")):
        whole = restoring(PAGES, PAGES, hit_blocks__storage=PAGES, dump_blocks__existing=FILLER)
        with script.adds(**whole, theirs=(PAGES, FILLER, STORED)):
            restored(server, ids, STORED, cold)

        # What comes after the damaged page is computed and stored again, as is that page itself.
        again = PAGES - DAMAGED + FILLER
        path = storage.pages(ids)[DAMAGED]
        damage(path)
        told = restoring(
            PAGES,
            PAGES - 1,
            again,
            load_pages__failed=1,
            checksum_failures=1,
            hit_blocks__storage=PAGES - 1,
            dump_blocks__written=1,
            dump_blocks__existing=again - 1,
        )
        with script.adds(**told, theirs=(PAGES - 1, again, DAMAGED * PAGE)):
            restored(server, ids, DAMAGED * PAGE, cold)
        with script.adds(**whole, theirs=(PAGES, FILLER, STORED)):
            restored(server, ids, STORED, cold)

        path.unlink()
        told = restoring(
            DAMAGED,
            DAMAGED,
            again,
            hit_blocks__storage=DAMAGED,
            dump_blocks__written=1,
            dump_blocks__existing=again - 1,
        )
        with script.adds(**told, theirs=(DAMAGED, again, DAMAGED * PAGE)):
            restored(server, ids, DAMAGED * PAGE, cold)
    with script.adds():
        assert gauge(server, "cachestore_attached") == 0


def gauge(server, name):
    """A gauge of this model, over its other labels."""
    return sum(
        v for n, labels, v in server.samples() if n == name and labels["model_name"] == MODEL
    )


def agrees_with_top(server, storage):
    """`cachestore top --once --json` says of the attach what the script has caused in it."""
    main = "import sys; from cachestore_connector.cli import main; sys.exit(main())"
    where = ["--directory", str(storage.root.parent)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", main, "top", "--once", "--json", *where],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (backend,) = json.loads(done.stdout)["backends"]
    assert [backend["pid"]] == server.pids() and backend["model"] == MODEL
    assert (backend["state"], backend["pipeline"]) == ("live", "Cache|Posix")
    stored = PAGES + FILLER
    counted = {name: value for name, value in backend["pools"]["kv"].items() if value}
    assert counted == {
        "load_ok": PAGES,
        "load_bytes": PAGES * SIZE,
        "dump_ok": stored,
        "dump_bytes": stored * SIZE,
    }
    assert backend["counters"]["cache_hit"] == PAGES
    # Asked for twice, and there the second time: as the page has it.
    assert backend["counters"]["lookup_pages"] == 2 * PAGES
    assert backend["counters"]["lookup_page_hits"] == PAGES
    assert gauge(server, "cachestore_attached") == 1
    assert gauge(server, "cachestore_cache_slots") == backend["counters"]["cache_slots"]
