"""Scores of lm-evaluation-harness on grids, against those of its own model for transformers.

The tasks are local, since no data set can be downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from axonn_ext import Grid, GridShape, from_pretrained
from axonn_ext.data import Prompts, open_vocabulary
from commands import AXONN, run
from grids import grid_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("lm_eval", "transformers", "accelerate", "peft"))),
        reason="needs lm_eval and transformers",
    ),
]
LENGTH = 64
TASKS = ["tiny_choice", "tiny_end", "tiny_text", "tiny_answer"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = "the grid splits each matrix over three axes and the batch over a fourth one"
WORDS = TEXT.split()
DATA = (
    "test_split: test\ndataset_path: json\n"
    "dataset_kwargs: {data_files: {test: FOLDER/NAME}, cache_dir: FOLDER/cache}\n"
)
YAML = {
    "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
    "doc_to_choice: '{{choices}}'\ndoc_to_target: label\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "tiny_end": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: ' {{choices[0]}}'\nmetric_list: [{metric: perplexity}, {metric: acc}]\n",
    "tiny_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "tiny_answer": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs: {until: ['e', 'q'], max_gen_toks: 12}\n"
    "metric_list: [{metric: exact_match}]\n",
}  # fmt: skip


def sentence(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(length))


def write_tasks(folder: Path) -> None:
    """Documents of many lengths; some questions and texts are longer than the model takes."""
    lengths = [3, 0, 9, 60, 5, 1, 33]
    documents = [
        {"question": sentence(i, length), "text": sentence(i, 5 * length + 1), "label": i % 3,
         "choices": [f" {sentence(i + k, 1 + 2 * k)}" for k in range(3)]}
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    (folder / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    filled = [{**d, "question": d["question"] or "the"} for d in documents]
    (folder / "filled.jsonl").write_text("".join(json.dumps(d) + "\n" for d in filled))
    for name, text in YAML.items():
        # The harness's own model takes no empty prompt to continue.
        data = DATA.replace("FOLDER", str(folder))
        data = data.replace("NAME", "filled.jsonl" if name == "tiny_answer" else "data.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    long = (folder / "tiny_answer.yaml").read_text().replace("tiny_answer", "tiny_long")
    (folder / "tiny_long.yaml").write_text(long.replace("max_gen_toks: 12", "max_gen_toks: 64"))


def write_model(folder: Path, kind: str) -> None:
    """Saves a model with random weights and a tokenizer; llama's begins texts with bos."""
    import transformers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if kind == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    size = tokenizer.get_vocab_size()
    torch.manual_seed(3)
    common: dict[str, Any] = {
        "vocab_size": size, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3,
    }  # fmt: skip
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, **common,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **common
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    ).save_pretrained(folder)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_tasks(path)
    write_model(path, request.param)
    return path


def evaluated(lm: Any, folder: Path, chat: bool) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=TASKS, task_manager=manager, bootstrap_iters=0, apply_chat_template=chat
    )
    answers = {t: [s["resps"] for s in found["samples"][t]] for t in TASKS}
    return {"results": found["results"], "answers": answers}


def by_transformers(folder: Path, chat: bool) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(str(folder), device="cpu", dtype="float64", batch_size=3)
    return evaluated(lm, folder, chat)


def lm_on(grid: Grid, folder: Path) -> Any:
    from axonn_ext.train.integrations.lm_eval import AxonnLM

    model = from_pretrained(folder, grid, dtype=torch.float64)
    prompts = Prompts(open_vocabulary(str(folder / "tokenizer.json")), model=folder)
    return AxonnLM(model, prompts, name=str(folder), tokens_at_once=150)


def on_grids(folder: Path, shapes: list[str], chat: bool) -> list[dict[str, Any]]:
    results = []
    for shape in shapes:
        grid = grid_of(GridShape.parse(shape))
        with lm_on(grid, folder) as lm:
            if grid.rank == 0:
                results.append(evaluated(lm, folder, chat))
    return results


def numbers(answers: Any) -> Iterator[Any]:
    if isinstance(answers, list | tuple):
        for each in answers:
            yield from numbers(each)
    else:
        yield answers


def near(value: Any, bound: float) -> Any:
    return value if isinstance(value, str | bool) else pytest.approx(value, rel=bound)


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_transformers(folder, pool, chat: bool) -> None:
    want = pool(1).run(by_transformers, folder, chat)[0]
    assert len({text for doc in want["answers"]["tiny_answer"] for [text] in doc}) > 3
    grids = {1: ["x=1"], 4: ["x=2,y=2", "z=2,data=2"]}
    for world_size in (1, 4) if not chat else (1,):
        for found in pool(world_size).run(on_grids, folder, grids[world_size], chat)[0]:
            for task in TASKS:
                ours, theirs = (list(numbers(each["answers"][task])) for each in (found, want))
                # transformers computes the angles of rotary positions in fp32, the rest in fp64.
                bound = 1e-6 if "llama" in folder.name else 1e-12
                assert ours == [near(each, bound) for each in theirs], task
                results = {n: near(v, bound) for n, v in want["results"][task].items()}
                assert found["results"][task] == results, task


def chat_texts(folder: Path) -> list[tuple[str, str]]:
    from lm_eval.models.huggingface import HFLM

    theirs, ours = HFLM(str(folder), device="cpu"), lm_on(grid_of(GridShape()), folder)
    turns = [("system", "be brief"), ("user", " the grid "), ("assistant", " axes "), ("user", "x")]
    chat = [{"role": role, "content": text} for role, text in turns]
    return [
        tuple(lm.apply_chat_template(chat[:count], opens) for lm in (ours, theirs))
        for count, opens in ((2, True), (4, True), (3, False))
    ]


def test_chats_are_those_of_transformers(folder, pool) -> None:
    for ours, theirs in pool(1).run(chat_texts, folder)[0]:
        assert ours == theirs and "<user>the grid" in ours


def test_the_command_shows_the_scores(folder, pool) -> None:
    """On a text, too: its bits per byte are those of the harness if no text begins with bos."""
    text, out = folder / "text.txt", folder / "scores.json"
    text.write_text(json.loads((folder / "data.jsonl").read_text().splitlines()[3])["text"])
    want = pool(1).run(by_transformers, folder, False)[0]
    done = run(
        [*AXONN, "evaluate", str(folder), "--text", str(text), "--tasks", "tiny_choice, tiny_t*",
         "--include-path", str(folder), "--grid", "x=2", "--json", str(out)]
    )  # fmt: skip
    assert done.status == 0, done.output
    assert "tiny_choice  acc_norm " in done.output and "bits per byte" in done.output
    found = json.loads(out.read_text())
    assert found["tasks"].keys() == {"tiny_choice", "tiny_text"}
    for task, values in found["tasks"].items():
        for name, value in values.items():
            if "stderr" not in name and not isinstance(value, str):
                # fp32 has 24 bits; logits of this model are below 100.
                assert value == pytest.approx(want["results"][task][name], rel=1e-4), name
    [[[total]]] = want["answers"]["tiny_text"][3:4]
    if "gpt2" in folder.name:
        bits = -total / math.log(2) / text.stat().st_size
        assert found["text"]["bits_per_byte"] == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_bad_tasks_are_named(folder) -> None:
    for name, message in (
        ("tiny_choise", "got 'tiny_choise' (did you mean tiny_choice?)"),
        ("tiny_long", "expected a max_gen_toks from 1 to 63, as the model takes 64 tokens, got 64"),
    ):
        done = run(
            [*AXONN, "evaluate", str(folder), "--include-path", str(folder), "--tasks", name]
        )
        assert done.status == 2 and message in done.output, done.output
