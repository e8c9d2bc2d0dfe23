"""Loads the compiled extension and hands it the settings. Everything else imports this first."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
from pathlib import Path
from types import ModuleType

import torch

from axonn_ext import settings
from axonn_ext._version import __version__

try:
    from axonn_ext import _C
except ImportError as error:
    raise ImportError(
        "axonn_ext's compiled extension cannot be loaded. Build it against the torch that is "
        f"installed here (torch {torch.__version__}): pip install --no-build-isolation -e ."
    ) from error


def _load_cuda(name: str) -> ModuleType | None:
    """A module of CUDA parts, which registers kernels; None where it is not built."""
    if importlib.util.find_spec(f"axonn_ext.{name}") is None:
        return None
    try:
        return importlib.import_module(f"axonn_ext.{name}")
    except ImportError as error:
        raise ImportError(
            "axonn_ext was built with CUDA parts, which the torch that is installed here "
            f"({torch.__version__}, CUDA {torch.version.cuda or 'none'}) cannot load. Build it "
            f"again: pip install --no-build-isolation . (the cause: {error})"
        ) from error


cuda = _load_cuda("_cuda")
cuda_sm90 = _load_cuda("_cuda_sm90")

enter_warm_up = _C.enter_warm_up
leave_warm_up = _C.leave_warm_up
tuning_choices = _C.tuning_choices
clear_tuning_choices = _C.clear_tuning_choices
waited_seconds = _C.waited_seconds
find_measurement = _C.find_measurement
keep_measurement = _C.keep_measurement
left_out = _C.left_out


def configure(loaded: settings.Settings) -> None:
    """Hands the settings to C++. They hold for groups, and signatures, met from now on."""
    links = [f"{axis} emulated at {speed:g} GB/s" for axis, speed in loaded.emulated_links.items()]
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", *_nvidia_gpus(), *links]
    _C.configure(
        timeout_seconds=loaded.timeout_seconds,
        symmetric_memory_bytes=loaded.symmetric_memory_bytes,
        fused_nccl_sms=loaded.fused_nccl_sms,
        cache_dir=os.fsencode(loaded.cache_dir),  # any bytes, as names of files may have
        product_kernels=list(loaded.product_kernels),
        machine=", ".join(parts),
        torch=torch.__version__,
        axonn_ext=__version__,
        emulated_links={axis: speed * 1e9 for axis, speed in loaded.emulated_links.items()},
    )


def extension_path() -> str:
    """Where the compiled extension lies."""
    return str(_C.__file__)


def symmetric_memory_bytes_in_use() -> int:
    """Bytes of symmetric memory that this rank has used in all of its groups, on GPUs as well."""
    on_gpus = 0 if cuda is None else int(cuda.symmetric_workspace_bytes())
    return int(_C.symmetric_memory_bytes_in_use()) + on_gpus


def _processor() -> str:
    """The model of this machine's processors: timings of another are of no use."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not on this kind of machine
    return platform.machine()


def _nvidia_gpus() -> list[str]:
    """The models of this machine's GPUs, from the driver's files: no device is touched."""
    models = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        match = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        models.add(match[1].strip() if match else "an NVIDIA GPU")
    return sorted(models)


configure(settings.load())
