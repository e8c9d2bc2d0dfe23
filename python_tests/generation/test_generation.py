"""Generation with a cache on every grid, against running the whole model for each token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from axonn_ext import (
    GridShape,
    Sampling,
    add_adapters,
    full_state_dict,
    generate,
    merge_adapters,
    models,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.generation import stream
from axonn_ext.models.generation.sampling import choose
from axonn_ext.models.plain import PlainTransformer
from grids import every_grid, grid_of
from model_cases import CONFIGS, sampled

NEW = 6
# Various lengths; data and z do not divide the number of prompts.
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [31, 41], [59, 26, 53]]
WAYS = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(layout="replicated"),
    "heads_over_y": ParallelConfig(heads_over_y=True),
}
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)


def config_of(name: str) -> ModelConfig:
    """Large initial values, so that the next token depends on more than the prompt's last token."""
    return dataclasses.replace(CONFIGS[name], sequence_length=24, init_std=0.3)


def on_grids(
    name: str, way: str, sampling: Sampling
) -> list[tuple[str, list[list[int]], dict[str, torch.Tensor]]]:
    found = []
    for grid in every_grid():
        parallel = WAYS[way]
        model = models.build(config_of(name), grid, parallel, seed=3, dtype=torch.float64)
        tokens = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
        found.append((str(grid.shape), tokens, full_state_dict(model)))
    return found


def continued(model: PlainTransformer, prompt: list[int], number: int, sampling: Sampling) -> list:
    """The tokens that the whole model chooses, one by one."""
    tokens = list(prompt)
    for index in range(NEW):
        logits = model(torch.tensor([tokens]))[:, -1].float()
        tokens.append(int(choose(logits, sampling, [number], index)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "world_size"),
    sampled(
        (
            "gpt2",
            "gpt2-odd",
            "qwen3-wide",
            "llama-scaled",
            "opt",
            "gemma2",
            "cohere2",
            "llama-long",
            "olmo2",
        ),
        (1, 2, 4),
    ),
)
def test_every_grid_chooses_what_the_whole_model_does(name, world_size, pool) -> None:
    way = {"opt": "replicated", "olmo2": "heads_over_y"}.get(name, "sharded")
    sampling = SAMPLED if name == "gpt2" else Sampling()
    found = pool(world_size).run(on_grids, name, way, sampling)
    model = PlainTransformer(config_of(name)).double()
    model.load_state_dict(found[0][0][2])
    with torch.no_grad():
        want = [continued(model, p, number, sampling) for number, p in enumerate(PROMPTS)]
    assert len({tuple(tokens) for tokens in want}) == len(want), "the prompts do not matter"
    for rank, grids in enumerate(found):
        for shape, tokens, _ in grids:
            assert tokens == want, (shape, rank)


def model_here() -> models.Transformer:
    return models.build(config_of("llama"), every_grid()[0], seed=3)


def stops() -> tuple[list[list[int]], list[list[int]], int]:
    model = model_here()
    whole = generate(model, PROMPTS, max_new_tokens=NEW)
    stop = {whole[0][2], whole[1][0]}
    ended = generate(model, PROMPTS, max_new_tokens=NEW, stop_ids=stop)
    steps = len(list(stream(model, PROMPTS[1:2], max_new_tokens=NEW, stop_ids=stop)))
    for tokens, all_tokens in zip(ended, whole, strict=True):
        places = [i for i, token in enumerate(all_tokens) if token in stop]
        assert tokens == all_tokens[: places[0] + 1 if places else NEW]
    return whole, ended, steps


def test_a_sequence_ends_with_a_stop_id(pool) -> None:
    whole, ended, steps = pool(1).run(stops)[0]
    assert ended != whole
    assert steps == 1, "it goes on after all sequences have ended"


def only_low_ids() -> tuple[list[list[int]], list[list[int]]]:
    """Generates only ids below 10, and then also one above them, which ends a text."""
    model = model_here()
    firsts = [tokens[0] for tokens in generate(model, PROMPTS, max_new_tokens=1)]
    number = firsts.index(max(firsts))
    assert firsts[number] >= 10
    low = generate(model, PROMPTS, max_new_tokens=NEW, num_tokens=10)
    ended = generate(model, PROMPTS, max_new_tokens=NEW, num_tokens=10, stop_ids=[max(firsts)])
    assert ended[number] == [max(firsts)]
    return low, ended


