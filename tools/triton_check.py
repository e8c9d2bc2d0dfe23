"""Compiles the Triton kernels for GPUs, without one, and inspects the machine code.

    python3 tools/triton_check.py            run by make triton-check
    python3 tools/triton_check.py --verbose  print a line for every kernel

For sm_80 and sm_90, it checks each kernel with its dtypes, layouts and tile sizes:
- no stack and no local memory (no spills; for older Tritons, no more than SPILLS_OF lists);
- no more registers than the limits below, and no more shared memory than tile_configs.py predicts;
- tensor core instructions, and TMA loads where descriptors are used;
- flags are read with acquire and raised with release, at system scope.
For gfx90a and gfx942 (AMD), it checks that the plain matmul has no spills and no scratch memory,
uses matrix instructions (MFMA), and fits into shared memory. The interpreter's tests check the
results, as does python_tests/gpu/test_gpu_triton.py on a GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # import the checkout's package, installed or not

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from axonn_ext.kernels.triton import (  # noqa: E402
    all_gather_matmul,
    matmul,
    matmul_reduce_scatter,
    tile_configs,
)
from axonn_ext.kernels.triton.tile_configs import Problem, TileConfig  # noqa: E402

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
SERIES = ".".join(map(str, VERSION))
KERNELS = {
    "matmul": matmul.matmul_kernel,
    "split_k_reduce": matmul.split_k_reduce_kernel,
    "all_gather_matmul": all_gather_matmul.all_gather_matmul_kernel,
    "inner_gather_matmul": all_gather_matmul.inner_gather_matmul_kernel,
    "multiply_and_send": matmul_reduce_scatter.multiply_and_send_kernel,
}
GATHERS = ("all_gather_matmul", "inner_gather_matmul")
FUSED = (*GATHERS, "multiply_and_send")
NVIDIA = (tile_configs.SM80.name, tile_configs.SM90.name)
AMD = tuple(tile_configs.AMD_LIMITS)
LIMITS = {
    limits.name: limits
    for limits in (tile_configs.SM80, tile_configs.SM90, *tile_configs.AMD_LIMITS.values())
}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Spills:
    """The known spills of a Triton version; more than these would be our fault."""

    kernels: int  # number of kernels with a stack
    stack_bytes: int  # maximum stack of a kernel
    loads_in_loop: int  # maximum loads from the stack per step of the loop over K; never a store


# The tile sizes are chosen so that the code of Triton 3.9 does not spill. In some kernels of older
# versions, ptxas keeps one to ten registers of a tile on a stack. The cause is their PTX: given it,
# the ptxas of 3.9 (12.9) spills as their own (12.8) does, and theirs spills nothing given the PTX
# of 3.9. These registers are stored and loaded once per tile, or once in all. The loop over K loads
# some only if A and B are both transposed, with tiles of 128 x 256 on sm_80; with 3.7, twice for
# 128 products. With a small change of the kernels (tl.range's disable_licm), some spill less,
# others more. A version that is not listed must not spill.
SPILLS_OF = {
    (3, 6): Spills(9, 40, 5),
    (3, 7): Spills(11, 40, 2),
    (3, 8): Spills(1, 8, 0),
}
# Registers a thread may use (default 255: with 8 warps, the whole register file).
MAX_REGISTERS = {"split_k_reduce": 96}
MAX_SHARED = {"split_k_reduce": 4096}
# Parameters of 64 bits: addresses passed as integers, and times.
WIDE = re.compile(r"(pad|slot)\d?|epoch_at|failure|counters|timeout")
WORLD_SIZE = 4


@dataclass(frozen=True)
class Variant:
    """A kernel to compile, with the arguments that affect its code."""

    kernel: str
    architecture: str  # a key of LIMITS
    dtype: str = "bfloat16"
    config: TileConfig | None = None  # only of the kernels that multiply
    layout: str = "NN"
    bias: bool = False
    ones: tuple[str, ...] = ()  # arguments that are 1, which Triton turns into constants
    aligned: bool = True  # addresses and sizes are multiples of 16
    columns: bool = False  # the output of all_gather_matmul is column-major

    @property
    def name(self) -> str:
        words = [self.kernel, self.architecture, SHORT[self.dtype]]
        if self.config:
            words += [self.layout, self.config.name]
        words += ["bias"] * self.bias
        words += [f"{name}=1" for name in self.ones] + ["unaligned"] * (not self.aligned)
        words += ["columns"] * self.columns
        return " ".join(str(word) for word in words)


@dataclass(frozen=True)
class Found:
    """What a compiled variant uses, and its problems."""

    registers: int
    shared_bytes: int
    problems: tuple[str, ...]
    spills: str = ""  # spills known for this version


# --- What is compiled ----------------------------------------------------------------------------


def configs_of(architecture: str, dtype: str, **fields: Any) -> list[TileConfig]:
    """Every tile size legal for the architecture, without split K; `fields` are Problem's."""
    problem = Problem(8192, 8192, 8192, dtype, **fields)
    problem = replace(problem, vectors=problem.aligned)
    legal = tile_configs.legal_configs(problem, LIMITS[architecture])
    return [config for config in legal if config.split_k == 1]


