"""`bench ranking`: the comparison of orders, and the grids to compare."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.bench.launched import from_json, to_json
from axonn_ext.bench.ranking import Row, judge, markdown, spearman
from axonn_ext.bench.ranking_cases import (
    CASES,
    Launch,
    Pipelines,
    Times,
    default_models,
    legal_configs,
    predict,
)
from axonn_ext.bench.ranking_ranks import time_configs
from axonn_ext.cli.main import main
from axonn_ext.models import check
from axonn_ext.planner import load_machine


def rows_of(predicted: list[float], measured: list[float]) -> list[Row]:
    pairs = zip(predicted, measured, strict=True)
    return [Row(f"x={i}", "sharded", "-", p, m, 2 * m, 0.01) for i, (p, m) in enumerate(pairs)]


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # 1 - 6 sum d^2 / n (n^2 - 1), d = 1, 1, 0, 0
    assert math.isclose(spearman([1, 2, 3, 4], [2, 1, 3, 4]), 0.8)
    # Of ranks (1.5, 1.5, 3) and (1, 2, 3).
    assert math.isclose(spearman([1, 1, 2], [1, 2, 3]), math.sqrt(3) / 2)


def test_the_verdict():
    good = judge(rows_of([1, 2, 3, 4, 5], [1.1, 1.0, 3, 4, 5]))
    assert good.gap == 0 and good.useful
    near = judge(rows_of([1, 2, 3, 4, 5], [2, 3, 4, 1.95, 6]))
    assert math.isclose(near.gap, 2 / 1.95 - 1) and not near.useful  # the correlation is 0.6
    far = judge(rows_of([1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 1, 5, 6, 7, 8]))
    assert far.gap == 1 and far.spearman > 0.8 and not far.useful
    with pytest.raises(ValueError, match="more than 3 rows"):
        judge(rows_of([1, 2, 3], [1, 2, 3]))


def test_the_table_is_in_the_planners_order():
    rows = rows_of([0.003, 0.001, 0.002, 0.004], [0.03, 0.01, 0.02, 0.04])
    lines = markdown("gpt", rows, judge(rows)).splitlines()
    assert lines[0].startswith("gpt: Spearman 1.00; the best of the planner's first 3 is 0.0%")
    assert lines[4] == "| 1 | 1 | x=1 | sharded | - | 1 | 10 | 20 | 50% |"
    assert [line.split("|")[3].strip() for line in lines[4:]] == ["x=1", "x=2", "x=0", "x=3"]


@pytest.mark.parametrize("name", CASES)
def test_every_grid_that_is_legal_is_compared(name: str):
    case = CASES[name]
    configs = legal_configs(case, 8)
    assert len({str(c.grid) for c in configs}) == len(configs) >= 15
    for config in configs:
        assert check(case.model, config.parallel, config.grid, batch_size=case.batch_size) == []


def test_grids_with_stages_are_compared_if_asked():
    """Each has as many micro-batches as its ranks can share, up to the requested number."""
    assert default_models(Pipelines(max_pipe=4)) == ("gpt-deep",)
    assert default_models(Pipelines()) == ("gpt", "gpt-tokens", "llama")
    case, machine = CASES["gpt-deep"], load_machine("host")
    without = legal_configs(case, 8)
    configs = legal_configs(case, 8, Pipelines(max_pipe=4, micro_batches=16))
    assert configs[: len(without)] == without
    assert {c.grid.pipe for c in configs} == {1, 2, 4}
    parts = {c.grid.short(): c.micro_batches for c in configs}
    assert parts["x=8"] == 1 and parts["x=2,pipe=4"] == 16
    assert parts["data=4,pipe=2"] == 8  # 4 sequences each, one per rank of data
    for config in configs:
        assert 0 < predict(case, config, machine) < 60
    assert from_json(Launch, to_json(Launch(case, configs, 1))).configs == configs
    assert {c.grid.pipe for c in legal_configs(CASES["gpt"], 8, Pipelines(4))} == {1, 2}  # 2 blocks


def time_launch(text: str) -> list[Times]:
    return time_configs(from_json(Launch, text))


@pytest.mark.parametrize("overlaps", [False, True])
def test_ranks_time_all_grids(pool: Any, overlaps: bool):
    case = CASES["llama"]
    configs = legal_configs(case, 2, Pipelines(max_pipe=2), overlaps=overlaps)
    launch = Launch(case, configs, rounds=2)
    assert len(launch.configs) == 5 and launch.configs[-1].grid.pipe == 2
    assert all((", overlap" in f", {c.schedule}") == overlaps for c in configs)
    first, second = pool(2).run(time_launch, to_json(launch))
    assert first == second and all(0 < times.fastest_s <= times.median_s for times in first)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--nproc", "0"], "--nproc: expected a whole number >= 1, got 0"),
        (["--machine", "none.toml"], "--machine: "),
        (["--machine", "this"], "run axonn-ext bench links"),
        (["--machine", "dgx-a100", "--nproc", "1"], "can be trained on 1 grids of 1 ranks"),
        (["--schedule", "1f1b"], "need pipeline stages: give --pipe"),
        (["what"], "unknown argument what"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: Any):
    assert main(["bench", "ranking", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_earlier_times_are_compared_with_new_predictions(tmp_path: Path, capsys: Any):
    """The planner's own times give its order; other files are refused."""
    case, machine = CASES["gpt"], load_machine("dgx-a100")
    rows = [
        dataclasses.asdict(
            Row(c.grid.short(), c.layout, c.schedule, 0.0, *[predict(case, c, machine)] * 3)
        )
        for c in legal_configs(case, 8)
    ]
    times, tables, found = tmp_path / "times.json", tmp_path / "tables.md", tmp_path / "found.json"
    arguments = ["bench", "ranking", "--model", "gpt", "--machine", "dgx-a100", "--times", times]
    arguments += ["--json", found, "--markdown", tables]
    times.write_text(json.dumps({"models": [{"model": "gpt", "rows": rows}]}))
    assert main(list(map(str, arguments))) == 0
    (model,) = json.loads(found.read_text())["models"]
    assert model["spearman"] == 1 and model["gap"] == 0 and len(model["rows"]) == len(rows)
    assert "gpt: Spearman 1.00" in tables.read_text()
    times.write_text(json.dumps({"models": [{"model": "gpt", "rows": rows[1:]}]}))
    assert main(list(map(str, arguments))) == 2
    assert f"has no times of gpt on {rows[0]['grid']}" in capsys.readouterr().err
    times.write_text("{}")
    assert main(list(map(str, arguments))) == 2
    assert "is not the --json of such a run" in capsys.readouterr().err
