"""Which weights these are: a sample of their files, and how often they were replaced in place.

SGLang can update weights on a live server. It empties its own caches then, and tells a storage
backend nothing; pages stored before would be taken for the new weights'. The plugin counts here,
and the backend looks.
"""

from __future__ import annotations

import hashlib
import os

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES = 8  # of each file, evenly spaced
_SAMPLE_BYTES = 4096

updates = 0


def sample(model_path: str | None) -> str | None:
    """A digest of some bytes of every weight file in a directory; None if it has none.

    Tells apart checkpoints that were put under one path one after the other: training changes
    nearly every byte. The same files copied elsewhere give the same digest. Raises OSError for a
    file that can't be read.
    """
    if not model_path or not os.path.isdir(model_path):
        return None
    names = sorted(name for name in os.listdir(model_path) if name.endswith(_SUFFIXES))
    if not names:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        with open(os.path.join(model_path, name), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{name}:{size}:".encode("utf-8", "surrogatepass"))
            for i in range(_SAMPLES):
                file.seek(
                    (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0
                )
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def count_update() -> None:
    """Weights have been replaced. Called on the scheduler thread alone."""
    global updates
    updates += 1
