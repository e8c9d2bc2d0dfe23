"""What gpu_check.py times and trains; run by it, one rank of a case.

gpu_cases.py --case JSON --rows FILE                 under torchrun
gpu_cases.py --link M,N,K;M,N,K;... --rows FILE
gpu_cases.py --gemm M,N,K;M,N,K;... --rows FILE      on GPUs of sm_90
gpu_cases.py --plot RESULTS.json --rows -            charts beside the file
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINK_CHUNKS = (3, 6, 12)
# Over PCIe 5 (50 GB/s) copies take about 0.25, 0.46 and 0.92 of the time of these products.
LINK_SHAPES = ((8192, 38912, 4096), (8192, 21248, 4096), (8192, 10624, 4096))
# Layers of Llama 2 7B and 70B, Llama 3 8B and GPT-3 175B.
GEMM_SHAPES = tuple(
    (m, n, k)
    for n, k in ((11008, 4096), (14336, 4096), (28672, 8192), (49152, 12288))
    for m in (1024, 2048, 4096, 8192)
)


@dataclass(frozen=True)
class Case:
    """A microbenchmark: an op on W ranks along x."""

    op: str
    shape: tuple[int, ...]
    ranks: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.op} {','.join(map(str, self.shape))} {self.dtype} x={self.ranks}"


# Layers of 7B to 70B models that fit an 80 GB GPU and the time; M small and large. Several ranks on
# one GPU talk through sockets, so theirs are small: they show that results are right, not how fast
# NVLink is.
CASES = (
    *(Case("linear", (m, 14336, 4096), 1) for m in (1024, 4096, 8192)),
    Case("linear", (8192, 28672, 8192), 1),
    Case("linear", (4096, 11008, 4096), 1, "fp16"),
    Case("linear", (2048, 4096, 4096), 1, "fp32"),
    Case("block", (4, 1024, 2048, 16), 1),
    *(
        Case(op, shape, ranks)
        for ranks in (2, 4)
        for op, shape in (
            ("ag-gemm", (2048, 4096, 4096)),
            ("gemm-rs", (2048, 4096, 4096)),
            ("gemm-ar", (1024, 4096, 4096)),
            ("linear", (2048, 4096, 4096)),
        )
    ),
)


# The published layer sizes: rows whose products are tuned, and cases of the ops on all GPUs, those
# that tell most first, since the time may not suffice for all; of the rows that are tuned, those
# that take least.
TUNED_ROWS = (1024, 8192, 4096, 2048)
PUBLISHED_CASES = tuple(
    (op, m)
    for m in (8192, 64, 1024, 4096, 256, 16384, 2048)
    for op in ("ag-gemm", "gemm-rs", "gemm-ar")
)


def tune_command(m: int) -> list[str]:
    """Tunes the products of the published layers with M = m."""
    return [sys.executable, "-m", "axonn_ext", "tune", "--device", "cuda",
            "--shapes", f"published:{m}"]  # fmt: skip


def published_command(op: str, m: int, ranks: int, *, fused: bool, baseline: bool) -> list[str]:
    """Times an op in the published layers with M = m, beside torch's symmetric-memory ops."""
    names = ("sequential", "chunked", *(("fused",) if fused else ()), "auto")
    return [
        sys.executable, "-m", "axonn_ext", "bench", op, "--device", "cuda", "--world", str(ranks),
        "--dtype", "bf16", "--rounds", "10", "--shapes", f"published:{m}",
        "--algorithms", ",".join(names), *(("--baseline", "torch-symm-mem") if baseline else ()),
    ]  # fmt: skip


# A GPT-2 of 100 M parameters; on several ranks of one GPU, whose collectives go through sockets, a
# short run.
TRAINING = {
    "model.hidden_size": 768, "model.num_layers": 12, "model.num_heads": 12,
    "model.sequence_length": 512, "data.max_bytes": 4_000_000, "train.batch_size": 16,
    "train.dtype": "bf16", "train.device": "cuda", "train.eval_interval": 0,
    "optim.warmup_steps": 5,
}  # fmt: skip
# Axis, ranks along it, steps, and whether weights and gradients cross it beside the computation.
RUNS = (("x", 1, 60, "off"), ("x", 2, 10, "off"), ("z", 2, 12, "on"))


