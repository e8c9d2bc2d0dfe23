"""Tile configs: their legality, and the heuristic's choices."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_ext.kernels.triton.tile_configs import (
    DTYPE_BYTES,
    GFX90A,
    GFX942,
    SM80,
    SM90,
    DeviceLimits,
    Problem,
    TileConfig,
    amd_limits,
    best_config,
    candidates,
    cost_us,
    device_limits,
    legal_configs,
    shared_bytes,
    why_illegal,
)

LARGE = Problem(8192, 8192, 8192, "bfloat16")
HOPPER = TileConfig(128, 256, 64, 8, 3, descriptors=True)


def why(config: TileConfig = HOPPER, problem: Problem = LARGE, limits: DeviceLimits = SM90) -> str:
    return why_illegal(config, problem, limits)


def test_a_legal_config_has_no_reason():
    assert why() == ""
    assert why(replace(HOPPER, descriptors=False), limits=SM80) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_m": 96}, "block_m must be a power of two of at least 16, got 96"),
        ({"block_n": 8}, "block_n must be a power of two of at least 16, got 8"),
        ({"block_k": 0}, "block_k must be a power of two of at least 16, got 0"),
        ({"num_warps": 3}, "num_warps must be a power of two of at most 16, got 3"),
        ({"num_warps": 32}, "num_warps must be a power of two of at most 16, got 32"),
        ({"num_stages": 0}, "num_stages must be 1 to 8, got 0"),
        ({"num_stages": 9}, "num_stages must be 1 to 8, got 9"),
        ({"group_m": 0}, "group_m must be positive, got 0"),
        ({"split_k": 0}, "split_k must be 1 to 16, got 0"),
        ({"split_k": 17}, "split_k must be 1 to 16, got 17"),
        ({"block_m": 512}, "descriptors load edges of at most 256 elements"),
        ({"block_m": 256}, "needs 256 accumulators a thread, at most 128 fit"),
        ({"num_stages": 5}, "needs 246784 bytes of shared memory, at most 232448 fit"),
        ({"split_k": 2}, "partial sums of 536870912 bytes, at most 268435456 are taken"),
    ],
)
def test_what_no_device_runs(changes, reason):
    config = replace(HOPPER, **changes)
    assert why(config) == f"{config.name} on sm_90: {reason}"


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (HOPPER, {"dtype": "float32"}, "dtype must be one of bfloat16, float16, got float32"),
        (HOPPER, {"n": -1}, "sizes must not be negative, got 8192, -1, 8192"),
        (HOPPER, {"aligned": False}, "descriptors need operands of 16-byte aligned rows or columns "
         "that are not empty"),
        (replace(HOPPER, split_k=4), {"m": 64, "k": 192}, "split_k=4 leaves a part empty: K has 3 "
         "blocks"),
        (replace(HOPPER, split_k=4), {"m": 64, "fused": True}, "a matmul that is fused with a "
         "collective does not split K"),
        (replace(HOPPER, descriptors=False), {"fused": True}, "needs 128 accumulators a thread, at "
         "most 64 fit"),
        (TileConfig(128, 128, 64, 8, 3), {"fused": True, "vectors": False}, "needs 64 accumulators "
         "a thread, at most 32 fit"),
        (TileConfig(128, 64, 64, 4, 3), {"vectors": False}, "loads 192 bytes a thread element by "
         "element, at most 128 fit"),
    ],
)  # fmt: skip
def test_what_a_problem_forbids(config, changes, reason):
    assert why(config, replace(LARGE, **changes)) == f"{config.name} on sm_90: {reason}"


def test_descriptors_exist_from_sm_90_on():
    assert why(limits=SM80) == f"{HOPPER.name} on sm_80: tensor descriptors need sm_90 or later"


def test_shared_memory_is_that_of_the_stages_or_of_the_tile():
    assert shared_bytes(HOPPER, 2) == 3 * (128 + 256) * 64 * 2 + 1024
    assert shared_bytes(replace(HOPPER, num_stages=1), 2) == 128 * 256 * 4 + 1024


SIZES = [(8192, 8192, 8192), (1, 4096, 4096), (64, 11008, 4096), (37, 3, 5), (5, 7, 1), (4, 4, 0)]


@pytest.mark.parametrize("limits", [SM80, SM90], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_every_problem_has_a_config_and_the_heuristics_is_legal(
    limits, dtype, aligned, vectors, fused
):
    for m, n, k in SIZES:
        problem = Problem(
            m, n, k, dtype, aligned=aligned and k > 0, vectors=vectors, fused=fused
        )  # fmt: skip
        legal = legal_configs(problem, limits)
        assert legal and best_config(problem, limits) == legal[0]
        assert all(why_illegal(config, problem, limits) == "" for config in legal)
        refused = set(candidates(problem.element_bytes)) - set(legal)
        assert all(why_illegal(config, problem, limits) for config in refused)
        costs = [cost_us(config, problem, limits) for config in legal]
        assert costs == sorted(costs)


def test_what_the_heuristic_takes():
    assert best_config(LARGE, SM90).descriptors
    assert not best_config(LARGE, SM80).descriptors
    assert best_config(LARGE, SM90).split_k == 1
    large = best_config(LARGE, SM90)
    assert large.block_m * large.block_n == 128 * 256
    # Few rows: few tiles, so K is split to occupy the SMs; and tiles have few rows.
    small = best_config(Problem(16, 4096, 16384, "bfloat16"), SM90)
    assert small.split_k > 1 and small.block_m <= 64


def test_the_heuristic_says_that_nothing_is_legal():
    none = replace(SM90, shared_bytes_per_block=1024)
    with pytest.raises(ValueError, match="no tile config is legal for Problem"):
        best_config(LARGE, none)


def test_more_work_costs_more():
    config = TileConfig(128, 128, 64, 8, 4)
    for name in ("m", "n", "k"):
        twice = replace(LARGE, **{name: 16384})
        assert cost_us(config, twice, SM90) > 1.9 * cost_us(config, LARGE, SM90) - 10
    split = replace(config, split_k=4)
    narrow = Problem(64, 256, 65536, "bfloat16")
    assert cost_us(split, narrow, SM90) < cost_us(config, narrow, SM90)


def test_fewer_rows_than_an_instruction_multiplies_save_no_time():
    """An instruction has 64 rows: with 16, math takes as long, and only memory traffic shrinks."""
    slow_math = replace(SM90, flops_per_cycle=1.0)
    full, low = (TileConfig(rows, 128, 64, 4, 4) for rows in (64, 16))
    problem = Problem(16, 128, 65536, "bfloat16")
    assert cost_us(low, problem, slow_math) == pytest.approx(
        cost_us(full, problem, slow_math), rel=1e-3
    )


def test_a_split_k_moves_its_partial_sums_once_more():
    """All SMs together read the sums of four parts, 4 bytes each, from L2."""
    split = TileConfig(128, 128, 64, 8, 4, split_k=4)
    slow = replace(SM90, l2_bytes_per_cycle=1e-3)
    tiles = 4 * (LARGE.m // 128) * (LARGE.n // 128)
    each = (256 * LARGE.k // 4 * 2 + 128 * 128 * 4) / slow.l2_bytes_per_cycle
    moved = 4 * 4 * LARGE.m * LARGE.n / (slow.num_sms * slow.l2_bytes_per_cycle)
    cycles = -(-tiles // slow.num_sms) * each * 1.1 + moved
    assert cost_us(split, LARGE, slow) == pytest.approx(cycles / (slow.clock_ghz * 1e3), rel=1e-3)


def test_a_fused_kernel_loads_half_as_much_element_by_element():
    scattered = replace(LARGE, aligned=False, vectors=False)
    config = TileConfig(64, 64, 64, 4, 3)  # 128 bytes per thread, 32 accumulators
    assert why(config, scattered, SM80) == ""
    assert "at most 64 fit" in why(config, replace(scattered, fused=True), SM80)


def test_limits_of_a_device():
    assert device_limits(90, 66, 1 << 17) == replace(
        SM90, num_sms=66, shared_bytes_per_block=1 << 17
    )
    assert device_limits(89, 128, 100 << 10) == replace(
        SM80, architecture=89, num_sms=128, shared_bytes_per_block=100 << 10
    )
    assert device_limits(100, 148, 228 << 10).architecture == 100
    with pytest.raises(ValueError, match=r"at least 80 \(sm_80\), got 75"):
        device_limits(75, 40, 64 << 10)


def test_limits_of_sm_90_are_those_of_the_core():
    header = Path(__file__).parents[2] / "csrc" / "core" / "gemm" / "launch_config.h"
    text = header.read_text().partition("kSm90{")[2].partition("}")[0]
    core = dict(re.findall(r"\.(\w+) = ([\d.* ]+)", text))
    for name in ("architecture", "num_sms", "shared_bytes_per_block", "clock_ghz",
                 "flops_per_cycle", "l2_bytes_per_cycle"):  # fmt: skip
        assert getattr(SM90, name) == math.prod(map(float, core[name].split("*"))), name


def test_names_tell_configs_apart():
    names = [config.name for config in candidates(2)]
    assert len(set(names)) == len(names)
    # The cache on disk writes them as bare TOML keys.
    assert all(name.isalnum() and name.isascii() for name in names)
    assert HOPPER.name == "m128n256k64w8s3g8p1t"


# --- AMD ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [GFX90A, GFX942], ids=lambda limits: limits.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("vectors", [True, False])
def test_amd_gpus_have_configs_that_fit_them(limits: DeviceLimits, dtype: str, vectors: bool):
    for m, n, k in SIZES:
        problem = Problem(m, n, k, dtype, vectors=vectors)
        legal = legal_configs(problem, limits)
        assert legal and best_config(problem, limits) == legal[0]
        refused = set(candidates(2, amd=True)) - set(legal)
        assert all(why_illegal(config, problem, limits) for config in refused)
        for config in legal:
            assert not config.descriptors
            assert shared_bytes(config, 2, amd=True) <= 64 * 1024
            assert config.num_warps * 64 <= 512
    names = [config.name for config in candidates(2, amd=True)]
    assert len(set(names)) == len(names)


def test_what_amd_gpus_do_not_run():
    gfx942 = TileConfig(128, 128, 64, 4, 2)
    assert why(gfx942, limits=GFX942) == ""
    assert "on gfx942: tensor descriptors need sm_90 or later" in why(limits=GFX942)
    assert "needs instructions of NVIDIA GPUs" in why(gfx942, replace(LARGE, fused=True), GFX942)
    assert "16 warps have more than 512 threads" in why(
        replace(gfx942, num_warps=16), limits=GFX942
    )
    deep = replace(gfx942, num_stages=4)
    assert "needs 99328 bytes of shared memory, at most 65536 fit" in why(deep, limits=GFX90A)


def test_limits_of_an_amd_gpu():
    assert amd_limits("gfx90a", 104) == replace(GFX90A, num_sms=104)
    with pytest.raises(ValueError, match="must be one of gfx90a, gfx942, got gfx1100"):
        amd_limits("gfx1100", 96)
