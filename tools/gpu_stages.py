"""The stages of gpu_check.py, the most valuable first: their commands and shares of the time."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
BUDGET_SECONDS = 540.0  # the BUDGET for which the stages' seconds are chosen
AMPLE_SECONDS = 8 * 60.0  # limit of each stage without a BUDGET
AMPLE_BUILD_SECONDS = 40 * 60.0
HANG = "{hang}"  # placeholder in a command: seconds after which a test counts as hung

GEMM_SHAPES = (
    "8192,14336,4096", "2048,14336,4096", "1024,28672,8192", "4096,28672,8192", "512,11008,4096",
    "2048,49152,12288", "8192,28672,8192", "1024,11008,4096", "256,14336,4096",
)  # fmt: skip
TUNED_SHAPES = ("1024,14336,4096", "8192,14336,4096", "4096,28672,8192")
# Over PCIe 5 (50 GB/s), the copies take about 0.25, 0.46 and 0.92 times as long as these products.
LINK_SHAPES = ("8192,38912,4096", "8192,21248,4096", "8192,10624,4096")
LINEAR_SHAPES = ("1024,14336,4096", "4096,14336,4096", "8192,14336,4096", "8192,28672,8192")
# M of the published layers, the most informative first.
PUBLISHED = "published:8192,64,1024,4096,256,16384,2048"
TRAINING = (
    "--model.hidden_size=1024", "--model.num_layers=24", "--model.num_heads=16",
    "--model.sequence_length=1024", "--model.vocab_size=50304", "--data.max_bytes=4000000",
    "--train.batch_size=16", "--train.dtype=bf16", "--train.device=cuda",
    "--train.eval_interval=0", "--optim.warmup_steps=5",
)  # fmt: skip
# Smaller, as the ranks may share a GPU, and their collectives then go through sockets.
SMALL_TRAINING = (*TRAINING, "--model.hidden_size=768", "--model.num_layers=12",
                  "--model.num_heads=12", "--model.sequence_length=512")  # fmt: skip
# Tests of products and of single kernels. The sanitizer may run kernels one after the other, so no
# kernel may wait for another's flags.
SANITIZED = "(test_gemm and 264x200x136) or test_bias_and_residual or test_rows_that_begin_anywhere"
SANITIZED_FILES = tuple(f"python_tests/gpu/test_gpu_{subject}.py" for subject in ("fused", "loss"))


TWO_GPUS, SM_90, SANITIZER = "two GPUs", "a GPU of sm_90", "compute-sanitizer"


@dataclass(frozen=True)
class Stage:
    """A command, its time limit, and the file of its results.

    kind     a name for STAGE that selects all stages of this kind
    seconds  its maximum share of BUDGET_SECONDS
    rows     the file of its results: JSON, lines of tests or lines of metrics
    needs    packages, TWO_GPUS, SM_90 or SANITIZER; it does not run without them
    """

    name: str
    kind: str
    seconds: float
    command: tuple[str, ...]
    rows: Path
    needs: tuple[str, ...] = ("rich",)
    ample_seconds: float = AMPLE_SECONDS


# Stages of one row run at the same time; the only stage of a row has the GPU to itself.
Row = tuple[Stage, ...]


@dataclass(frozen=True)
class StageMaker:
    """Makes the stages.

    results        the folder of the results
    scratch        the temporary folder that trainings write to
    architectures  the versions of the GPUs, e.g. 9.0
    ranks          the number of GPUs, rounded down to a power of two, at most MAX_RANKS
    fused          whether the algorithm "fused" runs on them
    """

    results: Path
    scratch: Path
    architectures: tuple[str, ...] = ("9.0",)
    ranks: int = 1
    fused: bool = True

    def build(self) -> Stage:
        """Builds with AXONN_CUDA=1, which fails with the reason if a CUDA part cannot be built."""
        wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(self.architectures)
        command = ("env", "AXONN_CUDA=1", f"TORCH_CUDA_ARCH_LIST={wanted}", sys.executable,
                   "setup.py", "build_ext", "--inplace")  # fmt: skip
        rows = self.results / "build.json"
        return Stage("build", "build", 300, command, rows, (), AMPLE_BUILD_SECONDS)

    def axonn(
        self, name: str, kind: str, seconds: float, *words: str, needs: tuple[str, ...] = ()
    ) -> Stage:
        rows = self.results / f"{name}.json"
        command = (sys.executable, "-m", "axonn_ext", *words, "--json", str(rows))
        return Stage(name, kind, seconds, command, rows, ("rich", *needs))

    def bench(self, name: str, seconds: float, *words: str, needs: tuple[str, ...] = ()) -> Stage:
        return self.axonn(name, "bench", seconds, "bench", *words, needs=needs)

    def compile_products(self, shape: str) -> Stage:
        """Fills Triton's cache of compiled kernels for `tune`; its measurements are not kept."""
        name = f"compile-{shape.replace(',', 'x')}"
        command = (
            "env", "AXONN_CACHE_DIR=", "AXONN_PRODUCT_KERNELS=triton", sys.executable, "-m",
            "axonn_ext", "tune", "--device", "cuda", "--shapes", shape,
        )  # fmt: skip
        rows = self.results / f"{name}.json"  # never written
        return Stage(name, "bench", 80, command, rows, ("rich", "triton"))

    def lane(self, seconds: float, lane: str, *, part: str = "1/1", number: int = 1) -> Stage:
        """Runs the tests of a lane; from number 2 on, continues where an earlier stage stopped."""
        of = "" if part == "1/1" else "-" + part.replace("/", "of")
        rows = self.results / f"tests-{lane}{of}.jsonl"
        command = (
            sys.executable, str(TOOLS / "gpu_tests.py"), str(rows), lane, part, HANG
        )  # fmt: skip
        name = f"test-{lane}{of}" + (f"-{number}" if number > 1 else "")
        return Stage(name, "test", seconds, command, rows, ("pytest",))

    def sanitize(self, tool: str) -> Stage:
        """Checks only our kernels, which have our namespace in their mangled names.

        Errors of API calls are not reported, since torch probes for features that the driver may
        lack.
        """
        rows = self.results / f"tests-{tool}.jsonl"
        command = (
            find_sanitizer() or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9",
            "--report-api-errors", "no", "--kernel-name", "kernel_substring=axonn",
            sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-q", "--no-header",
            "-p", "gpu_tests_plugin", "-p", "no:cacheprovider", "--results", str(rows),
            "-k", SANITIZED, *SANITIZED_FILES,
        )  # fmt: skip
        return Stage(tool, "sanitize", 80, command, rows, ("pytest", SANITIZER))

    def training(self, name: str, seconds: float, *options: str, grid: str = "x=1") -> Stage:
        folder = self.scratch / f"train-{name}"
        command = (sys.executable, "-m", "axonn_ext", "train", "--grid", grid, "--out", str(folder),
                   *options)  # fmt: skip
        return Stage(f"train-{name}", "train", seconds, command, folder / "metrics.jsonl")

    def table(self) -> tuple[Row, ...]:
        """All rows, those with the most information for their time first."""
        both = (*TRAINING, "--train.steps=40")
        llama = (*both, "--model.family=llama")
        plain = "--model.implementation=plain"
        shared = (*SMALL_TRAINING, "--train.steps=12")
        cuda, published = ("--device", "cuda"), ("--shapes", PUBLISHED)
        gemm = ("gemm", "--shapes", *GEMM_SHAPES)
        ops = ("gemm-ops", *cuda, "--world", str(self.ranks), "--dtype", "bf16", "--rounds", "10")
        names = ",".join(("sequential", "chunked", *(("fused",) if self.fused else ()), "auto"))
        return (
            (self.build(),),
            (self.axonn("doctor", "verify", 25, "doctor"),),
            (self.axonn("verify-fused", "verify", 110, "verify", "--only", "fused,cublaslt"),),
            (
                self.lane(80, "one", part="1/2"),
                self.lane(80, "one", part="2/2"),
                self.sanitize("memcheck"),
                self.sanitize("racecheck"),
                *(self.compile_products(shape) for shape in TUNED_SHAPES),
            ),
            (self.lane(45, "ranks"),),
            (self.bench("gemm-tiles", 35, *gemm, "--tiles", "all", needs=(SM_90,)),),
            (self.bench("gemm", 30, *gemm, needs=(SM_90,)),),
            (self.bench("link", 25, "link-overlap", "--chunks", "3", "6", "12", "--shape",
                        *LINK_SHAPES),),
            (self.bench("ops-published", 60, *ops, *published, "--algorithms", names,
                        needs=(TWO_GPUS,)),),
            (self.training("gpt", 35, *both),),
            (self.training("gpt-plain", 35, *both, plain),),
            (self.bench("ops-torch", 30, *ops, "--shapes", "published:8192,1024", "--algorithms",
                        "sequential,auto", "--baseline", "torch-symm-mem", needs=(TWO_GPUS,)),),
            (self.lane(65, "ranks", number=2),),
            (self.lane(40, "jobs"),),
            (self.axonn("tune", "bench", 45, "tune", *cuda, "--shapes", *TUNED_SHAPES),),
            (self.bench("loss", 20, "loss", *cuda, "--rows", "4096", "--rounds", "10"),),
            (self.bench("ops", 20, "ops", *cuda),),
            (self.bench("optimizer", 25, "optimizer", *cuda, "--threads", "0", "--rounds", "5"),),
            (self.training("llama", 30, *llama),),
            (self.training("llama-plain", 30, *llama, plain),),
            (self.bench("bench-train", 35, "train", *cuda, "--baseline", "ddp", "--baseline",
                        "fsdp2", "--rounds", "5"),),
            (self.bench("linear", 20, "linear", *cuda, "--grid", "1x1x1", "--dtype", "bf16",
                        "--rounds", "10", "--shapes", *LINEAR_SHAPES),),
            (self.bench("block", 15, "block", *cuda, "--grid", "1x1x1", "--dtype", "bf16",
                        "--rounds", "10", "--shapes", "4,1024,2048,16"),),
            (self.lane(40, "timing"),),
            (self.axonn("verify-triton", "verify", 85, "verify", "--only", "triton"),),
            (self.bench("ops-shared", 25, "gemm-ops", *cuda, "--world", "2", "--dtype", "bf16",
                        "--rounds", "10", "--shapes", "2048,4096,4096"),),
            (self.training("x2", 30, *shared, grid="x=2"),),
            (self.training("z2", 30, *shared, "--overlap.mode=on", grid="z=2"),),
            (self.lane(60, "ranks", number=3),),
            (self.axonn("tune-published", "bench", 60, "tune", *cuda, *published),),
        )  # fmt: skip


def find_sanitizer() -> str | None:
    folders = [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    search = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("compute-sanitizer", path=search)
