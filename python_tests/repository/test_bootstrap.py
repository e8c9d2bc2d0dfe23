"""tools/bootstrap.py, run as by `make`: a tiny checkout, a tiny torch, no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from limits import HANG_SECONDS
from loading import load

ROOT = Path(__file__).resolve().parents[2]
bootstrap_py = load("tools/bootstrap.py")

PYPROJECT = """
[build-system]
requires = []
[project]
dependencies = ["torch>=2.11,<2.16", "beside"]
[project.optional-dependencies]
test = []
"""


def make_wheel(folder: Path, name: str, version: str, *, source: str, requires: str = "") -> Path:
    """Writes a wheel with one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(file, text)
    return path


def make_checkout(folder: Path) -> Path:
    """Copies the parts of a checkout that bootstrap needs to make the environment."""
    (folder / "tools").mkdir(parents=True)
    for name in ("bootstrap.py", "find_cuda.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def bootstrap(checkout: Path, python: Path | str, index: Path, **settings: str) -> str:
    """Runs the step `environment`, with a pip that finds packages only in `index`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "TORCH"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    result = subprocess.run(
        [str(python), str(checkout / "tools" / "bootstrap.py"), "environment"],
        env=kept | offline | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# torch.__version__, and the version of the distribution, under which an index lists it.
PYPI = ("2.13.0+cu130", "2.13.0")
LOCAL = ("2.13.0", "2.13.0+cpu")


@pytest.mark.parametrize(
    ("module_version", "version"),
    [pytest.param(*PYPI, id="pypi"), pytest.param(*LOCAL, id="local", marks=pytest.mark.slow)],
)
def test_torch_that_is_installed_is_held_by_the_version_of_the_index(
    tmp_path: Path, module_version: str, version: str
) -> None:
    index = tmp_path / "index"
    make_wheel(index, "torch", version, source=f"__version__ = {module_version!r}\n")
    make_wheel(index, "torch", "2.14.0", source="__version__ = '2.14.0'\n")
    make_wheel(index, "beside", "1.0", source="", requires="torch>=2.11")
    checkout = make_checkout(tmp_path / "checkout")
    output = bootstrap(checkout, sys.executable, index, TORCH=f"torch=={version}")
    assert f"installing the dependencies, next to torch {version}\n" in output
    assert (checkout / ".venv" / "constraints.txt").read_text() == f"torch=={version}\n"
    program = "import beside, torch; print(torch.__version__)"
    python = checkout / ".venv" / "bin" / "python"
    assert subprocess.check_output([python, "-c", program], text=True) == f"{module_version}\n"
    # Finished steps are skipped.
    assert bootstrap(checkout, sys.executable, index) == ""


@pytest.mark.slow
def test_torch_of_the_base_python_is_held_by_the_version_of_the_index(tmp_path: Path) -> None:
    index = tmp_path / "index"
    make_wheel(index, "beside", "1.0", source="", requires="torch>=2.11")
    base = tmp_path / "base"
    venv.create(base, with_pip=False)
    module_version, version = PYPI
    source = f"__version__ = {module_version!r}\n"
    wheel = make_wheel(tmp_path, "torch", version, source=source)
    (site_packages,) = base.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    checkout = make_checkout(tmp_path / "checkout")
    output = bootstrap(checkout, base / "bin" / "python", index)
    assert f"using the torch {version} of" in output
    assert (checkout / ".venv" / "constraints.txt").read_text() == f"torch=={version}\n"


@pytest.mark.parametrize("target", ["lint", "format"])
def test_linters_are_those_that_the_python_of_venv_imports(target: str) -> None:
    """Linters that .venv inherits from its base Python have no scripts in .venv/bin."""
    listed = subprocess.check_output(["make", "--dry-run", target], cwd=ROOT, text=True)
    linters = [line for line in listed.splitlines() if re.search("ruff|mypy|clang", line)]
    assert linters and all(line.startswith(".venv/bin/python ") for line in linters)


# --- Where the CUDA parts are compiled ------------------------------------------------------------


DRIVER = """
int cuInit(unsigned flags) { return %d; }
int cuDeviceGetCount(int* count) { *count = %d; return 0; }
"""


@pytest.mark.parametrize(
    ("status", "count", "why"),
    [
        (None, None, "this machine has no NVIDIA driver"),
        (100, 1, "the NVIDIA driver finds no GPU that works (error 100)"),
        (0, 0, "the NVIDIA driver finds no GPU"),
        (0, 2, None),
    ],
)
def test_a_gpu_is_what_a_driver_finds(
    tmp_path: Path, status: int | None, count: int | None, why: str | None
) -> None:
    driver = tmp_path / "libcuda.so.1"
    if status is None:
        driver.write_text("")  # hides a driver of this machine
    else:
        compile_ = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(driver)]
        subprocess.run(compile_, input=DRIVER % (status, count), text=True, check=True)
    program = "import bootstrap; print(repr(bootstrap.why_no_gpu()), bootstrap.build_settings())"
    kept = {k: v for k, v in os.environ.items() if k != "AXONN_CUDA"}
    environment = kept | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "tools")}

    def run(**settings: str) -> str:
        return subprocess.check_output(
            [sys.executable, "-c", program], env=environment | settings, text=True
        )

    found, _, settings = run().partition(" {")
    assert found == repr(why)
    assert ("'AXONN_CUDA': '0'" in settings) == (why is not None)
    assert why is None or f"{why}; AXONN_CUDA=1 make build compiles them" in settings
    assert run(AXONN_CUDA="1").endswith(" {}\n")  # an explicit setting is kept


# --- Which torches and Pythons are supported ------------------------------------------------------


def test_all_places_name_the_same_torches() -> None:
    first, end = (".".join(map(str, version)) for version in bootstrap_py.SUPPORTED_TORCH)
    assert f'"torch>={first},<{end}"' in (ROOT / "pyproject.toml").read_text()
    torches = load("tools/matrix.py").TORCHES.split()
    newest = torches[-1]
    major, minor = map(int, newest.split("."))
    assert (torches[0], (major, minor + 1)) == (first, bootstrap_py.SUPPORTED_TORCH[1])
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"{first} to {newest}" in (ROOT / page).read_text()


def test_all_places_name_the_same_oldest_python() -> None:
    oldest = load("tools/matrix.py").PYTHONS.split()[0].removeprefix("python")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["requires-python"] == f">={oldest}"
    assert pyproject["tool"]["mypy"]["python_version"] == oldest
    assert f"Python {oldest} or newer" in (ROOT / "docs/install.md").read_text()
    assert f"older than {oldest}" in (ROOT / "Makefile").read_text()


# --- When the extension is built again ------------------------------------------------------------

Key = Callable[..., str]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Key:
    """`key(settings)`: extension_key without CUDA settings, and without CUDA files."""
    for name in ("AXONN_CUDA", *bootstrap_py.SETUP_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(bootstrap_py, "CONSTRAINTS", tmp_path / "constraints.txt")
    bootstrap_py.CONSTRAINTS.write_text("torch==2.13.0\n")

    def get(**settings: str) -> str:
        return bootstrap_py.extension_key(settings, [str(tmp_path / "site")])

    return get


def test_a_gpu_that_comes_is_a_reason_to_build_again(key: Key) -> None:
    without = key(AXONN_CUDA="0", AXONN_CUDA_REASON="no GPU")
    assert without == key(AXONN_CUDA="0", AXONN_CUDA_REASON="no GPU")
    assert without != key()


@pytest.mark.parametrize(
    "name",
    ["TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "CUTLASS_HOME", "AXONN_DEBUG_INFO"],
)
def test_what_setup_py_is_told_is_a_reason_to_build_again(
    key: Key, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = [key()]
    for value in ("9.0", "12.0"):
        monkeypatch.setenv(name, value)
        keys.append(key())
        assert keys[-1] == key()
    assert len(set(keys)) == 3


def test_what_setup_py_finds_of_cuda_is_a_reason_to_build_again(key: Key, tmp_path: Path) -> None:
    keys = [key()]
    for name in (
        "bin/nvcc",
        "site/cutlass_library/source/include/cutlass/cutlass.h",
        "site/nvidia/cu13/include/nccl.h",
        "site/nvidia/cu13/include/cccl/cuda/std/cstdint",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
        keys.append(key())
        assert keys[-1] == key()
    os.utime(tmp_path / "bin" / "nvcc", (1, 1))  # a different nvcc at the same path
    assert len({*keys, key()}) == len(keys) + 1
