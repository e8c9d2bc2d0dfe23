"""The configs of our Triton kernels: all of them, those that are legal for a problem, and the best.

This module needs neither triton nor a device, so it can be tested anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

DTYPE_BYTES = {"bfloat16": 2, "float16": 2}
# A tensor descriptor needs this alignment of the base and of every stride but the last, which is 1.
DESCRIPTOR_ALIGNMENT = 16
MAX_BOX = 256  # the most elements of an edge of the box that one descriptor loads
MAX_WORKSPACE_BYTES = 256 << 20  # the limit of split-K's partial sums
MAX_SPLIT_K = 16
MAX_THREADS = 512  # the limit for one program, since more would leave each thread too few registers
# The most accumulators of a thread that must also hold the addresses of operands loaded element by
# element, or the state of a schedule. If both apply, the limit is half of this.
# tools/triton_check.py shows that more accumulators spill.
MAX_CROWDED_ACCUMULATORS = 64
# The most bytes that a thread loads element by element per step; half of this in fused kernels.
MAX_SCATTERED_BYTES = 128


@dataclass(frozen=True)
class TileConfig:
    """The tiling of a persistent matmul: output tile, depth of a step, warps per tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # the stages of shared memory between loads and math
    group_m: int = 8  # the rows of tiles that are computed together, for the L2 cache
    split_k: int = 1  # the parts of K, each with its own fp32 tile
    descriptors: bool = False  # whether to load by tensor descriptors (TMA) or by pointers

    @property
    def name(self) -> str:
        """The name in the cache on disk, like m128n256k64w8s3g8p1t."""
        return (
            f"m{self.block_m}n{self.block_n}k{self.block_k}w{self.num_warps}s{self.num_stages}"
            f"g{self.group_m}p{self.split_k}{'t' if self.descriptors else ''}"
        )


