"""Sets up what the Makefile's targets need, skipping what is already done.

    python3 tools/bootstrap.py environment             .venv with torch and the dependencies
    python3 tools/bootstrap.py environment extension   and the compiled package, editable
    python3 tools/bootstrap.py environment lint        and the formatters and type checker
    python3 tools/bootstrap.py environment slow        and the packages that the slow tests need
    python3 tools/bootstrap.py environment headers     and CUTLASS's and NCCL's headers, in build

Each step stores a digest of its inputs in .venv/axonn-bootstrap.json and is skipped while the
digest is unchanged. This program needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from find_cuda import HEADERS, Toolkit, find_cutlass, find_nvcc, find_wheels

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STATE = VENV / "axonn-bootstrap.json"
COMPLETE = VENV / "complete"  # exists if every install into .venv has completed; names the torch
CONSTRAINTS = VENV / "constraints.txt"
LOG = ROOT / "build" / "bootstrap.log"
DEFAULT_TORCH = "torch==2.13.0"  # the version that the tests are run with
STEPS = ("environment", "extension", "lint", "slow", "headers")
CUTLASS, CUTLASS_WHEEL = ROOT / "build/cutlass", "nvidia-cutlass>=4.2,<5"
NCCL, NCCL_WHEEL = ROOT / "build/nccl", "nvidia-nccl-cu13>=2.28,<3"
SETUP_VARIABLES = (
    *("TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "CUTLASS_HOME"),
    "AXONN_DEBUG_INFO",
)
BUILD_FILES = (
    *("setup.py", "pyproject.toml"),
    *("tools/find_cuda.py", "tools/architectures.py", "tools/build_jobs.py", "tools/precompile.py"),
)
# Lines of pip's and ninja's output to show: ninja's count with the file name, and setup.py's lines.
BUILD_PROGRESS = r"(\[\d+/\d+\]).*/(csrc/\S+\.(?:cpp|cu)) |(axonn_ext: .*)"
# Prints the version under which a package index lists torch. It may lack the local part that
# torch.__version__ has: PyPI's 2.13.0 calls itself 2.13.0+cu130.
TORCH_VERSION = "import torch; from importlib.metadata import version; print(version('torch'))"
SUPPORTED_TORCH = ((2, 11), (2, 16))  # lower bound, exclusive upper bound; as in pyproject.toml


class SetupError(Exception):
    """What is wrong with this machine and what to do about it."""


# --- Small things -------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run_logged(
    command: Sequence[str | Path],
    *,
    show: str | None = None,
    environment: dict[str, str] | None = None,
    folder: Path = ROOT,
) -> None:
    """Runs a command in a folder with its output in the log, and prints the errors if it fails.

    show         regular expression; the groups of each matching line are printed at once
    environment  the command's whole environment; None: this program's
    """
    LOG.parent.mkdir(exist_ok=True)
    words = [str(word) for word in command]
    lines: list[str] = []
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(words)}\n")
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if show and (match := re.search(show, line)):
                say("  " + " ".join(group for group in match.groups() if group))
    if process.wait() != 0:
        first = next((i for i, line in enumerate(lines) if "error:" in line), len(lines) - 40)
        errors = "".join(lines[max(first, 0) :][:40])
        print(re.split(r"\n *Traceback|\n *error: subprocess-exited", errors)[0], flush=True)
        raise SetupError(f"{' '.join(words)} failed (whole output: {LOG.relative_to(ROOT)})")


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load_state() -> dict[str, str]:
    try:
        return dict(json.loads(STATE.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def once(name: str, key: str, step: Callable[[], None], *, whole: bool = True) -> None:
    """Runs the step unless it was done for the same key and its result is whole.

    An interrupted step counts as not done.
    """
    state = load_state()
    if whole and state.get(name) == key:
        return
    start = time.monotonic()
    state.pop(name, None)
    if STATE.exists():
        STATE.write_text(json.dumps(state, indent=1))
    step()
    STATE.write_text(json.dumps(load_state() | {name: key}, indent=1))
    say(f"{name} ready after {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Lets one bootstrap at a time work in this checkout."""
    LOG.parent.mkdir(exist_ok=True)
    with (LOG.parent / "bootstrap.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up in this checkout")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Build tools --------------------------------------------------------------------------------


def missing_tools() -> list[str]:
    """Debian's names of the build packages that this machine lacks."""
    missing = [tool for tool in ("gcc", "g++", "cmake") if shutil.which(tool) is None]
    if not any(Path(p, "gtest/gtest.h").exists() for p in ("/usr/include", "/usr/local/include")):
        missing.append("libgtest-dev")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart, as part of python3-venv)
    except ModuleNotFoundError:
        missing.append("python3-venv")
    return missing


