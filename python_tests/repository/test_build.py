"""The wheel: its content, and that it runs without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from axonn_ext.kernels import extension
from commands import small
from limits import HANG_SECONDS

pytestmark = [
    pytest.mark.long,
]  # the wheel compiles everything if nothing is built yet

ROOT = Path(__file__).resolve().parents[2]

# Run by every rank, in the environment with the installed wheel.
USE_THE_WHEEL = """
import importlib.metadata, sys
from pathlib import Path

import torch
import torch.distributed as dist

import axonn_ext

rank, world_size, store, prefix, version = sys.argv[1:]
rank, world_size = int(rank), int(world_size)
assert Path(axonn_ext.__file__).is_relative_to(prefix), axonn_ext.__file__
assert importlib.metadata.version("axonn-ext") == version
assert axonn_ext.__version__ == version, axonn_ext.__version__

dist.init_process_group(
    "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
)
generator = torch.Generator().manual_seed(0)
a = torch.randn(6, 5, generator=generator, dtype=torch.float64)
b = torch.randn(5, 7, generator=generator, dtype=torch.float64)
y = axonn_ext.ops.all_gather_matmul(a.chunk(world_size)[rank], b, dist.group.WORLD)
torch.testing.assert_close(y, a @ b)
dist.barrier()
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        # A developer's variables must not lead back to the checkout.
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=12 * HANG_SECONDS,  # it may recompile everything
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr  # pip shows the build's output on stderr


def project() -> dict[str, str]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@dataclass(frozen=True)
class WheelBuild:
    wheel: Path
    modules: set[str]  # the compiled modules of the checkout
    build_seconds: float  # the time of that build, as a file's mtime
    output: str


@pytest.fixture(scope="module")
def wheel_build(tmp_path_factory: pytest.TempPathFactory) -> WheelBuild:
    """A wheel of this checkout, made in seconds, since it reuses the objects in build/."""
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools packs everything that it finds there, but deleted modules must not be packed.
    copies = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for base in (ROOT / "build").glob("*-torch-*"):
        gone = base / copies / "axonn_ext" / "gone"
        gone.mkdir(parents=True, exist_ok=True)
        (gone / "__init__.py").touch()
    built = list((ROOT / "axonn_ext").glob(f"*{SUFFIX}"))
    # If the checkout was built without the CUDA parts, so is the wheel: they would take minutes.
    left_out = extension.left_out().get("_cuda")
    settings = {"AXONN_CUDA": "0", "AXONN_CUDA_REASON": left_out} if left_out else {}
    # A ninja of another version, e.g. the system's, would recompile everything.
    decoy = folder / "bin" / "ninja"
    decoy.parent.mkdir()
    decoy.write_text("#!/bin/sh\necho 'the ninja of the PATH was used'; exit 1\n")
    decoy.chmod(0o755)
    settings["PATH"] = os.pathsep.join([str(decoy.parent), os.environ["PATH"]])
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    output = run(*pip, "-w", folder, ROOT, cwd=folder, **settings)
    (wheel,) = folder.glob("*.whl")
    names = {path.name for path in built}
    return WheelBuild(wheel, names, min(path.stat().st_mtime for path in built), output)


@pytest.fixture(scope="module")
def wheel(wheel_build: WheelBuild) -> Path:
    return wheel_build.wheel


def test_wheel_of_a_tree_that_is_built_compiles_nothing(wheel_build: WheelBuild) -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    edited = max(path.stat().st_mtime for path in [*sources, ROOT / "setup.py"])
    if edited > wheel_build.build_seconds:
        pytest.skip("the sources were edited since they were built")
    compiled = re.findall(r"^ *\[\d+/\d+\] .*", wheel_build.output, re.MULTILINE)
    assert compiled == []
    num_compilations = 1 + len(wheel_build.modules)  # the core, and each module
    assert wheel_build.output.count("ninja: no work to do.") == num_compilations


def test_wheel_holds_the_package_and_nothing_else(wheel_build: WheelBuild) -> None:
    wheel = wheel_build.wheel
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.endswith(".so")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "axonn_ext").rglob("*")
        if path.suffix in (".py", ".pyi", ".toml") or path.name == "py.typed"
    }
    assert compiled == {f"axonn_ext/{name}" for name in wheel_build.modules}
    assert f"axonn_ext/_C{SUFFIX}" in compiled
    assert {name for name in names if not name.endswith(".so")} == sources
    assert "axonn_ext/py.typed" in names


def install(wheel: Path, prefix: Path) -> Path:
    """A new environment with the wheel, which also finds the running one's dependencies."""
    venv.create(prefix, with_pip=False)
    run(
        *(sys.executable, "-m", "pip", "--python", prefix / "bin" / "python"),
        *("install", "--no-deps", "--no-index", wheel),
        cwd=prefix,
    )
    # Python searches the folders named in a .pth file, but does not run their own .pth files, so
    # that the finder of an editable install is not active.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages,) = prefix.glob("lib/python3*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return prefix


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment").resolve())


@pytest.mark.parametrize("world_size", [1, 2])
def test_installed_wheel_runs_an_op(installed: Path, tmp_path: Path, world_size: int) -> None:
    script = tmp_path / "use_the_wheel.py"
    script.write_text(USE_THE_WHEEL)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    ranks = [
        subprocess.Popen(
            [
                *(installed / "bin" / "python", script, str(rank), str(world_size)),
                *(tmp_path / "store", installed, project()["version"]),
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)


def test_installed_command_line_is_there(installed: Path) -> None:
    assert (installed / "bin" / "axonn-ext").is_file()


# --- The sdist ------------------------------------------------------------------------------------

BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "nvcc", "ninja", "git")


def without_metadata(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_wheel_of_the_sdist_trains_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", BUILD_SDIST, tmp_path, cwd=ROOT, AXONN_CUDA="0")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    (source,) = (tmp_path / "elsewhere").iterdir()
    assert not (source / ".git").exists() and not (source / "build").exists()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, "-w", tmp_path, source, cwd=tmp_path, AXONN_CUDA="0")
    (built,) = tmp_path.glob("*.whl")
    ours = {name for name in without_metadata(wheel) if not Path(name).match("_cuda*.so")}
    assert without_metadata(built) == ours

    bin_ = install(built, tmp_path / "environment") / "bin"
    assert [name for name in COMPILERS if shutil.which(name, path=str(bin_))] == []
    options = ["--nproc", "2", "--grid", "x=2", "--out", str(tmp_path / "run"), *small()]
    run(bin_ / "axonn-ext", "train", *options, cwd=tmp_path, PATH=str(bin_))
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in steps if '"loss"' in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert "CUDA parts" in run(bin_ / "axonn-ext", "doctor", cwd=tmp_path, PATH=str(bin_))
