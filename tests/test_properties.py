"""Two processes, one directory, and whatever may happen to it: the right bytes, or a miss.

Any sequence of dumps, overwrites, damage at any byte, deletions, evictions, clears, restarts and
kills (F02 to F07, F11, F15, F16, F22). The model says for each block what a load may give.
"""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from cachestore_connector.errors import Code
from cachestore_connector.store import Store, StoreOptions
from store_users import OtherProcess, StoreUser, block_id, content

SIZES = (5000, 37)
FILE_BYTES = 8192 + 4096
BLOCKS = range(6)
MISS = None

blocks = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4, unique=True)
block = st.sampled_from(BLOCKS)
seeds = st.integers(1, 3)
users = st.integers(0, 1)
nobody_or_users = st.sampled_from([None, 0, 1])
picks = st.integers(0, len(BLOCKS) - 1)
# Every byte of a file, but its ends and the seams of its parts more often.
places = st.sampled_from(
    [0, 4999, 5000, 5036, 5037, 8191, 8192, 8200, 8300, 12283, 12284, 12287]
) | st.integers(0, FILE_BYTES - 1)


class TwoProcesses(RuleBasedStateMachine):
    """``may[block]``: what its next load may give: versions, and `MISS`.

    ``unsure``: blocks of which a file may be there that can't be loaded. ``forgets``: whether a
    block may go by itself (it is evicted). ``remembers``: whether one may be served though its file
    has gone (from the cache).
    """

    forgets = False
    remembers = False
    changes: ClassVar[dict] = {}

    other = OtherProcess()

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="cachestore-properties-"))
        self.users = [StoreUser(), self.other]
        self.stranger = None
        self.may = {number: {MISS} for number in BLOCKS}
        self.unsure = set()

    @initialize(direct=st.booleans())
    def start(self, direct):
        self.options = StoreOptions(
            pipeline="Posix",
            storage_backends=[str(self.root / "store")],
            identity_name="model-0123456789abcdef",
            identity_manifest="{}\n",
            identity_fingerprint=bytes(range(32)),
            tensor_sizes=SIZES,
            shard_size=8192,
            block_size=8192,
            posix_load_worker_number=2,
            posix_dump_worker_number=2,
            posix_queue_depth=128,
            io_direct=direct,
            posix_zero_copy="auto",
            timeout_ms=20000,
            cache_buffer_directory=str(self.root),
        )
        self.options = dataclasses.replace(self.options, **self.changes)
        for user in self.users:
            user.open(self.options)

    def teardown(self):
        if hasattr(self, "options"):
            self.both_close_and_all_is_as_it_was()
        if self.stranger is not None:
            self.stranger.close()
        for user in self.users:
            user.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # What a user does.

    @rule(who=users, which=blocks, seed=seeds)
    def dump(self, who, which, seed):
        codes = self.users[who].dump(which, seed)
        for number, code in zip(which, codes, strict=True):
            if self.forgets and code == Code.NO_SPACE:
                continue
            assert code == Code.OK
            self.dumped(number, seed)

    def dumped(self, number, seed):
        if number in self.unsure:
            self.may[number] |= {seed}
        elif self.may[number] == {MISS}:
            self.may[number] = {seed} | self.nothing()
        elif MISS in self.may[number] or self.remembers:
            self.may[number] |= {seed}

    def nothing(self):
        return {MISS} if self.forgets else set()

    @rule(who=users, which=blocks)
    def load(self, who, which):
        for number, (code, got) in zip(which, self.users[who].load(which), strict=True):
            self.loaded(number, code, got)

    def loaded(self, number, code, got):
        size = sum(SIZES)
        versions = {
            seed: content(number, seed, size).tobytes() for seed in self.may[number] - {MISS}
        }
        if code == Code.OK:
            found = [seed for seed, wanted in versions.items() if wanted == got]
            assert found, f"block {number}: bytes of none of {sorted(versions)}"
            if not self.remembers:
                self.may[number] = set(found) | self.nothing()
                self.unsure.discard(number)
        else:
            assert code in (Code.NOT_FOUND, Code.CORRUPT)
            assert MISS in self.may[number], f"block {number} was stored, and {Code(code).name}"
            if not self.remembers:
                self.may[number] = {MISS}
                self.unsure.discard(number)

    @rule(who=users, which=blocks)
    def lookup(self, who, which):
        for number, present in zip(which, self.users[who].lookup(which), strict=True):
            if self.may[number] == {MISS} and number not in self.unsure:
                assert not present
            elif MISS not in self.may[number]:
                assert present

    @rule(who=users, number=block)
    def lookup_and_load(self, who, number):
        user = self.users[who]
        (present,) = user.lookup([number])
        before = user.stats()
        ((code, got),) = user.load([number])
        after = user.stats()
        counted = {
            name: after[name] - before[name]
            for name in ("load_ok", "load_absent", "load_corrupt", "load_failed")
        }
        assert sum(counted.values()) == counted[
            {Code.OK: "load_ok", Code.NOT_FOUND: "load_absent"}.get(code, "load_corrupt")
        ] == 1  # fmt: skip
        if present and code != Code.OK:
            assert number in self.unsure or self.forgets or self.remembers
        if not present:
            assert code != Code.OK or self.remembers
        self.loaded(number, code, got)
        if code != Code.OK and not self.remembers:
            assert user.lookup([number]) == [False]

    @rule(who=users)
    def clear(self, who):
        self.users[who].clear()
        self.may = {number: {MISS} for number in BLOCKS}
        self.unsure = set()

    @rule(who=users)
    def reopen(self, who):
        self.users[who].open(self.options)

    @rule(which=blocks, seed=seeds)
    def kill_in_the_middle_of_a_dump(self, which, seed):
        self.other.send("dump", which, seed)
        for number in which:
            if MISS in self.may[number] or self.remembers:
                self.may[number] |= {seed}
        self.kill()

    @rule()
    def kill(self):
        self.other.kill()
        if self.remembers:  # what was in memory alone
            for number in BLOCKS:
                self.may[number] |= {MISS}
        self.other.open(self.options)

    # What happens to the directory.

    def path(self, number, identity=None):
        name = block_id(number).hex()
        base = Path(self.options.storage_backends[0], identity or self.options.identity_name)
        return base / "blocks" / name[:3] / name

    def gone(self, number):
        if self.remembers:
            self.may[number] |= {MISS}
        else:
            self.may[number] = {MISS}
            self.unsure.discard(number)

    def spoilt(self, number):
        if self.remembers:
            self.may[number] |= {MISS}
        else:
            self.may[number] = {MISS}
        self.unsure.add(number)

    def whole(self):
        """Blocks with a file that nothing has happened to: a second change may undo the first."""
        return [n for n in BLOCKS if n not in self.unsure and self.path(n).exists()]

    def spoil(self, pick, then, how):
        """Do ``how`` to the file of one of them; ``then``: who loads it next, or None."""
        if not self.whole():
            self.dump(0, [pick], 1)
        whole = self.whole()
        if not whole:  # not stored yet, or gone again
            return
        number = whole[pick % len(whole)]
        try:
            with open(self.path(number), "r+b") as file:
                how(file)
        except FileNotFoundError:  # evicted just now
            return
        self.spoilt(number)
        if then is not None:
            self.load(then, [number])

    @rule(pick=picks, at=places, change=st.integers(1, 255), then=nobody_or_users)
    def damage_a_byte(self, pick, at, change, then):
        def how(file):
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ change]))

        self.spoil(pick, then, how)

    @rule(pick=picks, length=places, then=nobody_or_users)
    def truncate(self, pick, length, then):
        self.spoil(pick, then, lambda file: file.truncate(length))

    @rule(pick=picks, more=st.binary(min_size=1, max_size=5000), then=nobody_or_users)
    def append(self, pick, more, then):
        self.spoil(pick, then, lambda file: (file.seek(0, os.SEEK_END), file.write(more)))

    @rule(number=block)
    def delete_a_file(self, number):
        """As the collector evicts one, or a person."""
        self.path(number).unlink(missing_ok=True)
        self.gone(number)

    @rule(number=block)
    def delete_a_fan_out_directory(self, number):
        shutil.rmtree(self.path(number).parent, ignore_errors=True)
        for each in BLOCKS:
            if self.path(each).parent == self.path(number).parent:
                self.gone(each)

    @rule()
    def delete_temporaries(self):
        """But for the locks, which are how a writer says that it lives."""
        for directory in self.root.glob("store/*/tmp/*"):
            with contextlib.suppress(FileNotFoundError):  # reclaimed just now
                for path in directory.iterdir():
                    if path.name != "lock":
                        path.unlink(missing_ok=True)  # or published just now

    @rule(number=block, another=block, then=nobody_or_users)
    def put_another_block_in_its_place(self, number, another, then):
        self.dump(0, [another], 1)
        # What lies at ``another`` may be of ``number``: then this would mend it.
        if number != another and another not in self.unsure and self.path(another).exists():
            self.path(number).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # evicted just now
                shutil.copyfile(self.path(another), self.path(number))
                self.spoilt(number)
                if then is not None:
                    self.load(then, [number])

    @rule(number=block, seed=seeds)
    def put_another_identitys_in_its_place(self, number, seed):
        identity = "other-0123456789abcdef"
        if self.stranger is None:
            self.stranger = StoreUser()
            self.stranger.open(
                dataclasses.replace(
                    self.options,
                    pipeline="Posix",
                    identity_name=identity,
                    identity_fingerprint=bytes(range(1, 33)),
                )
            )
        codes = self.stranger.dump([number], seed)
        if codes == [Code.OK] and self.path(number, identity).exists():
            self.path(number).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(self.path(number, identity), self.path(number))
            self.spoilt(number)

    # At the end.

    def both_close_and_all_is_as_it_was(self):
        for user in self.users:
            user.close()
        # What a killed one left goes behind the back of the next one.
        left = f"store/{self.options.identity_name}/tmp/*"
        store = Store(self.options)
        deadline = time.monotonic() + 20
        while len(list(self.root.glob(left))) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        store.close()
        assert not list(self.root.glob(left))
        self.users[0].open(self.options)
        self.load(0, list(BLOCKS))


