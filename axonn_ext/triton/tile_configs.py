"""The configs of our Triton kernels: which exist, which are legal for a problem, which to take.

Plain Python: neither triton nor a device is touched, so that all of it is tested anywhere. One
predicate, `why_illegal`, serves the heuristic below and the pruner of autotune.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ACTIVATIONS = ("gelu", "swiglu")
# A tensor descriptor asks this alignment of the base and of every stride but the last, which is 1.
DESCRIPTOR_ALIGNMENT = 16
MAX_BOX = 256  # elements of an edge of what one descriptor load takes
MAX_WORKSPACE_BYTES = 256 << 20  # of split-K's partial sums
MAX_SPLIT_K = 16
MAX_THREADS = 512  # of a program: more would leave each too few registers
# Accumulators of a thread that holds much else: rows of A and columns of B, where there are no
# tensor cores; addresses of operands that are loaded element by element; the state of a schedule.
# Half of them, where two of these meet.
# What is beyond them spills: tools/triton_check.py shows it.
MAX_CROWDED_ACCUMULATORS = 64
# Without tensor cores a step of the loop is unrolled: bytes of a row of it.
MAX_IEEE_STEP_BYTES = 64
# What a thread loads in a step if it has to load element by element; half where it is fused.
MAX_SCATTERED_BYTES = 128


@dataclass(frozen=True)
class TileConfig:
    """How a persistent matmul is cut: tiles of the output, depth of a step, workers of a tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # of shared memory between loads and math
    group_m: int = 8  # rows of tiles that are worked on together, for the sake of the L2 cache
    split_k: int = 1  # parts of K, each a tile of its own in fp32
    descriptors: bool = False  # load by tensor descriptors (TMA), else by pointers

    @property
    def name(self) -> str:
        """As m128n256k64w8s3g8p1t: what the cache on disk calls it."""
        return (
            f"m{self.block_m}n{self.block_n}k{self.block_k}w{self.num_warps}s{self.num_stages}"
            f"g{self.group_m}p{self.split_k}{'t' if self.descriptors else ''}"
        )


@dataclass(frozen=True)
class Problem:
    """C [m, n] = A [m, k] @ B [k, n], as far as it matters for the choice of a config."""

    m: int
    n: int
    k: int
    dtype: str  # of A, B and C: a key of DTYPE_BYTES
    layout: str = "NN"  # A, then B: N rows are contiguous, T columns are, S neither
    bias: bool = False
    activation: str | None = None  # one of ACTIVATIONS
    tf32: bool = False  # whether float32 may be rounded to it for the tensor cores
    aligned: bool = True  # both operands can be read by tensor descriptors
    vectors: bool = True  # both can be read by pointers in vectors, not element by element
    # Edges of chunks along m, which must be edges of tiles; 0: not cut, or cut anywhere.
    chunk_tile_m: int = 0
    fused: bool = False  # with a collective: no split-K, no epilogue

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def ieee(self) -> bool:
        """Whether products are of full float32, which tensor cores do not make."""
        return self.dtype == "float32" and not self.tf32


@dataclass(frozen=True)
class DeviceLimits:
    """What a GPU can hold; the last three are for the model in `cost_us`."""

    architecture: int  # 80: sm_80; of AMD hexadecimal, 0x90A: gfx90a
    num_sms: int
    shared_bytes_per_block: int
    max_accumulators: int  # fp32 registers of a thread, next to what addresses and loops need
    clock_ghz: float
    flops_per_cycle: float  # of one SM, for elements of 2 bytes; half for tf32, 256 for ieee
    l2_bytes_per_cycle: float  # into one SM
    registers_per_sm: int = 65536
    warp_size: int = 32  # 64: AMD's wavefronts, whose compute units are called SMs here

    @property
    def is_amd(self) -> bool:
        return self.warp_size == 64

    @property
    def name(self) -> str:
        """As sm_90, gfx90a."""
        return f"gfx{self.architecture:x}" if self.is_amd else f"sm_{self.architecture}"


