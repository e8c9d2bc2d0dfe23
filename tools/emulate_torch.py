"""`make emulate-torch`: runs tests marked gpu on PyTorch's own CUDA build and a GPU in software.

It builds the same package as `make cuda-check`, in .venv-cuda, and the GPU in software as the
libraries that this PyTorch loads. It needs neither a GPU nor a driver. docs/gpu_machine.md says
how it works; cpp_tests/gpu_machine/torch/left_out.toml lists the tests that are left out, and why.

    tools/emulate_torch.py                          the tests that emulate_torch_runs.py lists
    tools/emulate_torch.py --slow-too               slow ones, too
    tools/emulate_torch.py ARGUMENTS OF PYTEST      other tests
    tools/emulate_torch.py --run COMMAND ...        another command of .venv-cuda
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from bootstrap import BIN as BUILD_BIN
from bootstrap import (
    BUILD_PROGRESS,
    ROOT,
    SetupError,
    digest,
    exclusive,
    install_tools,
    requirements,
    run_logged,
    say,
)
from cuda_check import BIN, PAGE, VENV, find_cuobjdump, install_commands, run_commands
from emulate_torch_runs import WHOLE, Starter, run_all

BUILD = ROOT / "build" / "emulate"
LIBRARIES = BUILD / "cpp_tests" / "gpu_machine" / "torch"
PTX = LIBRARIES / "ptx"
PRELOADED = ("cudart.so.13", "cuda.so.1", "nccl.so.2", "nvidia-ml.so.1")
TARGETS = (
    *("machine_cudart", "machine_cuda", "machine_nccl", "machine_nvidia-ml"),
    "machine_operators",
)


def site_packages() -> Path:
    return next(VENV.glob("lib/python3.*/site-packages"))


def install_test_packages() -> None:
    """Installs the tests' packages into .venv-cuda, which install.md's commands have made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = requirements(project, "test")
    done, key = VENV / "test-packages", digest(packages)
    if done.exists() and done.read_text() == key:
        return
    say("installing what the tests need")
    run_logged([BIN / "python", "-m", "pip", "install", "--progress-bar", "off", *packages])
    done.write_text(key)


def build_libraries() -> None:
    say("building the GPU in software as PyTorch's CUDA libraries")
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DAXONN_GPU_MACHINE=ON",
                 "-DAXONN_WERROR=ON", f"-DAXONN_TORCH_SITE={site_packages()}"]  # fmt: skip
    environment = dict(os.environ) | {"PATH": f"{BUILD_BIN}{os.pathsep}{os.environ['PATH']}"}
    run_logged(configure, environment=environment)
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    build = ["cmake", "--build", BUILD, "-j", jobs, "--target", *TARGETS]
    run_logged(build, environment=environment, show=BUILD_PROGRESS)


def extract_ptx() -> None:
    """Extracts the PTX of our extension to a folder next to the libraries, unless up to date."""
    modules = sorted((site_packages() / "axonn_ext").glob("_cuda*.so"))
    key = digest([(path, path.stat().st_mtime_ns) for path in modules])
    done = PTX / "complete"
    if done.exists() and done.read_text() == key:
        return
    PTX.mkdir(parents=True, exist_ok=True)
    for path in PTX.iterdir():
        path.unlink()
    for module in modules:
        subprocess.run(
            [find_cuobjdump(), "--extract-ptx", "all", module], cwd=PTX, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    done.write_text(key)


def build() -> None:
    with exclusive():
        install_tools()
        run_commands(install_commands((ROOT / PAGE).read_text()))
        install_test_packages()
        build_libraries()
        extract_ptx()


def environment(wire: str) -> dict[str, str]:
    """The environment of a process whose CUDA is the GPU in software.

    wire  the folder in which its ranks meet
    """
    preload = os.pathsep.join(str(LIBRARIES / f"lib{name}") for name in PRELOADED)
    return {
        **{name: text for name, text in os.environ.items() if not name.startswith("PYTHON")},
        "LD_PRELOAD": preload,
        "GPU_MACHINE_DEVICES": os.environ.get("GPU_MACHINE_DEVICES", str(WHOLE.devices)),
        "GPU_MACHINE_WIRE": wire,
        "PYTHONPATH": str(ROOT / "tools"),
        "PYTHONSAFEPATH": "1",  # programs that tests start import the installed package, too
        # Triton passes the output of its ptxas to the driver; here it must remain PTX.
        "TRITON_PTXAS_PATH": str(ROOT / "cpp_tests/gpu_machine/torch/ptxas"),
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        "TRITON_CACHE_DIR": str(LIBRARIES / "triton"),
    }


def tests_command(arguments: Sequence[str | Path]) -> list[str | Path]:
    options = ("-p", "emulate_torch_plugin", "-m", "gpu", "--durations=15")
    place = ("--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider")
    return [BIN / "pytest", *options, *place, *arguments]


def whole_path(argument: str) -> str:
    """The argument, with an absolute path if it begins with the path of an existing file."""
    path, mark, rest = argument.partition("::")
    return f"{Path(path).resolve()}{mark}{rest}" if Path(path).is_file() else argument


def command_of(arguments: Sequence[str]) -> list[str | Path]:
    """The command to run for this program's arguments."""
    if arguments[0] == "--run":
        return [BIN / arguments[1], *map(whole_path, arguments[2:])]
    return tests_command([whole_path(argument) for argument in arguments])


def main() -> int:
    start = time.monotonic()
    try:
        build()
    except SetupError as error:
        print(f"emulate-torch: error: {error}")
        return 1
    say(f"built after {time.monotonic() - start:.0f} s")
    arguments = sys.argv[1:]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="axonn-wire-", dir=memory) as scratch:
        if arguments in ([], ["--slow-too"]):
            starter = Starter(tests_command, environment, LIBRARIES)
            return run_all(Path(scratch), arguments, starter)
        done = subprocess.run(
            command_of(arguments), cwd=LIBRARIES, env=environment(scratch), check=False
        )
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
