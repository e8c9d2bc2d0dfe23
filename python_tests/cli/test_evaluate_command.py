"""`axonn-ext evaluate` on a text; python_tests/integrations/test_lm_eval.py has the tasks."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from axonn_ext import GridShape, from_pretrained, full_state_dict
from axonn_ext.cli import evaluate, main
from axonn_ext.models.plain import PlainTransformer
from commands import AXONN, run
from grids import grid_of
from trained_here import train_here

TEXT = "import math\n\n\ndef root(x: float) -> float:\n    return math.sqrt(x)\n" * 2
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on bytes, and a text."""
    folder = tmp_path_factory.mktemp("evaluate")
    train_here(folder / "run", checkpoint__interval=6, model__family="llama")
    assert main(["checkpoint", "export", str(folder / "run"), str(folder / "model")]) == 0
    (folder / "text.txt").write_text(TEXT)
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["evaluate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@torch.no_grad()
def whole_loss(model: Path) -> float:
    """The mean loss of all bytes but the first; the last window has as many as fit before it."""
    trained = from_pretrained(model, grid_of(GridShape()), dtype=torch.float64)
    plain = PlainTransformer(trained.config).double()
    plain.load_state_dict(full_state_dict(trained))
    tokens, total, done = torch.tensor(list(TEXT.encode())), 0.0, 1
    while done < len(tokens):
        end = min(done + LENGTH, len(tokens))
        first = max(0, end - LENGTH - 1)
        logits = plain(tokens[None, first : end - 1])[0, done - end :]
        total += cross_entropy(logits, tokens[done:end], reduction="sum").item()
        done = end
    return total / (len(tokens) - 1)


def check(found: dict[str, float], loss: float) -> None:
    size = len(TEXT.encode())
    assert (found["bytes"], found["tokens"]) == (size, size - 1)
    # Each of the losses, about 5, is rounded to fp32: 2^-24, and a few more for its logits.
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * (size - 1) / size, rel=1e-5)


@pytest.mark.parametrize("name", ["model", "run"])
def test_the_loss_is_that_of_the_whole_model(folder, name, pool, capsys) -> None:
    loss = pool(1).run(whole_loss, folder / "model")[0]
    out = folder / f"{name}.json"
    status, shown, err = call(
        capsys, folder / name, "--text", folder / "text.txt", "--vocabulary", "bytes", "--json", out
    )
    assert status == 0, err
    found = json.loads(out.read_text())["text"]
    assert f" {found['loss']:.4f} " in shown
    check(found, loss)


@pytest.mark.long
def test_on_a_grid(folder, pool) -> None:
    loss, out = pool(1).run(whole_loss, folder / "model")[0], folder / "grid.json"
    done = run(
        [*AXONN, "evaluate", str(folder / "run"), "--text", str(folder / "text.txt"),
         "--grid", "x=2,data=2", "--json", str(out)]
    )  # fmt: skip
    assert done.status == 0, done.output
    check(json.loads(out.read_text())["text"], loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected --text FILE or --tasks NAME,..., got neither"),
        (["--text", "none.txt"], "--text: cannot read none.txt: No such file"),
        (["--text", "some.jsonl"], "--text: expected plain text, got JSON lines, some.jsonl"),
        (["--text", "some.parquet"], "--text: some.parquet would be read as one text"),
        (["--text", "EMPTY"], "--text: expected at least two tokens in "),
        (["--text", "TEXT", "--limit", "3"], "--limit is only for --tasks"),
        (["--text", "TEXT", "--num-fewshot", "0"], "--num-fewshot is only for --tasks"),
        (["--text", "TEXT", "--grid", "pipe=2"], "does not work on pipeline stages; use pipe=1"),
        (["--text", "TEXT", "--grid", "x=8"], "num_heads: 4 must be"),
        (["--text", "TEXT", "--json", "no/such/file"], "--json: there is no folder"),
    ],
)
def test_mistakes_are_named(folder, options, message, capsys) -> None:
    (folder / "empty").touch()
    paths = {"TEXT": str(folder / "text.txt"), "EMPTY": str(folder / "empty")}
    given = [paths.get(each, each) for each in options]
    status, _, err = call(capsys, folder / "model", "--vocabulary", "bytes", *given)
    assert status == 2
    assert message in err


def test_a_missing_harness_is_named(folder, monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    missing = lambda name: None if name == "lm_eval" else find(name)  # noqa: E731
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", missing)
    status, _, err = call(capsys, folder / "model", "--tasks", "arc_easy")
    assert status == 2
    assert (
        "expected lm_eval to be installed, got no such package: pip install 'axonn-ext[eval" in err
    )
