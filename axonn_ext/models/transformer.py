"""A decoder-only model on a grid, for all families."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_ext.checkpoint.whole_tensors import NamedState
from axonn_ext.models.block import Block, linear_options, make_block, make_norm, scaled
from axonn_ext.models.checks import check_labels, check_token_ids
from axonn_ext.models.compiled import RunBlock, compiled_blocks, run_block
from axonn_ext.models.stored import Stored, stored
from axonn_ext.nn import (
    CrossEntropy,
    Embedding,
    Init,
    KeyValueCache,
    Linear,
    Places,
    PositionEmbedding,
    Rotary,
)
from axonn_ext.nn.adapter import Adapter
from axonn_ext.nn.norm import AllHeadsNorm
from axonn_ext.nn.sharded import ParameterSpec, ShardedModule, own_rows, sharded_parameters
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.stages import Stages
from axonn_ext.spec.vocabulary import padded_vocab_size


class Transformer(nn.Module, NamedState):
    """A decoder-only model on a grid. Its family decides the modules and the names of the state.

    token_ids [B, S]: all sequences of this rank's (data, z) group, equal on every x, y and pipe
    rank.

    stages: the blocks of each stage of the grid's pipeline; the default minimises the operations of
    the largest stage. A rank has only the modules of its stages: the first stage has the embedding,
    the last one the last norm and the head. If table and head are tied, the last stage also has the
    table; `sync_gradients` adds the two gradients, and the norm counts the table once.

    config_json: the config.json that the model was loaded from, which `save_pretrained` keeps.
    """

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        parallel: ParallelConfig,
        *,
        stages: Stages | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.grid, self.parallel = config, grid, parallel
        self.config_json: Mapping[str, Any] = {}
        # The rows of the table and the head in addition to those of the vocabulary.
        rows = padded_vocab_size(config.vocab_size, grid.shape)
        self._padding = rows - config.vocab_size
        self.stages = stages or Stages.balanced(config, grid.size("pipe"))
        self._check_stages()
        own, rank = self.stages, grid.axis("pipe").rank
        self.has_embedding, self.has_head = own.has_first(rank), own.has_last(rank)
        self._options: dict[str, Any] = {
            "grid": grid,
            "layout": parallel.layout,
            "algorithm": parallel.algorithm,
            "dtype": dtype,
            "device": device,
            # Uninitialised: `build` sets the values of the whole model.
            "seed": None,
        }
        self._add_table()
        self._add_positions()
        self._run_block: RunBlock = run_block
        self.blocks = nn.ModuleList()  # named by their number in the whole model
        numbers = [n for stage in own.on(rank) for n in own.blocks[stage]]
        for number in numbers:
            block = make_block(config, number, parallel, self._rotary_of(number), self._options)
            self.blocks.add_module(str(number), block)
        again = parallel.recomputation
        self._recomputed = {n for i, n in enumerate(numbers) if again.has_block(i)}
        if self.has_head:
            self._add_head()
            # Nothing else uses the logits of `loss` or of a pipeline's last stage.
            common = ("grid", "layout", "algorithm")
            self.criterion = CrossEntropy(
                in_place=True, **{name: self._options[name] for name in common}
            )

    def _check_stages(self) -> None:
        stages, pipe = self.stages, self.grid.size("pipe")
        if stages.pipe != pipe or stages.num_blocks != self.config.num_layers:
            raise ValueError(
                f"stages must have the model's {self.config.num_layers} blocks on pipe={pipe}, got "
                f"{stages.num_blocks} on pipe={stages.pipe}"
            )

    def _add_table(self) -> None:
        """Adds the embedding on the first stage, and on the last one if the head shares it."""
        config = self.config
        if not self.has_embedding and not (self.has_head and config.tie_embeddings):
            return
        table = Embedding(
            config.vocab_size, config.hidden_size, padding=self._padding,
            init=Init.normal(config.init_std), **self._options,
        )  # fmt: skip
        if config.tie_embeddings and self.grid.size("pipe") > 1:
            table.specs["weight"] = dataclasses.replace(table.specs["weight"], on_ends=True)
        self.add_module(config.traits.hugging_face.names.own_table, table)

    def _rotary_of(self, number: int) -> Rotary | None:
        """Returns the rotation of a block."""
        if not self.config.rotates(number):
            return None
        return self.local_rotary if self.config.is_local(number) else self.rotary

    def _add_positions(self) -> None:
        """Adds the rotations that the blocks share, or the first stage's table of positions."""
        config = self.config
        if config.traits.rotary:
            self.rotary = Rotary(
                config.rotary_dim, config.sequence_length, config.rope_theta,
                scaling=config.rope_scaling,
            )  # fmt: skip
            if config.local_theta is not None:
                self.local_rotary = Rotary(
                    config.rotary_dim, config.sequence_length, config.local_theta
                )
        elif self.has_embedding:
            options = {k: self._options[k] for k in ("grid", "layout", "seed", "dtype", "device")}
            self.wpe = PositionEmbedding(
                config.sequence_length, config.hidden_size, offset=config.traits.position_offset,
                init=Init.normal(config.init_std), **options,
            )  # fmt: skip

    def _add_head(self) -> None:
        config, parallel = self.config, self.parallel
        self.norm = make_norm(config, self._options)
        rows = config.vocab_size + self._padding
        self.lm_head = Linear(
            config.hidden_size, rows, role="expand", bias=False,
            **linear_options(config, parallel, self._options),
        )  # fmt: skip
        spec = dataclasses.replace(self.lm_head.specs["weight"], padding=self._padding)
        if config.tie_embeddings:
            self.lm_head.weight, spec = self.table.weight, self.table.specs["weight"]
        self.lm_head.specs["weight"] = spec

    @property
    def table(self) -> Embedding:
        """The table of the embedding."""
        table = getattr(self, self.config.traits.hugging_face.names.own_table)
        assert isinstance(table, Embedding)
        return table

    def _embed(self, token_ids: Tensor, table: Tensor | None, places: Places | None) -> Tensor:
        """Returns the input of the first block: [m / Gx, H / Gy] (replicated: m rows)."""
        x = scaled(self.table(token_ids, table), self.config.embedding_factor)
        if self.config.traits.rotary:
            return x
        return self.wpe(x, token_ids.shape[1], None if places is None else places.positions)

    def forward(self, token_ids: Tensor, places: Places | None = None) -> Tensor:
        """Returns this rank's logits, [m / Gy, V / Gx] (replicated: m rows), m = B * S.

        V is the vocabulary, plus rows of zeros if x z does not divide it (spec.vocabulary), whose
        logits are the lowest number of their dtype.

        places: positions of the tokens in their documents, if a sequence has several, such as
        Places.packed(documents).
        """
        self._refuse_stages("the model alone")
        return self.run_stage(0, None, token_ids, places)

    def run_stage(
        self, stage: int, x: Tensor | None, token_ids: Tensor, places: Places | None = None
    ) -> Tensor:
        """Returns the output of a virtual stage on this rank, [m / Gx, H / Gy].

        x: the previous stage's output; None for the first stage. The last stage returns logits,
        [m / Gy, V / Gx]. In layout "replicated" each has m rows.
        """
        length = check_token_ids(token_ids, self.config)
        last = stage == self.stages.num_virtual - 1
        is_end = stage == 0 or last
        table = self.table.gather_weight() if self.config.tie_embeddings and is_end else None
        if stage == 0:
            x = self._embed(token_ids, table, places)
        assert x is not None
        x = self._run_blocks(self.stages.blocks[stage], x, length, places)
        return self._logits(x, table) if last else x

    def compile_blocks(self) -> None:
        """Lets torch.compile compile the blocks, from their next calls on.

        Blocks that differ only in the values of their tensors share code. It is compiled in the
        first call with gradients and in the first without, and again for another shape of the
        micro-batch; torch allows 8 such variants. Only rounding differs from eager blocks. An
        Orchestrator should prefetch and defer a multiple of 4 weights, those of a block.
        Generation, and the result of `replicated`, do not use compiled code.

        Raises, from later calls: ValueError while weight gradients are deferred.
        """
        self._run_block = compiled_blocks()

    def _logits(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Returns this rank's logits of rows x; padding gets the lowest number of the dtype.

        Softmax turns it into exact zeros, and so are its gradients, which need no mask.
        """
        logits = self.lm_head(scaled(self.norm(x), self.config.logits_scale), table)
        if (cap := self.config.logits_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        if self._padding:
            first = self.grid.axis("x").rank * logits.shape[-1]
            own = min(max(self.config.vocab_size - first, 0), logits.shape[-1])
            with torch.no_grad():
                logits[..., own:] = torch.finfo(logits.dtype).min
        return logits

    def _refuse_stages(self, what: str) -> None:
        if self.grid.size("pipe") > 1:
            raise ValueError(
                f"{what} does not run on the stages of a pipeline ({self.grid.shape.short()}): use "
                "axonn_ext.pipeline.Pipeline"
            )

    def logits_at(
        self,
        token_ids: Tensor,
        places: Places,
        rows: Tensor,
        caches: Sequence[KeyValueCache] = (),
    ) -> Tensor:
        """Returns this rank's logits of some rows, [n, V / Gx].

        rows: [n], indices of tokens among the B * S of token_ids [B, S]; n is equal in all (data,
        z) groups. caches: the KV caches, one for each block, if there are earlier tokens. Layout
        "replicated" only; see `replicated`.
        """
        length = check_token_ids(token_ids, self.config)
        table = self.table.gather_weight() if self.config.tie_embeddings else None
        x = self._embed(token_ids, table, places)
        own: Sequence[KeyValueCache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, own, strict=True):
            x = block(x, length, places, cache)
        return self._logits(x[rows], table)

    def replicated(self) -> Transformer:
        """Returns a model in layout "replicated", for any number of rows, that shares this model's
        parameters and buffers.

        Collectives: with heads_over_y, norms of the keys of all heads are gathered over y.
        """
        self._refuse_stages("generation")
        is_watched = self.table.weight_source is not None  # by the training's orchestrator
        parallel = self.parallel
        recomputes = parallel.recompute != "none"
        is_compiled = self._run_block is not run_block  # for each number of rows
        if parallel.layout == "replicated" and not (recomputes or is_watched or is_compiled):
            return self
        parallel = dataclasses.replace(
            self.parallel, layout="replicated", heads_over_y=False, recompute="none"
        )
        dtype = self.table.weight.dtype
        with torch.device("meta"):  # avoids recomputing tables of positions, too
            other = type(self)(self.config, self.grid, parallel, dtype=dtype, device="meta")
        for name, module in self.named_modules():
            if isinstance(module, Linear) and module.adapter is not None:
                linear, adapter = other.get_submodule(name), module.adapter
                assert isinstance(linear, Linear)
                linear.adapter = Adapter(
                    linear, adapter.targets, rank=adapter.rank, alpha=adapter.alpha
                )
        for named in (self.named_parameters, self.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                owner, _, own = name.rpartition(".")
                module = self.get_submodule(owner)
                if isinstance(module, AllHeadsNorm) and self.parallel.heads_over_y:
                    # The other model splits it over x only.
                    whole = self.grid.unshard(tensor.detach(), {0: ("y",)})
                    tensor = nn.Parameter(whole, requires_grad=False)
                setattr(other.get_submodule(owner), own, tensor)
        return other

    def stored(self, name: str) -> Stored:
        """Returns how Hugging Face's model stores one of our parameters."""
        rows = self.get_parameter_spec(name).state_sizes[0]
        owner, _, own = name.rpartition(".")
        adapter = self.get_submodule(owner)
        if isinstance(adapter, Adapter):
            public, order = adapter.public(own)
            return Stored(((public, rows),), order)
        return stored(self.config, name, rows)

    def export_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        public: dict[str, Tensor] = {}
        for name, tensor in state.items():
            public |= self.stored(name).export(tensor)
        if self.config.tie_embeddings and self.table_name in public:
            public[self.head_name] = public[self.table_name]
        return public

    def import_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.config.tie_embeddings and self.head_name in state:
            self._drop_tied_head(state)
        places = {p.name: self.stored(p.name) for p in sharded_parameters(self)}
        return {
            name: where.restore(state)
            for name, where in places.items()
            if all(part in state for part in where.names)
        }

    def _drop_tied_head(self, state: dict[str, Tensor]) -> None:
        """Removes the head from the state. Raises ValueError if it differs from the tied table."""
        if not torch.equal(state.pop(self.head_name), state[self.table_name]):
            raise ValueError(
                f"load_full_state_dict: {self.head_name} differs from {self.table_name}, but the "
                "model ties them; build it with tie_embeddings=False"
            )

    @property
    def head_name(self) -> str:
        """The name of lm_head's weight in Hugging Face's model."""
        return f"{self.config.traits.hugging_face.names.head}.weight"

    @property
    def table_name(self) -> str:
        """The name of the embedding's table in Hugging Face's model."""
        names = self.config.traits.hugging_face.names
        return f"{names.body}.{names.table}.weight"

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Returns the weights of the blocks' Linears on this rank, which `optim.Muon` can update.

        They are all matrices but the tables of tokens and positions, and the head.
        """
        return [m.weight for m in self.blocks.modules() if isinstance(m, Linear)]

    def get_parameter_spec(self, name: str) -> ParameterSpec:
        """Returns how the grid treats the named parameter."""
        owner, _, own = name.rpartition(".")
        module = self.get_submodule(owner)
        assert isinstance(module, ShardedModule)
        return module.specs[own]

    def loss(
        self,
        token_ids: Tensor,
        labels: Tensor,
        num_labels: Tensor | float | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """Returns the mean loss over the labelled tokens of the global batch, equal on every rank.

        labels: [B, S], each token's next token; -100 means no label. The model does not shift them:
        pass tokens[:, :-1] and tokens[:, 1:]. num_labels: the divisor; default the number of labels
        of this call on all ranks (see CrossEntropy). places: where the tokens stand in their
        documents, if a sequence has several.
        """
        check_labels(labels, token_ids, self.config, self.grid.rank)
        return self.criterion(self(token_ids, places), self._own_labels(labels), num_labels)

    def share_of_loss(self, logits: Tensor, labels: Tensor, num_labels: Tensor | float) -> Tensor:
        """Returns this rank's part of `loss`, given the output of the last stage.

        The sum over y (layout "sharded"), z and data is the loss.
        """
        return self.criterion.share(logits, self._own_labels(labels), num_labels)

    def _own_labels(self, labels: Tensor) -> Tensor:
        rows = labels.flatten()
        if self.parallel.layout == "sharded":
            axis = self.grid.axis("y")
            rows = own_rows(rows, axis.rank, axis.size)
        return rows

    def _run_blocks(
        self, numbers: Iterable[int], x: Tensor, sequence_length: int, places: Places | None
    ) -> Tensor:
        for number in numbers:
            block = self.blocks.get_submodule(str(number))
            assert isinstance(block, Block)
            if number in self._recomputed and torch.is_grad_enabled():
                x = checkpoint(
                    self._run_block, block, x, sequence_length, places, use_reentrant=False
                )
            else:
                x = self._run_block(block, x, sequence_length, places)
        return x
