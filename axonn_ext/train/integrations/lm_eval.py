"""A model on a grid for EleutherAI's lm-evaluation-harness (extra `evaluation`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from axonn_ext.data import Prompts
from axonn_ext.models.generation import Sampling, score, stream, windows
from axonn_ext.models.generation.scoring import TOKENS_AT_ONCE, batches
from axonn_ext.models.transformer import Transformer
from axonn_ext.ranks.rank_values import of_first_rank

MAX_NEW_TOKENS = 256  # of a task that names no limit, as in the harness
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_PATIENCE = timedelta(days=30)  # rank 0 may download data sets and compute metrics meanwhile


@dataclass(frozen=True)
class _Continuation:
    """How a task continues texts: until one of some strings, or at most `new` tokens."""

    until: list[str]
    new: int
    sampling: dict[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any], longest: int) -> _Continuation:
        """Returns the meaning of a task's generation_kwargs, with the harness's defaults.

        longest: the model's sequence length. Raises ValueError for options that mean nothing here.
        """
        left = dict(options)
        limits = [left.pop(name, None) for name in _LIMITS]
        new = int(next((each for each in limits if each is not None), MAX_NEW_TOKENS))
        if not 0 < new < longest:
            raise ValueError(
                f"generation_kwargs: expected a max_gen_toks from 1 to {longest - 1}, as the model "
                f"takes {longest} tokens, got {new}"
            )
        until = left.pop("until", None) or []
        names = {each.name for each in fields(Sampling)} - {"seed"}
        sampling = {name: left.pop(name) for name in names & left.keys()}
        draws = left.pop("do_sample", bool(sampling.get("temperature")))
        if left:
            raise ValueError(
                f"generation_kwargs: expected until, {', '.join(_LIMITS)}, do_sample, "
                f"{', '.join(sorted(names))}, got {', '.join(left)}"
            )
        sampling["temperature"] = float(sampling.get("temperature", 1.0)) if draws else 0.0
        return cls([until] if isinstance(until, str) else list(until), new, sampling)

    def cut(self, text: str) -> str:
        """Returns the text before the first of the strings that end it."""
        for end in filter(None, self.until):
            text = text.split(end)[0]
        return text


class AxonnLM(TemplateLM):
    """Computes the harness's requests on a grid. Rank 0 runs the harness, and all ranks compute.

        lm = AxonnLM(axonn_ext.from_pretrained(folder, grid), Prompts(vocabulary, model=folder))
        with lm:
            if grid.rank == 0:
                results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])

    At the end of the block, the other ranks compute what rank 0 asks for until it leaves the block.
    Tokens, truncation and scores are those of the harness's `hf` model; see docs/evaluation.md for
    the differences.

    Args:
        model: on a grid without pipeline stages.
        prompts: encodes text. The id before a text without context is its begin_id, else end_id,
            else the id of a newline.
        name: of the tokenizer, for the harness's cache of requests.
        tokens_at_once: tokens of a (data, z) group that are computed together.

    Collectives: broadcasts of requests as JSON in a gloo group of their own, and those of `score`
    and `stream`.
    """

    def __init__(
        self, model: Transformer, prompts: Prompts, *, name: str = "",
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:  # fmt: skip
        super().__init__()
        model.grid.shape.refuse_pipe("AxonnLM")
        self._model, self._prompts, self._name = model, prompts, name
        self._tokens_at_once = tokens_at_once
        self._groups = model.grid.num_parts(("data", "z"))
        self._device = model.table.weight.device
        ids = (prompts.begin_id, prompts.end_id, *prompts.vocabulary.encode(b"\n").tolist())
        self._prefix = next(each for each in ids if each is not None)
        self._failed = False  # in a computation, in which all ranks fail
        self._group: dist.ProcessGroup | None = None
        if model.grid.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def __enter__(self) -> AxonnLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._group is None or self._failed:
            return
        if self._model.grid.rank == 0:
            of_first_rank(None, self._group)
        elif error is None:
            while (asked := of_first_rank(None, self._group)) is not None:
                self._compute(asked[0], asked[1], None)

    @property
    def eot_token_id(self) -> int:
        return self._prefix if self._prompts.end_id is None else self._prompts.end_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def max_length(self) -> int:
        return self._model.config.sequence_length

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        if add_special_tokens is False:
            return self._prompts.vocabulary.encode(string.encode()).tolist()
        return self._prompts.prompt(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._prompts.chat_text(chat_history, opens=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._name if chat_template else None

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        longest = self.max_length
        for _, _, continuation in requests:
            if not 0 < len(continuation) <= longest:
                raise ValueError(
                    f"expected a continuation of 1 to {longest} tokens, which the model takes, got "
                    f"one of {len(continuation)}"
                )
        sequences = [[*context, *end][-(longest + 1) :] for _, context, end in requests]
        counts = [len(end) for _, _, end in requests]
        found = self._ask("score", [sequences, counts], **options)
        answers = [(float(total), bool(is_greedy)) for total, is_greedy in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args[0] for request in requests]
        parts = [
            list(windows(self.tok_encode(text), self.max_length, self._prefix)) for text in texts
        ]
        flat = [part for text in parts for part in text]
        asked = [[sequence for sequence, _ in flat], [count for _, count in flat]]
        found = iter(self._ask("score", asked, disable_tqdm=disable_tqdm))
        answers = [float(sum(next(found)[0] for _ in text)) for text in parts]
        for text, answer in zip(texts, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        numbers: dict[str, list[int]] = {}  # of requests with equal options
        for number, request in enumerate(requests):
            numbers.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        for options, own in numbers.items():
            how = _Continuation.of(json.loads(options), self.max_length)
            # As in the harness, the end of a prompt that leaves no room for the new tokens.
            room = self.max_length - how.new
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in own]
            prompts = [prompt or [self._prefix] for prompt in prompts]
            found = self._ask("continue", [prompts, asdict(how)], disable_tqdm=disable_tqdm)
            for number, text in zip(own, found, strict=True):
                answers[number] = how.cut(text)
                self.cache_hook.add_partial(
                    "generate_until", requests[number].args, answers[number]
                )
        return answers

    def _ask(self, what: str, arguments: list[Any], *, disable_tqdm: bool = False) -> list[Any]:
        """Returns what all ranks compute together for rank 0."""
        if not arguments[0]:
            return []
        if self._group is not None:
            of_first_rank([what, arguments], self._group)
        total, title = len(arguments[0]), f"Running {what} requests"
        self._failed = True
        with tqdm(total=total, desc=title, disable=disable_tqdm) as bar:
            found = self._compute(what, arguments, bar)
        self._failed = False
        return found

    def _compute(self, what: str, arguments: list[Any], bar: tqdm[Any] | None) -> list[Any]:
        advance = (lambda count: None) if bar is None else bar.update
        if what == "score":
            sequences, counts = arguments
            return list(score(
                self._model, sequences, counts, tokens_at_once=self._tokens_at_once,
                advance=advance,
            ))  # fmt: skip
        prompts, how = arguments[0], _Continuation(**arguments[1])
        texts: dict[int, str] = {}
        lengths = [len(prompt) + how.new for prompt in prompts]
        for numbers in batches(lengths, self._groups, self._tokens_at_once):
            # Draws depend on the number of a prompt in its batch, so each batch has its own seed.
            sampling = Sampling(**how.sampling, seed=numbers[0])
            found = self._continued([prompts[number] for number in numbers], how, sampling)
            texts |= zip(numbers, found, strict=True)
            advance(len(numbers))
        return [texts[number] for number in range(len(prompts))]

    def _continued(
        self, prompts: Sequence[Sequence[int]], how: _Continuation, sampling: Sampling
    ) -> list[str]:
        """Returns the text after each prompt, at least to the first string that ends it."""
        stops, count = self._prompts.stop_ids, self._prompts.vocabulary.num_tokens
        found: list[list[int]] = [[] for _ in prompts]
        texts, going = [""] * len(prompts), set(range(len(prompts)))
        for tokens in stream(
            self._model, prompts, max_new_tokens=how.new, sampling=sampling, stop_ids=stops,
            num_tokens=count,
        ):  # fmt: skip
            for number in tuple(going):
                token = tokens[number]
                if token is None or token in stops:
                    going.remove(number)
                    continue
                found[number].append(token)
                texts[number] = self._prompts.vocabulary.decode(found[number])
                if how.cut(texts[number]) != texts[number]:
                    going.remove(number)
            if not going:
                break  # on all ranks, which have the same tokens
        return texts
