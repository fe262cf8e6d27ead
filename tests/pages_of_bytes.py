"""Plain memory to store from and load into, for tests below the host pool."""

import numpy as np


class Memory:
    """``count`` pages of tensors of ``sizes`` bytes, one after another."""

    def __init__(self, count, sizes, *, seed=None):
        self.sizes = list(sizes)
        self.count = count
        page = sum(sizes)
        if seed is None:
            self.bytes = np.zeros((count, page), dtype=np.uint8)
        else:
            self.bytes = np.random.default_rng(seed).integers(0, 256, (count, page), dtype=np.uint8)

    def addresses(self):
        starts = np.cumsum([0, *self.sizes[:-1]])
        base = self.bytes.ctypes.data
        pages = base + np.arange(self.count) * self.bytes.shape[1]
        return (pages[:, None] + starts).astype(np.uint64)

    def lengths(self):
        return np.tile(np.array(self.sizes, dtype=np.uint64), (self.count, 1))


def block_ids(count, prefix="block"):
    """``count`` different block ids, one after another."""
    import hashlib

    return b"".join(
        hashlib.blake2b(f"{prefix}-{i}".encode(), digest_size=16).digest() for i in range(count)
    )
