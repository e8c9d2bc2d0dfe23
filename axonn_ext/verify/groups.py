"""The groups of cases of `axonn-ext verify`. Each group runs in its own processes.

The target of a group returns the number of cases and the failures. It raises NotImplementedError,
with the reason, if this machine cannot run any of its cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from axonn_ext.kernels import extension
from axonn_ext.kernels.verified import FUSED
from axonn_ext.verify import linears, products, ranks, virtual

Found = tuple[int, list[str]]
Check = tuple[str, Callable[[], None]]

MAX_FAILURES = 20  # the most failures of a group that are reported
MAX_RANKS = 8
# A guess: up to about 60 kernels in a group, at some seconds each.
TRITON_SECONDS = 200.0


@dataclass(frozen=True)
class Group:
    """Cases of one kernel that run in the same processes, so that a crash ends all of them.

    target           module:function
    gpus             the number of GPUs, one for each rank; 1: all ranks share one GPU
    seconds          the time after which the group is ended
    compile_seconds  the part of it spent compiling kernels, which makes the command take longer
    """

    name: str
    kernel: str
    target: str
    num_ranks: int = 1
    gpus: int = 1
    seconds: float = 40.0
    compile_seconds: float = 0.0


def groups(num_gpus: int) -> list[Group]:
    """Returns all groups for that many GPUs; those of one GPU come first."""
    compile_seconds = TRITON_SECONDS if gemm_source() == "triton" else 0.0

    def group(
        name: str,
        kernel: str,
        target: str,
        *,
        num_ranks: int = 1,
        gpus: int = 1,
        seconds: float = 40.0,
    ) -> Group:
        more = compile_seconds if kernel == FUSED else 0.0
        return Group(name, kernel, f"{__name__}:{target}", num_ranks, gpus, seconds + more, more)

    found = [
        group("fused_sm90: products", "fused_sm90", "fused_sm90_products"),
        group("fused_sm90: flags, bias, residual", "fused_sm90", "plain_gemms"),
        group("fused: gathers, virtual ranks", FUSED, "virtual_gathers"),
        group("fused: sums, virtual ranks", FUSED, "virtual_sums"),
        group("fused: calls back to back", FUSED, "virtual_calls"),
    ]
    if num_gpus == 1:
        found += [
            group("fused: ops, 2 ranks on 1 GPU", FUSED, "fused_ops", num_ranks=2),
            group("fused: Linear, 2 ranks on 1 GPU", FUSED, "fused_linears", num_ranks=2),
        ]
    most = 1 << min(num_gpus, MAX_RANKS).bit_length() - 1
    for size in sorted({2, most} - {1}) if num_gpus > 1 else []:
        at = {"num_ranks": size, "gpus": size}
        found.append(group(f"fused: ops, {size} GPUs", FUSED, "fused_ops", **at))
        found.append(group(f"fused: Linear, {size} GPUs", FUSED, "fused_linears", **at))
    return [
        *found,
        group("cublaslt: products", "cublaslt", "cublaslt_products"),
        group("triton: products", "triton", "triton_products", seconds=80),
    ]


# --- Targets --------------------------------------------------------------------------------------


def run_checks(checks: Iterator[Check]) -> Found:
    """Runs all checks; an error other than wrong values, such as a CUDA error, ends them."""
    failures, count = [], 0
    for name, check in checks:
        count += 1
        try:
            check()
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    return count, failures


def fused_module() -> ModuleType:
    """Returns axonn_ext._cuda. Raises NotImplementedError with the op's reason if it cannot run."""
    device = torch.device("cuda", torch.cuda.current_device())
    why = torch.ops.axonn._why_no_fused_here(device, torch.bfloat16, 1, False)
    if why:
        raise NotImplementedError(why)
    assert extension.cuda is not None, "whose reason would have been that it is not built"
    return extension.cuda


def gemm_source() -> str:
    """Returns the source of the current GPU's fused GEMMs: "cutlass", "triton" or "" for none."""
    if extension.cuda is None or not torch.cuda.is_available():
        return ""
    return str(extension.cuda.gemm_source(torch.cuda.current_device()))


def sm90_module() -> ModuleType:
    """Returns axonn_ext._cuda if the GEMMs for sm_90 (CUTLASS) run here.

    Raises NotImplementedError otherwise.
    """
    cuda = fused_module()
    if gemm_source() != "cutlass":
        raise NotImplementedError("the fused kernels of this GPU are Triton's")
    return cuda


