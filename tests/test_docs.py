"""The documentation: links lead somewhere, numbers are right, what is said of files is so."""

import dataclasses
import os
import re
import stat
from pathlib import Path

import pytest
import yaml

import stored_pages
from cachestore_connector import settings_page
from cachestore_connector.cli import COMMANDS
from cachestore_connector.config import SETTINGS, load
from cachestore_connector.manifest import RECORD_BYTES
from cachestore_connector.store import Store

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOKENS = 64  # of a page, in docs/sizing.md
GIB = 1 << 30

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page):
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def anchors(page):
    """What GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(page), flags=re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        same = sum(each.rpartition("-")[0] == name for each in found) + (name in found)
        found.add(f"{name}-{same}" if same else name)
    return found


@pages
def test_links_lead_somewhere(page):
    """Pinned: every relative link is to a file of the repository, and to a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_relative_to(ROOT) and there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def test_every_page_can_be_reached():
    """Pinned: from README.md or docs/README.md each page is one link away."""
    linked = set()
    for start in (ROOT / "README.md", ROOT / "docs" / "README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", start.read_text("utf-8")):
            linked.add((start.parent / target).resolve())
    assert set(PAGES) - {ROOT / "README.md"} <= linked


def test_settings_page_is_what_the_code_gives():
    """Pinned: docs/settings.md is made, and made of the table as it is."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert page == settings_page.text(), f"make it anew: {settings_page.COMMAND}"
    for name, row in SETTINGS.items():
        assert page.count(f"\n### {name}\n") == 1
        assert f"[`{name}`](#{name})" in page
        assert row.metadata["doc"].split()[0] in page


@pages
def test_settings_in_the_text_can_be_set(page):
    """Pinned: `name: value` in the text is a setting, and a value that it takes."""
    for name, value in re.findall(r"`([a-z][a-z0-9_]+): ([^`]+)`", prose(page)):
        if name in ("medium", "class_name", "backend_name", "interface_v1"):
            continue  # Kubernetes's, SGLang's
        row = SETTINGS[name]
        row.metadata["kind"].parse(name, yaml.safe_load(value), row.metadata["unit"], {})


@pages
def test_commands_in_the_text_are_there(page):
    """Pinned: `cachestore word` is a subcommand."""
    text = re.sub(r"\s+", " ", page.read_text("utf-8"))
    for word in re.findall(r"(?:`|^|\n|run [^`]*)cachestore ([a-z][a-z-]+)", text):
        assert word in COMMANDS, word


def test_the_quick_start_s_settings_can_be_used():
    """Pinned: the YAML that a new user copies."""
    text = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        assert load(yaml.safe_load(block), {}).storage_backends == ("/nvme/kv",)


def block_file(page_bytes):
    """Bytes of a page's file: padding to 4096, and the record."""
    return -(-page_bytes // 4096) * 4096 + RECORD_BYTES


def one_page(pool):
    """Bytes of a page, as SGLang's host pool says them."""
    import torch

    _, sizes = pool.get_page_buffer_meta(torch.arange(TOKENS))
    return sum(sizes)


@pytest.fixture(scope="module")
def sizing():
    text = (ROOT / "docs" / "sizing.md").read_text("utf-8")
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def page_bytes():
    """Of the models in docs/sizing.md, from SGLang's own host pools."""
    torch = pytest.importorskip("torch", reason="SGLang's host pools need torch")
    pytest.importorskip("sglang", reason="there are no host pools without SGLang")
    from host_pools import mha_pool, mla_pool

    deep = {"layers": 61, "rank": 512, "rope": 64, "page_size": TOKENS}
    llama = {"layers": 80, "dim": 128, "page_size": TOKENS}
    both = {"pages": 2, "layout": "page_first"}
    deep, llama = deep | both, llama | both
    return {
        "DeepSeek-V3": one_page(mla_pool(**deep)),
        "DeepSeek-V3, FP8": one_page(mla_pool(**deep, dtype=torch.float8_e4m3fn)),
        "Llama-3-70B, TP 4": one_page(mha_pool(**llama, heads=2)),
        "Llama-3-70B, TP 8": one_page(mha_pool(**llama, heads=1)),
    }


RANKS = {
    "DeepSeek-V3": 1,
    "DeepSeek-V3, FP8": 1,
    "Llama-3-70B, TP 4": 4,
    "Llama-3-70B, TP 8": 8,
}


def test_bytes_of_a_page(sizing, page_bytes):
    """Pinned: the formulas, the pools and the table of docs/sizing.md agree."""
    assert page_bytes == {
        "DeepSeek-V3": 61 * (512 + 64) * 2 * TOKENS,
        "DeepSeek-V3, FP8": 61 * (512 + 64) * TOKENS,
        "Llama-3-70B, TP 4": 80 * 2 * (8 // 4) * 128 * 2 * TOKENS,
        "Llama-3-70B, TP 8": 80 * 2 * (8 // 8) * 128 * 2 * TOKENS,
    }
    for name, size in page_bytes.items():
        file, ranks = block_file(size), RANKS[name]
        assert f"{size:,} | {file:,} | {ranks} | {file * ranks // TOKENS:,} |" in sizing, name


def test_what_a_capacity_holds(sizing, page_bytes):
    """Pinned: pages, tokens and files in 3200 GiB, and how much of a disk that is."""
    capacity = 3200 * GIB
    for name in ("DeepSeek-V3", "DeepSeek-V3, FP8", "Llama-3-70B, TP 8"):
        ranks = RANKS[name]
        held = capacity // block_file(page_bytes[name]) // ranks
        row = f"{held:,} | {held * TOKENS / 1e6:.1f} million | {held * ranks:,} |"
        assert row in sizing, (name, row)
    assert f"{3.84e12 / GIB:,.0f}" in sizing and 0.9 * 3.84e12 / GIB >= 3200


def test_what_a_buffer_holds(sizing, page_bytes):
    """Pinned: slots in 128 GiB: less than a thousandth is bookkeeping."""
    for name in ("DeepSeek-V3", "DeepSeek-V3, FP8"):
        slots = 128 * GIB // page_bytes[name]
        low, high = (
            re.search(
                rf"([\d,]+) to {slots:,} \| {slots * TOKENS / 1e6:.2f} million", sizing
            ).group(1),
            slots,
        )
        low = int(low.replace(",", ""))
        # 88 bytes of metadata a slot, 4 to 16 of buckets, 64 processes of 524 bytes
        assert low <= (128 * GIB - 64 * 600 - slots * 104) // page_bytes[name] <= high
        assert low > high * 0.999
    assert f"{8192 * page_bytes['DeepSeek-V3'] / GIB:.1f} GiB in bfloat16" in sizing
    assert 16 * 32768 // TOKENS == 8192
    assert f"{128 * page_bytes['DeepSeek-V3'] / GIB:.2f} GiB" in sizing


def test_times_and_wear(sizing, page_bytes):
    """Pinned: bytes and seconds of a prefix, the speed that takes as long, and bytes a day."""
    for name in ("DeepSeek-V3", "DeepSeek-V3, FP8", "Llama-3-70B, TP 8"):
        each = page_bytes[name] * RANKS[name] / TOKENS
        total = each * 32768
        row = f"{total / 1e9:.2f} GB | {total / 6e9:.2f} s | {6e9 / each:,.0f} tokens/s |"
        assert row in sizing, (name, row)
    second = 10_000 * block_file(page_bytes["DeepSeek-V3"]) / TOKENS
    assert f"{second / 1e6:.0f} MB/s, or {second * 86400 / 1e12:.1f} TB a day" in sizing


def modes(top):
    """(directories, files) below, by mode; what is gone meanwhile is left out."""
    directories, files = {}, {}
    for place, _, names in os.walk(top):
        for path in (place, *(os.path.join(place, name) for name in names)):
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue
            kind = directories if stat.S_ISDIR(info.st_mode) else files
            kind.setdefault(stat.S_IMODE(info.st_mode), []).append(Path(path))
    return directories, files


def test_modes_are_as_the_security_page_says(options, tmp_path):
    """Pinned: 0700 and 0600, with any umask, of all that a store makes, the buffer too."""
    which = stored_pages.identity()
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o777)
    given = stored_pages.given(
        options,
        which,
        posix_capacities=[1 << 30],
        pipeline="Cache|Posix",
        cache_buffer_directory=str(shm),
        cache_buffer_capacity=1 << 20,
    )
    given = dataclasses.replace(given, shard_size=8192, block_size=8192)
    before = os.umask(0)
    try:
        store = Store(given)
        assert stored_pages.dump(store, which, stored_pages.keys(3)) == [0] * 3
        (region,) = shm.iterdir()
        assert stat.S_IMODE(region.stat().st_mode) == 0o600
        assert region.name.startswith(f"cachestore-region-{os.geteuid()}-")
        directories, files = modes(given.storage_backends[0])
        assert any(path.name == "lock" for path in files[0o600])
        store.close()
        assert list(shm.iterdir()) == []  # removed with its last process
        store = Store(given)
        store.clear()
        store.close()
    finally:
        os.umask(before)
    for found in (directories, modes(given.storage_backends[0])[0]):
        assert set(found) == {0o700}, found
    for found in (files, modes(given.storage_backends[0])[1]):
        assert set(found) == {0o600}, found


def test_links_are_not_followed(options, tmp_path):
    """Pinned: a link in the place of the buffer, or of an identity's directory, is an error."""
    from cachestore_connector.errors import StoreError

    which = stored_pages.identity()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = Path(stored_pages.given(options, which).storage_backends[0])
    root.mkdir()
    (root / which.directory_name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        Store(stored_pages.given(options, which))
