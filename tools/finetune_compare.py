"""Fine-tunes the same model with `axonn-ext finetune` and in a plain loop with transformers.

    python tools/finetune_compare.py --out /tmp/compare --grid x=2,y=2
    python tools/finetune_compare.py --out /tmp/compare-lora --grid x=2,y=2 --lora 16 \\
        --base /tmp/compare/run/model --lr 3e-3

Both start from the same folder (--base, or a Llama with random weights and a tokenizer trained
here), use the same batches and AdamW options, and record their losses. The plain loop runs the
model and attention of transformers, and the adapters of PEFT, in one process. Writes losses.json
and losses.png, and prints the largest relative difference. Needs transformers, tokenizers and, with
--lora, peft. The text is Python's standard library: function signatures are the prompts, their
docstrings the completions.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_ext.data import PackedBatches, RowGroup, find_text
from axonn_ext.nn import Places
from axonn_ext.train.batches import packed_batches
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import load_config
from axonn_ext.train.corpora import load
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import read_metrics
from axonn_ext.train.trainer import make_schedule


def write_data(path: Path, count: int) -> None:
    """Writes examples from functions of Python's standard library: signature, then docstring."""
    lines: list[str] = []
    for file in find_text(""):
        if len(lines) >= count:
            break
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and text:
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                lines.append(json.dumps({"prompt": prompt, "completion": text}))
    path.write_text("\n".join(lines[:count]) + "\n")


def write_model(folder: Path, data: Path, args: argparse.Namespace) -> None:
    """Writes a Llama with random weights, and a tokenizer trained on the data."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = [json.loads(line) for line in data.read_text().splitlines()]
    tokenizer.train_from_iterator(
        (each["prompt"] + each["completion"] for each in texts), vocab_size=args.vocabulary,
        special_tokens=["<end>"], show_progress=False,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, intermediate_size=11 * args.hidden // 4,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_adapter(model: Path, folder: Path, rank: int) -> None:
    """Writes PEFT's initial adapters, from which both runs start."""
    import peft
    import transformers

    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    peft.get_peft_model(base, lora).save_pretrained(folder)


def batches_of(config: Config) -> PackedBatches:
    """Returns the batches of a run, not split over row groups."""
    job = prepare(config, world_size=config.grid.size)
    examples: Any = load(config, job.text, job.model.vocab_size)
    return packed_batches(config, examples, RowGroup())


def plain_losses(model: Any, config: Config, batches: PackedBatches) -> Iterator[float]:
    """Trains a model of transformers in one process; yields the loss of each step."""
    optim, train = config.optim, config.train
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
        weight_decay=optim.weight_decay, fused=True,
    )  # fmt: skip
    schedule = make_schedule(optim, train.steps)
    for step in range(train.steps):
        batch = batches.micro_batch(step, 0)
        assert batch.documents is not None
        loss = loss_of(model, batch.token_ids, batch.labels, batch.documents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def loss_of(model: Any, token_ids: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
    """Returns a transformers model's mean loss over the labels of packed sequences."""
    places = Places.packed(documents)
    logits = model(
        token_ids, attention_mask=places.mask, position_ids=places.positions, use_cache=False
    ).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def our_losses(folder: Path, arguments: Sequence[str]) -> list[float]:
    """Runs the command; returns the loss of each step."""
    command = [sys.executable, "-m", "axonn_ext", "finetune", "--out", str(folder), *arguments]
    subprocess.run([*command, "--overwrite"], check=True)
    return [step.loss for step in read_metrics(folder).steps]


def draw(path: Path, ours: Sequence[float], plain: Sequence[float], title: str) -> None:
    """Draws both curves, and below them their relative difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(ours) + 1)
    above.plot(steps, plain, color="#d98c5f", linewidth=4, alpha=0.6, label="transformers")
    above.plot(steps, ours, color="#22303c", linewidth=1.2, label="axonn-ext finetune")
    above.set(ylabel="loss", title=title)
    above.legend(frameon=False)
    below.semilogy(steps, [max(abs(a / b - 1), 1e-9) for a, b in zip(ours, plain, strict=True)],
                   color="#2e86ab")  # fmt: skip
    below.set(xlabel="step", ylabel="relative\ndifference")
    for ax in (above, below):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Runs both and prints the largest relative difference of their losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--grid", default="x=2,y=2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", default="3e-4")
    parser.add_argument("--examples", type=int, default=3000)
    parser.add_argument("--base", type=Path, help="begin with this folder, not random weights")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all parameters train")
    args = parser.parse_args()
    import transformers

    args.out.mkdir(parents=True, exist_ok=True)
    model, data, adapter = args.out / "base", args.out / "data.jsonl", args.out / "adapter"
    write_data(data, args.examples)
    if args.base is None:
        write_model(model, data, args)
    else:
        model = args.base
    keys = [
        "--grid", args.grid, "--model", str(model), "--data", str(data), "--steps", str(args.steps),
        "--batch-size", str(args.batch_size), "--sequence-length", str(args.sequence_length),
        "--train.eval_interval", "0", "--train.device", "cpu", "--lr", args.lr,
    ]  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    if args.lora:
        import peft

        write_adapter(model, adapter, args.lora)
        plain = peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True)
        keys += ["--lora", str(args.lora), "--lora.start", str(adapter)]
    ours = our_losses(args.out / "run", keys)
    config = load_config(args.out / "run" / "config.toml")
    found = list(plain_losses(plain.train(), config, batches_of(config)))
    (args.out / "losses.json").write_text(json.dumps({"axonn_ext": ours, "transformers": found}))
    count = sum(p.numel() for p in plain.parameters())
    what = f"LoRA of rank {args.lora}" if args.lora else "all parameters"
    draw(
        args.out / "losses.png", ours, found, f"{count / 1e6:.0f} M parameters, {what}, {args.grid}"
    )
    apart = max(abs(a / b - 1) for a, b in zip(ours, found, strict=True))
    print(f"loss {ours[0]:.4f} -> {ours[-1]:.4f}; largest relative difference {apart:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
