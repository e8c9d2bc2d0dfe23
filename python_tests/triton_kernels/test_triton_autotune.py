"""The tuner of the Triton matmul: measured once, kept on disk, never where it may not be.

Times are made up, since there is no GPU; all else is real. Runs in the interpreter's process.
"""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_ext import _library, settings
from axonn_ext.triton.tile_configs import (
    SM90,
    Problem,
    TileConfig,
    best_config,
    legal_configs,
    why_illegal,
)
from triton_interpreter import run_ranks

pytestmark = pytest.mark.triton

PROBLEM = Problem(64, 256, 512, "float32", tf32=True)
CPU = torch.device("cpu")


@contextmanager
def cache_in(directory: Path) -> Iterator[None]:
    loaded = settings.load()
    _library.configure(dataclasses.replace(loaded, cache_dir=str(directory)))
    try:
        yield
    finally:
        _library.configure(loaded)


def prefers(wanted: TileConfig, calls: list[list[str]]) -> Callable[..., dict[TileConfig, float]]:
    """A timer that calls every config once, and finds `wanted` to be the fastest."""

    def timer(
        configs: Sequence[TileConfig], device: torch.device, run: Callable[[TileConfig], Any]
    ) -> dict[TileConfig, float]:
        calls.append([config.name for config in configs])
        for config in configs:
            run(config)
        return {config: 1.5 if config == wanted else 2.0 for config in configs}

    return timer


def tuner(**options: Any) -> Any:
    return importlib.import_module("axonn_ext.triton.autotune").Tuner(**options)


def choose(chooser: Any, problem: Problem = PROBLEM) -> TileConfig:
    return chooser.config_for(problem, SM90, CPU, lambda config: None)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def second_best() -> TileConfig:
    return legal_configs(PROBLEM, SM90)[1]


def measured_then_read(directory: Path) -> None:
    calls: list[list[str]] = []
    with cache_in(directory):
        first = tuner(measure=True, timer=prefers(second_best(), calls))
        assert [choose(first), choose(first)] == [second_best()] * 2
        assert len(calls) == 1 and second_best().name in calls[0]
        [choice] = first.choices()
        assert choice.source == "measured" and set(choice.median_us) == set(calls[0])
        [file] = files(directory)
        record = tomllib.loads(file.read_text())
        assert record["signature"] == choice.signature
        assert record["algorithm"] == second_best().name
        assert record["median_us"] == choice.median_us
        # Another process, which may measure or not, finds it.
        for options in ({}, {"measure": True, "timer": prefers(second_best(), calls)}):
            other = tuner(**options)
            assert choose(other) == second_best()
            assert other.choices()[0].source == "disk"
            assert other.choices()[0].median_us == choice.median_us
        assert len(calls) == 1


def test_measured_once_and_kept(interpreter, tmp_path: Path):
    interpreter.run(measured_then_read, tmp_path)


def defaults(directory: Path) -> None:
    with cache_in(directory):
        for options in ({}, {"measure": True}):  # the latter may not in the interpreter
            chooser = tuner(**options)
            assert choose(chooser) == best_config(PROBLEM, SM90)
            assert chooser.choices()[0].source == "default"
        assert files(directory) == []


def test_nothing_is_measured_in_the_interpreter(interpreter, tmp_path: Path):
    interpreter.run(defaults, tmp_path)


def without_a_cache() -> None:
    calls: list[list[str]] = []
    _library.configure(dataclasses.replace(settings.load(), cache_dir=""))
    for expected in (1, 2):
        assert choose(tuner(measure=True, timer=prefers(second_best(), calls))) == second_best()
        assert len(calls) == expected


def test_without_a_cache_each_tuner_measures(interpreter):
    interpreter.run(without_a_cache)


def of_one_class(directory: Path) -> None:
    calls: list[list[str]] = []
    small = Problem(2100, 2100, 1 << 20, "bfloat16")
    large = dataclasses.replace(small, m=4096, n=4096)  # whose partial sums take more memory
    wanted = next(c for c in legal_configs(small, SM90) if why_illegal(c, large, SM90))
    with cache_in(directory):
        chooser = tuner(measure=True, timer=prefers(wanted, calls))
        assert choose(chooser, small) == wanted
        assert choose(chooser, large) == best_config(large, SM90)
        assert len(calls) == 1 and len(chooser.choices()) == 1


def test_a_winner_that_is_illegal_for_another_of_its_class(interpreter, tmp_path: Path):
    interpreter.run(of_one_class, tmp_path)


def damaged(directory: Path) -> list[str]:
    calls: list[list[str]] = []
    with cache_in(directory), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose(tuner(measure=True, timer=prefers(second_best(), calls)))
        [file] = files(directory)
        whole = file.read_text()
        file.write_text(whole[: len(whole) // 2])
        assert choose(tuner()) == best_config(PROBLEM, SM90)
        # A config that this version does not have counts as none, without a word.
        file.write_text(whole.replace(f'"{second_best().name}"', '"m1n1k1"'))
        assert choose(tuner()) == best_config(PROBLEM, SM90)
        choose(tuner(measure=True, timer=prefers(second_best(), calls)))
        assert len(calls) == 2
        assert choose(tuner()) == second_best()
        return [str(warning.message) for warning in caught]


def test_a_damaged_file_is_measured_again(interpreter, tmp_path: Path):
    [message] = interpreter.run(damaged, tmp_path)
    assert message.startswith("axonn_ext goes on without its cache of measurements")
    assert message.endswith("its end is missing")


def many_writers(directory: Path) -> None:
    configs = legal_configs(PROBLEM, SM90)[:4]

    def write(rank: int) -> None:
        calls: list[list[str]] = []
        for _ in range(20):
            with cache_in(directory), warnings.catch_warnings():
                warnings.simplefilter("error")  # half a file would be complained of
                found = choose(tuner(measure=True, timer=prefers(configs[rank], calls)))
                assert found in configs
                for file in files(directory):
                    if file.suffix == ".toml":
                        file.unlink(missing_ok=True)

    run_ranks(4, write)
    assert all(not path.name.startswith(".") for path in files(directory))


def test_writers_do_not_disturb_each_other(interpreter, tmp_path: Path):
    interpreter.run(many_writers, tmp_path)


def through_matmul(directory: Path) -> None:
    matmul = importlib.import_module("axonn_ext.triton.matmul")
    calls: list[list[str]] = []
    a, b = torch.ones(20, 48), torch.ones(48, 32)
    problem = matmul.problem_of(a, b, bias=None, activation=None)
    wanted = legal_configs(problem, matmul.limits_of(CPU))[3]
    with cache_in(directory):
        chooser = tuner(measure=True, timer=prefers(wanted, calls))
        for _ in range(2):
            assert torch.equal(matmul.matmul(a, b, tuner=chooser), a @ b)
        assert [choice.config for choice in chooser.choices()] == [wanted] and len(calls) == 1


def test_matmul_takes_the_tuners_choice(interpreter, tmp_path: Path):
    interpreter.run(through_matmul, tmp_path)
