"""The whole protocol on a model written by transformers: fine-tuned, killed, resumed, measured."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_ext.train.memorization.documents import CONTINUED, read_documents
from axonn_ext.train.memorization.generated_text import TextGenerator
from axonn_ext.train.memorization.measures import edit_distance, longest_common_run
from commands import AXONN, run, start, wait_until

pytestmark = pytest.mark.slow

LENGTH = 96
REPETITIONS = (0, 1, 4, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers  # `make test-slow` installs it

    torch.manual_seed(2)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=LENGTH,
        tie_word_embeddings=False, **ends,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("theirs") / "theirs"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of various lengths, some longer than the model's sequences, for all buckets."""
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    lines = [{"text": text} for text in TextGenerator(1).documents(12, 60, LENGTH + 10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, documents: Path, out: Path, *more: str) -> list[str]:
    return [
        *AXONN, "memorize", "--model", str(model), "--vocabulary", "bytes", "--documents",
        str(documents), "--out", str(out), "--background-size", "60", "--batch-size", "4", "--lr",
        "3e-3", "--train.threads", "1", "--train.device", "cpu", *more,
    ]  # fmt: skip


def extracted(folder: Path, documents: Path) -> list[dict[str, Any]]:
    """The results of extraction with transformers, one prompt at a time."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    read, _ = read_documents(documents, lambda text: list(text.encode()))
    rows = []
    for repetitions in REPETITIONS:
        bucket = [document for document in read if document.repetitions == repetitions]
        found, loss = [], 0.0
        for document in bucket:
            prompt = torch.tensor([document.prompt])
            whole = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=CONTINUED, pad_token_id=0,
            )  # fmt: skip
            found.append((whole[0, prompt.shape[1] :].tolist(), document.continuation))
            tokens = torch.tensor([document.tokens])
            labels = tokens.clone()
            labels[:, :-CONTINUED] = -100
            with torch.no_grad():
                loss += model(tokens, labels=labels).loss.item()
        rows.append({
            "repetitions": repetitions, "documents": len(bucket),
            "matches": sum(tuple(a) == b for a, b in found),
            "edit_distance": sum(edit_distance(a, b) for a, b in found) / len(bucket),
            "longest_run": sum(longest_common_run(a, b) for a, b in found) / len(bucket),
            "loss": loss / len(bucket),
        })  # fmt: skip
    return rows


def test_a_run_that_was_killed_goes_on_to_the_same_figures(model, documents, tmp_path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = run(command(model, documents, whole))
    assert finished.status == 0, finished.output
    job = start(command(model, documents, killed), output=tmp_path / "log")
    metrics = killed / "theirs" / "goldfish" / "metrics.jsonl"
    try:
        wait_until(
            lambda: metrics.is_file() and metrics.read_text().count('"grad_norm"') >= 10,
            "ten steps of the second arm",
        )  # fmt: skip
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert not (killed / "results.json").exists()
    finished = run(command(model, documents, killed, "--resume"))
    assert finished.status == 0, finished.output
    assert "resumed  step" in finished.output
    text = (whole / "results.json").read_text()
    assert (killed / "results.json").read_text() == text
    arms = json.loads(text)["arms"]
    assert [arm["arm"] for arm in arms] == ["plain", "goldfish"]
    assert arms[0]["validation_loss"] != arms[1]["validation_loss"]
    for arm in arms:
        rows = extracted(whole / "theirs" / arm["arm"] / "model", whole / "theirs/documents.jsonl")
        for row, bucket in zip(rows, arm["buckets"], strict=True):
            # transformers sums in a different order.
            assert row.pop("loss") == pytest.approx(bucket["loss"], rel=1e-5)
            assert row == {name: bucket[name] for name in row}
        assert arm["validation_loss"] < arm["validation"][0][1]