def algorithms(case: dict[str, Any]) -> tuple[str, ...]:
    """With "fused" where it can run and be timed: on a GPU of sm_90 for each of several ranks."""
    import torch

    fused = (
        case["op"] != "block"
        and case["dtype"] in ("bf16", "fp16")
        and 1 < case["ranks"] <= torch.cuda.device_count()
        and not why_no_fused()
    )
    return ("sequential", "chunked", "auto", *(("fused",) if fused else ()))


def why_no_fused() -> str:
    """The op's own reason; empty where this GPU has fused kernels."""
    import torch

    import axonn_ext.ops  # noqa: F401  registers torch.ops.axonn

    device = torch.device("cuda", torch.cuda.current_device())
    return str(torch.ops.axonn._why_no_fused_here(device, torch.bfloat16, 1, False))


def time_case(text: str, path: Path) -> None:
    """Times one case as one of its ranks; rank 0 writes the rows."""
    from axonn_ext.bench.case import Spec
    from axonn_ext.bench.worker import Plan, run_worker
    from axonn_ext.calibrate.shapes import BlockShape, GemmShape
    from axonn_ext.launch.process import this_process
    from axonn_ext.spec.grid import GridShape

    case = json.loads(text)
    options = {"linear": {"role": "expand", "layout": "sharded"}, "block": {"layout": "sharded"}}
    shape = (BlockShape if case["op"] == "block" else GemmShape)(*case["shape"])
    spec = Spec(
        case["op"], shape, GridShape(x=case["ranks"]), case["dtype"],
        algorithms(case), options.get(case["op"], {}), "cuda",
    )  # fmt: skip
    here = this_process()
    assert here is not None, "started by torchrun"
    rows = run_worker(Plan((spec,), threads=1, rounds=10), here)
    if here.rank == 0:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def time_link(text: str, path: Path) -> None:
    """Times the emulated link; fails where a result is wrong."""
    from axonn_ext.bench.link_overlap import measure_link

    time_shapes(text, path, lambda m, n, k: measure_link(m, n, k, LINK_CHUNKS))


def time_gemm(text: str, path: Path) -> None:
    """Times the kernel of "fused" against torch.mm; fails where a result is wrong."""
    from axonn_ext.bench.fused_gemm import LAYOUTS, measure_gemm

    def measure(m: int, n: int, k: int) -> list[Any]:
        return [measure_gemm(m, n, k, "bf16", layout) for layout in LAYOUTS]

    time_shapes(text, path, measure)


def time_shapes(text: str, path: Path, measure: Callable[[int, int, int], Sequence[Any]]) -> None:
    """Writes the rows of M,N,K;M,N,K;... after each, for who may end this process early."""
    from axonn_ext.bench.link_overlap import MAX_DIFFERENCE

    found: list[dict[str, Any]] = []
    part = path.with_suffix(".part")
    for shape in text.split(";"):
        m, n, k = map(int, shape.split(","))
        rows = measure(m, n, k)
        assert all(row.max_difference <= MAX_DIFFERENCE for row in rows), rows
        found += [dataclasses.asdict(row) for row in rows]
        part.write_text(json.dumps(found))
        part.replace(path)


def draw_charts(text: str, _: Path) -> None:
    """A chart of each op that the file of results has, beside it: <gpu>-<op>.png."""
    from axonn_ext.bench.plot import plot_rows
    from axonn_ext.bench.results import Row

    path = Path(text)
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in (*content["rows"], *content["published"])]
    machine = content["machine"]
    subtitle = f"{machine['gpu']}, torch {machine['torch']}, NCCL {machine['nccl']}"
    for op in dict.fromkeys(row.op for row in rows):
        chart = path.with_name(f"{path.stem}-{op}.png")
        plot_rows([row for row in rows if row.op == op], chart, subtitle=subtitle)


def main(arguments: Sequence[str]) -> None:
    """Runs what the first argument names."""
    kind, text, option, path = arguments
    assert option == "--rows", arguments
    kinds = {"--case": time_case, "--link": time_link, "--gemm": time_gemm, "--plot": draw_charts}
    kinds[kind](text, Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
