"""Loads the compiled extension and hands it the settings. Everything else imports this first."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import zlib
from pathlib import Path
from types import ModuleType

import torch

from axonn_ext._version import __version__
from axonn_ext.kernels import host, verified
from axonn_ext.spec import settings

try:
    from axonn_ext import _C
except ImportError as error:
    raise ImportError(
        "axonn_ext's compiled extension cannot be loaded. Build it against the torch that is "
        f"installed here (torch {torch.__version__}): pip install --no-build-isolation -e . "
        f"(the cause: {error})",
        name="axonn_ext._C",
    ) from error


def _load_cuda(name: str) -> ModuleType | None:
    """Loads a module of CUDA parts, which registers kernels; returns None if it is not built."""
    if importlib.util.find_spec(f"axonn_ext.{name}") is None:
        return None
    try:
        return importlib.import_module(f"axonn_ext.{name}")
    except ImportError as error:
        raise ImportError(
            "axonn_ext was built with CUDA parts, which the torch that is installed here "
            f"({torch.__version__}, {host.gpu_runtime() or 'a CPU build'}) cannot load. Build "
            f"it again: pip install --no-build-isolation . (the cause: {error})",
            name=f"axonn_ext.{name}",
        ) from error


cuda = _load_cuda("_cuda")
cuda_sm90 = _load_cuda("_cuda_sm90")

algorithm_candidates = _C.algorithm_candidates
all_say_the_same = _C.all_say_the_same
enter_warm_up = _C.enter_warm_up
leave_warm_up = _C.leave_warm_up
tuning_choices = _C.tuning_choices
clear_tuning_choices = _C.clear_tuning_choices
waited_seconds = _C.waited_seconds
left_out = _C.left_out


def configure(loaded: settings.Settings, *, suggest_verify: bool = True) -> None:
    """Hands the settings to C++. They hold for groups and signatures first used from now on.

    The time limit also holds for earlier groups whose ranks share no memory.

    suggest_verify: rank 0 warns once if "auto" could measure more after `axonn-ext verify`
    """
    links = [f"{axis} emulated at {speed:g} GB/s" for axis, speed in loaded.emulated_links.items()]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    parts = [host.processor(), cores, *host.nvidia_gpus(), *host.amd_gpus(), *links]
    unlocked = find_unlocked(loaded)
    launch = settings.launch_environment()
    _C.configure(
        timeout_seconds=loaded.timeout_seconds,
        symmetric_memory_bytes=loaded.symmetric_memory_bytes,
        fused_nccl_sms=loaded.fused_nccl_sms,
        fused_free_sms=loaded.fused_free_sms,
        graphs_in_turn=loaded.graphs_in_turn,
        cache_dir=os.fsencode(loaded.cache_dir),  # file names may have any bytes
        product_kernels=list(unlocked.product_kernels),
        unverified_kernels=list(unlocked.unverified),
        verified_fused_ranks=unlocked.fused_ranks,
        suggest_verify=suggest_verify
        and unlocked.suggest_verify
        and (launch is None or launch.rank == 0),
        machine=", ".join(parts),
        torch=torch.__version__,
        axonn_ext=__version__,
        emulated_links={axis: speed * 1e9 for axis, speed in loaded.emulated_links.items()},
        debug_collectives=loaded.debug_collectives,
    )


def extension_path() -> str:
    """Returns the file of the compiled extension."""
    return str(_C.__file__)


def symmetric_memory_bytes_in_use() -> int:
    """Returns the bytes of symmetric memory this rank uses in all groups, including on GPUs."""
    on_gpus = 0 if cuda is None else int(cuda.symmetric_workspace_bytes())
    return int(_C.symmetric_memory_bytes_in_use()) + on_gpus


def release_workspaces() -> None:
    """Frees the GPU memory that the fused ops of this process hold between calls.

    Each process group whose fused ops run on GPUs has a workspace, sized for its largest call so
    far. It is freed once its calls are done, unless a CUDA graph has captured it. The next fused
    call of a group makes another one, like its first call.

    Collective: every rank of every group with a workspace must call it between the same two calls.
    On the CPU it does nothing.

    Raises: RuntimeError while a CUDA graph is captured, and if a rank does not make the call within
        AXONN_TIMEOUT_SECONDS.
    """
    if cuda is not None:
        cuda.release_workspaces()


def stamp_keys() -> list[verified.Key]:
    """Returns the keys of this machine's stamps, one per GPU model."""
    gpus = host.nvidia_gpus() if host.runs_cuda() else []
    if not gpus:
        return []
    modules = [Path(str(module.__file__)) for module in (cuda, cuda_sm90) if module is not None]
    # "fused" runs Triton kernels where there are no CUTLASS ones.
    modules += sorted((Path(__file__).parent / "triton").glob("*.py"))
    checksum = 0
    for path in modules:
        checksum = zlib.crc32(path.read_bytes(), checksum)
    # This call of torch needs no device.
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return [
        verified.Key(
            gpu=gpu,
            driver=host.nvidia_driver(),
            torch=torch.__version__,
            nccl=".".join(map(str, nccl)),
            triton=_version_of("triton"),
            axonn_ext=f"{__version__}+{checksum:08x}",
        )
        for gpu in gpus
    ]


def find_unlocked(loaded: settings.Settings) -> verified.Unlocked:
    """Returns the kernels that "auto" may measure on this machine's GPUs."""
    if not (host.runs_cuda() and host.nvidia_gpus()):
        return verified.unlocked(loaded.product_kernels, [])
    if not verified.any_kept(loaded.cache_dir):  # then the keys are not needed
        return verified.unlocked(loaded.product_kernels, [None])
    found = [verified.find(loaded.cache_dir, key) for key in stamp_keys()]
    return verified.unlocked(loaded.product_kernels, found)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


configure(settings.load())
