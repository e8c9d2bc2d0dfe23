"""parallelize on unmodified transformers models: logits, loss and gradients on every grid."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import (
    GridShape,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    parallelize,
    plan_of,
    sync_gradients,
)
from grids import factorisations, grid_of, relative_error
from transformers_cases import MODELS, batch, compared, loss_sum, make, relative_errors

pytestmark = pytest.mark.slow

GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [GridShape(2, 2, 2), GridShape(4, 2), GridShape(2, 1, 2, 2), GridShape(1, 2, 2, 2)],
}


def placed(name: str, shape: GridShape) -> tuple[dict[str, float], dict[str, str], bool]:
    """Relative errors on this rank, the plain modules, and whether the state is unchanged."""
    grid = grid_of(shape)
    plain, model = make(name), make(name)
    classifies = name == "bert-classifier"
    plan = plan_of(parallelize(model, grid, leave_plain=classifies, verbose=False))
    state = full_state_dict(model)
    same = all(torch.equal(state[n], p) for n, p in plain.named_parameters())
    errors = compared(name, model, plain, grid, ("data", "z"))
    load_full_state_dict(model, {n: p + 1 for n, p in plain.named_parameters()})
    state = full_state_dict(model)
    same = same and all(torch.equal(state[n], p + 1) for n, p in plain.named_parameters())
    return errors, plan.plain(), same


@pytest.mark.parametrize("world_size", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name, world_size, pool) -> None:
    for shape in GRIDS[world_size]:
        for errors, plain, same in pool(world_size).run(placed, name, shape):
            # Both compute in fp32, with sums in different orders. 96 terms of a sum lose a few
            # units of 6e-8 each, and gradients pass through the layers twice.
            assert max(errors.values()) < 2e-5, (shape, errors)
            assert same
            odd = name == "bert-classifier" and shape.y * shape.z > 1
            assert plain.keys() == ({"classifier"} if odd else set()), plain


def own_loss(shape: GridShape) -> float:
    """The relative error of a gradient if the model computes its own loss."""
    grid = grid_of(shape)
    plain, model = make("llama"), make("llama")
    parallelize(model, grid, verbose=False)
    ids, _ = batch("llama")
    plain(input_ids=ids, labels=ids).loss.backward()
    own = grid.shard(ids, {0: ("data", "z")})
    (model(input_ids=own, labels=own).loss / grid.num_parts(("data", "z"))).backward()
    sync_gradients(model)
    want = {n: p.grad for n, p in plain.named_parameters()}
    return max(relative_errors(full_gradients(model), want).values())


def test_the_loss_of_the_model_itself(pool) -> None:
    assert max(pool(4).run(own_loss, GridShape(x=2, z=2))) < 2e-5


SAVED = ("gpt2", "llama", "opt", "bert", "qwen3")


def saved(folder: str) -> None:
    grid = grid_of(GridShape(x=2))
    for name in SAVED:
        model = make(name)
        parallelize(model, grid, verbose=False)
        torch.save(full_state_dict(model), f"{folder}/{name}-{grid.rank}.pt")


def test_transformers_loads_the_full_state(pool, tmp_path) -> None:
    pool(2).run(saved, str(tmp_path))
    for name in SAVED:
        want, other = make(name), make(name)
        for parameter in other.parameters():
            parameter.data.zero_()
        loaded = other.load_state_dict(torch.load(tmp_path / f"{name}-1.pt"), strict=False)
        assert not loaded.unexpected_keys
        ids, _ = batch(name)
        assert torch.equal(other.eval()(ids).logits, want.eval()(ids).logits)


def messages() -> list[str]:
    """Messages for sizes that cannot be placed, for generation, and for a bare model."""
    found = []
    cases = [
        ("llama", GridShape(x=4), {"num_key_value_heads": 2}, {}),
        ("gpt2", GridShape(x=4), {"vocab_size": 254}, {}),
        ("gpt2", GridShape(x=4), {"attn_pdrop": 0.1}, {}),
        ("bert-classifier", GridShape(y=4), {}, {}),
    ]
    for name, shape, values, options in cases:
        try:
            parallelize(make(name, **values), grid_of(shape), verbose=False, **options)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_placed_is_named(pool) -> None:
    for llama, gpt2, dropout, bert in pool(4).run(messages):
        assert "model.layers.0.self_attn (LlamaAttention): " in llama
        assert "its 2 (key-value) heads must be divisible by x=4" in llama
        assert "2 modules cannot be placed on x=4" in gpt2 and "[254, 64]" in gpt2
        assert "lm_head" in gpt2 and "transformer.wte" in gpt2
        assert "transformer.h.0.attn.attn_dropout (Dropout) has p=0.1" in dropout
        assert "1 modules cannot be placed" in bert and "out_features=3" in bert


def left_plain(name: str, shape: GridShape, values: dict[str, int]) -> float:
    """The largest error of logits and gradients if a part of the model stays plain."""
    grid = grid_of(shape)
    plain, model = make(name, **values), make(name, **values)
    assert plan_of(parallelize(model, grid, leave_plain=True, verbose=False)).plain()
    ids, labels = (t[:4] % 250 for t in batch(name))
    want_logits, found_logits = plain(ids).logits, model(ids).logits
    loss_sum(name, want_logits, labels).backward()
    loss_sum(name, found_logits, labels).backward()
    sync_gradients(model)
    want = {n: p.grad / grid.num_parts(("data", "z")) for n, p in plain.named_parameters()}
    found = {n: g / grid.num_parts(("data", "z")) ** 2 for n, g in full_gradients(model).items()}
    errors = relative_errors(found, want)
    return max(*errors.values(), relative_error(found_logits, want_logits))


@pytest.mark.parametrize("shape", [GridShape(x=4), GridShape(x=2, y=2)], ids=str)
def test_what_stays_plain_computes_the_same(pool, shape) -> None:
    kv = {"num_key_value_heads": 2 if shape.x == 4 else 1}
    for name in ("llama", "qwen3"):
        assert max(pool(4).run(left_plain, name, shape, kv)) < 2e-5
    assert max(pool(4).run(left_plain, "gpt2", shape, {"vocab_size": 251})) < 2e-5


def generated(name: str, shape: GridShape) -> bool:
    """Whether greedy generation with a key-value cache gives the plain model's tokens."""
    plain, model = make(name).eval(), make(name).eval()
    parallelize(model, grid_of(shape), verbose=False)
    ids, _ = batch(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2}
    want = plain.generate(ids[:2, :5], **options)
    return torch.equal(model.generate(ids[:2, :5], **options), want)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"])
