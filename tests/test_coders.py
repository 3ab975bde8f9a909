"""Reference coders: the strongest settings, on the text as a whole."""

from __future__ import annotations

import argparse
import bz2
import lzma
import random
import shutil
import subprocess
from pathlib import Path

from hfpretrain.bpb.coders import coded_bytes


def test_the_whole_text_is_one_piece() -> None:
    """Noise of 300 kB twice: who sees far enough back writes it once, and a window of 100 or 256 kB does not reach."""
    noise = random.Random(0).randbytes(300_000)
    sizes = coded_bytes(noise + noise)
    assert 300_000 < sizes["xz -9"] < 302_000 < 600_000 < len(lzma.compress(noise + noise, preset=0))
    assert sizes["bz2 -9"] == len(bz2.compress(noise + noise, 9)) != len(bz2.compress(noise + noise, 1))
    assert ("zstd -19" in sizes) == (shutil.which("zstd") is not None)
    assert 300_000 < sizes.get("zstd -19", 300_001) < 302_000


def test_the_strongest_settings_are_used() -> None:
    data = Path(argparse.__file__).read_bytes()
    sizes = coded_bytes(data)
    assert sizes["xz -9"] == len(lzma.compress(data, preset=9)) < len(lzma.compress(data, preset=1))
    if "zstd -19" in sizes:
        fast = subprocess.run(["zstd", "-1", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout
        assert sizes["zstd -19"] < 0.9 * len(fast)


def test_nothing_and_noise() -> None:
    assert all(size < 50 for size in coded_bytes(b"").values())
    noise = bytes((n * n * 2654435761 >> 7) % 256 for n in range(1000))
    assert all(size > 900 for size in coded_bytes(noise).values())