def test_ids_behind_the_tokens_are_never_chosen_unless_they_end_a_text(pool) -> None:
    low, ended = pool(2).run(only_low_ids)[0]
    assert max(max(tokens) for tokens in low) < 10
    assert all(token < 10 for tokens in ended for token in tokens[:-1])


def with_adapters() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    model = models.build(config_of("llama"), every_grid()[-1], seed=3)
    before = generate(model, PROMPTS, max_new_tokens=NEW)
    add_adapters(model, rank=4, alpha=64, targets=["q_proj", "o_proj", "up_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_b"):
                parameter.fill_(0.3)
    beside = generate(model, PROMPTS, max_new_tokens=NEW)
    merge_adapters(model)
    return before, beside, generate(model, PROMPTS, max_new_tokens=NEW)


def test_adapters_take_part(pool) -> None:
    for before, beside, merged in pool(4).run(with_adapters):
        assert beside == merged
        assert beside != before


def lost_logits(rank: int) -> str:
    """The error, which every rank must raise, if one rank's weights are not finite."""
    model = models.build(config_of("llama"), grid_of(GridShape(data=2)), seed=3)
    if model.grid.rank == rank:
        with torch.no_grad():
            model.norm.weight.fill_(torch.nan)
    try:
        generate(model, [[1], [2]], max_new_tokens=2)
    except ValueError as error:
        return str(error)
    return ""


def test_logits_that_are_not_finite_are_named_on_every_rank(pool) -> None:
    assert pool(2).run(lost_logits, 1) == ["prompt 1: its logits are not finite"] * 2


def different_prompts() -> str:
    grid = grid_of(every_grid()[0].shape)
    prompts = [[1, 2]] if grid.rank == 0 else [[]]
    try:
        generate(model_here(), prompts, max_new_tokens=2)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_prompts_are_named(pool) -> None:
    errors = pool(2).run(different_prompts)
    assert errors == ["generate: all ranks must pass the same arguments, but not rank 1"] * 2


def refused(prompts: list[list[int]], new: int) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        generate(model_here(), prompts, max_new_tokens=new)
    return str(error.value)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 1, "prompts: expected at least one, got none"),
        ([[1], []], 1, "prompt 1: expected at least one token, got none"),
        ([[1, 64]], 1, r"prompt 0: token ids must be in [0, 64), got 1 to 64"),
        ([[1] * 20], 5, "prompt 0: its 20 tokens and 5 new ones are more than the model's"),
        ([[1]], 0, "max_new_tokens must be >= 1, got 0"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts, new, message, pool) -> None:
    assert message in pool(1).run(refused, prompts, new)[0]


@pytest.mark.parametrize(("k", "p"), [(6, 0.8), (3, 1.0)])
def test_sampling_draws_with_the_probabilities(k: int, p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.7, top_k=k, top_p=p, seed=1)
    probabilities = (logits[0].double() / 0.7).softmax(0)
    order = probabilities.argsort(descending=True)
    of_k = probabilities[order[:k]] / probabilities[order[:k]].sum()
    left = min(k, int((of_k.cumsum(0) < p).sum()) + 1)
    want = torch.zeros(12, dtype=torch.float64)
    want[order[:left]] = of_k[:left] / of_k[:left].sum()
    draws = 20_000
    rows = choose(logits.expand(draws, 12), sampling, range(draws), 0)
    found = torch.bincount(rows, minlength=12).double() / draws
    assert ((found > 0) == (want > 0)).all()
    # Five standard deviations of a frequency over this many draws.
    assert ((found - want).abs() <= 5 * (want * (1 - want) / draws).sqrt()).all()
    other = choose(logits.expand(100, 12), dataclasses.replace(sampling, seed=2), range(100), 0)
    assert not torch.equal(other, rows[:100])


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"seed": -1}]
)
def test_sampling_refuses_other_values(values) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} must be"):
        Sampling(**values)
