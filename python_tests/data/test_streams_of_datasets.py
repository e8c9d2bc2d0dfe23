"""Streams of `datasets`: every document once per epoch, in one order, however a run is cut."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from axonn_ext.data import ByteVocabulary, RowGroup
from axonn_ext.data.stream import Documents, Place
from axonn_ext.data.stream_batches import Stream, StreamBatches
from axonn_ext.spec.stream import StreamOptions
from stream_cases import documents, needs_datasets, write_lines

pytestmark = pytest.mark.long
LENGTH, BATCH = 8, 8
GROUPS = (1, 2, 4, 8)


def opened(name: str, *, seed: int = 0, **options: object) -> Documents:
    needs_datasets()
    return Documents(name, StreamOptions(**options), ByteVocabulary(), seed=seed)


def batches(*sources: Documents, micro: int = 1) -> list[StreamBatches]:
    """The batches of each row group, as if each read the stream."""
    return [
        StreamBatches(
            source, sequence_length=LENGTH, batch_size=BATCH, num_micro_batches=micro,
            group=RowGroup(index, len(sources)),
        )
        for index, source in enumerate(sources)
    ]  # fmt: skip


def step_of(groups: list[StreamBatches], step: int) -> torch.Tensor:
    """All sequences of a step, with their last labels, in order."""
    found = []
    for index in range(groups[0].num_micro_batches):
        for group in groups:
            batch = group.micro_batch(step, index)
            assert torch.equal(batch.token_ids[:, 1:], batch.labels[:, :-1])
            found.append(torch.cat([batch.token_ids, batch.labels[:, -1:]], dim=1))
    return torch.cat(found)


def text_of(rows: torch.Tensor) -> bytes:
    """The text of sequences that follow each other and share a token."""
    return bytes([*rows[:, :-1].flatten().tolist(), int(rows[-1, -1])])


@pytest.mark.parametrize("buffer", [0, 7, 100])
def test_each_document_once_per_epoch(tmp_path: Path, buffer: int) -> None:
    """Two epochs and a bit: a run that is not shuffled has the documents as they are."""
    texts = documents()
    source = opened(write_lines(tmp_path / "d", texts), held_out=20, shuffle_buffer=buffer)
    assert bytes(source.held_out().tolist()).decode() == "".join(texts[:20])
    epoch = "".join(texts[20:])
    groups = batches(source)
    num_steps = 2 * len(epoch) // (LENGTH * BATCH) + 1
    read = b"".join(text_of(step_of(groups, step))[:-1] for step in range(num_steps)).decode()
    first, second = read[: len(epoch)], read[len(epoch) : 2 * len(epoch)]
    parts = [re.findall(r"<\d+>[a-z]*", each) for each in (first, second)]
    whole = [text for text in texts[20:] if text]
    assert sorted(parts[0]) == sorted(parts[1]) == sorted(whole)
    if buffer:
        assert parts[0] != parts[1] != whole, "a new order in each epoch"
        other = opened(source.name, seed=1, held_out=20, shuffle_buffer=buffer)
        assert not torch.equal(step_of(batches(other), 0), step_of(batches(source), 0))
    else:
        assert parts[0] == parts[1] == whole


@pytest.mark.parametrize("buffer", [0, 50])
@pytest.mark.parametrize("kind", ["json", "parquet", "saved"])
def test_cut_anywhere_and_on_other_grids_nothing_is_lost_or_repeated(
    tmp_path: Path, kind: str, buffer: int
) -> None:
    """The cuts include places in a document, between two, and in the second epoch."""
    name = write_lines(tmp_path / "d", documents())
    if kind != "json":
        name = converted(tmp_path, name, kind)
    keys = {"held_out": 5, "shuffle_buffer": buffer}
    source = opened(name, **keys)
    num_steps = 500
    groups = batches(source)
    want = [step_of(groups, step) for step in range(num_steps)]
    assert groups[0].state_dict()["place"]["epoch"] == 1
    draw, step, state, num_in_documents = random.Random(1), 0, None, 0
    while step < num_steps:
        count, micro = draw.choice(GROUPS), draw.choice((1, 2))
        sources = [opened(name, **keys) for _ in range(min(count, BATCH // micro))]
        groups = batches(*sources, micro=micro)
        if state is not None:
            assert all(group.load_state_dict(json.loads(state)) for group in groups)
        for _ in range(draw.randrange(1, 120)):
            if step < num_steps:
                assert torch.equal(step_of(groups, step), want[step]), step
                step += 1
        state = json.dumps(groups[0].state_dict())
        num_in_documents += groups[0].state_dict()["place"]["token"] > 0
    assert num_in_documents


def rows_of(name: str, folder: Path) -> Any:
    """The documents of a stream as a data set with random access."""
    needs_datasets()
    import datasets

    return datasets.load_dataset(name[3:], split="train", cache_dir=str(folder / "cache"))


def converted(folder: Path, name: str, kind: str) -> str:
    """The same documents in another format."""
    rows = rows_of(name, folder)
    if kind == "saved":
        rows.save_to_disk(folder / kind, num_shards=2)
    else:
        (folder / kind).mkdir()
        rows.to_parquet(folder / kind / "rows.parquet")
    return f"hf:{folder / kind}"


def test_another_batch_size_and_length_read_on(tmp_path: Path) -> None:
    texts = documents()
    source = opened(write_lines(tmp_path / "d", texts), held_out=0)
    read, place = b"", Place()
    for count, length, num_steps in ((8, 8, 5), (3, 20, 4), (1, 1, 7), (2, 500, 2)):
        steps = source.sequences(place, count=count, length=length)
        for _ in range(num_steps):
            rows, place = next(steps)
            read += text_of(torch.from_numpy(rows))[:-1]
    assert read and "".join(texts).startswith(read.decode())


def test_a_document_ends_with_its_token(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "d", ["ab", "", "c"])
    found = opened(name, held_out=0, append_id=0).documents(Place())
    assert [next(found)[1].tolist() for _ in range(4)] == [[97, 98, 0], [], [99, 0], [97, 98, 0]]


def test_a_place_in_another_stream_is_not_taken(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "d", documents())
    (group,) = batches(opened(name))
    step_of([group], 0)
    state = group.state_dict()
    for other in (opened(name, held_out=9), opened(name, shuffle_buffer=3)):
        (fresh,) = batches(other)
        assert not fresh.load_state_dict(state) and not fresh.load_state_dict({})
        assert fresh.state_dict()["place"] == asdict(Place())


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["a", None, "b"], {}, r"row 1 of train: expected text in the column text .*got NoneType"),
        ([["a"], ["b"], ["c"]], {}, "row 0 of train: expected text in the column text .* got list"),
        ([3, 4, 5], {}, r"row 0 of train: expected text in the column text .*, got int"),
        (["", "", ""], {}, "has no text for training after the 0 documents of stream.held_out"),
        (["a", "b"], {"held_out": 2}, "no text for training after the 2 documents of stream.held"),
        (["a"], {"split": "test"}, r"has no split test \(stream.split\); it has train"),
        (["a"], {"column": "body"}, r"no column body \(stream.column\); it has id, text"),
        (["a"], {"append_id": 256}, "stream.append_id: expected a token below 256, or -1 for none"),
        (["a"], {"subset": "en"}, r"cannot open hf:.* \(stream.subset en\): BuilderConfig 'en'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(tmp_path: Path, texts, options, message: str) -> None:
    name = write_lines(tmp_path / "d", texts, files=1)
    with pytest.raises(ValueError, match=message):
        source = opened(name, **{"held_out": 0} | options)
        next(source.sequences(Place(), count=1, length=4))


def test_what_is_empty_or_missing(tmp_path: Path, monkeypatch) -> None:
    needs_datasets()
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = rows_of(write_lines(tmp_path / "lines", ["b"], files=1), tmp_path)
    (tmp_path / "empty").mkdir()
    rows.select([]).to_parquet(tmp_path / "empty" / "rows.parquet")
    datasets.DatasetDict(a=rows).save_to_disk(tmp_path / "d")
    for folder, message in (
        ("empty", r"has no document in the split train \(stream.split\)"),
        ("d", r"has no split train \(stream.split\); it has a"),
        ("none", "cannot open hf:.*none: "),
    ):
        with pytest.raises(ValueError, match=message):
            opened(f"hf:{tmp_path / folder}")
    assert opened(f"hf:{tmp_path / 'd'}", split="a", held_out=1).held_out().tolist() == [98]


def on_ranks(name: str, steps: int) -> tuple[list[list[int]], list[int], str]:
    """The rows of this rank's group, all tokens held out, and the error that ends them."""
    rank = dist.get_rank()
    source = opened(name, held_out=4) if rank == 0 else None
    stream = Stream(source, None if source is None else source.held_out())
    held_out = stream.held_out_everywhere()
    group = StreamBatches(
        source, sequence_length=LENGTH, batch_size=BATCH, group=RowGroup(rank % 2, 2)
    )
    rows: list[list[int]] = []
    try:
        for step in range(steps):
            rows += step_of([group], step).tolist()
    except ValueError as error:
        return rows, held_out.tolist(), str(error)
    return rows, held_out.tolist(), ""


def test_ranks_receive_what_rank_0_reads(pool, tmp_path: Path) -> None:
    """Ranks of one row group get the same rows; an error of rank 0 is raised on all."""
    needs_datasets()
    texts = documents()
    name = write_lines(tmp_path / "d", [*texts[:300], None], files=1)
    source = opened(name, held_out=4)
    want = [rows.tolist() for rows, _ in _until_error(source)]
    answers = pool(4).run(on_ranks, name, 10**6)
    for rank, (rows, held_out, error) in enumerate(answers):
        assert rows == [row for step in want for row in step[rank % 2 * 4 :][:4]]
        assert bytes(held_out).decode() == "".join(texts[:4])
        assert "row 300 of train: expected text in the column text (stream.column)" in error


def _until_error(source: Documents) -> list[tuple[np.ndarray, Place]]:
    found = []
    with pytest.raises(ValueError, match="row 300"):
        for each in source.sequences(Place(), count=BATCH, length=LENGTH):
            found.append(each)
    return found