def test_generates_what_the_plain_model_does(name, pool) -> None:
    assert all(pool(4).run(generated, name, GridShape(x=2, y=2)))


def body_alone(name: str, shape: GridShape) -> float:
    """The error of the hidden states that a model without a head returns."""
    plain, model = (make(name).base_model.eval() for _ in range(2))
    parallelize(model, grid_of(shape), verbose=False)
    ids, _ = batch(name)
    want, found = plain(ids), model(ids)
    assert want.keys() == found.keys()
    names = [n for n, value in want.items() if isinstance(value, torch.Tensor)]
    return max(relative_error(found[n], want[n]) for n in names)


@pytest.mark.parametrize("name", ["llama", "bert-classifier"])
def test_a_model_without_a_head_returns_whole_states(name, pool) -> None:
    assert max(pool(4).run(body_alone, name, GridShape(x=2, y=2))) < 2e-5


def broken_projections() -> float:
    """The error if x z = 8 does not divide the projections' 12 features, but x the heads."""
    values = {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    values |= {"word_embed_proj_dim": 12, "ffn_dim": 16}
    return left_plain("opt", GridShape(x=2, z=4), values)


def test_an_attention_stays_plain_as_a_whole(pool) -> None:
    assert max(pool(8).run(broken_projections)) < 2e-5


def norm_of_heads_plain() -> str:
    """The error for a plan that leaves the norm of one attention's queries plain."""
    name = "model.layers.0.self_attn.q_norm"
    with pytest.raises(ValueError) as refused:
        parallelize(make("qwen3"), grid_of(GridShape(x=2, y=2)), {name: "plain"}, verbose=False)
    return str(refused.value)


def test_the_norm_of_heads_is_plain_with_its_attention_alone(pool) -> None:
    for text in pool(4).run(norm_of_heads_plain):
        assert "layers.0.self_attn.q_norm (Qwen3RMSNorm" in text
        assert 'let the plan make a module around it "plain"' in text
