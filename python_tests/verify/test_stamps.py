"""Made-up stamps of `axonn-ext verify`, and the kernels that they unlock; without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_ext.cli import verify as command
from axonn_ext.kernels import extension, host, verified
from axonn_ext.kernels.verified import Key, Stamp, Verdict
from axonn_ext.spec import settings
from stamp_cases import H100, RIGHT, WRONG, measured_products

# --- Stamps ---------------------------------------------------------------------------------------


def test_a_stamp_is_found_by_its_key_alone(tmp_path: Path):
    stamp = Stamp(H100, {"fused": Verdict(ranks=8), "fused_sm90": WRONG})
    assert not verified.any_kept(str(tmp_path)) and not verified.any_kept("")
    path = verified.keep(tmp_path, stamp)
    assert verified.any_kept(str(tmp_path))
    assert path == verified.path_of(tmp_path, H100)
    assert verified.find(tmp_path, H100) == stamp
    for name in (field.name for field in dataclasses.fields(Key)):
        assert verified.find(tmp_path, dataclasses.replace(H100, **{name: "another"})) is None
    verified.keep(tmp_path, Stamp(H100, RIGHT, complete=False))
    assert verified.find(tmp_path, H100) == Stamp(H100, RIGHT, complete=False)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_run_changes_what_it_has_looked_at():
    groups_of = {"2 GPUs": "wrong", "8 GPUs": "wrong"}
    all_right, one_gpu = Verdict(ranks=8), Verdict(ranks=1)
    failed = Verdict(reasons=groups_of)

    def fused(old: Verdict, new: Verdict, *passed: str) -> Verdict:
        return verified.merged({"fused": old}, {"fused": new}, passed=passed)["fused"]

    old = {"fused": all_right, "triton": WRONG}
    assert verified.merged(old, {}, passed=["triton: products"]) == old
    assert verified.merged(old, {"cublaslt": one_gpu}, passed=[]) == old | {"cublaslt": one_gpu}
    assert verified.merged({}, old, passed=[]) == old
    assert fused(all_right, one_gpu) == all_right and fused(one_gpu, all_right) == all_right
    assert fused(all_right, failed) == failed
    # A failure between GPUs remains when fewer GPUs pass later.
    assert fused(failed, one_gpu, "1 GPU") == failed
    assert fused(failed, Verdict(ranks=2), "2 GPUs").reasons == {"8 GPUs": "wrong"}
    assert fused(failed, all_right, *groups_of) == all_right
    assert fused(failed, Verdict(reasons={"1 GPU": "worse"}), "2 GPUs").reasons == {
        "8 GPUs": "wrong",
        "1 GPU": "worse",
    }


def test_the_format_is_what_the_documents_say(tmp_path: Path):
    document = json.loads(verified.keep(tmp_path, Stamp(H100, {"fused": WRONG})).read_text())
    assert document == {
        "format": 1,
        "key": dataclasses.asdict(H100),
        "complete": True,
        "kernels": {"fused": {"passed": False, "ranks": 1, "reasons": dict(WRONG.reasons)}},
    }


def test_a_damaged_stamp_counts_as_none(tmp_path: Path):
    text = verified.encode(Stamp(H100, RIGHT))
    path = verified.keep(tmp_path, Stamp(H100, RIGHT))
    document = json.loads(text)
    damaged = [
        text[: len(text) // 2],
        "",
        "null",
        "[]",
        "[" * 100_000,
        "\x00\xff",
        text.replace('"format": 1', '"format": 2'),
        text.replace('"driver"', '"drivers"'),
        text.replace('"ranks": 4', '"ranks": "4"'),
        text.replace('"ranks": 4', '"ranks": -1'),
        text.replace('"ranks": 4', '"ranks": true'),
        text.replace('"passed": true', '"passed": false', 1),
        text.replace('"reasons": {}', '"reasons": {"sums": "wrong"}', 1),
        text.replace('"reasons": {}', '"reasons": 7', 1),
        json.dumps(document | {"kernels": ["fused"]}),
        json.dumps(document | {"complete": 1}),
        json.dumps({name: document[name] for name in ("format", "key", "kernels")}),
        json.dumps(document | {"key": document["key"] | {"driver": "1"}}),
    ]
    for one in damaged:
        assert one != text
        path.write_text(one, encoding="latin-1")
        assert verified.find(tmp_path, H100) is None, one[:80]
    path.write_text(text)
    assert verified.find(tmp_path, H100) is not None
    path.unlink()
    path.mkdir()
    assert verified.find(tmp_path, H100) is None


# --- What they unlock -----------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_unlocked_or_suggested():
    found = verified.unlocked(None, [])
    assert found.product_kernels == ("cublaslt", "triton")
    assert (found.fused_ranks, found.unverified, found.suggest_verify) == (0, (), False)


def test_without_a_stamp_it_is_suggested():
    found = verified.unlocked(None, [None])
    assert found.product_kernels == ("cublaslt", "triton")
    assert (found.fused_ranks, found.unverified) == (0, ("fused_sm90",))
    assert found.suggest_verify


def test_a_stamp_unlocks_what_it_says_is_right():
    found = verified.unlocked(None, [Stamp(H100, RIGHT)])
    assert found.product_kernels == ("cublaslt", "triton", "fused_sm90")
    assert (found.fused_ranks, found.unverified, found.suggest_verify) == (4, (), False)
    assert verified.unlocked(("triton",), [Stamp(H100, RIGHT)]).product_kernels == ("triton",)
    assert verified.unlocked((), [Stamp(H100, RIGHT)]).product_kernels == ()


@pytest.mark.parametrize("failed", verified.KERNELS)
def test_what_has_failed_is_locked_out_alone(failed: str):
    stamp = Stamp(H100, RIGHT | {failed: WRONG})
    for asked in (None, settings.PRODUCT_KERNELS):
        found = verified.unlocked(asked, [stamp])
        expected = tuple(name for name in settings.PRODUCT_KERNELS if name != failed)
        assert found.product_kernels == expected
        assert found.fused_ranks == (0 if failed == "fused" else 4)
        assert not found.suggest_verify and found.unverified == ()


def test_every_model_of_gpu_must_have_passed():
    other = dataclasses.replace(H100, gpu="NVIDIA H200")
    two_ranks = Stamp(other, RIGHT | {"fused": Verdict(ranks=2)})
    assert verified.unlocked(None, [Stamp(H100, RIGHT), two_ranks]).fused_ranks == 2
    for second in (None, Stamp(other, {}), Stamp(other, {"fused": WRONG, "fused_sm90": WRONG})):
        found = verified.unlocked(None, [Stamp(H100, RIGHT), second])
        assert found.fused_ranks == 0
        assert found.product_kernels == ("cublaslt", "triton")


def fake_driver(folder: Path, models: list[str]) -> Path:
    for number, model in enumerate(models):
        path = folder / "gpus" / f"0000:{number:02x}:00.0" / "information"
        path.parent.mkdir(parents=True)
        path.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  "
        "(root@host)  Sun Jul 20 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    return folder


def test_the_driver_tells_models_and_its_version(tmp_path: Path):
    folder = fake_driver(tmp_path, ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"])
    assert host.nvidia_gpus(folder) == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert host.nvidia_driver(folder) == "580.65.06"
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    )
    (folder / "version").write_text(text)
    assert host.nvidia_driver(folder) == "535.104.05"
    assert host.nvidia_gpus(tmp_path / "none") == []
    assert host.nvidia_driver(tmp_path / "none") == ""


def test_amd_gpus_are_told_apart(tmp_path: Path):
    """They are read from the kernel's files, as measurements of another GPU are useless."""
    versions = (0, 90402, 90010)
    for number, version in enumerate(versions):
        (tmp_path / str(number)).mkdir()
        text = f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / str(number) / "properties").write_text(text)
    assert host.amd_gpus(tmp_path) == ["AMD gfx90a, 1216 SIMDs", "AMD gfx942, 1216 SIMDs"]
    assert host.amd_gpus(tmp_path / "none") == []