@dataclass(frozen=True)
class Problem:
    """The properties of C [m, n] = A [m, k] @ B [k, n] that matter for the choice of a config."""

    m: int
    n: int
    k: int
    dtype: str  # the dtype of A, B and C, a key of DTYPE_BYTES
    layout: str = "NN"  # of A, then B: N if rows are contiguous, T if columns are, S if neither are
    bias: bool = False
    aligned: bool = True  # whether tensor descriptors can read both operands
    vectors: bool = True  # whether pointers can read both in vectors, not element by element
    fused: bool = False  # whether it is fused with a collective; excludes split-K and bias

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a GPU, and the parameters of the model in `cost_us`."""

    architecture: int  # 80 for sm_80; for AMD in hexadecimal, 0x90A for gfx90a
    num_sms: int
    shared_bytes_per_block: int
    max_accumulators: int  # fp32 registers per thread, besides those for addresses and loops
    clock_ghz: float
    flops_per_cycle: float  # per SM for elements of 2 bytes
    l2_bytes_per_cycle: float  # from L2 into one SM
    registers_per_sm: int = 65536
    warp_size: int = 32  # 64 for AMD's wavefronts; AMD's compute units are called SMs here

    @property
    def is_amd(self) -> bool:
        return self.warp_size == 64

    @property
    def name(self) -> str:
        """The name of the architecture, like sm_90 or gfx90a."""
        return f"gfx{self.architecture:x}" if self.is_amd else f"sm_{self.architecture}"


# Source: CUDA C programming guide, compute capabilities; the whitepapers of A100 and H100. Clock
# and L2 bandwidth of sm_90 are those of csrc/core/gemm/launch_config.h: a test holds them equal,
# since kernels are also compiled where the extension is not built.
SM80 = DeviceLimits(80, 108, 163 * 1024, 128, 1.41, 2048, 47)
SM90 = DeviceLimits(90, 132, 227 * 1024, 128, 1.48, 4096, 43)
# Source: AMD's data sheets of MI250X (one of its two dies) and MI300X. It is a guess that a compute
# unit reads 64 bytes per cycle from L2. None of this has run on an AMD GPU.
GFX90A = DeviceLimits(0x90A, 110, 64 * 1024, 128, 1.7, 1024, 64, 131072, 64)
GFX942 = DeviceLimits(0x942, 304, 64 * 1024, 128, 2.1, 2048, 64, 131072, 64)
AMD_LIMITS = {limits.name: limits for limits in (GFX90A, GFX942)}
TILE_CYCLES = 1500  # the time to fill the stages and to drain the accumulators (a guess)
LAUNCH_US = 4.0  # a guess


def device_limits(architecture: int, num_sms: int, shared_bytes_per_block: int) -> DeviceLimits:
    """Returns the limits of a device from what its driver reports.

    An unknown architecture gets those of the last known one before it, whose kernels it can run.
    """
    if architecture < SM80.architecture:
        raise ValueError(f"architecture must be at least 80 (sm_80), got {architecture}")
    base = SM90 if architecture >= SM90.architecture else SM80
    return replace(
        base,
        architecture=architecture,
        num_sms=num_sms,
        shared_bytes_per_block=shared_bytes_per_block,
    )


def amd_limits(gfx: str, num_sms: int) -> DeviceLimits:
    """Returns the limits of an AMD GPU with a name like gfx942. Raises ValueError if unknown."""
    if gfx not in AMD_LIMITS:
        raise ValueError(f"the architecture must be one of {', '.join(AMD_LIMITS)}, got {gfx}")
    return replace(AMD_LIMITS[gfx], num_sms=num_sms)


# block_m, block_n, block_k (as bytes per row), warps, stages, for both architectures; `why_illegal`
# says which are legal. The last one has two stages: with three, ptxas spills in the gather for
# sm_80.
_TILES = (
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 128, 128, 8, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 5),
    (64, 256, 64, 4, 4),
    (32, 128, 128, 4, 5),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 5),
    (64, 32, 128, 4, 4),
    (32, 32, 64, 4, 2),
)
# On AMD, one stage is in registers. The others share 64 KiB, half of it for each of two programs.
_AMD_TILES = (
    (256, 128, 128, 8, 2),
    (128, 256, 128, 8, 2),
    (256, 128, 64, 8, 2),
    (128, 128, 128, 4, 2),
    (128, 128, 64, 4, 2),
    (128, 64, 128, 4, 2),
    (64, 128, 128, 4, 2),
    (64, 64, 128, 4, 2),
    (32, 64, 128, 4, 2),
    (16, 64, 128, 4, 2),
    (32, 32, 64, 4, 2),
)
_SPLITS = (1, 2, 4, 8)


@functools.cache
def candidates(element_bytes: int, *, amd: bool = False) -> tuple[TileConfig, ...]:
    """Returns every config for which kernels are built, legal or not. Ties go to the first."""
    return tuple(
        TileConfig(m, n, row_bytes // element_bytes, warps, stages, split_k=split, descriptors=by)
        for m, n, row_bytes, warps, stages in (_AMD_TILES if amd else _TILES)
        for by in ((False,) if amd else (True, False))
        for split in _SPLITS
    )


def shared_bytes(config: TileConfig, element_bytes: int, *, amd: bool = False) -> int:
    """Returns an upper bound on a program's shared memory: its stages, or the tile that it stores.

    tools/triton_check.py checks the compiler's numbers against it.
    """
    stage = (config.block_m + config.block_n) * config.block_k * element_bytes
    barriers = 1024
    if amd:
        return max(config.num_stages - 1, 1) * stage + barriers
    return max(config.num_stages * stage, config.block_m * config.block_n * 4) + barriers


def _is_power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def _why_illegal_shape(config: TileConfig) -> str:
    """Says why the config is illegal for every problem and device; "" if it is not."""
    for name in ("block_m", "block_n", "block_k"):
        size = getattr(config, name)
        if not _is_power_of_two(size) or size < 16:
            return f"{name} must be a power of two of at least 16, got {size}"
    if not _is_power_of_two(config.num_warps) or config.num_warps > 16:
        return f"num_warps must be a power of two of at most 16, got {config.num_warps}"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages must be 1 to 8, got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be positive, got {config.group_m}"
    if not 1 <= config.split_k <= MAX_SPLIT_K:
        return f"split_k must be 1 to {MAX_SPLIT_K}, got {config.split_k}"
    if config.descriptors and max(config.block_m, config.block_n, config.block_k) > MAX_BOX:
        return f"descriptors load edges of at most {MAX_BOX} elements"
    return ""


def _why_illegal_problem(config: TileConfig, problem: Problem) -> str:
    if problem.dtype not in DTYPE_BYTES:
        return f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {problem.dtype}"
    if min(problem.m, problem.n, problem.k) < 0:
        return f"sizes must not be negative, got {problem.m}, {problem.n}, {problem.k}"
    if config.descriptors and not problem.aligned:
        return (
            f"descriptors need operands of {DESCRIPTOR_ALIGNMENT}-byte aligned rows or columns "
            "that are not empty"
        )
    if config.split_k > 1:
        if problem.fused:
            return "a matmul that is fused with a collective does not split K"
        blocks = -(-problem.k // config.block_k)
        if config.split_k > blocks:
            return f"split_k={config.split_k} leaves a part empty: K has {blocks} blocks"
        workspace = config.split_k * problem.m * problem.n * 4
        if workspace > MAX_WORKSPACE_BYTES:
            return f"partial sums of {workspace} bytes, at most {MAX_WORKSPACE_BYTES} are taken"
    return ""


def _why_crowded(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    """Says what would not fit into the registers of a thread; "" if everything does."""
    threads = config.num_warps * limits.warp_size
    accumulators = config.block_m * config.block_n // threads
    scattered = not config.descriptors and not problem.vectors
    by_pointer = scattered or (problem.fused and not config.descriptors)
    most = MAX_CROWDED_ACCUMULATORS if by_pointer else limits.max_accumulators
    if scattered and problem.fused:
        most //= 2
    if accumulators > most:
        return f"needs {accumulators} accumulators a thread, at most {most} fit"
    loaded = (config.block_m + config.block_n) * config.block_k * problem.element_bytes // threads
    room = MAX_SCATTERED_BYTES // (2 if problem.fused else 1)
    if scattered and loaded > room:
        return f"loads {loaded} bytes a thread element by element, at most {room} fit"
    return ""


def _why_illegal_device(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    if config.descriptors and (limits.is_amd or limits.architecture < 90):
        return "tensor descriptors need sm_90 or later"
    if limits.is_amd and problem.fused:
        return "waiting for flags between ranks needs instructions of NVIDIA GPUs"
    if config.num_warps * limits.warp_size > MAX_THREADS:
        return f"{config.num_warps} warps have more than {MAX_THREADS} threads"
    why = _why_crowded(config, problem, limits)
    if why:
        return why
    shared = shared_bytes(config, problem.element_bytes, amd=limits.is_amd)
    if shared > limits.shared_bytes_per_block:
        return f"needs {shared} bytes of shared memory, at most {limits.shared_bytes_per_block} fit"
    return ""


# This is cached because it is called before every launch, where the time of the host matters.
@functools.lru_cache(maxsize=1 << 14)
def why_illegal(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    """Says why the config cannot be used for the problem on such a device; "" if it can."""
    why = (
        _why_illegal_shape(config)
        or _why_illegal_problem(config, problem)
        or _why_illegal_device(config, problem, limits)
    )
    return f"{config.name} on {limits.name}: {why}" if why else ""


def cost_us(config: TileConfig, problem: Problem, limits: DeviceLimits) -> float:
    """Returns the modelled (not measured) microseconds of a legal config, from its waves of tiles.

    A tile takes as long as its math or its loads from L2, whichever is longer. The parts of a split
    K are also written to memory and read back. The model is good enough to rank configs.
    """
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * config.split_k
    waves = -(-tiles // limits.num_sms)
    blocks = -(-problem.k // config.block_k)
    depth = -(-blocks // config.split_k) * config.block_k
    # An instruction multiplies 64 rows, so fewer rows take just as long.
    math_cycles = 2 * max(config.block_m, 64) * config.block_n * depth / limits.flops_per_cycle
    load_bytes = (config.block_m + config.block_n) * depth * problem.element_bytes
    store_bytes = config.block_m * config.block_n * (4 if config.split_k > 1 else 2)
    cycles = max(math_cycles, load_bytes / limits.l2_bytes_per_cycle) + TILE_CYCLES
    cycles += store_bytes / limits.l2_bytes_per_cycle
    if not config.descriptors and not limits.is_amd and limits.architecture >= 90:
        cycles *= 1.1  # a guess for the warps that compute addresses
    us = LAUNCH_US + waves * cycles / (limits.clock_ghz * 1e3)
    if config.split_k > 1:
        moved = problem.m * problem.n * 4 * config.split_k
        us += LAUNCH_US + moved / (limits.num_sms * limits.l2_bytes_per_cycle) / (
            limits.clock_ghz * 1e3
        )
    return us


def legal_configs(problem: Problem, limits: DeviceLimits) -> list[TileConfig]:
    """Returns the candidates that are legal for the problem, the cheapest by the model first."""
    every = candidates(problem.element_bytes, amd=limits.is_amd)
    legal = [c for c in every if not why_illegal(c, problem, limits)]
    return sorted(legal, key=lambda config: cost_us(config, problem, limits))


@functools.lru_cache(maxsize=4096)
def best_config(problem: Problem, limits: DeviceLimits) -> TileConfig:
    """Returns the legal candidate with the least modelled cost. Raises ValueError if none is."""
    legal = legal_configs(problem, limits)
    if not legal:
        raise ValueError(f"no tile config is legal for {problem} on {limits.name}")
    return legal[0]