def install_tools() -> None:
    missing = missing_tools()
    if not missing:
        return
    install = f"apt-get install -y {' '.join(missing)}"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {', '.join(missing)}")
        quiet = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
        run_logged(["apt-get", "update", "-q"], environment=quiet)
        run_logged([*install.split(), "-q", "--no-install-recommends"], environment=quiet)
        missing = missing_tools()
    # CMake downloads GoogleTest if it is not installed, so only the other tools are required.
    if set(missing) - {"libgtest-dev"}:
        raise SetupError(
            f"these build tools are missing: {', '.join(missing)}. On Debian or Ubuntu: "
            f"sudo {install}; elsewhere install the packages of the same purpose."
        )


# --- The environment ----------------------------------------------------------------------------


def installed_torch(python: str | Path) -> str | None:
    """The version of a Python's torch as a package index lists it; None without a working torch."""
    # -I: ignore the current folder and PYTHONPATH.
    result = subprocess.run(
        [str(python), "-I", "-c", TORCH_VERSION], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else None


def base_torch() -> str | None:
    """The version of the torch that the base Python already has; None if it is not supported."""
    version = installed_torch(sys.executable)
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match is None:
        return None
    first, last = SUPPORTED_TORCH
    return version if first <= (int(match[1]), int(match[2])) < last else None


def pip(
    *arguments: str | Path,
    show: str | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    command = [BIN / "python", "-m", "pip", "install", "--progress-bar", "off", *arguments]
    run_logged(command, show=show, environment=environment)


def environment_is_whole(torch: str | None) -> bool:
    """Whether .venv can be kept: complete, made at this path, and with the torch asked for."""
    if not COMPLETE.exists() or not (BIN / "python").exists():
        return False
    path, _, made_with = COMPLETE.read_text().strip().partition("\n")
    return path == str(VENV) and torch in (None, made_with)


def update_environment(project: dict[str, object], torch: str | None) -> None:
    """Creates .venv and installs torch, if needed, then installs pyproject.toml's dependencies.

    torch  pip's argument for torch; None: the one in .venv, else the base Python's, else the
           default
    """
    install_tools()
    if environment_is_whole(torch):
        torch = COMPLETE.read_text().strip().partition("\n")[2]
    else:
        if VENV.exists():
            say("removing a .venv that is unfinished, moved, or made for another torch")
            shutil.rmtree(VENV)
        inherited = None if torch else base_torch()
        torch = torch or DEFAULT_TORCH
        say(f"creating .venv with Python {sys.version.split()[0]}")
        run_logged(
            [sys.executable, "-m", "venv", VENV, *["--system-site-packages"] * bool(inherited)]
        )
        if inherited:
            say(f"using the torch {inherited} of {sys.executable}")
            if sys.prefix != sys.base_prefix:
                # If this Python is a venv's, --system-site-packages means those of its base.
                (site_packages() / "base_environment.pth").write_text(
                    sysconfig.get_path("purelib") + "\n"
                )
        else:
            say(f"installing {torch} (the slow step: minutes, if it must be downloaded)")
            pip(*torch.split())
    # Until the install completes, .venv counts as incomplete; if interrupted, it is made again.
    COMPLETE.unlink(missing_ok=True)
    version = installed_torch(BIN / "python")
    if version is None:
        raise SetupError(f"{torch} cannot be imported in .venv, or is no installed distribution")
    CONSTRAINTS.write_text(f"torch=={version}\n")  # no later step may swap it
    say(f"installing the dependencies, next to torch {version}")
    pip("-c", CONSTRAINTS, *requirements(project, "test"))
    COMPLETE.write_text(f"{VENV}\n{torch}\n")


def site_packages() -> Path:
    return next((VENV / "lib").glob("python3.*")) / "site-packages"


def requirements(project: dict[str, object], extra: str) -> list[str]:
    """The packages needed to build and run from a checkout, and those of an extra."""
    meta = project["project"]
    system = project["build-system"]
    assert isinstance(meta, dict) and isinstance(system, dict)
    return [*system["requires"], *meta["dependencies"], *meta["optional-dependencies"][extra]]


# --- The package --------------------------------------------------------------------------------


def why_no_gpu() -> str | None:
    """Why no NVIDIA GPU works here; None if one does.

    Only the driver can tell: its files may exist without a GPU (on login nodes, in containers), and
    a GPU may be there without the usual files (under WSL).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return f"the NVIDIA driver finds no GPU that works (error {status})"
    return None if count.value else "the NVIDIA driver finds no GPU"


def build_settings() -> dict[str, str]:
    """Variables for the build: without a GPU, the CUDA parts are compiled only on request."""
    reason = None if os.environ.get("AXONN_CUDA") else why_no_gpu()
    if reason is None:
        return {}
    hint = f"{reason}; AXONN_CUDA=1 make build compiles them nevertheless"
    return {"AXONN_CUDA": "0", "AXONN_CUDA_REASON": hint}


def module_paths() -> list[str]:
    """The sys.path of .venv's Python."""
    program = "import sys; print(*sys.path, sep='\\n')"
    return subprocess.check_output([BIN / "python", "-I", "-c", program], text=True).splitlines()


def setup_key(paths: Sequence[str]) -> list[object]:
    """setup.py's settings, and the CUDA files that it would find; runs no nvcc."""
    variables = [os.environ.get(name) for name in SETUP_VARIABLES]
    wheels = find_wheels(paths)
    nvcc = find_nvcc(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), wheels)
    found: list[object] = [wheels, find_cutlass(None, paths)]
    if nvcc is not None:
        toolkit = Toolkit(Path(nvcc).resolve().parent.parent, version="", wheels=wheels)
        found += [nvcc, os.stat(nvcc).st_mtime_ns, *map(toolkit.find_header, HEADERS)]
    return [variables, found]


def extension_key(settings: dict[str, str], paths: Sequence[str]) -> str:
    """A digest that changes if ninja may have work, or the package must be installed again.

    paths  the sys.path of .venv's Python
    """
    suffixes = {".h", ".cpp", ".cu", ".cuh"}
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes)
    stamps = [(path, path.stat().st_mtime_ns) for path in sources]
    project = [(ROOT / name).read_bytes() for name in BUILD_FILES]
    cuda = sorted(settings.items()) or os.environ.get("AXONN_CUDA")
    return digest(stamps, project, CONSTRAINTS.read_text(), cuda, setup_key(paths))


