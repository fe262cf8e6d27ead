"""One rank of the cold case: a process with a store of its own on the buffer of all.

It does what lines of JSON on its standard input say, and answers each with one. Imports neither
SGLang nor torch, so that eight of them are started in no time.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.cases import PAGE_TOKENS, page_keys
from cachestore_connector import config, identity
from cachestore_connector.opening import open_store
from cachestore_connector.store import Store


class Rank:
    """A store for pages of one tensor, and memory for ``pages`` of them.

    ``settings``: as SGLang would hand them over, with ``store_pipeline``.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tp_rank: int,
        tp_size: int,
        page_bytes: int,
        pages: int,
    ) -> None:
        """Open the store. The memory is touched when it is first used."""
        self.memory = np.zeros((pages, page_bytes), dtype=np.uint8)
        self.identity = identity.from_parts(
            model_identity="benchmark",
            dtype="bfloat16",
            layout="page_first_direct",
            page_size=PAGE_TOKENS,
            tensor_sizes=[page_bytes],
            is_mla=True,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        checked = config.load(settings, {})
        pipeline, _ = config.choose_pipeline(checked, is_mla=True)
        self.store: Store = open_store(checked, pipeline, self.identity, (page_bytes,))
        self._addresses = np.array([page.ctypes.data for page in self.memory], dtype=np.uint64)
        self._sizes = np.full(pages, page_bytes, dtype=np.uint64)

    def block_ids(self, label: str) -> bytes:
        """Of the pages of one round."""
        return self.identity.block_ids(page_keys(label, len(self.memory)))

    def load(self, block_ids: bytes) -> int:
        """Into the memory; how many pages came."""
        return self.store.load(block_ids, self._addresses, self._sizes).count(0)

    def dump(self, block_ids: bytes) -> int:
        """From the memory; how many pages went."""
        return self.store.dump(block_ids, self._addresses, self._sizes).count(0)

    def sums(self) -> list[int]:
        """A checksum of each page."""
        return [zlib.crc32(page) for page in self.memory]


def _serve(rank: Rank, lines: Sequence[str] | Any, answer: Any) -> None:
    block_ids = b""
    for line in lines:
        command = json.loads(line)
        if command["do"] == "prepare":
            block_ids = rank.block_ids(command["label"])
            answer({})
        elif command["do"] == "load":
            loaded = rank.load(block_ids)
            answer({"loaded": loaded, "ended": time.perf_counter()})
        elif command["do"] == "stats":
            answer(rank.store.stats())
        elif command["do"] == "sums":
            answer({"sums": rank.sums()})


def main() -> None:
    """Until the end of the input."""

    def answer(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    rank = Rank(**json.loads(sys.stdin.readline()))
    answer({})
    _serve(rank, sys.stdin, answer)
    rank.store.close()


if __name__ == "__main__":
    main()
