"""If ranks differ in configuration, data, version or settings, every rank names it at once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_ext
from axonn_ext.data import Corpus, Examples
from axonn_ext.ranks import meeting
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec import settings
from axonn_ext.spec.files.keys import Key, keys_of
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import Override, load_config, toml_value
from axonn_ext.train.corpora import load
from axonn_ext.train.differences import MAY_DIFFER, shared_values
from axonn_ext.train.job import Job, device_of, prepare
from commands import AXONN, ROOT, environment, small
from kills import losses
from limits import HANG_SECONDS
from token_files import write_token_files

NUM_PAIRS = 200
TEXTS = {  # keys with own syntax
    "recompute": ("full", "every:2"), "blocks": ("1,1", "2,0"), "sinks": ("a:b", "tensorboard"),
}  # fmt: skip
OTHER_SETTINGS = {
    "AXONN_TIMEOUT_SECONDS": "77",
    "AXONN_SYMMETRIC_MEMORY_BYTES": "2097152",
    "AXONN_DEBUG_COLLECTIVES": "1",
    "AXONN_DEBUG_TOKEN_IDS": "1",
    "AXONN_FUSED_NCCL_SMS": "9",
    "AXONN_FUSED_FREE_SMS": "3",
    "AXONN_PRODUCT_KERNELS": "cublaslt",
    "AXONN_EMULATED_LINKS": "y=2",
}
VERSIONS = ("axonn_ext", "torch")
DATA = ("text", "mixture", "tokens", "documents", "examples", "prompts")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A difference between ranks 0 and 1: a key, a setting, a version or the data."""

    kind: str
    name: str
    value: Any = None


def other_value(info: Key, name: str, value: Any, draw: random.Random) -> Any:
    """Another valid value of the key."""
    if isinstance(value, bool):
        return not value
    if info.row is not None:
        return (info.row(names=f"blocks.{draw.randrange(99)}.*"),)
    if info.choices:
        return draw.choice([choice for choice in info.choices if choice != value])
    if isinstance(value, str):
        return draw.choice([text for text in TEXTS.get(name, ("other", "more")) if text != value])
    least = info.minimum if info.minimum is not None else info.above or 0
    most = min(info.maximum if info.maximum is not None else math.inf, 2 * value + 1000)
    while True:
        if isinstance(value, int):
            found: float = draw.randint(math.ceil(least), math.floor(most))
        else:
            found = draw.uniform(least, most)
        legal = info.accepts is None or info.accepts(found)
        if found != value and legal and (info.above is None or found > info.above):
            return found


def all_pairs() -> Iterator[Pair]:
    """Yields without end: each key with a value, each setting, version and kind of data."""
    draw = random.Random(45)
    while True:
        for table in dataclasses.fields(Config):
            values = getattr(Config(), table.name)
            for name, key in keys_of(type(values)).items():
                value = getattr(values, name)
                value = other_value(key, name, 0 if value is None else value, draw)
                yield Pair("key", f"{table.name}.{name}", value)
        yield from (Pair("setting", name, value) for name, value in OTHER_SETTINGS.items())
        yield from (Pair("version", name, f"1.2.{draw.randrange(99)}") for name in VERSIONS)
        yield from (Pair("data", name, draw.randrange(50)) for name in DATA)


def with_key(config: Config, dotted: str, value: Any) -> Config:
    name, _, key = dotted.partition(".")
    table = copy.copy(getattr(config, name))
    object.__setattr__(table, key, value)  # other keys may forbid this value
    return dataclasses.replace(config, **{name: table})


def base_config(folder: Path, **keys: str) -> Config:
    given = {"data.text": folder / "text.txt", "model.hidden_size": 32, "model.num_layers": 2,
             "model.num_heads": 4, "model.sequence_length": 32, "train.device": "cpu"}  # fmt: skip
    overrides = given | {name.replace("__", "."): value for name, value in keys.items()}
    return load_config(
        None, grid="y=2", overrides=tuple(Override(k, str(v)) for k, v in overrides.items())
    )


