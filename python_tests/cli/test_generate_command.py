"""`axonn-ext generate`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch

from axonn_ext.cli import generate, main
from axonn_ext.data.vocabulary import open_vocabulary
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.spec.model_files import read_config
from commands import AXONN, run
from trained_here import train_here

PROMPT = "import "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder written by `checkpoint export`, without a tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    train_here(folder / "run", checkpoint__interval=6, model__family="llama")
    assert main(["checkpoint", "export", str(folder / "run"), str(folder / "model")]) == 0
    return folder / "model"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def greedy(folder: Path, prompt: str, new: int) -> list[int]:
    from axonn_ext.models.pretrained.files import PretrainedFiles

    plain = PlainTransformer(read_config(folder / "config.json"))
    files = PretrainedFiles(folder)
    state = {n: files.read(n, range(files.shape(n)[0]), None) for n in files.names}
    plain.load_state_dict(state, strict=False)  # a tied head is stored once
    tokens = list(prompt.encode())
    for _ in range(new):
        tokens.append(int(plain(torch.tensor([tokens]))[0, -1, :256].argmax()))
    return tokens[len(prompt) :]


def test_a_prompt_grows_as_the_whole_model_says(model, capsys) -> None:
    arguments = ("--model", model, "--vocabulary", "bytes", "--max-new-tokens", 12)
    status, out, err = call(capsys, *arguments, "--prompt", PROMPT)
    assert status == 0
    want = bytes(greedy(model, PROMPT, 12)).decode(errors="replace")
    assert out == f"{PROMPT}{want}\n"
    assert "generated 12 tokens in" in err


def test_a_continuation_keeps_the_space_before_its_first_word(tmp_path) -> None:
    """Tokenizers like SentencePiece's drop the space before the first word of a text."""
    words = {"\u2581once": 0, "\u2581upon": 1, "\u2581a": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="\u2581a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = open_vocabulary(str(tmp_path / "tokenizer.json"))
    assert vocabulary.decode([1, 2]) == "upon a"
    request = SimpleNamespace(prompts=[vocabulary.encode(b"once").tolist()], vocabulary=vocabulary)
    assert generate._continuation(request, 0, [1, 2]) == " upon a"


def test_a_character_is_shown_when_all_its_bytes_are_there(capsys) -> None:
    vocabulary = open_vocabulary("bytes")
    prompt, *new = (vocabulary.encode(text).tolist() for text in (b"a", b"\xc3", b"\xa9", b"b"))
    request = SimpleNamespace(texts=["a"], prompts=[prompt], vocabulary=vocabulary)
    assert generate._show(request, iter(new), as_json=False) == 3
    assert capsys.readouterr().out == "a\u00e9b\n"


def test_several_processes_write_json(model, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def ", "x = ")))
    finished = run(
        [*AXONN, "generate", "--model", str(model), "--vocabulary", "bytes", "--grid", "x=2",
         "--max-new-tokens", "5", "--prompt", PROMPT, "--prompts", str(prompts), "--json"]
    )  # fmt: skip
    assert finished.status == 0, finished.output
    lines = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    assert [line["prompt"] for line in lines] == [PROMPT, "def ", "x = "]
    for line in lines:
        assert line["tokens"] == greedy(model, line["prompt"], 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a"], "tokenizer.json: not found; give --vocabulary"),
        (["--vocabulary", "bytes"], "--prompt: expected a prompt, or --prompts FILE, got none"),
        (["--vocabulary", "bytes", "--prompt", ""], "prompt 0: expected at least one token"),
        (["--vocabulary", "none.json", "--prompt", "a"], "none.json is not a file"),
        (["--vocabulary", "bytes", "--prompt", "a", "--grid", "x=8"], "num_heads: 4 must be"),
        (["--vocabulary", "bytes", "--prompt", "a", "--max-new-tokens", "99"], "sequence_length"),
        (["--vocabulary", "bytes", "--prompt", "a", "--top-p", "0"], "--top-p: expected a finite"),
        (["--vocabulary", "bytes", "--prompts", "none"], "none: cannot be read"),
    ],
)
def test_mistakes_are_named(arguments, message, model, capsys) -> None:
    status, _, err = call(capsys, "--model", model, *arguments)
    assert status == 2
    assert message in err


def test_a_bad_line_is_named_by_its_number(model, tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n\n{"prompt": 3}\n')
    arguments = ("--model", model, "--vocabulary", "bytes", "--prompts", prompts)
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert f"{prompts}, line 3: expected a text in the field prompt, or a chat in" in err


def test_a_folder_without_a_model_is_named(tmp_path, capsys) -> None:
    status, _, err = call(capsys, "--model", tmp_path, "--prompt", "a", "--vocabulary", "bytes")
    assert status == 2
    assert f"{tmp_path}: expected a folder with config.json" in err