def build_extension(settings: dict[str, str]) -> None:
    """Installs the package editable; ninja recompiles what changed, in build/"""
    say("compiling the extension")
    options = ("--no-build-isolation", "--no-deps", "-v")
    environment = dict(os.environ) | settings
    pip(*options, "-e", ".", show=BUILD_PROGRESS, environment=environment)


def install_extra(target: str, packages: list[str]) -> None:
    say(f"installing what `make {target}` needs")
    pip("-c", CONSTRAINTS, *packages)


def install_cutlass() -> None:
    """Installs CUTLASS outside .venv, where finding it would recompile the extension."""
    say("installing CUTLASS's headers")
    pip("--no-deps", "--upgrade", "--target", CUTLASS, CUTLASS_WHEEL)


def install_nccl() -> None:
    """Installs only the headers: the library takes 300 MB, and needs a GPU."""
    say("installing NCCL's headers (a download of 300 MB)")
    pip("--no-deps", "--upgrade", "--target", NCCL, NCCL_WHEEL)
    shutil.rmtree(NCCL / "nvidia/nccl/lib")


def leave_venv() -> None:
    """Restarts with the Python that .venv was made from, as .venv may have to be made again."""
    base = getattr(sys, "_base_executable", sys.executable)
    if Path(sys.prefix) == VENV and Path(base).exists() and BIN not in Path(base).parents:
        os.execv(base, [base, *sys.argv])


def main() -> None:
    leave_venv()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="+", choices=STEPS)
    steps = parser.parse_args().steps

    os.environ["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    torch = os.environ.get("TORCH") or None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with exclusive():
        once(
            "environment",
            digest(requirements(project, "test")),
            lambda: update_environment(project, torch),
            whole=environment_is_whole(torch),
        )
        if "extension" in steps:
            built = any((ROOT / "axonn_ext").glob("_C.*.so"))
            settings = build_settings()
            key = extension_key(settings, module_paths())
            once("extension", key, partial(build_extension, settings), whole=built)
        for extra, target in (("lint", "lint"), ("slow", "test-slow")):
            if extra in steps:
                packages = project["project"]["optional-dependencies"][extra]
                once(f"extra {extra}", digest(packages), partial(install_extra, target, packages))
        if "headers" in steps:
            once("cutlass", CUTLASS_WHEEL, install_cutlass, whole=CUTLASS.is_dir())
            once("nccl", NCCL_WHEEL, install_nccl, whole=NCCL.is_dir())


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
