"""Chats and tokenizers through the commands: finetune, checkpoint export and generate agree."""

from __future__ import annotations

import json
import shutil
from datetime import date, datetime, tzinfo
from pathlib import Path

import pytest
import torch

from axonn_ext.cli import main
from axonn_ext.data import Prompts, open_vocabulary
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.models.pretrained.files import PretrainedFiles
from axonn_ext.spec.model_files import read_config
from chat_cases import MESSAGES, SYSTEM, write_tokenizer
from trained_here import train_here

pytest.importorskip("tokenizers")

LENGTH = 160
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 384 tokens, without a tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    train_here(
        folder / "run", checkpoint__interval=1, train__steps=1, model__family="llama",
        model__vocab_size=384, model__sequence_length=LENGTH,
    )  # fmt: skip
    assert main(["checkpoint", "export", str(folder / "run"), str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture
def model(bare: Path, tmp_path: Path) -> Path:
    """The model with a tokenizer like Llama 3's that also puts a token after each text."""
    shutil.copytree(bare, tmp_path / "model")
    return write_tokenizer(tmp_path / "model", "llama-3", back="<|end_of_text|>")


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def finetune(model: Path, data: Path, out: Path, *more: object) -> int:
    threads = torch.get_num_threads()
    try:
        return main(
            ["finetune", "--model", str(model), "--data", str(data), "--out", str(out),
             "--train.threads", "1", "--train.device", "cpu", "--batch-size", "2", "--steps", "2",
             "--lr", "1e-3", "--checkpoint.interval", "2", *map(str, more)]
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def answers(capsys: Capture, model: Path, *options: object) -> list[dict[str, object]]:
    arguments = ["generate", "--model", model, "--max-new-tokens", 6, "--json", *options]
    assert main([str(each) for each in arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def greedy(folder: Path, tokens: list[int], new: int, stop: set[int]) -> list[int]:
    plain = PlainTransformer(read_config(folder / "config.json"))
    files = PretrainedFiles(folder)
    state = {n: files.read(n, range(files.shape(n)[0]), None) for n in files.names}
    plain.load_state_dict(state, strict=False)  # a tied head is stored once
    found: list[int] = []
    count = open_vocabulary(str(folder / "tokenizer.json")).num_tokens
    while len(found) < new and not stop & set(found):
        found.append(int(plain(torch.tensor([tokens + found]))[0, -1, :count].argmax()))
    return found


CHATS = [{"messages": [*given, *MESSAGES]} for given in ([], [SYSTEM])]


def test_chats_are_fine_tuned_exported_and_continued(model, tmp_path, capsys) -> None:
    unusable = [{"messages": MESSAGES[:1]}, {"prompt": "a" * 600, "completion": "b"},
                {"prompt": "a", "completion": ""}]  # fmt: skip
    data = write_lines(tmp_path / "chats.jsonl", CHATS[0], *unusable, CHATS[1])
    run, out = tmp_path / "run", tmp_path / "exported"
    assert finetune(model, data, run) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 examples, 0 held out" in shown
    assert (
        f"3 examples skipped: 2 with nothing to learn (first: {data}, line 2), 1 with no room for "
        f"learned tokens (first: {data}, line 3)"
    ) in shown
    assert "no evaluation: data.held_out is 0.05, which is none of 2 examples" in shown
    assert main(["checkpoint", "export", str(run), str(out)]) == 0
    capsys.readouterr()
    for folder in (run / "model", out):
        assert {file.name for file in folder.iterdir()} == {
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json",
        }  # fmt: skip
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (model / name).read_bytes()
    both = [
        answers(capsys, folder, "--prompts", data_of(tmp_path)) for folder in (run / "model", out)
    ]
    assert both[0] == both[1]
    prompts = Prompts(open_vocabulary(str(out / "tokenizer.json")), model=out)
    for chat, answer in zip(CHATS, both[0], strict=True):
        text, ids = prompts.chat_prompt(chat)
        assert answer["prompt"] == text
        assert answer["tokens"] == greedy(out, ids, 6, set(prompts.stop_ids))


def data_of(folder: Path) -> Path:
    return write_lines(folder / "questions.jsonl", *CHATS)


def test_a_prompt_goes_on_before_what_the_tokenizer_puts_behind_texts(model, capsys) -> None:
    prompts = Prompts(open_vocabulary(str(model / "tokenizer.json")), model=model)
    ids = prompts.prompt("What is")
    assert ids[-1] not in prompts.stop_ids
    want = greedy(model, ids, 6, set(prompts.stop_ids))
    for text in ("What is", "<|begin_of_text|>What is"):
        assert answers(capsys, model, "--prompt", text)[0]["tokens"] == want


def test_a_bad_prompt_of_a_file_is_named_by_its_line(model, tmp_path, capsys) -> None:
    for line, message in (
        ({"messages": []}, 'expected "messages" to be a list of at least one object'),
        ({"prompt": "a " * 200}, "tokens and 6 new ones are more than the model's"),
    ):
        path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"}, line)
        arguments = ["generate", "--model", model, "--max-new-tokens", 6, "--prompts", path]
        assert main([str(each) for each in arguments]) == 2
        assert f"{path}, line 2: " in (error := capsys.readouterr().err)
        assert message in error


def test_one_example_is_enough_and_unusable_ones_can_end_the_run(model, tmp_path, capsys) -> None:
    data = write_lines(tmp_path / "a.jsonl", {"text": "Five, six!"}, {"text": ""})
    assert finetune(model, data, tmp_path / "run") == 0
    assert finetune(model, data, tmp_path / "stop", "--data.on_unusable", "stop") == 2
    assert f"data.text: {data}, line 2: expected at least two tokens" in capsys.readouterr().err


def test_a_resumed_run_tells_templates_the_day_on_which_it_began(
    model, tmp_path, capsys, monkeypatch
) -> None:
    """Otherwise a chat would get different token ids on another day."""
    monkeypatch.setattr("axonn_ext.train.run_folder.datetime", SomeDay)
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[-1].content }}"
    (model / "chat_template.jinja").write_text(
        "{% generation %}" + template + "{% endgeneration %}"
    )
    data, run = write_lines(tmp_path / "chats.jsonl", CHATS[0]), tmp_path / "run"
    read: list[date | None] = []
    made = Prompts.__init__

    def note(self: Prompts, *args: object, today: date | None = None, **options: object) -> None:
        read.append(today)
        made(self, *args, today=today, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Prompts, "__init__", note)
    assert finetune(model, data, run) == 0
    SomeDay.day += 1
    for resume in ("auto", str(run / "checkpoints" / "step-00000002")):
        read.clear()
        assert finetune(model, data, run, "--resume", resume, "--overwrite") == 0
        assert set(read) == {date(2020, 2, 3)}
    assert finetune(model, data, run, "--data.date", "tomorrow", "--overwrite") == 2
    assert "data.date: expected YYYY-MM-DD, got 'tomorrow'" in capsys.readouterr().err


class SomeDay(datetime):
    """A clock that stands still."""

    day = 3

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime(2020, 2, cls.day, tzinfo=tz)


def test_the_folder_with_which_a_run_began_is_gone(model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the saved path of the model must not depend on the current folder
    data = write_lines(tmp_path / "a.jsonl", CHATS[0])
    assert finetune(Path("model"), data, tmp_path / "run") == 0
    monkeypatch.chdir("/")
    export = ["checkpoint", "export", str(tmp_path / "run")]
    assert main([*export, str(tmp_path / "first")]) == 0
    model.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main([*export, str(tmp_path / "second")]) == 2
    error = capsys.readouterr().err
    assert f"the run began with {model}" in error and "give --like FOLDER with a copy" in error
    assert not (tmp_path / "second").exists()
    again = [*export, str(tmp_path / "second"), "--like", str(tmp_path / "elsewhere")]
    assert main(again) == 0
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()


def test_a_run_from_nothing_is_exported_with_its_tokenizer(tmp_path, capsys) -> None:
    vocabulary = write_tokenizer(tmp_path / "own", "mistral") / "tokenizer.json"
    train_here(
        tmp_path / "run", checkpoint__interval=1, train__steps=1, model__family="llama",
        data__vocabulary=vocabulary,
    )  # fmt: skip
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == vocabulary.read_bytes()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    prompts = Prompts(open_vocabulary(str(vocabulary)))
    assert (config["eos_token_id"], config["bos_token_id"]) == (prompts.end_id, None)
    [answer] = answers(capsys, tmp_path / "model", "--prompt", "Five")
    assert answer["tokens"]
