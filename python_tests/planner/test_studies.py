"""Published studies: the data, their predictions, and the document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_ext.cli.plan.study_page import with_study
from axonn_ext.cli.plan.study_tables import markdown
from axonn_ext.planner import load_machine, memory_of
from axonn_ext.planner.estimate import estimate
from axonn_ext.planner.job import Job, Options, violations
from axonn_ext.planner.published.cases import Case
from axonn_ext.planner.published.retold import (
    Line,
    Told,
    fastest_of,
    jobs_of_framework,
    lines_of,
    mean_error,
    range_of_network,
    retell,
    share_of_peak,
)
from axonn_ext.planner.published.runs import FLOPS, load_runs, predict
from axonn_ext.planner.published.study import (
    Figure,
    Study,
    Way,
    load_study,
    read_study,
    study_names,
)
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.grid import GridShape, grids_of
from axonn_ext.spec.presets import PRESETS

pytestmark = pytest.mark.long

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published.md"

SMALL = """
title = "A study"
source = "a test"
says = "a step"
assumed = ["all"]
lacks = ["nothing"]
flops = "palm"
most_stages = 2
series = true

[theirs]
name = "ours"
machine = "dgx-a100"
sequence_length = 1024
batch_size = 64
layout = "replicated"
recompute = "full"
overlap = { prefetch = 1, deferred = 2, held_blocks = 0 }

[frameworks.slow]
name = "Slow"
layout = "replicated"
recompute = "full"
axes = { pipe = 2, data = 8 }
sequences = [1, 2]

[models.mine]
vocab_size = 50304
hidden_size = 1024
num_layers = 24
num_heads = 16

[machines.lab]
base = "dgx-a100"
memory_bytes = 50_000_000_000
memory_bytes_per_s = 1e12

[[rows]]
model = "mine"
num_ranks = 8
figures = [
    { kind = "faster", than = "slow", value = 0.1, to = 0.2 },
    { kind = "tokens_per_s_per_gpu", value = 10000 },
]