def data_of(folder: Path, kind: str, changed: int | None) -> dict[str, str]:
    """Writes this kind of data; returns the keys of a run. changed: the place that differs."""
    folder.mkdir(parents=True, exist_ok=True)
    text = bytearray(random.Random(1).randbytes(4000))
    if kind == "mixture":
        (folder / "a.txt").write_bytes(text)
        (folder / "b.txt").write_bytes(text[::-1])
        share = 0.5 if changed is None else 0.51 + changed / 200
        names = f"{folder}/a.txt={share},{folder}/b.txt={1 - share:.9f}"
        return {"data__text": "", "data__mixture": names}
    if kind in ("examples", "prompts"):
        words = ["yes", "no", "perhaps"] * 20
        if changed is not None:
            words[changed] = "never"
        lines = [
            f'{{"prompt": "{word if kind == "prompts" else i}", "completion": "{word}"}}\n'
            for i, word in enumerate(words)
        ]
        (folder / "e.jsonl").write_text("".join(lines))
        return {"data__text": f"{folder}/e.jsonl", "data__order": "examples"}
    if kind in ("tokens", "documents"):
        tokens, lengths = list(text), [40] * 100
        if changed is not None and kind == "tokens":
            tokens[changed * 80] ^= 1
        elif changed is not None:
            lengths[changed], lengths[changed + 1] = 41, 39
        ends = [0, *itertools.accumulate(lengths)]
        documents = [[tokens[a:b]] for a, b in itertools.pairwise(ends)]
        write_token_files(folder / "t", documents)
        order = "documents" if kind == "documents" else "windows"
        return {"data__text": f"{folder}/t", "model__vocab_size": "256", "data__order": order}
    if changed is not None:
        text[changed * 80] ^= 1
    (folder / "text.txt").write_bytes(text)
    return {"data__text": f"{folder}/text.txt"}


def read(job: Job) -> Corpus | Examples:
    return load(job.config, job.text, job.model.vocab_size)


def meet_in_pairs(folder: Path, pairs: list[Pair]) -> list[str]:
    """This rank's error for each pair, in which rank 1 has the other value; "" for none."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    data_of(own := folder / str(rank), "text", None)
    config = base_config(own)
    job = prepare(config, world_size=2)
    corpus, found = read(job), []
    for number, pair in enumerate(pairs):
        here, its_job, its_corpus = rank == 1, job, corpus
        with pytest.MonkeyPatch.context() as patch:
            if pair.kind == "setting" and here:
                patch.setenv(pair.name, pair.value)
            elif pair.kind == "version" and here:
                module = meeting if pair.name == "axonn_ext" else torch
                patch.setattr(module, "__version__", pair.value)
            elif pair.kind == "key" and here:
                changed = with_key(config, pair.name, pair.value)
                its_job = dataclasses.replace(job, config=changed, device=device_of(changed))
            elif pair.kind == "data":
                keys = data_of(own / str(number), pair.name, pair.value if here else None)
                its_job = prepare(base_config(own, **keys), world_size=2)
                its_corpus = read(its_job)
            store = dist.PrefixStore(f"{folder}/{number}", world.get_group_store())
            values = shared_values(its_job, its_corpus)
            try:
                process.meet(store, Process(rank, 2, 2), lambda values=values: values)
            except UserError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


def expected(pair: Pair, base: Config) -> str:
    """The error that every rank must raise; "" for a key that may differ."""
    if pair.kind == "setting":
        return f"{pair.name} is "
    if pair.kind == "version":
        return f"the version of {pair.name} is {pair.value} on rank 1, but "
    if pair.kind == "data":
        return "the text is "
    table, _, key = pair.name.partition(".")
    if pair.name in ("model.pretrained", "lora.start"):  # one of the ranks does not set it
        return f"whether {pair.name} is set is true on rank 1, but false on rank 0"
    if pair.name in MAY_DIFFER:
        is_other_device = pair.name == "train.device" and pair.value == "cuda"
        return "train.device is cuda on rank 1, but cpu on rank 0" if is_other_device else ""
    before = toml_value(getattr(getattr(base, table), key))
    return f"{pair.name} is {toml_value(pair.value)} on rank 1, but {before} on rank 0"


def test_ranks_that_differ_in_one_thing_name_it(pool, tmp_path: Path) -> None:
    """The pairs include every key, setting and kind of data."""
    pairs = list(itertools.islice(all_pairs(), NUM_PAIRS))
    base = base_config(tmp_path)
    answers = zip(pairs, *pool(2).run(meet_in_pairs, tmp_path, pairs), strict=True)
    num_named = 0
    for pair, *said in answers:
        wanted = expected(pair, base)
        for text in said:
            assert (wanted in text and "rank 1" in text) if wanted else not text, (pair, text)
        num_named += bool(wanted)
    assert num_named > 0.85 * NUM_PAIRS


def test_all_kinds_of_differences_are_among_the_pairs() -> None:
    keys = {
        f"{table.name}.{key.name}"
        for table in dataclasses.fields(Config)
        for key in dataclasses.fields(getattr(Config(), table.name))
    }
    pairs = list(itertools.islice(all_pairs(), NUM_PAIRS))
    assert keys == {pair.name for pair in pairs if pair.kind == "key"}
    assert MAY_DIFFER.keys() <= keys
    assert OTHER_SETTINGS.keys() == settings.load({}).shared().keys()
    assert {"key", "setting", "version", "data"} == {pair.kind for pair in pairs}


# --- Jobs ----------------------------------------------------------------------------------------


def run_ranks(
    folder: Path,
    *options: str,
    of_rank_1: tuple[str, ...] = (),
    code: Path | None = None,
    **variables: str,
) -> list[tuple[int, str]]:
    """Status and output of two ranks without a launcher; `of_rank_1` are rank 1's own options."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        more, others = (of_rank_1, variables) if rank else ((), {})
        command = [*AXONN, *options, *more]
        ranks.append(
            subprocess.Popen(
                command, cwd=code if rank and code else ROOT, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env=environment() | place | others,
            )
        )  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def train(folder: Path, text: Path) -> list[str]:
    return ["train", "--grid", "y=2", "--out", str(folder), *small(data__text=text)]


