"""What goes wrong with the storage under a live server: serving goes on and the output is right."""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from backends import flip
from disks import mounted

PROMPT = 690
STORED = 640
PAGES = 10
PAGE = 64


@contextlib.contextmanager
def read_only(path):
    """``path`` can only be read inside the ``with``: a read-only mount of itself lies over it.

    (A file system with a file open for writing can't be made read-only in place.)
    """
    with mounted(path, "--bind", source=path):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (path / "probe").touch()
        yield


def test_read_only_storage(
    llama_server, attached, storage_at, tmp_path, prompt, computed, restored, new_log
):
    """Pinned: with the directory read-only, what it holds is served and what is new is computed.

    The failed dumps are in the log, with the reason. Once it can be written again, it is.
    """
    old, new = prompt(PROMPT, seed=20), prompt(PROMPT, seed=21)
    expected = computed(llama_server, new)
    with mounted(tmp_path / "disk", "-t", "tmpfs") as disk:
        storage = storage_at(disk / "storage")
        with attached(llama_server, "cachestore", storage.config()) as server:
            cold = computed(server, old)
            storage.wait(PAGES)
            with read_only(storage.root):
                log = new_log(server)
                restored(server, old, STORED, cold)
                restored(server, new, 0, expected)
                restored(server, new, 0, expected)
                assert len(storage.blocks()) == PAGES
                assert any("Read-only file system" in line for line in log())
                assert any("pages: " in line and " IO" in line for line in log())
            # It is probed every few seconds; the log says so with the next request.
            for _ in range(30):
                restored(server, old, STORED, cold)
                if any("in full use again" in line for line in log()):
                    break
                time.sleep(1)
            restored(server, new, 0, expected)
            storage.wait(2 * PAGES)
            restored(server, new, STORED, expected)


def test_attached_to_read_only_storage(
    llama_server, attached, storage_at, tmp_path, prompt, computed, restored, new_log
):
    """Pinned: a storage that could only ever be read is no reason to refuse it: it serves hits."""
    ids = prompt(PROMPT, seed=22)
    with mounted(tmp_path / "disk", "-t", "tmpfs") as disk:
        storage = storage_at(disk / "storage")
        with attached(llama_server, "cachestore", storage.config()):
            cold = computed(llama_server, ids)
            storage.wait(PAGES)
        with read_only(disk):
            log = new_log(llama_server)
            with attached(llama_server, "cachestore", storage.config()):
                assert any("nothing can be stored" in line for line in log())
                restored(llama_server, ids, STORED, cold)


def test_full_disk(
    llama_server, attached, storage_at, tmp_path, prompt, computed, restored, new_log
):
    """Pinned: on a full disk the output is right, hits are a whole prefix, and no scrap is left.

    The failed dumps are in the log, with the reason. Once there is space, it is used.
    """
    ids = prompt(PROMPT, seed=23)
    expected = computed(llama_server, ids)
    # A block is 128 KiB and its record: six fit.
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=900k") as disk:
        storage = storage_at(disk / "storage")
        # SGLang asks for four pages or more, unless told to ask for fewer.
        config = storage.config(prefetch_threshold=PAGE)
        with attached(llama_server, "cachestore", config) as server:
            log = new_log(server)
            assert computed(server, ids).same_output(expected)
            server.flush()  # waits for the backup
            stored = [path.exists() for path in storage.pages(ids)]
            assert 3 <= sum(stored) < PAGES
            assert storage.temporaries() == []
            assert any("No space left" in line for line in log())
            assert any("NO_SPACE" in line for line in log())
            restored(server, ids, stored.index(False) * PAGE, expected)
            assert storage.temporaries() == []

            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
            server.flush()
            assert server.generate(ids).same_output(expected)
            storage.wait(PAGES)
            restored(server, ids, STORED, expected)


def flip_a_byte(path):
    """Right length, wrong bytes (F04)."""
    flip(path, 1234)


def flip_a_byte_of_the_record(path):
    """The last 4096 bytes say what the block is."""
    flip(path, -4096 + 20)


def cut(path):
    """As an append that was lost (F05)."""
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    """As after a crash of the file system (F05)."""
    os.truncate(path, 0)


def other_page(path):
    """A whole block, but of another page (F22)."""
    other = next(each for each in path.parent.parent.glob("*/*") if each != path)
    shutil.copyfile(other, path)


def directory(path):
    """Nothing that could be read."""
    path.unlink()
    path.mkdir()


# The page of each, so that one request in a row meets one of them.
DAMAGE = {
    9: flip_a_byte,
    8: cut,
    7: flip_a_byte_of_the_record,
    6: empty,
    5: other_page,
    4: directory,
}


def test_damaged_blocks(shared_server, attached, storage, prompt, computed, restored, new_log):
    """Pinned: a damaged block is a miss that ends the hit; it is computed, and stored again.

    Without a buffer before the files: what is in there isn't read again.
    """
    ids = prompt(PROMPT, seed=24)
    config = storage.config(store_pipeline="Posix")
    with attached(shared_server, "cachestore", config) as server:
        cold = computed(server, ids)
        storage.wait(PAGES)
        pages = storage.pages(ids)
        good = {path: path.read_bytes() for path in pages}
        log = new_log(server)
        for page, damage in DAMAGE.items():
            damage(pages[page])
            restored(server, ids, page * PAGE, cold)
            server.flush()  # waits for the backup
            assert pages[page].is_file(), damage.__doc__
            assert len(pages[page].read_bytes()) == len(good[pages[page]])
            restored(server, ids, STORED, cold)
        # Of a kind, the first is logged; then one every ten seconds.
        assert any(f"damaged block {pages[9]} (checksum" in line for line in log())


def test_deleted_storage(llama_server, attached, storage, prompt, computed, restored):
    """Pinned: with the whole directory deleted, all is computed, and stored in a new one (F11)."""
    ids = prompt(PROMPT, seed=25)
    with attached(llama_server, "cachestore", storage.config()) as server:
        cold = computed(server, ids)
        storage.wait(PAGES)
        shutil.rmtree(storage.root)
        restored(server, ids, 0, cold)
        storage.wait(PAGES)
        restored(server, ids, STORED, cold)
