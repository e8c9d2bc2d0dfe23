"""Writes the PTX of the Triton kernels for the GPU in software, and how to launch each.

    python3 tools/triton_ptx.py FOLDER           one kernel of each kind
    python3 tools/triton_ptx.py FOLDER --all     every kernel that tools/triton_check.py compiles

The kernels are those of tools/triton_check.py for sm_80 and sm_90. FOLDER gets a file for each, and
cases.txt. That has a line `case` for each kernel, followed by a line for each of its facts (file,
threads per block, bytes of dynamic shared memory, constants) and one for each of its parameters, in
order. docs/gpu_machine.md says how they are used.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton_check
from triton_check import KERNELS, NVIDIA, Variant

WARP_SIZE = 32


def kind_of(variant: Variant) -> Variant:
    """The variant without its tile sizes: one kernel is written for each kind."""
    config = variant.config
    if config is None:
        return variant
    kept = replace(config, block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=1, group_m=1)
    return replace(variant, config=kept)


def chosen(*, every: bool) -> list[Variant]:
    variants = [v for v in dict.fromkeys(triton_check.variants()) if v.architecture in NVIDIA]
    return variants if every else list({kind_of(v): v for v in reversed(variants)}.values())


def params_of(name: str, kind: str) -> list[tuple[str, str]]:
    """The PTX parameters of a parameter in the source; a tensor descriptor has several."""
    if not kind.startswith("tensordesc"):
        return [(name, "pointer" if kind.startswith("*") else kind)]
    num_dims = kind.partition("[")[2].count(",") + 1
    shape = [(f"{name}.shape{dim}", "i32") for dim in range(num_dims)]
    strides = [(f"{name}.stride{dim}", "i64") for dim in range(num_dims)]
    return [(f"{name}.map", "map"), *shape, *strides]


def lines_of(variant: Variant, compiled: Any, file: str) -> list[str]:
    """The lines of cases.txt for a kernel; `compiled` is the result of triton.compile."""
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(f"{variant.name} needs scratch memory, which no case has")
    constants = triton_check.constants_of(variant)
    params = []
    for name in KERNELS[variant.kernel].arg_names:
        if name not in constants:
            params += params_of(name, triton_check.type_of(name, variant))
    # Triton appends two pointers to scratch memory, which are null.
    params += [("global_scratch", "pointer"), ("profile_scratch", "pointer")]
    facts = {
        "file": file, "kernel": variant.kernel, "architecture": variant.architecture,
        "dtype": variant.dtype, "layout": variant.layout, "bias": int(variant.bias),
        "aligned": int(variant.aligned),
        "ones": "".join(variant.ones) or "-", "columns": int(variant.columns),
        "threads": WARP_SIZE * metadata.num_warps, "shared": metadata.shared,
    }  # fmt: skip
    facts |= {name: int(value) for name, value in constants.items() if isinstance(value, int)}
    maps = getattr(metadata, "tensordesc_meta", None) or []
    names = [name.partition(".")[0] for name, kind in params if kind == "map"]
    for name, described in zip(names, maps, strict=True):
        facts[f"{name}.box"] = ",".join(map(str, described["block_size"]))
        facts[f"{name}.swizzle"] = described["swizzle"]
    return [
        f"case {variant.name.replace(' ', '_')}",
        *(f"fact {name} {value}" for name, value in facts.items()),
        *(f"param {name} {kind}" for name, kind in params),
    ]


def write(variant: Variant, folder: Path) -> list[str]:
    """Compiles the variant, and returns its lines of cases.txt."""
    compiled = triton_check.compile_variant(variant)
    file = f"{variant.name.replace(' ', '_')}.ptx"
    (folder / file).write_text(compiled.asm["ptx"])
    return lines_of(variant, compiled, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every tile size")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    variants = chosen(every=options.all)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        cases = list(pool.map(write, variants, [options.folder] * len(variants), chunksize=4))
    text = "".join(f"{line}\n" for case in cases for line in case)
    (options.folder / "cases.txt").write_text(text)
    print(f"triton-ptx: wrote {len(cases)} kernels for {' and '.join(NVIDIA)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
