"""The options of a stream of documents, which Hugging Face's `datasets` reads."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.keys import check, key

PREFIX = "hf:"  # of data.text


@dataclass(frozen=True)
class StreamOptions:
    """Which documents of `data.text = "hf:..."` are read, and in what order.

    Raises ValueError, which names the option, for an illegal value.
    """

    subset: str = key("", "subset (configuration) of the data set; empty: its only one")
    split: str = key("train", "split to read", expected="a name", accepts=bool)
    column: str = key("text", "column with the text", expected="a name", accepts=bool)
    held_out: int = key(
        100, "documents at the start of the split that are for evaluation only", minimum=0
    )
    shuffle_buffer: int = key(
        0, "documents that are shuffled together; 0: the order of the stream", minimum=0,
        maximum=10**7,
    )  # fmt: skip
    append_id: int = key(-1, "token to append to each document; -1: none", minimum=-1)

    def __post_init__(self) -> None:
        check(self, "stream.")