[[rows]]
model = "gpt2-medium"
num_ranks = 16
machine = "lab"
grid = { z = 4, data = 4 }
micro_batches = 2
assumed = "the micro-batches"
"""


def read(folder: Path, text: str) -> Study:
    path = folder / "mine.toml"
    path.write_text(text)
    return read_study(path, "mine")


# --- The data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", study_names())
def test_studies_are_whole(name: str) -> None:
    study = load_study(name)
    assert study.rows
    for row in study.rows:
        case = row.case
        assert case.options.dtype in study.machines[case.machine].peak_flops
        if case.grid is None:
            continue
        job = Job(case.model, case.grid, case.options, case.batch_size)
        assert next(violations(job), None) is None, (case.model_name, case.num_ranks)


def test_an_unknown_study_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown study 'axonn-2025'.*axonn-2021"):
        load_study("axonn-2025")


def test_models_of_summit_have_the_sizes_of_their_names() -> None:
    rows = load_study("axonn-2021").rows
    sizes = {int(row.case.model_name[6:-1]): row.case.model.num_parameters() for row in rows}
    assert list(sizes) == [12, 24, 50, 100]
    for billions, parameters in sizes.items():
        assert parameters == pytest.approx(billions * 1e9, rel=0.03)


def test_torchtitans_tokens_are_its_share_of_peak() -> None:
    """It reports 29.0 % and 109 tokens/s, so its rule, model and peak match ours."""
    rows = load_study("llama-torchtitan").rows
    row = next(r for r in rows if (r.case.model_name, r.case.num_ranks) == ("llama3-405b", 128))
    figure = row.figures[0]
    assert figure.reported == (109, 109)
    step = FLOPS[figure.flops](row.case.model, row.case.batch_size)
    per_token = step / row.case.batch_size / row.case.model.sequence_length
    assert 109 * per_token / 989e12 == pytest.approx(0.29, abs=0.003)


def test_metas_operations_are_its_share_of_peak() -> None:
    reported = [row.figures[0].reported for row in load_study("llama-meta").rows]
    shares = [low * 1e12 / load_machine("dgx-h100").peak_flops["bf16"] for low, _ in reported]
    assert shares == pytest.approx([0.43, 0.41], abs=0.01)


def test_rows_of_published_runs_are_those_of_the_fit() -> None:
    study = load_study("axonn-2024")
    told = {(t.case.machine, t.case.num_ranks): t for t in study.rows}
    runs = [run for run in load_runs()[0] if run.source == "AxoNN 2024"]
    assert len(runs) == 3
    for run in runs:
        row = told[run.machine, run.num_ranks]
        assert row.figures[0].reported == (run.reported, run.reported)
        assert (row.case.batch_size, row.case.options) == (run.batch_size, run.options)
    for machine in ("perlmutter", "frontier", "alps"):
        gpus = [row.case.num_ranks for row in study.rows if row.case.machine == machine]
        assert gpus == sorted(gpus)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('title = "A study"\n', "", "title must be a text; it is missing"),
        ("series = true", "serial = true", "serial"),
        ('flops = "palm"', 'flops = "plam"', "flops must be one of recomputed, palm"),
        ('assumed = ["all"]', "assumed = []", "assumed must be an array of texts"),
        ("z = 4, data = 4", "z = 4, data = 2", "a grid of num_ranks=16 ranks"),
        ('kind = "faster"', 'kind = "quicker"', "kind must be one of share_of_peak"),
        ('than = "slow"', 'than = "fast"', "frameworks.fast must be a table"),
        ("to = 0.2", "to = 0.05", "to must be a finite number >= 0.1"),
        ("micro_batches = 2", "microbatches = 2", "microbatches"),
        ("series = true", 'compared = ["axonn2025"]', "compared must be an array of sources"),
        ("sequences = [1, 2]", "sequences = [0]", "sequences must be an array of whole numbers"),
        ("axes = {", "zeros = 3\naxes = {", "unknown key in frameworks.slow 'zeros'"),
        ("batch_size = 64", "batch_size = 64\nbatches = 3", "unknown key in theirs 'batches'"),
        ("axes = {", "zero = 3\naxes = {", "zero must be 0, 1 or 2, got 3"),
        ("memory_bytes_per_s = 1e12", "memory_bytes_per_s = 0", "finite number > 0, got 0"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert SMALL.count(old) == 1
    with pytest.raises(InputError) as error:
        read(tmp_path, SMALL.replace(old, new))
    assert expected in str(error.value)
    assert "mine.toml" in str(error.value)


# --- The predictions -----------------------------------------------------------------------------


def test_steps_are_those_of_the_file(tmp_path: Path) -> None:
    """Each prediction is repeated by hand from the file."""
    study = read(tmp_path, SMALL)
    first, second = retell(study)
    assert first.theirs is not None and second.theirs is not None
    job = second.theirs.job
    assert job.grid == GridShape(z=4, data=4)
    assert (job.options.micro_batches, job.options.layout) == (2, "replicated")
    lab = study.machines["lab"]
    assert (lab.memory_bytes, lab.products.memory_bytes_per_s) == (50e9, 1e12)
    by_hand = estimate(job, lab, memory_of(job, device="cuda"))
    assert second.theirs.step_time_s == by_hand.step_time_s
    dgx = estimate(job, load_machine("dgx-a100"), by_hand.memory)
    assert dgx.step_time_s < by_hand.step_time_s  # its memory is faster
    slow = first.frameworks["slow"]
    assert slow is not None and slow.job.options.overlap is None
    assert slow.job.grid.pipe * slow.job.grid.data == 8
    assert first.best is not None and first.best.step_time_s <= first.theirs.step_time_s
    lines = list(lines_of((first, second)))
    assert lines[0].theirs == slow.step_time_s / first.theirs.step_time_s - 1
    tokens = 64 * 1024 / first.theirs.step_time_s / 8
    assert lines[1].theirs == pytest.approx(tokens)
    assert lines[1].error == pytest.approx(tokens / 10000 - 1)
    assert lines[2].figure == Figure("share_of_peak", "palm")
    assert lines[2].error is None
    assert [line.efficiency for line in lines] == [1, 1, 1]  # each machine starts at 1
    assert study.rows[1].assumed == "the micro-batches"


def test_a_framework_runs_the_fastest_of_its_own_grids() -> None:
    machine, model = load_machine("dgx-a100"), PRESETS["gpt2-medium"]
    case = Case(
        "dgx-a100", "gpt2-medium", model, 8, 64, None, Options(recompute="full"), None, False
    )
    way = Way("some", (("x", 4), ("data", 8)), (1, 4))
    jobs = list(jobs_of_framework(case, way))
    assert {job.grid for job in jobs} == {
        grid for grid in grids_of(8) if grid.y == grid.z == 1 and grid.x <= 4
    }
    assert {64 // job.grid.data // job.options.micro_batches for job in jobs} == {1, 4}
    times = [
        estimate(job, machine, memory_of(job, device="cuda")).step_time_s
        for job in jobs
        if next(violations(job), None) is None
    ]
    best = fastest_of(jobs, machine)
    assert best is not None and best.step_time_s == min(times)
    tiny = replace(machine, memory_bytes=machine.memory_reserved_bytes + 1_000_000)
    assert fastest_of(jobs, tiny) is None


def test_a_published_run_is_predicted_as_in_the_fit() -> None:
    study = load_study("axonn-2023")
    [told] = retell(replace(study, rows=study.rows[:1]))
    run = next(run for run in load_runs()[0] if run.source == "AxoNN 2023")
    assert told.theirs is not None
    share = share_of_peak(told, told.theirs, run.flops)
    assert share == pytest.approx(predict(run, load_machine("perlmutter")).fraction)
    low, high = range_of_network(told, told.theirs, run.flops)
    assert 0.8 * share < low < share < high < 1.2 * share
    assert not told.too_large
    assert replace(told, machine=replace(told.machine, memory_bytes=4_000_000_000)).too_large


def test_one_gpu_has_no_network() -> None:
    machine, model = load_machine("dgx-a100"), PRESETS["gpt2-small"]
    case = Case("dgx-a100", "gpt2-small", model, 1, 8, GridShape(), Options(), None, False)
    job = Job(model, GridShape(), Options(), 8)
    step = estimate(job, machine, memory_of(job, device="cuda"))
    told = Told(load_study("axonn-2021").rows[0], machine, step, step, {})
    told = replace(told, row=replace(told.row, case=case))
    share = share_of_peak(told, step, "palm")
    assert range_of_network(told, step, "palm") == (share, share)


@pytest.mark.parametrize(
    ("kind", "modelled", "expected"),
    [
        ("share_of_peak", 0.45, 0.0),  # inside the range
        ("share_of_peak", 0.6, 0.2),
        ("share_of_peak", 0.3, -0.25),
        ("faster", 0.8, 0.2),  # 1.8 over 1.5
        ("share_of_peak", None, None),
    ],
)
def test_errors_are_to_the_nearer_end_of_a_range(
    kind: str, modelled: float | None, expected: float | None
) -> None:
    told = Told(load_study("axonn-2021").rows[0], load_machine("summit"), None, None, {})
    line = Line(told, Figure(kind, "palm", (0.4, 0.5)), modelled, None, None, None)
    assert line.error == (None if expected is None else pytest.approx(expected))
    apart = replace(line, figure=replace(line.figure, apart=True))
    other = Line(told, Figure("efficiency", "palm", (0.5, 0.5)), 0.45, None, None, None)
    errors = [e for e in (expected, -0.1) if e is not None]
    mean = sum(map(abs, errors)) / len(errors)
    assert mean_error([line, apart, other]) == (pytest.approx(mean), len(errors))


# --- The document --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "axonn-2023" else pytest.mark.slow)
        for name in study_names()
    ],
)
def test_the_document_has_these_numbers(name: str) -> None:
    """To update it: python -m axonn_ext.cli.plan.study_page docs/published.md"""
    text, study = PAGE.read_text(), load_study(name)
    assert text == with_study(text, name, markdown(study, retell(study)))


def test_a_document_without_the_marks_of_a_study() -> None:
    with pytest.raises(ValueError, match="<!-- study axonn-2021: begin -->"):
        with_study("# Title", "axonn-2021", "")