def plain_gemms() -> Found:
    cuda = sm90_module()

    def checks() -> Iterator[Check]:
        for dtype in virtual.DTYPES:
            yield f"bias {dtype}", partial(virtual.check_bias_and_residual, cuda, dtype)
            for shape, transposed in itertools.product(virtual.SHAPES, virtual.LAYOUTS):
                for wait_chunks in (0, 1, 4):
                    name = f"gemm {shape} {dtype} {transposed} {wait_chunks}"
                    yield name, partial(
                        virtual.check_gemm,
                        cuda, shape, dtype, transposed=transposed, wait_chunks=wait_chunks,
                    )  # fmt: skip

    return run_checks(checks())


def shapes_of(dtype: torch.dtype) -> tuple[virtual.Shape, ...]:
    """Returns the shapes to check; in fp16, only one for Triton, whose kernels must be compiled."""
    few = gemm_source() == "triton" and dtype == torch.float16
    return virtual.SHAPES[:1] if few else virtual.SHAPES


def virtual_gathers() -> Found:
    cuda = fused_module()

    def checks() -> Iterator[Check]:
        for dtype, arriving in itertools.product(virtual.DTYPES, virtual.ARRIVING):
            for shape, size in itertools.product(shapes_of(dtype), (1, 2, 4)):
                yield (
                    f"{arriving} {shape} {dtype} {size} ranks",
                    partial(virtual.check_gather, cuda, size, shape, dtype, arriving=arriving),
                )

    return run_checks(checks())


def virtual_sums() -> Found:
    cuda = fused_module()

    def checks() -> Iterator[Check]:
        for dtype, size in itertools.product(virtual.DTYPES, (2, 4)):
            for shape in shapes_of(dtype):
                name = f"{shape} {dtype} {size} ranks"
                if gemm_source() == "cutlass":
                    sum_broadcasts = partial(virtual.check_sum_broadcasts, cuda, size, shape, dtype)
                    yield f"sum broadcasts {name}", sum_broadcasts
                for transposed, everywhere in itertools.product(virtual.LAYOUTS, (False, True)):
                    if not virtual.is_summable(size, shape, transposed):
                        continue
                    yield f"sum {name} {transposed} {everywhere}", partial(
                        virtual.check_sum,
                        cuda, size, shape, dtype, transposed=transposed, everywhere=everywhere,
                    )  # fmt: skip

    return run_checks(checks())


def virtual_calls() -> Found:
    cuda = fused_module()
    ways = ("copy_engine", *(("peer_stores",) if gemm_source() == "cutlass" else ()))
    check = partial(virtual.check_calls_keep_apart, cuda, 300, sum_broadcasts=ways)
    return run_checks(iter([("300 calls", check)]))


def fused_ops() -> Found:
    fused_module()
    shapes = [(128, 256, 128), (64, 64, 192), (264, 200, 136), (1024, 512, 512)]
    failures = [
        failure
        for op, dim in ranks.OPS
        for failure in ranks.op_failures(op, dim, "fused", shapes, virtual.DTYPES)
    ]
    return len(ranks.OPS) * len(shapes) * len(virtual.DTYPES) * len(ranks.LAYOUTS), failures


def fused_linears() -> Found:
    fused_module()
    grids = linears.every_grid()
    failures = [
        failure
        for layout in ("sharded", "replicated")
        for dtype in virtual.DTYPES
        # The limit covers a rounding of each part of a sum, and of the result, over one and over
        # two reductions.
        for failure in linears.linear_failures(
            grids,
            layout,
            "fused",
            dtype=dtype,
            sizes=(256, 512, 1024),
            limit=8 * torch.finfo(dtype).eps,
        )
    ]
    return 2 * len(virtual.DTYPES) * len(grids) * len(linears.ROLES), failures


def fused_sm90_products() -> Found:
    sm90_module()
    return _products("fused_sm90", virtual.SHAPES, products.HALF, products.LAYOUTS)


def cublaslt_products() -> Found:
    dtypes = (torch.float32, *products.HALF)
    return _products("cublaslt", products.SHAPES, dtypes, products.LAYOUTS)


def triton_products() -> Found:
    # Each config and layout takes a second to compile.
    count, failures = _products("triton", products.SHAPES[:2], products.HALF[:1], products.LAYOUTS)
    more, others = _products("triton", products.SHAPES[2:], products.HALF[1:], ("NT",))
    return count + more, failures + others


def _products(
    kind: str,
    shapes: tuple[tuple[int, int, int], ...],
    dtypes: tuple[torch.dtype, ...],
    layouts: tuple[str, ...],
) -> Found:
    if not products.is_registered(kind):
        raise NotImplementedError(f"{kind} is not there: not built, or not installed")
    count, failures = products.all_failures(kind, shapes, dtypes, layouts)
    if count == 0:
        raise NotImplementedError(f"{kind} has nothing for this GPU")
    return count, failures