def other_version(folder: Path) -> Path:
    """A folder that contains this package with another version number."""
    package = folder / "axonn_ext"
    package.mkdir(parents=True)
    for path in Path(axonn_ext.__file__).parent.iterdir():
        if path.name not in ("_version.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "_version.py").write_text('__version__ = "99.0"\n')
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["key", "data", "version", "setting", "debug", "grid"])
def test_jobs_whose_ranks_differ_end_and_say_why(tmp_path: Path, kind: str) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(b"Call me Ishmael. " * 200)
    other.write_bytes(b"Call me Ishmaex. " * 200)
    options = train(tmp_path / "run", text)
    if kind == "key":
        found = run_ranks(tmp_path, *options, of_rank_1=("--optim.weight_decay", "0.2"))
        expected = "optim.weight_decay is 0.2 on rank 1, but 0.1 on rank 0"
    elif kind == "data":
        found = run_ranks(tmp_path, *options, of_rank_1=("--data.text", str(other)))
        expected = "the text is 3,400 tokens ("
    elif kind == "version":
        found = run_ranks(tmp_path, *options, code=other_version(tmp_path / "code"))
        expected = "the version of axonn_ext is 99.0 on rank 1, but "
    elif kind == "setting":
        found = run_ranks(tmp_path, *options, AXONN_EMULATED_LINKS="y=1")
        expected = "AXONN_EMULATED_LINKS is y=1 on rank 1, but not set on rank 0"
    elif kind == "debug":
        found = run_ranks(tmp_path, *options, AXONN_DEBUG_COLLECTIVES="1")
        expected = "AXONN_DEBUG_COLLECTIVES is 1 on rank 1, but 0 on rank 0"
    else:
        found = run_ranks(tmp_path, *options, of_rank_1=("--grid", "auto"))
        expected = "whether --grid is auto is True on rank 1, but False on rank 0"
    (first, output), (second, rest) = found
    assert first == second == 2 and f"[rank 0] error: {expected}" in output, output
    assert "error: " not in rest, rest  # a host shows an error of all ranks once


@pytest.mark.long
def test_keys_that_may_differ_change_no_loss(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(os.urandom(4000))
    (tmp_path / "link.txt").symlink_to("text.txt")
    others = {"data.text": tmp_path / "link.txt", "train.threads": 2, "train.device": "auto",
              "train.machine": "perlmutter", "optim.offload_folder": tmp_path}  # fmt: skip
    assert others.keys() <= MAY_DIFFER.keys()
    same = run_ranks(tmp_path, *train(tmp_path / "same", tmp_path / "text.txt"))
    differ = run_ranks(
        tmp_path, *train(tmp_path / "differ", tmp_path / "text.txt"),
        of_rank_1=tuple(f"--{key}={value}" for key, value in others.items()),
        AXONN_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert [status for status, _ in (*same, *differ)] == [0] * 4, differ
    expected, found = losses(tmp_path / "same"), losses(tmp_path / "differ")
    assert list(found) == list(expected) and found
    assert all(math.isclose(found[step], expected[step], rel_tol=1e-5) for step in expected)
