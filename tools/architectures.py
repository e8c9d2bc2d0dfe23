"""Which extension modules setup.py makes of the CUDA code, and for which architectures."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from find_cuda import BuildError

DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"


@dataclass(frozen=True)
class KernelModule:
    """An extension module of CUDA code: all of its files are compiled with the same flags."""

    name: str
    flags: tuple[str, ...]
    sources: list[str] = field(default_factory=list)


def gencode_flags(arch_list: str | None) -> tuple[str, ...]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, which torch reads: versions, names, and "native".

    Raises: BuildError for what this torch does not know, or "native" without a GPU.
    """
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    words = re.split(r"[;, ]+", (arch_list or DEFAULT_ARCHITECTURES).strip("; ,"))
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(words)  # torch takes it from nowhere else
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
    """The modules that the .cu files go to: _cuda, and _cuda_sm90 for files named *_sm90.cu.

    Those use what only that architecture has, and must not meet the flags of another; from 9.0 on
    such code is for that version alone (sm_90a). PTX comes with it where it is asked for. Modules
    whose architecture is not asked for are left out.
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
    """The modules to build of the .cu files, and of those left out the names and the reasons.

    lacking  what the modules of one architecture need and this machine has not

    Raises: BuildError if all are demanded and one that is asked for lacks something.
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