def test_the_settings_find_the_stamps_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The machine seems to have a GPU."""
    loaded = dataclasses.replace(settings.load(), cache_dir=str(tmp_path))
    assert not extension.find_unlocked(loaded).suggest_verify
    monkeypatch.setattr(host, "runs_cuda", lambda: True)
    monkeypatch.setattr(host, "nvidia_gpus", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(host, "nvidia_driver", lambda: "580.65.06")
    assert extension.find_unlocked(loaded).suggest_verify
    [key] = extension.stamp_keys()
    assert (key.gpu, key.driver, key.torch) == ("NVIDIA H200", "580.65.06", torch.__version__)
    verified.keep(tmp_path, Stamp(dataclasses.replace(key, driver="570.1"), RIGHT))
    assert extension.find_unlocked(loaded).fused_ranks == 0
    verified.keep(tmp_path, Stamp(key, RIGHT))
    assert extension.find_unlocked(loaded).fused_ranks == 4
    assert command.key_of("NVIDIA H200") == key


# --- What "auto" measures then --------------------------------------------------------------------

ALL = ["fused", "chunked", "sequential"]


@pytest.mark.parametrize(
    ("verified_ranks", "num_ranks", "is_supported", "names"),
    [
        (0, 2, True, ALL[1:]),  # no stamp
        (4, 2, True, ALL),
        (4, 4, True, ALL),
        (4, 8, True, ALL[1:]),  # verified between fewer ranks
        (1, 2, True, ALL[1:]),  # on one GPU only
        (8, 2, False, ALL[1:]),  # sm_80, float32, rows of 3 elements
    ],
)
def test_candidates_on_gpus(
    verified_ranks: int, num_ranks: int, is_supported: bool, names: list[str]
):
    """On GPUs, only measured algorithms become the default."""
    found = extension.algorithm_candidates(
        is_cpu=False, shares_memory=False, is_supported=is_supported, num_ranks=num_ranks,
        verified_ranks=verified_ranks,
    )  # fmt: skip
    assert found == (names, "sequential")


def test_candidates_on_cpus_do_not_depend_on_gpus():
    for shares, ranks in itertools.product((True, False), (0, 8)):
        found = extension.algorithm_candidates(
            is_cpu=True, shares_memory=shares, is_supported=False, num_ranks=2, verified_ranks=ranks
        )
        assert found == ((ALL, "fused") if shares else (ALL[1:], "sequential"))


def words(by_rank: list[list[str]]) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    return [
        extension.all_say_the_same(group.group_name, key=f"{by_rank}/{turn}", word=word)
        for turn, word in enumerate(by_rank[dist.get_rank()])
    ]


def test_ranks_use_together_only_what_all_can(pool):
    """`said` has each rank's host, or "" if its stamp or its operands forbid the algorithm."""
    said = [["host a", "host a", "", "host a"], ["host a", "host b", "", ""]]
    assert pool(2).run(words, said) == [[True, False, False, False]] * 2


def test_auto_measures_the_product_kernel_that_is_right(monkeypatch: pytest.MonkeyPatch):
    wrong = Stamp(H100, RIGHT | {"fused_sm90": WRONG})
    assert "fused_sm90" not in measured_products(monkeypatch, wrong)
    assert "fused_sm90" in measured_products(monkeypatch, Stamp(H100, RIGHT))
    assert "fused_sm90" not in measured_products(monkeypatch, None)
    asked = {"product_kernels": ("fused_sm90",)}
    assert "fused_sm90" in measured_products(monkeypatch, None, **asked)
