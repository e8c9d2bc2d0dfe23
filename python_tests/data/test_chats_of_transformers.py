"""Chats have the same ids, masks and loss as with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from axonn_ext.cli import main
from axonn_ext.data import Prompts, open_vocabulary
from axonn_ext.data.chat import Chat
from axonn_ext.train.metrics import read_metrics
from chat_cases import KINDS, MESSAGES, cases, write_tokenizer

pytestmark = pytest.mark.slow

# `make test-slow` installs it
FAMILIES = {"llama-3": "llama", "qwen-2.5": "qwen2", "mistral": "mistral", "smollm-2": "llama"}


def theirs(folder: Path, line: dict[str, Any], **options: object) -> dict[str, list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        line["messages"], tools=line.get("tools"), tokenize=True, return_dict=True, **options
    )


@pytest.mark.parametrize(("name", "line"), cases())
def test_ids_and_masks_are_those_of_transformers(name, line, tmp_path) -> None:
    folder = write_tokenizer(tmp_path, name, tag=True)
    prompts = Prompts(open_vocabulary(str(folder / "tokenizer.json")), model=folder)
    ids, learned = prompts.chat(line)
    want = theirs(folder, line, return_assistant_tokens_mask=True)
    assert ids == want["input_ids"]
    assert learned.astype(int).tolist() == want["assistant_masks"]
    begun = line | {"messages": list(Chat.of(line).prompt.messages)}
    want = theirs(folder, begun, add_generation_prompt=True)
    assert prompts.chat_prompt(line)[1] == want["input_ids"]
    # Without the tag, transformers gives the same ids and no mask; our mask is the same.
    untagged = write_tokenizer(tmp_path / "untagged", name)
    plain = Prompts(open_vocabulary(str(untagged / "tokenizer.json")), model=untagged)
    same_ids, same_learned = plain.chat(line)
    assert same_ids == ids == theirs(untagged, line)["input_ids"]
    assert (same_learned == learned).all()


def write_model(folder: Path, name: str) -> Path:
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        FAMILIES[name], vocab_size=384, hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=320,
        initializer_range=0.2, tie_word_embeddings=False, sliding_window=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return write_tokenizer(folder, name, tag=True)


def finetune(model: Path, data: Path, out: Path, *more: str) -> None:
    arguments = ["--model", str(model), "--data", str(data), "--out", str(out)]
    arguments += ["--train.threads", "1", "--train.device", "cpu", "--sequence-length", "320"]
    threads = torch.get_num_threads()
    try:
        assert main(["finetune", *arguments, *more]) == 0
    finally:
        torch.set_num_threads(threads)


def assistant_only_loss(folder: Path, lines: list[dict[str, Any]]) -> float:
    """The mean loss over the assistant's tokens, each predicted from all earlier tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for line in lines:
        found = theirs(folder, line, return_assistant_tokens_mask=True)
        ids, said = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        mine = said[1:]
        total += float(cross_entropy(logits[:-1][mine], ids[1:][mine], reduction="sum"))
        count += int(mine.sum())
    return total / count


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_that_of_the_assistant_alone(name, tmp_path) -> None:
    """This holds for a step on all chats; then transformers loads the model from `finetune`."""
    folder = write_model(tmp_path / "model", name)
    lines = [line for kind, line in cases() if kind == name] + [{"messages": MESSAGES[:2]}]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "run"
    finetune(
        folder, data, out, "--steps", "1", "--batch-size", str(len(lines)), "--data.epochs", "1"
    )
    [step] = read_metrics(out).steps
    # Both compute in fp32, but in different orders.
    assert step.loss == pytest.approx(assistant_only_loss(folder, lines), rel=1e-5)
    assert theirs(out / "model", lines[0]) == theirs(folder, lines[0])


@pytest.mark.parametrize("name", KINDS)
def test_an_exported_model_goes_on_in_transformers_as_in_generate(name, tmp_path, capsys) -> None:
    import transformers

    folder, data = write_model(tmp_path / "model", name), tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    options = ("--lr", "1e-2", "--steps", "30", "--batch-size", "1", "--checkpoint.interval", "30")
    finetune(folder, data, tmp_path / "run", *options)
    out = tmp_path / "exported"
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(out)]) == 0
    capsys.readouterr()
    arguments = ["--prompts", str(data), "--json", "--max-new-tokens", "24"]
    assert main(["generate", "--model", str(out), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["tokens"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = tokenizer.apply_chat_template(
        MESSAGES[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    count = len(tokenizer)
    forbidden = [[token] for token in range(count, 384)]  # ids without a token
    whole = model.generate(
        **ids, do_sample=False, max_new_tokens=24, pad_token_id=0, bad_words_ids=forbidden
    )
    assert found == whole[0, ids["input_ids"].shape[1] :].tolist()
    assert found[-1] in Prompts(open_vocabulary(str(out / "tokenizer.json")), model=out).stop_ids
