"""`axonn-ext tune`: its arguments, errors, measurements, output and files."""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import commands
from axonn_ext import GridShape
from axonn_ext.calibrate.products import ProductRow, gain, time_in_turns
from axonn_ext.calibrate.shapes import PUBLISHED_LAYERS, PUBLISHED_ROWS
from axonn_ext.cli import main
from axonn_ext.cli.tune import Request, add_parser, make_request
from axonn_ext.kernels import extension, tuning
from axonn_ext.spec import settings
from axonn_ext.spec.presets import PRESETS
from axonn_ext.spec.products import Product
from tuning_cache import files

Capture = pytest.CaptureFixture[str]
MARGIN = 0.05


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The command's folder of measurements, with a configuration file next to it."""
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    extension.configure(settings.load())
    tuning.clear()
    (tmp_path / "job.toml").write_text(
        "[model]\nhidden_size = 128\nnum_layers = 2\nsequence_length = 128\n"
        "[train]\nbatch_size = 8\ndtype = 'bf16'\n[data]\nmax_bytes = 100000\n"
    )
    yield tmp_path
    torch.set_num_threads(threads)
    monkeypatch.undo()
    extension.configure(settings.load())
    tuning.clear()


@pytest.mark.long
def test_the_command_measures_shows_and_keeps(tune: Path, capsys: Capture):
    arguments = ["tune", "--model", str(tune / "job.toml"), "--grid", "1x2x1", "--device", "cpu",
                 "--threads", "1", "--json", str(tune / "products.json")]  # fmt: skip
    assert main(arguments) == 0
    text = capsys.readouterr().out
    content = json.loads((tune / "products.json").read_text())
    assert content["grid"] == GridShape(y=2).as_dict()
    assert (content["dtype"], content["batch"], content["device"]) == ("bf16", 8, "cpu")
    rows = content["rows"]
    sources = {row["source"] for row in rows}
    assert sources == {"measured", "small"}
    assert {row["product_pass"] for row in rows} == {"forward", "dgrad", "wgrad"}
    for row in rows:
        assert f"{row['m']},{row['n']},{row['k']}" in text
        if row["source"] == "small":
            assert row["direct_us"] is None and row["median_us"] == {}
            continue
        assert row["speedup"] == pytest.approx(row["direct_us"] / row["winner_us"])
        if row["winner"] == "direct":
            assert row["winner_us"] == row["direct_us"] == row["median_us"]["direct"]
        else:
            best = row["median_us"][row["winner"]]
            assert row["median_us"]["direct"] > (1 + MARGIN) * best
    measured = [row for row in rows if row["source"] == "measured"]
    logarithms = [math.log(row["speedup"]) for row in measured]
    assert content["worst_speedup"] == min(row["speedup"] for row in measured)
    assert content["mean_speedup"] == pytest.approx(math.exp(sum(logarithms) / len(measured)))
    assert len(files(tune / "cache")) == len(measured)
    assert "direct us" in text and f"kept in {tune / 'cache'}" in text

    tuning.clear()
    assert main(arguments) == 0
    again = json.loads((tune / "products.json").read_text())["rows"]
    winners = [(row["winner"], row["source"]) for row in again if row["source"] != "small"]
    assert winners == [(row["winner"], "disk") for row in measured]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "--model: expected one of gpt-5b"),
        (["--model", "missing.toml"], "--model: missing.toml: cannot be read: No such file"),
        (["--model", "gpt2-small", "--grid", "2x2"], "--grid 2x2: grid must read like"),
        (["--model", "gpt2-small", "--grid", "x=5"], "num_heads: 12 must be divisible by 5"),
        (["--model", "gpt2-small", "--batch", "0"], "--batch: expected a whole number >= 1, got 0"),
        (["--model", "gpt2-small", "--batch", "3", "--grid", "z=2"], "3 must be divisible by 2"),
        (["--model", "gpt2-small", "--threads", "0"], "--threads: expected a whole number >= 1"),
        (["--model", "gpt2-small", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--model", "gpt2-small", "--json", "/no/such/file"], "there is no folder /no/such"),
        (["--model", "gpt2-small", "--more"], "unknown argument --more"),
        (["--shapes", "1,2"], 'linear takes "M,N,K" or one of llama-70b, gpt3, published'),
        (["--shapes", "published:7"], "published has M of 64, 256"),
        (["--shapes", "64,10,8", "--grid", "x=4"], "N must be divisible by 4"),
        (["--shapes", "64,8,8", "--batch", "2"], "--batch needs --model"),
        (["--shapes", "64,8,8", "--model", "gpt2-small"], "not allowed with argument"),
        ([], "one of the arguments --model --shapes is required"),
    ],
)
def test_mistakes_are_named(tune: Path, capsys: Capture, arguments: list[str], message: str):
    assert main(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert files(tune / "cache") == []


@pytest.mark.long
def test_what_was_measured_before_the_end_is_kept(tune: Path):
    path, output = tune / "products.json", tune / "output"
    shapes = [f"{m},512,512" for m in range(128, 1024, 64)]
    options = ["--device", "cpu", "--threads", "1", "--json", str(path)]
    job = commands.start([*commands.AXONN, "tune", "--shapes", *shapes, *options], output=output)
    # At its start, the command only creates the file, empty, to check that it can be written.
    found = lambda: path.exists() and path.stat().st_size > 0  # noqa: E731
    try:
        commands.wait_until(found, "the first product")
    finally:
        job.send_signal(signal.SIGKILL)
        assert job.wait(timeout=300) == -signal.SIGKILL
    content = json.loads(path.read_text())
    assert 1 <= len(content["rows"]) < 3 * len(shapes)
    assert content["worst_speedup"] is not None
    printed = output.read_text().splitlines()
    assert printed[1].split()[:3] == ["pass", "Linears", "m,n,k"]
    assert len(printed) - 2 >= len(content["rows"]) - 1
    assert f"{content['rows'][0]['winner']}" in printed[2]


def request_for(*arguments: str) -> Request:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return make_request(parser.parse_args(["tune", "--device", "cpu", *arguments]))


def test_shapes_stand_for_the_products_of_linears():
    request = request_for("--shapes", "64,32,48", "64,32,48")
    assert [(p.product_pass, p.m, p.n, p.k, p.layout, p.linears) for p in request.products] == [
        ("forward", 64, 32, 48, "NT", ("expand 32x48",)),
        ("dgrad", 64, 48, 32, "NN", ("expand 32x48",)),
        ("wgrad", 32, 48, 64, "TN", ("expand 32x48",)),
    ]
    whole = request_for("--shapes", "published").products
    assert len(whole) == len(set(whole)) == 2 * len(PUBLISHED_LAYERS) * len(PUBLISHED_ROWS) * 3
    for layout in ("NN", "NT"):  # every listed shape, as it is and transposed
        found = {(p.m, p.n, p.k) for p in whole if p.layout == layout}
        listed = {(m, *nk) for m in PUBLISHED_ROWS for nk in PUBLISHED_LAYERS}
        assert found == listed | {(m, k, n) for m, n, k in listed}
    # Sizes of a rank: x splits the outputs of "expand" and the inputs of "contract", z the rows.
    part = request_for("--shapes", "published:1024", "--grid", "x=8,z=2").products
    assert {(p.m, p.n, p.k) for p in part if p.product_pass == "forward"} == {
        size for n, k in PUBLISHED_LAYERS for size in ((512, n // 8, k), (512, k, n // 8))
    }


def test_the_command_tunes_shapes(tune: Path, capsys: Capture):
    arguments = ["tune", "--shapes", "256,256,320", "--device", "cpu", "--threads", "1",
                 "--json", str(tune / "products.json")]  # fmt: skip
    assert main(arguments) == 0
    content = json.loads((tune / "products.json").read_text())
    assert (content["model"], content["batch"]) == ("256,256,320", None)
    assert [row["layout"] for row in content["rows"]] == ["NT", "NN", "TN"]
    assert f"{content['worst_speedup']:.3f} in the worst" in capsys.readouterr().out


@pytest.mark.timing
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_winner_is_timed_again_in_turns(device: str):
    a, b = torch.ones(128, 2048, device=device), torch.ones(2048, 64, device=device)
    repeated = torch.ones(16 * 128, 2048, device=device)
    us = time_in_turns(a, b, None, ("direct", "relayout_b"), about_us=500.0)
    assert set(us) == {"direct", "relayout_b"} and min(us.values()) > 0
    longer = time_in_turns(repeated, b, None, ("direct",), about_us=5000.0)
    assert longer["direct"] > us["direct"], "16 times the work"


def test_what_choosing_wins():
    def row(m: int, direct_us: float | None, winner_us: float | None) -> ProductRow:
        speedup = direct_us / winner_us if direct_us and winner_us else None
        product = Product("forward", ("up",), m, 8, 8, "NT", False)
        return ProductRow(product, direct_us, "relayout_a", winner_us, speedup, "measured", {})

    won = gain([row(1, 20.0, 10.0), row(2, 9.9, 10.0), row(3, None, None)])
    assert won is not None and won.num_products == 2 and won.slower == ()
    assert won.mean_speedup == pytest.approx(math.sqrt(2 * 0.99))
    assert (won.worst_speedup, won.worst) == (pytest.approx(0.99), "forward 2,8,8 NT")
    assert won.sentence().endswith("0.990 in the worst (forward 2,8,8 NT); at least 0.98 in all")
    won = gain([row(1, 20.0, 10.0), row(2, 9.0, 10.0)])
    assert won is not None and won.slower == ("forward 2,8,8 NT",)
    assert won.sentence().endswith("below 0.98 in 1: forward 2,8,8 NT")
    assert gain([row(3, None, None)]) is None


def test_presets_are_the_published_sizes():
    published = {
        "gpt2-small": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558,
        "llama2-7b": 6738, "llama2-70b": 68977,
    }  # fmt: skip
    millions = {name: round(PRESETS[name].num_parameters() / 1e6) for name in published}
    assert millions == published
