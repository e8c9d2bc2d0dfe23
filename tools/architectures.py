"""Decides which extension modules setup.py builds of the CUDA code, for which architectures."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from find_cuda import BuildError

DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"


@dataclass(frozen=True)
class KernelModule:
    """An extension module of CUDA code; all its files are compiled with the same flags."""

    name: str
    flags: tuple[str, ...]
    sources: list[str] = field(default_factory=list)


def gencode_flags(arch_list: str | None) -> tuple[str, ...]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, as torch reads it: versions, names, and "native".

    Raises: BuildError for an entry that this torch does not know, or "native" without a GPU.
    """
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    words = re.split(r"[;, ]+", (arch_list or DEFAULT_ARCHITECTURES).strip("; ,"))
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(words)  # the only place torch reads it from
    try:
        flags = _get_cuda_arch_flags()
    except (ValueError, IndexError) as error:  # IndexError: "native" finds no GPU
        why = "there is no GPU here" if isinstance(error, IndexError) else str(error)
        raise BuildError(
            "TORCH_CUDA_ARCH_LIST must list versions such as 8.0, 9.0a or 9.0+PTX, or names such "
            f"as Hopper, separated by semicolons, got {arch_list!r}: {why}"
        ) from None
    finally:
        if asked is None:
            del os.environ["TORCH_CUDA_ARCH_LIST"]
        else:
            os.environ["TORCH_CUDA_ARCH_LIST"] = asked

    def version_then_ptx(flag: str) -> tuple[int, bool]:
        return int(re.findall(r"\d+", flag)[0]), "code=compute" in flag

    return tuple(sorted(flags, key=version_then_ptx))


def kernel_modules(sources: Sequence[str], arch_list: str | None) -> list[KernelModule]:
    """The modules for the .cu files: _cuda, and _cuda_sm90 for files named *_sm90.cu.

    Files named for an architecture use its special instructions, so they must not be compiled with
    the flags of another. From 9.0 on, such code runs on that version only (sm_90a). It includes PTX
    if TORCH_CUDA_ARCH_LIST asks for it. Modules for architectures not in that list are left out.
    """
    flags = gencode_flags(arch_list)
    asked = {match[1] for flag in flags if (match := re.search(r"code=sm_(\d+)", flag))}
    with_ptx = {match[1] for flag in flags if (match := re.search(r"code=compute_(\d+)", flag))}
    modules = {"": KernelModule("axonn_ext._cuda", flags)}
    for source in sources:
        match = re.search(r"_sm(\d+)\.cu$", source)
        number = match[1] if match else ""
        if number and number not in asked:
            continue
        if number not in modules:
            real = number + ("a" if int(number) >= 90 else "")
            codes = (f"sm_{real}", *([f"compute_{real}"] if number in with_ptx else []))
            only = tuple(f"-gencode=arch=compute_{real},code={code}" for code in codes)
            modules[number] = KernelModule(f"axonn_ext._cuda_sm{number}", only)
        modules[number].sources.append(source)
    return list(modules.values())


def choose_modules(
    sources: Sequence[str], arch_list: str | None, *, lacking: str | None, demanded: bool
) -> tuple[list[KernelModule], dict[str, str]]:
    """The modules to build, and the names of those left out, each with the reason.

    lacking   why this machine cannot build the modules for one architecture; None if it can
    demanded  whether the CUDA parts must be built

    Raises: BuildError if the CUDA parts are demanded and a module of TORCH_CUDA_ARCH_LIST cannot
        be built.
    """
    modules = kernel_modules(sources, arch_list)
    built = {module.name for module in modules}
    left_out = {}
    for number in sorted(set(re.findall(r"_sm(\d+)\.cu$", "\n".join(sources), re.MULTILINE))):
        if f"axonn_ext._cuda_sm{number}" not in built:
            version = f"{number[:-1]}.{number[-1]}"
            left_out[f"_cuda_sm{number}"] = f"{version} is not in TORCH_CUDA_ARCH_LIST={arch_list}"
    if lacking and len(modules) > 1:
        if demanded:
            raise BuildError(f"AXONN_CUDA=1 demands the CUDA parts, but {lacking}")
        left_out |= {module.name.rpartition(".")[2]: lacking for module in modules[1:]}
        modules = modules[:1]
    return modules, left_out
