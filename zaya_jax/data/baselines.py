"""Bits per byte of gzip and xz on the held-out text, as a baseline for the model."""

import functools
import gzip
import itertools
import lzma
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

# A compressor cannot use text beyond its window: 64 MiB in `xz -9`, 32 KiB in `gzip -9`. Dropping earlier text gives
# the same figures and bounds the time.
WINDOW_BYTES = 64 * 2**20


def compressor_baselines(train: bytes, heldout: bytes) -> dict[str, float]:
    """Compress the held-out text, alone and as the continuation of the training text.

    Args:
      train: concatenated text of the train split; only the part within the largest window matters.
      heldout: text of the held-out split, at least one byte.

    Returns:
      Bits per byte of held-out text. `gzip` and `xz` compress it alone. `gzip_given_train` and `xz_given_train` append
      it to the training text, and count only the bits that this adds.
    """
    texts = {"both": train[-WINDOW_BYTES:] + heldout, "train": train[-WINDOW_BYTES:], "heldout": heldout}
    jobs = list(itertools.product(texts, _COMPRESSORS))  # longest first
    with ThreadPoolExecutor(max_workers=2) as threads:  # both release the GIL; `xz -9` takes 0.7 GB a thread
        sizes = dict(zip(jobs, threads.map(lambda job: len(_COMPRESSORS[job[1]](texts[job[0]])), jobs), strict=True))
    bits_per_byte = {}
    for name in _COMPRESSORS:
        given_train = sizes["both", name] - sizes["train", name]
        bits_per_byte[name] = 8 * sizes["heldout", name] / len(heldout)
        bits_per_byte[f"{name}_given_train"] = 8 * given_train / len(heldout)
    return bits_per_byte


def last_window(texts: Iterable[str]) -> bytes:
    """Return the end of the concatenated texts that fits a compressor's window, in UTF-8.

    Args:
      texts: in reverse order, the last one first.
    """
    parts, size = [], 0
    for text in texts:
        parts.append(text.encode())
        size += len(parts[-1])
        if size >= WINDOW_BYTES:
            break
    return b"".join(reversed(parts))[-WINDOW_BYTES:]


_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "xz": functools.partial(lzma.compress, preset=9),
    "gzip": functools.partial(gzip.compress, compresslevel=9, mtime=0),
}
