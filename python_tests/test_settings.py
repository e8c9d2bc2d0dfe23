from __future__ import annotations

from pathlib import Path

import pytest

from axonn_ext.spec import settings


def test_defaults_and_values():
    assert settings.load({}) == settings.Settings()
    loaded = settings.load(
        {
            "AXONN_TIMEOUT_SECONDS": "2.5",
            "AXONN_SYMMETRIC_MEMORY_BYTES": str(1 << 21),
            "AXONN_FUSED_NCCL_SMS": "16",
            "AXONN_FUSED_FREE_SMS": "0",
        }
    )
    assert loaded == settings.Settings(
        timeout_seconds=2.5, symmetric_memory_bytes=1 << 21, fused_nccl_sms=16, fused_free_sms=0
    )


@pytest.mark.parametrize("name", ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"])
@pytest.mark.parametrize("value, in_turn", [("1", True), ("0", False), ("32", False)])
def test_graphs_in_turn(name: str, value: str, in_turn: bool):
    assert settings.load({name: value}).graphs_in_turn is in_turn


@pytest.mark.parametrize("text, value", [("", False), ("0", False), ("1", True)])
def test_switches(text: str, value: bool):
    assert settings.load({"AXONN_DEBUG_COLLECTIVES": text}).debug_collectives is value
    assert settings.load({"AXONN_DEBUG_TOKEN_IDS": text}).debug_token_ids is value


@pytest.mark.parametrize(
    "environment, kernels",
    [
        ({}, None),
        ({"AXONN_PRODUCT_KERNELS": ""}, ()),
        ({"AXONN_PRODUCT_KERNELS": "fused_sm90, triton"}, ("fused_sm90", "triton")),
    ],
)
def test_product_kernels(environment: dict[str, str], kernels: tuple[str, ...] | None):
    assert settings.load(environment).product_kernels == kernels


@pytest.mark.parametrize(
    "environment, directory",
    [
        ({"HOME": "/home/ada"}, "/home/ada/.cache/axonn_ext"),
        ({"HOME": "/home/ada", "XDG_CACHE_HOME": "/scratch"}, "/scratch/axonn_ext"),
        ({"HOME": "/home/ada", "XDG_CACHE_HOME": "scratch"}, "/home/ada/.cache/axonn_ext"),
        ({"HOME": "/home/ada", "AXONN_CACHE_DIR": "/scratch/"}, "/scratch"),
        ({"AXONN_CACHE_DIR": "here"}, str(Path.cwd() / "here")),
        ({"HOME": "/home/ada", "AXONN_CACHE_DIR": ""}, ""),
        ({}, ""),
    ],
)
def test_cache_directory(environment: dict[str, str], directory: str):
    assert settings.load(environment).cache_dir == directory


@pytest.mark.parametrize(
    "name, value, word",
    [
        ("AXONN_TIMEOUT_SECONDS", "soon", "'soon'"),
        ("AXONN_TIMEOUT_SECONDS", "0", "a number of seconds from 0.001 to 2000000, got '0'"),
        ("AXONN_SYMMETRIC_MEMORY_BYTES", "10", "bytes from 1048576 to 70368744177664, got '10'"),
        ("AXONN_TIMEOUT_SECONDS", "nan", "got 'nan'"),
        ("AXONN_SYMMETRIC_MEMORY_BYTES", "1e300", "got '1e300'"),
        ("AXONN_DEBUG_COLLECTIVES", "yes", "0 or 1, got 'yes'"),
        ("AXONN_FUSED_NCCL_SMS", "4", "0 or a whole number from 8 to 1024, got '4'"),
        ("AXONN_FUSED_NCCL_SMS", "8.5", "got '8.5'"),
        ("AXONN_FUSED_FREE_SMS", "-1", "a whole number from 0 to 1024, got '-1'"),
        ("AXONN_FUSED_FREE_SMS", "1.5", "got '1.5'"),
        ("AXONN_FUSED_FREE_SMS", "2000", "from 0 to 1024, got '2000'"),
        ("AXONN_PRODUCT_KERNELS", "cublaslt,cublas", "got 'cublas'"),
    ],
)
def test_bad_values_are_named(name, value, word):
    with pytest.raises(ValueError) as error:
        settings.load({name: value})
    assert name in str(error.value) and word in str(error.value)


def test_the_least_number_of_sms_is_that_of_the_transport():
    header = Path(__file__).parent.parent / "csrc" / "core" / "cuda" / "nccl" / "nccl_chunks.h"
    assert f"kMostCtas = {settings.MIN_FUSED_NCCL_SMS};" in header.read_text()


def test_launch_environment():
    assert settings.launch_environment({}) is None
    launch = settings.launch_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "1234"}
    )
    assert launch is not None
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert (launch.master_addr, launch.master_port, launch.local_world_size) == (
        "",
        1234,
        4,
    )


def test_ranks_that_share_gpus_are_hosts_to_nccl() -> None:
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}  # the user's value is kept
    settings.let_ranks_share_gpus(3, environment)
    assert environment == {
        "NCCL_HOSTID": "axonn-ext-rank-3", "NCCL_MULTI_RANK_GPU_ENABLE": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }  # fmt: skip