# Source: CUDA C programming guide, compute capabilities; the whitepapers of A100 and H100. The L2
# bandwidth of sm_90 is a guess, as in csrc/core/gemm/launch_config.h.
SM80 = DeviceLimits(80, 108, 163 * 1024, 128, 1.41, 2048, 47)
SM90 = DeviceLimits(90, 132, 227 * 1024, 128, 1.83, 4096, 64)
# Source: AMD's data sheets of MI250X (one of its two dies) and MI300X; into a compute unit 64 bytes
# a cycle of L2, a guess. No AMD GPU has run anything of this.
GFX90A = DeviceLimits(0x90A, 110, 64 * 1024, 128, 1.7, 1024, 64, 131072, 64)
GFX942 = DeviceLimits(0x942, 304, 64 * 1024, 128, 2.1, 2048, 64, 131072, 64)
AMD_LIMITS = {limits.name: limits for limits in (GFX90A, GFX942)}
IEEE_FLOPS_PER_CYCLE = 256  # 128 fused multiply-adds
TILE_CYCLES = 1500  # to fill the stages and to drain the accumulators: a guess
LAUNCH_US = 4.0  # a guess


def device_limits(architecture: int, num_sms: int, shared_bytes_per_block: int) -> DeviceLimits:
    """The limits of a device, from what its driver says of it.

    An architecture that is not known is taken for the last known one before it, which it can run
    the kernels of.
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
    """The limits of an AMD GPU by its name, as gfx942. Raises ValueError for one not known."""
    if gfx not in AMD_LIMITS:
        raise ValueError(f"the architecture must be one of {', '.join(AMD_LIMITS)}, got {gfx}")
    return replace(AMD_LIMITS[gfx], num_sms=num_sms)


# block_m, block_n, block_k in bytes of a row, warps, stages; for both architectures, as legal.
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
    (32, 32, 64, 4, 3),
)
# On AMD: a stage in registers, the others in 64 KiB, of which two programs are to have half each.
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
    """Every config that kernels are built for, legal or not. Of equals the first is taken."""
    return tuple(
        TileConfig(m, n, row_bytes // element_bytes, warps, stages, split_k=split, descriptors=by)
        for m, n, row_bytes, warps, stages in (_AMD_TILES if amd else _TILES)
        for by in ((False,) if amd else (True, False))
        for split in _SPLITS
    )


def shared_bytes(config: TileConfig, element_bytes: int, *, amd: bool = False) -> int:
    """An upper bound of a program's shared memory: its stages, or the tile on its way out.

    tools/triton_check.py holds what the compiler says to it.
    """
    stage = (config.block_m + config.block_n) * config.block_k * element_bytes
    barriers = 1024
    if amd:
        return max(config.num_stages - 1, 1) * stage + barriers
    return max(config.num_stages * stage, config.block_m * config.block_n * 4) + barriers


def _is_power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def _why_illegal_shape(config: TileConfig) -> str:
    """What no problem and no device could change."""
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
    if problem.activation == "swiglu" and problem.n % 2:
        return f"swiglu needs pairs of columns, got n={problem.n}"
    if config.descriptors and problem.ieee:
        return "descriptors feed tensor cores, which do not multiply full float32"
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
    if problem.chunk_tile_m % config.block_m:
        return f"edges of chunks ({problem.chunk_tile_m} rows) must be edges of tiles"
    return ""


def _why_crowded(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    """What would not fit the registers of a thread."""
    threads = config.num_warps * limits.warp_size
    accumulators = config.block_m * config.block_n // threads
    scattered = not config.descriptors and not problem.vectors
    by_pointer = scattered or (problem.fused and not config.descriptors)
    activated = problem.dtype == "float32" and problem.activation is not None
    crowded = problem.ieee or by_pointer or activated
    most = MAX_CROWDED_ACCUMULATORS if crowded else limits.max_accumulators
    if scattered and (problem.fused or problem.dtype == "float32"):
        most //= 2
    if accumulators > most:
        return f"needs {accumulators} accumulators a thread, at most {most} fit"
    step = config.block_k * problem.element_bytes
    if problem.ieee and step > MAX_IEEE_STEP_BYTES:
        return f"steps of {step} bytes of K, at most {MAX_IEEE_STEP_BYTES} fit"
    loaded = (config.block_m + config.block_n) * step // threads
    room = MAX_SCATTERED_BYTES // (2 if problem.fused else 1)
    if scattered and loaded > room:
        return f"loads {loaded} bytes a thread element by element, at most {room} fit"
    return ""


def _why_illegal_device(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    if config.descriptors and (limits.is_amd or limits.architecture < 90):
        return "there are tensor descriptors from sm_90 on"
    if limits.is_amd and problem.fused:
        return "flags between ranks are awaited with instructions of NVIDIA's"
    if config.num_warps * limits.warp_size > MAX_THREADS:
        return f"{config.num_warps} warps have more than {MAX_THREADS} threads"
    why = _why_crowded(config, problem, limits)
    if why:
        return why
    shared = shared_bytes(config, problem.element_bytes, amd=limits.is_amd)
    if shared > limits.shared_bytes_per_block:
        return f"needs {shared} bytes of shared memory, at most {limits.shared_bytes_per_block} fit"
    return ""


# Asked before every launch, where the host has no time to lose.
@functools.lru_cache(maxsize=1 << 14)
def why_illegal(config: TileConfig, problem: Problem, limits: DeviceLimits) -> str:
    """Why the config cannot serve the problem on such a device; empty: it can."""
    why = (
        _why_illegal_shape(config)
        or _why_illegal_problem(config, problem)
        or _why_illegal_device(config, problem, limits)
    )
    return f"{config.name} on {limits.name}: {why}" if why else ""


def cost_us(config: TileConfig, problem: Problem, limits: DeviceLimits) -> float:
    """A model, not a measurement: microseconds of a legal config, as waves of tiles.

    A tile takes as long as its math or its loads from L2, whichever is longer; parts of a split K
    cross memory once more. Good for ranking configs.
    """
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * config.split_k
    waves = -(-tiles // limits.num_sms)
    blocks = -(-problem.k // config.block_k)
    depth = -(-blocks // config.split_k) * config.block_k
    rate = IEEE_FLOPS_PER_CYCLE if problem.ieee else limits.flops_per_cycle * 2
    rate = rate / (problem.element_bytes if not problem.ieee else 1)
    # Fewer rows than an instruction of the architecture multiplies take as long as these.
    rows = config.block_m if problem.ieee else max(config.block_m, 64)
    math_cycles = 2 * rows * config.block_n * depth / rate
    load_bytes = (config.block_m + config.block_n) * depth * problem.element_bytes
    store_bytes = config.block_m * config.block_n * (4 if config.split_k > 1 else 2)
    cycles = max(math_cycles, load_bytes / limits.l2_bytes_per_cycle) + TILE_CYCLES
    cycles += store_bytes / limits.l2_bytes_per_cycle
    if not config.descriptors and not limits.is_amd and limits.architecture >= 90:
        cycles *= 1.1  # warps that compute addresses; a guess
    us = LAUNCH_US + waves * cycles / (limits.clock_ghz * 1e3)
    if config.split_k > 1:
        moved = problem.m * problem.n * 4 * config.split_k
        us += LAUNCH_US + moved / (limits.num_sms * limits.l2_bytes_per_cycle) / (
            limits.clock_ghz * 1e3
        )
    return us


def legal_configs(problem: Problem, limits: DeviceLimits) -> list[TileConfig]:
    """The candidates that can serve the problem, cheapest by the model first."""
    every = candidates(problem.element_bytes, amd=limits.is_amd)
    legal = [c for c in every if not why_illegal(c, problem, limits)]
    return sorted(legal, key=lambda config: cost_us(config, problem, limits))


@functools.lru_cache(maxsize=4096)
def best_config(problem: Problem, limits: DeviceLimits) -> TileConfig:
    """The legal candidate of least modelled cost. Raises ValueError if there is none."""
    legal = legal_configs(problem, limits)
    if not legal:
        raise ValueError(f"no tile config is legal for {problem} on {limits.name}")
    return legal[0]


def _rounded_up(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def shape_class(problem: Problem, limits: DeviceLimits) -> str:
    """The key under which a winner is kept: what changes it, sizes as the next power of two.

    Winners of one class are legal for all of it, or the heuristic takes over (autotune.py asks).
    """
    epilogue = ("bias" if problem.bias else "") + (problem.activation or "")
    return (
        f"triton_matmul {problem.dtype}{' tf32' if problem.tf32 else ''} "
        f"M={_rounded_up(problem.m)} N={_rounded_up(problem.n)} K={_rounded_up(problem.k)} "
        f"layout={problem.layout}{'' if problem.aligned else ' unaligned'}"
        f"{'' if problem.vectors else ' scattered'} "
        f"epilogue={epilogue or 'none'} {limits.name} sms={limits.num_sms}"
    )
