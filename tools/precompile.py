"""Compiles the headers of torch that most of our C++ files include, once for all modules.

In most files, g++ spends more time on these headers than on everything else.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HEADERS = (
    "ATen/core/Tensor.h", "ATen/ops/empty.h", "torch/csrc/distributed/c10d/ProcessGroup.hpp",
    "torch/library.h",
)  # fmt: skip


def precompile(folder: Path, compiler: Sequence[str]) -> list[str]:
    """Returns the flags that make g++ use the precompiled headers; none if they do not compile.

    The precompiled headers take 0.4 GB and contain paths. With CCACHE_PCH_EXTSUM set, ccache hashes
    the .sum file instead, which is the same in other checkouts.

    folder    a different one for each torch
    compiler  g++ with the flags that all modules share, which include torch's version
    """
    header, compiled = folder / "torch_headers.h", folder / "torch_headers.h.gch"
    digest = folder / "torch_headers.h.gch.sum"
    text = "".join(f"#include <{name}>\n" for name in HEADERS)
    version = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=True)
    flags = [flag for flag in compiler[1:] if not os.path.isabs(flag.removeprefix("-I"))]
    key = hashlib.sha256("\n".join([text, version.stdout, *flags]).encode()).hexdigest()
    if not compiled.exists() or not digest.exists() or digest.read_text() != key:
        folder.mkdir(parents=True, exist_ok=True)
        digest.unlink(missing_ok=True)
        header.write_text(text)
        print("axonn_ext: compiling the headers of torch, once for all files", flush=True)
        partial = folder / f"{os.getpid()}.gch"  # another build may be reading the old one
        command = [*compiler, "-x", "c++-header", str(header), "-o", str(partial)]
        if subprocess.run(command, env={**os.environ, "CCACHE_DISABLE": "1"}).returncode:
            partial.unlink(missing_ok=True)
            print("axonn_ext: the headers are compiled with each file, which takes longer")
            return []
        partial.replace(compiled)
        digest.write_text(key)
    return ["-include", str(header), "-Winvalid-pch"]