def sample(configs: list[TileConfig]) -> list[TileConfig]:
    """Every tile size once, with descriptors if legal; the first few also with pointers."""
    by_pointer = [config for config in configs if not config.descriptors]
    by_descriptor = [config for config in configs if config.descriptors]
    return [*by_descriptor, *(by_pointer[:4] if by_descriptor else by_pointer)]


def variants() -> Iterator[Variant]:
    for architecture in AMD:
        yield from amd_variants(architecture)
    for architecture in NVIDIA:
        for dtype in SHORT:
            yield from matmul_variants(architecture, dtype)
        for kernel, dtype in itertools.product(FUSED, ("bfloat16", "float16")):
            yield from fused_variants(Variant(kernel, architecture, dtype))


def amd_variants(architecture: str) -> Iterator[Variant]:
    """The kernels that a Linear may use: bfloat16 and float16, with and without a bias."""
    base = Variant("matmul", architecture, "bfloat16")
    configs = configs_of(architecture, "bfloat16")
    for config in configs:
        yield replace(base, config=config)
    for layout in ("NT", "TN"):
        yield replace(base, config=configs[0], layout=layout, bias=True)
    yield replace(base, config=configs[0], dtype="float16")
    yield replace(base, config=replace(configs[0], split_k=4))
    scattered = configs_of(architecture, "bfloat16", aligned=False)[0]
    yield replace(base, config=scattered, layout="TN", aligned=False)
    yield Variant("split_k_reduce", architecture, "bfloat16", None, "NN", True)


def fused_variants(base: Variant) -> Iterator[Variant]:
    configs = configs_of(base.architecture, base.dtype, fused=True)
    every = base.dtype == "bfloat16"  # for other dtypes, only the heuristic's first choice
    for config in sample(configs) if every else configs[:1]:
        yield replace(base, config=config)
    # The gathered operand arrives in parts along K, so its other dimension is contiguous.
    layouts = ("TT", "TN") if base.kernel == "inner_gather_matmul" else ("NT",)
    for layout in layouts:
        yield replace(base, config=configs[0], layout=layout)
    if base.kernel == "multiply_and_send":
        yield replace(base, config=configs[0], layout="TN")
    if base.kernel == "all_gather_matmul":
        yield replace(base, config=configs[0], layout="NT", columns=True)
    scattered = configs_of(base.architecture, base.dtype, fused=True, aligned=False)
    for config in scattered[:2] if every else scattered[:1]:
        yield replace(base, config=config, aligned=False)


