"""Prompts that a run continues at each evaluation. Runs without train.samples do not load this."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from axonn_ext.data import Prompts, StoredVocabulary, Vocabulary, open_vocabulary
from axonn_ext.data.prompts import continuation, read_prompts
from axonn_ext.data.source import expand_home
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.models.generation import NotFiniteError, Sampling, check_prompts, generate
from axonn_ext.models.transformer import Transformer
from axonn_ext.spec.model import ModelConfig
from axonn_ext.train.config import Config
from axonn_ext.train.corpora import date_of
from axonn_ext.train.metrics import Sample


@dataclass(frozen=True)
class Samples:
    """The prompts of a run: their texts and ids, and how they are continued."""

    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    encoder: Prompts
    num_tokens: int
    sampling: Sampling

    @classmethod
    def of(
        cls, config: Config, vocabulary: Vocabulary | StoredVocabulary, model: ModelConfig
    ) -> Samples:
        """Raises ValueError for prompts that cannot be read or are too long for the model."""
        train, folder = config.train, config.model.pretrained
        encoder = Prompts(
            _encoder(vocabulary), model=Path(folder) if folder else None, today=date_of(config)
        )
        places, texts, prompts = [], [], []
        for where, text, ids in read_prompts(expand_home(train.samples), encoder):
            places.append(f"{where} (train.sample_tokens {train.sample_tokens})")
            texts.append(text)
            prompts.append(tuple(ids))
        if not prompts:
            raise ValueError(f"expected a prompt per line of {train.samples}, got none")
        check_prompts(
            prompts, train.sample_tokens, model.sequence_length, model.vocab_size, places=places
        )
        sampling = Sampling(temperature=1.0, seed=train.seed)
        return cls(tuple(texts), tuple(prompts), encoder, train.sample_tokens, sampling)

    @property
    def digest(self) -> str:
        """A digest of the ids."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    def continued(self, model: Transformer) -> tuple[Sample, ...]:
        """Returns the prompts and the texts that follow, equal on every rank.

        If logits are not finite, there are none. The draws depend only on the run's seed, and use
        no generator of torch. Collectives: those of `generate`.
        """
        vocabulary = self.encoder.vocabulary
        try:
            found = generate(
                model, self.prompts, max_new_tokens=self.num_tokens, sampling=self.sampling,
                stop_ids=self.encoder.stop_ids, num_tokens=vocabulary.num_tokens,
            )  # fmt: skip
        except NotFiniteError:  # the evaluation and the next step report it
            return ()
        return tuple(
            Sample(text, continuation(vocabulary, prompt, tokens))
            for text, prompt, tokens in zip(self.texts, self.prompts, found, strict=True)
        )


def _encoder(vocabulary: Vocabulary | StoredVocabulary) -> Vocabulary:
    if not isinstance(vocabulary, StoredVocabulary):
        return vocabulary
    if vocabulary.name == BYTES:
        return open_vocabulary(BYTES)
    raise ValueError(
        "expected the tokenizer of the token files in data.vocabulary, since it encodes the "
        f"prompts, got only its name, {vocabulary.name}"
    )
