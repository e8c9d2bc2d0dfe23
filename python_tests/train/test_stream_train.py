"""Runs on streams of `datasets`, which resume on other grids, and their bad keys."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small
from stream_cases import documents, needs_datasets, write_lines
from trained_here import train_here

STREAM = {
    "data.max_bytes": 0, "stream.held_out": 30, "stream.shuffle_buffer": 40, "stream.append_id": 0,
    "parallel.algorithm": "sequential", "optim.final_lr_fraction": 1,
}  # fmt: skip


def losses(folder: Path) -> dict[str, float]:
    found = read_metrics(folder)
    return {f"step {each.step}": each.loss for each in found.steps} | {
        f"evaluation {each.step}": each.eval_loss for each in found.evaluations
    }


@pytest.mark.long
def test_the_stream_goes_on_on_other_grids(tmp_path: Path) -> None:
    """An epoch has 20 steps. Every step trains on other random documents: the losses differ."""
    needs_datasets()
    options = STREAM | {"data.text": write_lines(tmp_path / "d", documents(count=110))}
    options |= {"train.eval_interval": 9, "checkpoint.interval": 9, "train.micro_batches": 2}
    train_here(tmp_path / "whole", **options | {"train.steps": 27})
    for grid, steps in (("x=2", 9), ("data=2", 18), ("z=2", 27)):
        command = [*AXONN, "train", "--grid", grid, "--out", str(tmp_path / "run")]
        changed = {"train.steps": steps, "checkpoint.resume": "auto"}
        if grid == "z=2":  # the warm-up that measures algorithms reads a batch
            changed["parallel.algorithm"] = "auto"
        keys = small(**options | changed)
        done = run([*command, *keys])
        assert done.status == 0, done.output
        assert "the stream is read from its beginning" not in done.output
    assert "resumed  step 18 of a run on x=1,y=1,z=1,data=2" in done.output
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert got.keys() == want.keys()
    # AdamW amplifies the error of fp32 sums in another order; other documents give 1e-3 and more.
    assert all(math.isclose(got[step], want[step], rel_tol=1e-5) for step in want)


@pytest.mark.long
def test_the_same_numbers_as_without_an_interruption(tmp_path: Path, capsys) -> None:
    """Bitwise, also from a folder that has moved; another stream is begun anew."""
    needs_datasets()
    options = STREAM | {"data.text": write_lines(tmp_path / "d", documents(count=110))}
    options |= {"checkpoint.interval": 4, "train.eval_interval": 0}
    train_here(tmp_path / "whole", **options | {"train.steps": 8})
    train_here(tmp_path / "run", **options | {"train.steps": 4})
    (tmp_path / "d").rename(tmp_path / "moved")
    options["data.text"] = f"hf:{tmp_path / 'moved'}"
    train_here(tmp_path / "run", **options | {"train.steps": 8, "checkpoint.resume": "auto"})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert "read from its beginning" not in capsys.readouterr().out
    other = {"stream.shuffle_buffer": 0, "train.steps": 9, "checkpoint.resume": "auto"}
    train_here(tmp_path / "run", **options | other)
    said = capsys.readouterr().out
    assert "stream.shuffle_buffer was 40 in the run that is continued, now 0" in said
    assert "the stream is read from its beginning: the run before read another one" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream.split": "test"}, "data.text: hf:.* has no split test (stream.split); it has tra"),
        ({"stream.column": "body"}, "data.text: hf:.* has no column body (stream.column); it has"),
        ({"stream.held_out": 1}, "the held-out text has 0 tokens, .*; raise stream.held_out 1"),
        ({"stream.held_out": 40}, "data.text: hf:.* has no text for training after the 40 docu"),
        ({"stream.held_out": 13}, "data.text: hf:.*, row 20 of train: expected text in the colum"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_rank_ends_at_once(tmp_path: Path, options, message: str) -> None:
    needs_datasets()
    texts = ["", *("some text " * 9,) * 39]
    texts[20] = None if options.get("stream.held_out") == 13 else texts[20]
    keys = STREAM | {"data.text": write_lines(tmp_path / "d", texts)} | options
    done = run([*AXONN, "train", "--grid", "data=2", "--out", str(tmp_path / "r"), *small(**keys)])
    assert done.status in (1, 2), done.output
    expected = re.escape(message).replace(r"\.\*", ".*")
    assert re.search(expected, done.output.replace("\n", " ")), done.output


UNANSWERED = """
import threading
from axonn_ext.data.stream_batches import _Ahead

def items():
    yield 1
    threading.Event().wait()

print(next(_Ahead(items())))
"""


@pytest.mark.long
def test_a_read_without_an_answer_does_not_keep_the_process() -> None:
    done = run([sys.executable, "-c", UNANSWERED])
    assert done.status == 0 and done.output == "1\n"


def test_the_library_is_missing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"data.text: expected datasets .*: pip install 'axonn-ext\[datasets\]'"
    with pytest.raises(UserError, match=message):
        train_here(tmp_path / "run", **STREAM | {"data.text": "hf:any/thing"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data.order": "documents"}, "data.order: expected windows with a stream .data.text.,"),
        ({"data.order": "examples"}, "data.order: expected windows with a stream"),
        ({"data.max_bytes": 9}, "data.max_bytes: expected 0 with a stream .data.text., got 9"),
        ({"goldfish.k": 3}, "goldfish.k: expected 0 with a stream .data.text., got 3"),
        ({"data.epochs": 1}, "data.epochs: expected 0 with data.order windows, got 1"),
        ({"stream.held_out": 0}, "stream.held_out: expected documents for train.eval_interval"),
        ({"data.text": "", "data.mixture": "hf:a=1,hf:b=2"},
         "data.mixture: expected no stream in a mixture, got hf:a"),
        ({"data.text": ""}, "stream.held_out is only for a stream: data.text = hf:NAME"),
        ({"data.text": "hf:"}, "data.text: expected hf:NAME, a data set's name or folder, got"),
        ({"stream.split": ""}, 'stream.split: expected a name, got ""'),
        ({"stream.column": ""}, 'stream.column: expected a name, got ""'),
        ({"stream.held_out": -1}, "stream.held_out: expected a whole number >= 0, got -1"),
        ({"stream.append_id": -2}, "stream.append_id: expected a whole number >= -1"),
        ({"stream.shuffle_buffer": 1.5}, "stream.shuffle_buffer: expected a whole number"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_keys(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_here(tmp_path / "run", **STREAM | {"data.text": "hf:any/thing"} | options)