class Cached(TwoProcesses):
    """With a buffer that both share, of fewer slots than there are blocks."""

    remembers = True
    changes: ClassVar[dict] = {
        "pipeline": "Cache|Posix",
        "cache_buffer_capacity": 5 * 8192 + (64 << 10),
    }


class Evicted(TwoProcesses):
    """With room for three blocks."""

    forgets = True
    changes: ClassVar[dict] = {"posix_capacities": [3 * FILE_BYTES + 4096]}


MACHINES = {"posix": TwoProcesses, "cache": Cached, "evicted": Evicted}

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "stateful_step_count": 30,
}


@pytest.mark.parametrize(("name", "examples"), [("posix", 20), ("cache", 20), ("evicted", 8)])
def test_the_right_bytes_or_a_miss(name, examples):
    """Pinned: a few hundred steps, always the same ones."""
    # Not made shorter when it fails, which takes minutes; the long run does that.
    fixed = settings(max_examples=examples, derandomize=True, phases=[Phase.generate], **COMMON)
    try:
        run_state_machine_as_test(MACHINES[name], settings=fixed)
    finally:
        TwoProcesses.other.end()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MACHINES)
def test_the_right_bytes_or_a_miss_for_long(name):
    """Pinned: many more, others each time."""
    try:
        run_state_machine_as_test(MACHINES[name], settings=settings(max_examples=400, **COMMON))
    finally:
        TwoProcesses.other.end()
