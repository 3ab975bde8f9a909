"""What general-purpose compressors make of the same bytes: a reference that has seen nothing but the text itself."""

from __future__ import annotations

import bz2
import lzma
import shutil
import subprocess


def coded_bytes(data: bytes) -> dict[str, int]:
    """Coder -> bytes of the whole `data` compressed: xz -9, bzip2 -9, and zstd -19 where its program is installed.

    Pass a corpus as its documents one after another: a coder then learns across them, which a model that scores each
    document alone may not, and pays its header once.
    """
    sizes = {"xz -9": len(lzma.compress(data, preset=9)), "bz2 -9": len(bz2.compress(data, compresslevel=9))}
    if program := shutil.which("zstd"):
        # --stream-size: with a pipe zstd would otherwise not know how long the text is, and choose smaller tables.
        command = [program, "-19", "--quiet", "--stdout", f"--stream-size={len(data)}"]
        sizes["zstd -19"] = len(subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout)
    return sizes
