"""A block file, read by docs/format.md alone: plain Python and an independent checksum."""

import struct
from pathlib import Path

from crc32c import crc32c

from cachestore_connector.errors import Code
from cachestore_connector.store import Store
from pages_of_bytes import Memory, block_ids


def test_every_byte_is_where_the_page_says(options):
    """Pinned: the worked example of docs/format.md, byte for byte."""
    memory, ids = Memory(1, [100, 37], seed=1), block_ids(1)
    store = Store(options())
    assert store.dump(ids, memory.addresses(), memory.lengths()) == [Code.OK]
    store.close()
    (path,) = Path(options().storage_backends[0]).rglob("blocks/*/*")
    assert path.name == ids.hex() and path.parent.name == ids.hex()[:3]
    file = path.read_bytes()
    payload = memory.bytes.tobytes()
    assert len(file) == 8192
    assert file[:137] == payload
    assert file[137:4096] == bytes(3959)
    record = file[4096:]
    boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
    expected = struct.pack(
        "<8sII32s16s16sQQIIIIQQII",
        b"CSBLOCK1", 2, 4096, bytes(range(32)), ids, boot, 137, 4096, 1, 2, 1, 0, 100, 37,
        crc32c(payload[:100]), crc32c(payload[100:] + bytes(3959)),
    )  # fmt: skip
    assert record[: len(expected)] == expected
    assert record[len(expected) : 4092] == bytes(4092 - len(expected))
    assert struct.unpack("<I", record[4092:]) == (crc32c(record[:4092]),)


def test_modes_are_private(options):
    """Pinned: nobody but the owner can read what a model's users said."""
    store = Store(options())
    memory, ids = Memory(1, [100, 37], seed=2), block_ids(1)
    store.dump(ids, memory.addresses(), memory.lengths())
    root = Path(options().storage_backends[0])
    modes = {oct(path.stat().st_mode & 0o777) for path in root.rglob("*") if path.is_file()}
    assert modes == {"0o600"}
    assert {oct(p.stat().st_mode & 0o777) for p in root.rglob("*") if p.is_dir()} == {"0o700"}
    store.close()
