"""Corpora, and batches of their tokens that depend only on the step and are equal on every grid.

IndexedTokens, ArrowTokens and ArrayTokens are streams of tokens, of which `whole` and `split` make
a Part. RandomWindows and ShuffledDocuments are orders of a part's sequences (`source`: the number
of the part in a mixture), and a Mixture is one of several orders'. TrainingBatches makes batches of
an order. For examples, which Prompts encodes, load_examples and PackedBatches do the same.

Names are loaded on first use, since the processes of `axonn-ext tokenize` do not need Torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_ext.spec import lazy_names

if TYPE_CHECKING:
    from axonn_ext.data.arrow import ArrowTokens as ArrowTokens
    from axonn_ext.data.batches import Batch as Batch
    from axonn_ext.data.batches import Batches as Batches
    from axonn_ext.data.batches import Evaluation as Evaluation
    from axonn_ext.data.batches import EvaluationBatches as EvaluationBatches
    from axonn_ext.data.batches import RowGroup as RowGroup
    from axonn_ext.data.batches import TrainingBatches as TrainingBatches
    from axonn_ext.data.corpus import Corpus as Corpus
    from axonn_ext.data.corpus import CorpusOptions as CorpusOptions
    from axonn_ext.data.corpus import Source as Source
    from axonn_ext.data.corpus import find_sources as find_sources
    from axonn_ext.data.corpus import load_corpus as load_corpus
    from axonn_ext.data.corpus import open_tokens as open_tokens
    from axonn_ext.data.corpus import text_bytes as text_bytes
    from axonn_ext.data.examples import Example as Example
    from axonn_ext.data.examples import Examples as Examples
    from axonn_ext.data.examples import load_examples as load_examples
    from axonn_ext.data.examples import stored_examples as stored_examples
    from axonn_ext.data.indexed import IndexedTokens as IndexedTokens
    from axonn_ext.data.mixture import Mixture as Mixture
    from axonn_ext.data.orders import Order as Order
    from axonn_ext.data.orders import RandomWindows as RandomWindows
    from axonn_ext.data.orders import ShuffledDocuments as ShuffledDocuments
    from axonn_ext.data.packed import PackedBatches as PackedBatches
    from axonn_ext.data.packed import PackedEvaluation as PackedEvaluation
    from axonn_ext.data.permutation import Permutation as Permutation
    from axonn_ext.data.prompts import Prompts as Prompts
    from axonn_ext.data.source import find_text as find_text
    from axonn_ext.data.source import python_sources as python_sources
    from axonn_ext.data.stored import vocabulary_of as vocabulary_of
    from axonn_ext.data.tokenizing import TextCorpus as TextCorpus
    from axonn_ext.data.tokenizing import Tokenizing as Tokenizing
    from axonn_ext.data.tokens import ArrayTokens as ArrayTokens
    from axonn_ext.data.tokens import Part as Part
    from axonn_ext.data.tokens import Tokens as Tokens
    from axonn_ext.data.tokens import split as split
    from axonn_ext.data.tokens import whole as whole
    from axonn_ext.data.vocabulary import ByteVocabulary as ByteVocabulary
    from axonn_ext.data.vocabulary import StoredVocabulary as StoredVocabulary
    from axonn_ext.data.vocabulary import TokenizerVocabulary as TokenizerVocabulary
    from axonn_ext.data.vocabulary import Vocabulary as Vocabulary
    from axonn_ext.data.vocabulary import open_vocabulary as open_vocabulary
    from axonn_ext.data.vocabulary import padded_size as padded_size
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        ".arrow": "ArrowTokens",
        ".batches": "Batch Batches Evaluation EvaluationBatches RowGroup TrainingBatches",
        ".corpus": "Corpus CorpusOptions Source find_sources load_corpus open_tokens text_bytes",
        ".examples": "Example Examples load_examples stored_examples",
        ".indexed": "IndexedTokens",
        ".mixture": "Mixture",
        ".orders": "Order RandomWindows ShuffledDocuments",
        ".packed": "PackedBatches PackedEvaluation",
        ".permutation": "Permutation",
        ".prompts": "Prompts",
        ".source": "find_text python_sources",
        ".stored": "vocabulary_of",
        ".tokenizing": "TextCorpus Tokenizing",
        ".tokens": "ArrayTokens Part Tokens split whole",
        ".vocabulary": (
            "ByteVocabulary StoredVocabulary TokenizerVocabulary Vocabulary open_vocabulary "
            "padded_size"
        ),
    })  # fmt: skip