def matmul_variants(architecture: str, dtype: str) -> Iterator[Variant]:
    configs = configs_of(architecture, dtype)
    best, base = configs[0], Variant("matmul", architecture, dtype)
    if dtype == "float16":  # its code differs from bfloat16's only in the instructions' names
        yield replace(base, config=best)
        return
    by_pointer = next(config for config in configs if not config.descriptors)
    scattered = configs_of(architecture, dtype, aligned=False)
    for config in configs:
        yield replace(base, config=config)
    for layout in ("NT", "TN", "TT"):
        yield replace(base, config=best, layout=layout)
    for config in scattered:
        yield replace(base, config=config, layout="SS", aligned=False)
    yield replace(base, config=scattered[0], layout="TN", aligned=False)
    for config in {best, by_pointer}:
        yield replace(base, config=config, bias=True)
    yield Variant("split_k_reduce", architecture, dtype, None, "NN", True)
    yield replace(base, config=replace(best, split_k=4))
    yield replace(base, config=by_pointer, ones=("m",), bias=True)
    yield replace(base, config=scattered[0], ones=("m", "n", "k"), aligned=False)


# --- Compiling -----------------------------------------------------------------------------------


def constants_of(variant: Variant) -> dict[str, Any]:
    """The values of constexpr parameters, and of arguments that Triton turns into constants."""
    constants: dict[str, Any] = dict.fromkeys(variant.ones, 1)
    constants |= {
        "HAS_BIAS": variant.bias,
        "WORLD": WORLD_SIZE, "INTERPRET": False, "UPCAST": False,
        "DTYPE": getattr(triton.language, variant.dtype), "ALIGNED": variant.aligned,
        "stride_cm" if variant.columns else "stride_cn": 1,
        "TRANSPOSED_A": variant.layout[0] == "T", "TRANSPOSED_B": variant.layout[1] == "T",
        "BLOCK_M": matmul.REDUCE_M, "BLOCK_N": matmul.REDUCE_N, "SPLIT_K": 4,
    }  # fmt: skip
    if not variant.bias:
        constants["bias_ptr"] = None
    for operand, (by_row, by_column) in zip(
        variant.layout, (("stride_am", "stride_ak"), ("stride_bk", "stride_bn")), strict=True
    ):
        if operand != "S":
            constants[by_row if operand == "T" else by_column] = 1
    if variant.config:
        constants |= {
            "BLOCK_M": variant.config.block_m, "BLOCK_N": variant.config.block_n,
            "BLOCK_K": variant.config.block_k, "GROUP_M": variant.config.group_m,
            "SPLIT_K": variant.config.split_k, "DESCRIPTORS": variant.config.descriptors,
        }  # fmt: skip
    return constants


def type_of(name: str, variant: Variant) -> str:
    """The type of a parameter that is not a constant."""
    dtype, config = SHORT[variant.dtype], variant.config
    if name in ("a", "b") and config and config.descriptors:
        rows, columns = (
            (config.block_m, config.block_k) if name == "a" else (config.block_k, config.block_n)
        )
        box = [columns, rows] if variant.layout["ab".index(name)] == "T" else [rows, columns]
        return f"tensordesc<{dtype}{box}>"
    if name == "parts_ptr" or (name == "c_ptr" and config and config.split_k > 1):
        return "*fp32"
    if name in ("a", "b") or name.endswith("_ptr"):
        return f"*{dtype}"
    return "i64" if WIDE.fullmatch(name) else "i32"


def compile_variant(variant: Variant) -> Any:
    kernel = KERNELS[variant.kernel]
    constants = constants_of(variant)
    signature, attributes, values = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        signature[name] = type_of(name, variant)
        specialised = variant.aligned and name not in getattr(kernel, "do_not_specialize", ())
        if specialised and not signature[name].startswith("tensordesc"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": 4}
    if variant.config:
        options = {
            "num_warps": variant.config.num_warps, "num_stages": variant.config.num_stages
        }  # fmt: skip
    limits = LIMITS[variant.architecture]
    target = (
        GPUTarget("hip", variant.architecture, limits.warp_size)
        if limits.is_amd
        else GPUTarget("cuda", limits.architecture, limits.warp_size)
    )
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=target, options=options)


