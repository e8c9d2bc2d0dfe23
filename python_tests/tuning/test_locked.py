"""What keeps "auto" from our own kernels, and which command is named; without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from axonn_ext.kernels import extension, locked, verified
from axonn_ext.kernels.locked import find_locks
from axonn_ext.kernels.verified import Stamp, Verdict
from axonn_ext.spec import settings
from pretend_gpus import H100_NAME, pretend_gpus
from stamp_cases import RIGHT, WRONG

UNLOCKS = "`axonn-ext verify` (3 minutes, once per machine) unlocks them"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    return tmp_path


def keep(cache: Path, verdicts: dict[str, Verdict], *, complete: bool = True) -> None:
    for key in extension.stamp_keys():
        verified.keep(cache, Stamp(key, verdicts, complete))


def lines(**asked: object) -> list[str]:
    return [lock.line() for lock in find_locks(**asked).values()]  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_say(cache: Path):
    assert find_locks() == {}


def test_without_a_stamp_verify_unlocks_them(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch)
    assert lines() == [f"fused kernels: not verified on {H100_NAME}; {UNLOCKS}"]
    assert find_locks()[H100_NAME].unverified
    keep(cache, {"triton": WRONG, "fused": Verdict()}, complete=False)
    assert find_locks()[H100_NAME].unverified
    keep(cache, {"triton": WRONG, "fused": Verdict()})
    assert not find_locks()[H100_NAME].unverified, "a whole run has told nothing of it"
    assert lines() == [f"fused kernels: fused_sm90 not verified on {H100_NAME}; {UNLOCKS}"]


def test_what_is_right_has_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch)
    keep(cache, RIGHT)
    assert find_locks() == {} and find_locks(sizes=(1, 1, 1)) == {}
    assert extension.find_unlocked(settings.load()).fused_ranks == 4


def test_where_kernels_are_tritons_there_is_no_fused_sm90(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its verdict, which never comes, is not missed."""
    pretend_gpus(monkeypatch, ["NVIDIA A100"], source="triton")
    assert lines() == [f"fused kernels: not verified on NVIDIA A100; {UNLOCKS}"]
    keep(cache, {"fused": Verdict()})
    assert find_locks() == {}


def test_a_list_of_product_kernels_decides_about_fused_sm90(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    pretend_gpus(monkeypatch)
    keep(cache, {"fused": Verdict()})
    for names in ("triton", "fused_sm90"):
        monkeypatch.setenv("AXONN_PRODUCT_KERNELS", names)
        assert find_locks() == {}


def test_wrong_kernels_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch)
    keep(cache, RIGHT | {"fused": WRONG})
    after = "run it again after an update of axonn_ext, torch or the driver"
    assert lines() == [
        f"fused kernels: `axonn-ext verify` found fused wrong on {H100_NAME}; {after}"
    ]
    assert not find_locks()[H100_NAME].unverified


@pytest.mark.parametrize(
    ("ranks", "num_gpus", "sizes", "wanted"),
    [
        (1, 4, None, 4),
        (1, 3, None, 2),
        (8, 16, None, 0),
        (2, 4, (2, 1, 2), 0),
        (2, 4, (4, 1, 1), 4),
        (2, 4, (3, 1, 1), 3),
        (2, 4, (8, 1, 1), 0),  # more ranks than GPUs that could be verified
        (2, 4, (8, 4, 1), 4),
        (1, 4, (1, 1, 1), 0),
    ],
)
def test_kernels_are_locked_between_more_gpus_than_they_ran_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, num_gpus: int,
    sizes: tuple[int, ...] | None, wanted: int,
):  # fmt: skip
    pretend_gpus(monkeypatch, [H100_NAME] * num_gpus)
    keep(cache, RIGHT | {"fused": Verdict(ranks=ranks)})
    few = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    line = f"fused kernels: verified on {few} of {wanted}; {UNLOCKS} where it sees {wanted}"
    assert lines(sizes=sizes) == ([line] if wanted else [])


def test_gpus_that_do_not_reach_each_other_need_no_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    pretend_gpus(monkeypatch, [H100_NAME] * 4, reach=False)
    keep(cache, RIGHT | {"fused": Verdict()})
    assert find_locks() == {}


def test_what_verify_cannot_unlock_does_not_name_it(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, ["NVIDIA V100"], why_none="it needs sm_80")
    assert lines() == ["fused kernels: none on NVIDIA V100: it needs sm_80"]
    pretend_gpus(monkeypatch, driver_names=[])
    [line] = lines()
    assert "does not name this GPU" in line and "axonn-ext" not in line
    assert not any(lock.unverified for lock in find_locks().values())


def test_without_a_folder_there_are_no_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AXONN_CACHE_DIR", "")
    pretend_gpus(monkeypatch)
    [lock] = find_locks().values()
    assert "AXONN_CACHE_DIR is empty; with a folder there" in lock.line() and not lock.unverified


def test_gpus_that_torch_does_not_see_do_not_matter(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, driver_names=["NVIDIA T400", H100_NAME])
    assert set(find_locks()) == {H100_NAME}


def test_the_driver_may_name_the_only_model_otherwise(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, driver_names=["H100"])
    assert lines() == [f"fused kernels: not verified on H100; {UNLOCKS}"]
    keep(cache, RIGHT)
    assert find_locks() == {}


def test_kernels_are_asked_for_the_dtype_of_the_job(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch)
    asked = []
    monkeypatch.setattr(
        torch.ops.axonn, "_why_no_fused_here", lambda *given: asked.append(given) or "of bf16"
    )
    assert lines(dtype=torch.float32) == [f"fused kernels: none on {H100_NAME}: of bf16"]
    assert asked == [(torch.device("cuda", 0), torch.float32, 1, False)]
    assert locked.MAX_RANKS == 8
