"""The Triton kernels on a GPU: the interpreter's checks, and those the interpreter cannot make.

The fused kernels run between virtual ranks, in processes that do not load CUTLASS's module, so that
they are Triton's even on sm_90.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from axonn_ext.kernels.triton.tile_configs import TileConfig, legal_configs
from limits import HANG_SECONDS

pytestmark = pytest.mark.gpu

DTYPES = ["bf16", "fp16"]


def load(name: str) -> ModuleType:
    """Imports a module that needs triton, only once a test of this file runs."""
    return importlib.import_module(name)


# --- matmul --------------------------------------------------------------------------------------


def failures_of(cases: list[dict[str, Any]], configs: list[TileConfig | None]) -> list[str]:
    module = load("triton_cases")
    return module.check_matmul([module.MatmulCase(**case) for case in cases], configs, "cuda")


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT", "SS"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_and_dtype(dtype, layout):
    sizes = [(512, 768, 256), (129, 257, 65), (1, 512, 512), (33, 1, 7)]
    cases = [{"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout} for m, n, k in sizes]
    split = TileConfig(32, 32, 16, 4, 3, split_k=4)
    assert failures_of(cases, [None]) == []
    assert failures_of(cases[:1], [split]) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    base = {"dtype": dtype, "bias": True}
    cases = [{**base, "m": m, "n": n, "k": k} for m, n, k in ((256, 512, 512), (37, 130, 64))]
    split = TileConfig(32, 32, 16, 4, 3, split_k=2)
    assert failures_of(cases, [None, split]) == []


def test_every_legal_config():
    cases = load("triton_cases")
    launch = load("axonn_ext.kernels.triton.launch")
    matmul = load("axonn_ext.kernels.triton.matmul")
    case = cases.MatmulCase(304, 272, 528)
    a, b = (
        torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((case.m, case.k), (case.k, case.n))
    )
    legal = legal_configs(matmul.problem_of(a, b, None), launch.limits_of(a.device))
    configs = [config for config in legal if config.split_k == 1]
    assert len(configs) > 10
    assert cases.check_matmul([case], configs, "cuda") == []


def test_offsets_have_64_bits():
    storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    a = storage.as_strided((2, 64), (2**31, 1))
    a.copy_(torch.arange(128.0).view(2, 64))
    eye = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(load("triton_cases").product(a, eye), a)


# --- With collectives ----------------------------------------------------------------------------

WITHOUT_CUTLASS = """
import importlib.util, json, os, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name == "axonn_ext._cuda_sm90" else find(name, *rest)
)
import torch
from axonn_ext import ops
from axonn_ext.kernels import extension
from axonn_ext.verify import groups
if extension.cuda is None or groups.gemm_source() != "triton":
    print(json.dumps("no CUDA parts, no triton, or a GPU before sm_80"))
    sys.exit()
"""
CHECK = """
print(json.dumps(groups.{target}()))
"""
ABSENT = """
ranks = extension.cuda.VirtualRanks(2, workspace_bytes=1 << 20, timeout_seconds=0.5)
shards = [torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)] * 2
others = [torch.ones(*{other}, device="cuda", dtype=torch.bfloat16)] * 2
try:
    ranks.all_gather_matmul(shards, others, arriving="{arriving}", absent={1})
    torch.cuda.synchronize()
    print(json.dumps(["no error", None]), flush=True)
except Exception as error:
    print(json.dumps([type(error).__name__, ranks.failure()]), flush=True)
os._exit(0)  # the context is lost, and with it every destructor
"""


def run_without_cutlass(program: str) -> Any:
    """Runs the program; returns the last line of its output, parsed as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUTLASS + program],
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if isinstance(answer, str):
        pytest.skip(answer)
    return answer


@pytest.mark.parametrize("target", ["virtual_gathers", "virtual_sums", "virtual_calls"])
def test_fused_calls(target):
    count, failures = run_without_cutlass(CHECK.replace("{target}", target))
    assert count > 0
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("arriving", "other"),
    [("rows", (64, 64)), ("columns", (64, 64)), ("inner", (64, 128)), ("inner_a", (128, 64))],
)
def test_a_rank_that_does_not_come_is_named(arriving, other):
    """Reports rank, peer, chunk, expected and seen epoch. In its own process, as it traps."""
    program = ABSENT.replace("{other}", str(other)).replace("{arriving}", arriving)
    error, found = run_without_cutlass(program)
    assert error in {"AcceleratorError", "RuntimeError"}
    assert found == [0, 1, 0, 1, 0]