# --- Looking -------------------------------------------------------------------------------------


def cuobjdump(*arguments: str | Path) -> str:
    """The output of the cuobjdump that comes with triton."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(word) for word in (program, *arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted_code(variant: Variant) -> list[tuple[str, str, str]]:
    """Patterns that the code must match: (kind of code, pattern, description)."""
    if LIMITS[variant.architecture].is_amd:
        return [("amdgcn", r"\bv_mfma_", "matrix instructions")] if variant.config else []
    wanted = []
    config = variant.config
    if config and variant.architecture == tile_configs.SM90.name and config.block_m >= 64:
        wanted.append(("sass", r"\bHGMMA\.", "warpgroups' tensor core instructions"))
    elif config:
        wanted.append(("sass", r"\bHMMA\.", "tensor core instructions"))
    if config and config.descriptors:
        wanted.append(("sass", r"\bUTMALDG\.", "TMA loads"))
    elif config and variant.aligned:
        wanted.append(("sass", r"\bLDGSTS\.", "asynchronous copies"))
    if variant.kernel in GATHERS:
        wanted += [
            ("ptx", r"ld\S*\.sys\.acquire|ld\.acquire\.sys", "acquire of flags"),
            ("sass", r"\bCCTL\.IVALL", "L1 cache invalidated behind it"),
            ("ptx", r"%globaltimer", "a clock that bounds waits"),
            ("sass", r"\bBPT\.TRAP", "a trap where a wait is in vain"),
        ]
    if variant.kernel in GATHERS and config and config.descriptors:
        wanted.append(("ptx", r"fence\.proxy\.async", "a fence before TMA loads"))
    if variant.kernel == "multiply_and_send":
        wanted += [
            ("ptx", r"atom\S*\.acq_rel\.sys\.|atom\S*\.sys\S*\.acq_rel\.", "a count of parts"),
            ("ptx", r"(atom|red)\S*\.release\.sys\.|atom\S*\.sys\S*\.release\.", "release"),
        ]
    return wanted


@dataclass(frozen=True)
class Code:
    """The compiled text by kind (ptx, sass, amdgcn), and the resources that it uses."""

    text: dict[str, str]
    registers: int
    spills: str  # empty: none
    stack_bytes: int = 0  # NVIDIA only; without local memory


def nvidia_code(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = cuobjdump("--dump-resource-usage", cubin.name)
        text = {"ptx": compiled.asm["ptx"], "sass": cuobjdump("--dump-sass", cubin.name)}
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump tells no use of resources: {usage}")
    registers, stack, local = (int(number) for number in match.groups())
    spills = f"a stack of {stack} and {local} bytes of local memory" if stack or local else ""
    return Code(text, registers, spills, 0 if local else stack)


def in_loops(sass: str, pattern: str) -> int | None:
    """The number of matching instructions in the loops over K; None if no loop has products."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    code = [(int(address, 16), text) for address, text in lines]
    loops = [
        (int(match[1], 16), at)
        for at, text in code
        if (match := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)) and int(match[1], 16) <= at
    ]
    innermost = set()
    for at, text in code:
        around = [loop for loop in loops if loop[0] <= at <= loop[1]]
        if around and re.search(r"\b(HMMA|HGMMA|FFMA)\b", text):
            innermost.add(min(around, key=lambda loop: loop[1] - loop[0]))
    found = [at for at, text in code if re.search(pattern, text)]
    if not innermost:
        return None
    return sum(any(begin <= at <= end for begin, end in innermost) for at in found)


def is_known(code: Code, spills: Spills | None) -> bool:
    """Whether these spills are within those known for the version."""
    if spills is None or not 0 < code.stack_bytes <= spills.stack_bytes:
        return False
    loads, stores = (in_loops(code.text["sass"], rf"\b{name}\b") for name in ("LDL", "STL"))
    return loads is not None and loads <= spills.loads_in_loop and stores == 0


def amd_code(compiled: Any) -> Code:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    counts = {}
    for name in names:
        match = re.search(rf"\.{name}:\s*(\d+)", text)
        if match is None:
            raise RuntimeError(f"the code's notes have no {name}")
        counts[name] = int(match[1])
    registers = counts.pop("vgpr_count")
    spills = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return Code({"amdgcn": text}, registers, spills)


def examine(variant: Variant) -> Found:
    """Compiles a variant and lists its problems."""
    limits = LIMITS[variant.architecture]
    try:
        compiled = compile_variant(variant)
        code = amd_code(compiled) if limits.is_amd else nvidia_code(compiled)
    except Exception as error:
        return Found(0, 0, (f"does not compile: {type(error).__name__}: {error}",))
    shared = int(compiled.metadata.shared)
    problems = [
        f"has no {what} ({pattern})"
        for kind, pattern, what in wanted_code(variant)
        if not re.search(pattern, code.text[kind])
    ]
    known = is_known(code, SPILLS_OF.get(VERSION))
    if code.spills and not known:
        problems.append(f"uses {code.spills}: it spills")
    # AMD has 512; if the compiler needs more, it spills.
    most = 512 if limits.is_amd else MAX_REGISTERS.get(variant.kernel, 255)
    if code.registers > most:
        problems.append(f"uses {code.registers} registers, at most {most} are expected")
    room = MAX_SHARED.get(variant.kernel, 0)
    if variant.config:
        element_bytes = tile_configs.DTYPE_BYTES[variant.dtype]
        room = tile_configs.shared_bytes(variant.config, element_bytes, amd=limits.is_amd)
    if shared > room:
        problems.append(f"uses {shared} bytes of shared memory, at most {room} are expected")
    return Found(code.registers, shared, tuple(problems), code.spills if known else "")


def too_many_spills(found: list[Found]) -> str:
    """A message if more kernels spill than known for the version; otherwise empty."""
    number = sum(bool(one.spills) for one in found)
    known = SPILLS_OF.get(VERSION)
    if known is None or number <= known.kernels:
        return ""
    return f"{number} kernels have a stack, at most {known.kernels} are known of this triton"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="a line for every kernel")
    parser.add_argument("--only", default="", help="those whose names match this pattern")
    options = parser.parse_args()
    start = time.monotonic()
    chosen = [v for v in dict.fromkeys(variants()) if re.search(options.only, v.name)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        found = list(pool.map(examine, chosen, chunksize=4))
    groups: dict[tuple[str, str], list[Found]] = collections.defaultdict(list)
    failed = 0
    for variant, one in zip(chosen, found, strict=True):
        groups[variant.kernel, variant.architecture].append(one)
        failed += bool(one.problems)
        if options.verbose or one.problems or one.spills:
            print(f"{variant.name}: {one.registers} registers, {one.shared_bytes} bytes shared")
        if one.spills:
            print(f"triton-check: {variant.name} uses {one.spills}, as triton {SERIES} is known to")
        for problem in one.problems:
            print(f"triton-check: error: {variant.name} {problem}")
    for (kernel, architecture), all_of in sorted(groups.items()):
        print(
            f"triton-check: {kernel}, {architecture}: {len(all_of)} compiled, at most "
            f"{max(one.registers for one in all_of)} registers and "
            f"{max(one.shared_bytes for one in all_of)} bytes of shared memory"
        )
    too_many = too_many_spills(found)
    if too_many:
        print(f"triton-check: error: {too_many}")
    if failed or not chosen:
        print(f"triton-check: error: {failed} of {len(chosen)} kernels failed")
    if failed or too_many or not chosen:
        return 1
    seconds = time.monotonic() - start
    print(f"triton-check: triton {triton.__version__} passed in {seconds:.0f} s; nothing was run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
