"""AdamW over a module's parameters, with fp32 master weights for those of lower precision."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.optim.averages import Averages
from axonn_ext.optim.bucketed import BucketedUpdate
from axonn_ext.optim.crossing import Crossing, NoCrossing, StreamCrossing
from axonn_ext.optim.pieces import (
    STATE_NAMES,
    Kind,
    MasterPiece,
    Options,
    Piece,
    groups_of,
    update,
)
from axonn_ext.optim.places import Place
from axonn_ext.optim.zero import GradientShards
from axonn_ext.spec.optimizer import BUCKET_ELEMENTS, OptimizerOptions, ParameterGroup


class AdamW:
    """AdamW, bitwise equal to torch's fused one, on fp32 copies of lower-precision parameters.

    A bf16 weight has 8 bits of mantissa, so an update of less than 1/256 of it would be lost; an
    fp16 one has 11. Therefore fp32 copies (masters) are updated and then cast. Weight decay applies
    only to matrices, not to biases and norm weights. The update is elementwise, so these options do
    not change a bit of it on x86-64 (GPU kernels may round differently than the host):

    zero: ZeRO stage. 1 shards masters and moments over the data axis: each rank updates its part,
    then all gather the new parameters. 2 also shards gradients: those of a backward pass are summed
    as soon as a bucket is full (see optim/zero). It needs a module, not parameters, and
    `sync_gradients` or an orchestrator; the sums are then not in `grad`, and `step` drops them.

    offload: "cpu" keeps masters and moments in host memory, pinned for a GPU, and the host updates
    them, bucket by bucket: while one bucket is updated, the gradients of the next one are copied to
    the host, and the values of the previous one return. "disk" keeps them in unnamed files in
    `folder` (default: the system's temporary folder), mapped into memory.

    bucket_elements: the number of elements of one bucket, over all ranks' parts.

    excluded: parameters that something else updates.
    ema_decay: above 0, keeps an exponential moving average of the masters, updated at each step by
    ema = ema_decay * ema + (1 - ema_decay) * master; `averaged` uses it. Not with offload "disk".

    groups: options of parameters by their names, which needs a module; the first group that matches
    a name counts. `freeze` freezes parameters; call it before.

    Masters that are copies (lower precision, zero, offload) are made here, and overwrite values
    that the model gets later.

    Bytes per element of a bf16 or fp16 parameter on the device: weight 2, gradient 2, master 4 and
    moments 8; the last two are divided by data (zero), or on the host. Sources: Loshchilov and
    Hutter, Decoupled Weight Decay Regularization (https://arxiv.org/abs/1711.05101); Singh and
    Bhatele, AxoNN, section V (https://arxiv.org/abs/2110.13005), for buckets on the host.

    Raises ValueError for other values, or parameters that do not fit them; OSError if the disk is
    full.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        groups: Sequence[ParameterGroup] = (),
        zero: int = 0,
        offload: str = "none",
        bucket_elements: int = BUCKET_ELEMENTS,
        folder: str | Path | None = None,
        ema_decay: float = 0.0,
        excluded: Iterable[nn.Parameter] = (),
    ) -> None:
        if not 0 <= ema_decay < 1 or (ema_decay and offload == "disk"):
            raise ValueError(
                f"AdamW: ema_decay must be at least 0 and below 1, and 0 with offload disk, got "
                f"{ema_decay} with offload {offload}"
            )
        chosen = OptimizerOptions(zero, offload, bucket_elements)
        module = parameters if isinstance(parameters, nn.Module) else None
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        others = {id(p) for p in excluded}
        self._parameters = [p for p in parameters if p.requires_grad and id(p) not in others]
        self._options: dict[Kind, Options] = {}
        self._rates: list[tuple[Options, float]] = []  # with the factors of their learning rates
        for number, group in enumerate((ParameterGroup("*"), *groups), start=-1):
            for is_matrix in (True, False):
                # All ranks list the same options, also where a stage has no parameter of a group,
                # or none but norms that AdamW updates.
                if groups or others or any((p.dim() >= 2) == is_matrix for p in self._parameters):
                    decay = group.decay(weight_decay, is_matrix=is_matrix)
                    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
                    self._options[number, is_matrix] = options
                    self._rates.append((options, group.lr_factor))
        self._set_lr(lr)
        path = Path(tempfile.gettempdir() if folder is None else folder)
        if offload == "disk" and not path.is_dir():
            raise ValueError(f"AdamW: folder must be one that exists, got {path}")
        self._whole: list[Piece] = []
        self._bucketed: list[BucketedUpdate] = []
        self._shards = _shards(module, self._parameters, chosen)
        if self._shards is None and offload == "none":
            self._whole = [_whole(p) for p in self._parameters]
        else:
            try:
                for alike in _alike(self._parameters):
                    self._bucketed.append(_bucketed(alike, chosen, self._shards, path))
            except BaseException:
                self.close()
                raise
        self._pieces_of: dict[int, list[Piece]] = {id(p): [] for p in self._parameters}
        numbers = groups_of(module, groups)
        for piece in self._own_pieces():
            piece.group = numbers.get(id(piece.parameter), -1)
            self._pieces_of[id(piece.parameter)].append(piece)
        self._averages = Averages(self._own_pieces(), ema_decay) if ema_decay else None
        self._runs_of: dict[int, list[tuple[int, int, int, int]]] = {}
        for bucket in (updated.bucket for each in self._bucketed for updated in each.buckets):
            part = bucket.part_numel if bucket.num_parts > 1 else 0
            for run in bucket.runs:
                runs = self._runs_of.setdefault(id(run.parameter), [])
                runs.append((run.start, run.stop, run.at, part))

    @property
    def pieces(self) -> Sequence[MasterPiece]:
        """The pieces that this rank updates, in the order of parameters or of buckets."""
        return self._own_pieces()

    def _own_pieces(self) -> list[Piece]:
        return [*self._whole, *(p for bucketed in self._bucketed for p in bucketed.pieces)]

    @property
    def keeps_average(self) -> bool:
        """Whether the pieces have averages."""
        return self._averages is not None

    def pieces_of(self, parameter: nn.Parameter) -> Sequence[MasterPiece] | None:
        """Returns the pieces of a parameter that this rank updates; None: no rank updates it."""
        return self._pieces_of.get(id(parameter))

    def runs_of(self, parameter: nn.Parameter) -> tuple[tuple[int, int, int, int], ...]:
        """Returns the runs of a parameter in buckets; none if it is updated whole.

        A run is (start, stop, place of its first element in the bucket, elements of the part of
        one rank of data). The last is 0 if each rank of data updates the whole bucket.
        """
        return tuple(self._runs_of.get(id(parameter), ()))

    @property
    def options(self) -> list[Options]:
        """lr, betas, eps and weight_decay, of matrices and of all others; then of each group.

        They may be changed.
        """
        return list(self._options.values())

    def state_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Returns the names of the tensors that are kept for a parameter, as in `Piece.state`."""
        return (*STATE_NAMES, "ema") if self.keeps_average else STATE_NAMES

    def step(self, lr: float | None = None, *, gradient_factor: float = 1.0) -> None:
        """Applies the gradients; `lr` replaces the learning rate from this step on.

        Groups multiply `lr` by their factors.

        gradient_factor: multiplies the gradients first, such as `gradient_norm`'s factor to clip
        and unscale them. Gradients of lower precision are multiplied in fp32, since fp16 could not
        hold the products; `grad` of parameters in fp32 and fp64 may be multiplied in place.

        Collectives: with zero, an all-gather over data of each bucket that has gradients. Raises
        RuntimeError if zero has gradients that were not summed. After any other error, some
        parameters are updated and others not: load a checkpoint before continuing.
        """
        if lr is not None:
            self._set_lr(lr)
        if self._shards is not None:
            self._shards.check_summed()
        for bucketed in self._bucketed:
            bucketed.step(self._options, gradient_factor)
        if self._shards is not None:
            self._shards.drop_sums()
        if self._whole:
            self._step_whole(gradient_factor)
        if self._averages is not None:
            self._averages.move()

    def _set_lr(self, lr: float) -> None:
        for options, factor in self._rates:
            options["lr"] = lr * factor

    def averaged(self) -> AbstractContextManager[None]:
        """Gives the parameters the values of their averages, if there are any, in its body.

        All ranks use it together. After an error in the body, they keep these values.
        Collectives: with zero, all-gathers over data, before and after the body.
        """
        return nullcontext() if self._averages is None else self._averages.in_place(self.write_back)

    @torch.no_grad()
    def _step_whole(self, factor: float) -> None:
        pieces = [p for p in self._whole if p.parameter.grad is not None]
        gradients = []
        for piece in pieces:
            gradient = piece.parameter.grad
            assert gradient is not None
            wide = gradient.to(piece.master.dtype)
            gradients.append(wide if factor == 1 else wide.mul_(factor))
        update(pieces, gradients, self._options)
        copied = [p for p in pieces if p.master is not p.parameter]
        if copied:
            torch._foreach_copy_([p.parameter for p in copied], [p.master for p in copied])

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._shards is not None:
            self._shards.discard()
            self._shards.drop_sums()

    @torch.no_grad()
    def write_back(self) -> None:
        """Sets the parameters to the masters; call it on all ranks after changing these.

        Collectives: with zero, all-gathers over data.
        """
        for bucketed in self._bucketed:
            bucketed.write_back()
        for piece in self._whole:
            piece.parameter.copy_(piece.master)

    def close(self) -> None:
        """Makes gradients be summed as without zero again. The optimizer is unusable afterwards."""
        for bucketed in self._bucketed:
            bucketed.close()
        if self._shards is not None:
            self._shards.detach()

    def state_dict(self) -> dict[str, Any]:
        """Returns moments, step counts and masters that are copies, for this rank's pieces."""
        pieces = [
            {key: value.clone() for key, value in tensors.items()} for tensors in self._tensors()
        ]
        return {"pieces": pieces, "options": [dict(options) for options in self.options]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of the same parameters, ranks and options.

        Parameters whose masters are copies do not change until `write_back` or the next step.

        Raises: ValueError if the state does not fit these parameters.
        """
        own, given = list(self._tensors()), state["pieces"]
        shapes = [{k: tuple(t.shape) for k, t in tensors.items()} for tensors in own]
        if [{k: tuple(t.shape) for k, t in tensors.items()} for tensors in given] != shapes:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: expected the state of {len(shapes)} "
                "pieces of these parameters, and in fp32 masters of those of lower precision, got "
                f"{len(given)} that differ"
            )
        with torch.no_grad():
            for tensors, saved in zip(own, given, strict=True):
                for key, tensor in tensors.items():
                    tensor.copy_(saved[key])
        for options, changed in zip(self.options, state["options"], strict=True):
            options.update(changed)

    def _tensors(self) -> Iterator[dict[str, Tensor]]:
        for piece in self.pieces:
            masters = {} if piece.master is piece.parameter else {"master": piece.master}
            yield piece.state | masters


def _whole(parameter: nn.Parameter) -> Piece:
    """Returns a whole parameter; its master is the parameter itself if it is fp32 or fp64."""
    master: Tensor = parameter
    if parameter.dtype not in (torch.float32, torch.float64):
        master = parameter.detach().float().clone()
    average, square = (torch.zeros_like(master, requires_grad=False) for _ in range(2))
    step = torch.zeros((), device=parameter.device)
    return Piece(parameter, 0, parameter.numel(), master, average, square, step)


def _alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters by device and dtype. Raises ValueError for non-contiguous ones."""
    groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if not parameter.is_contiguous():
            raise ValueError(
                "AdamW: parameters must be contiguous for zero and offload, got one of shape "
                f"{list(parameter.shape)} with strides {parameter.stride()}"
            )
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


def _shards(
    module: nn.Module | None, updated: Iterable[nn.Parameter], options: OptimizerOptions
) -> GradientShards | None:
    if not options.zero:
        return None
    if module is None:
        raise ValueError(
            f"AdamW: zero={options.zero} needs a module, which says how a grid splits its "
            "parameters, got only parameters"
        )
    own = {id(parameter) for parameter in updated}
    parameters = [p for p in sharded_parameters(module) if id(p.parameter) in own]
    if all(p.grid.size("data") == 1 for p in parameters):
        return None
    if options.zero > 1 and parameters[0].grid.size("pipe") > 1:
        raise ValueError(
            "AdamW: zero=2 sums the gradients of each backward pass over data, which the stages "
            "of a pipeline run in different orders; with pipe > 1 use zero=1"
        )
    elements = options.bucket_elements
    return GradientShards(parameters, bucket_elements=elements, stage=options.zero)


def _bucketed(
    parameters: Sequence[nn.Parameter], options: OptimizerOptions, shards: GradientShards | None,
    folder: Path,
) -> BucketedUpdate:  # fmt: skip
    place = Place(options.offload, parameters[0].device, folder)
    return BucketedUpdate(
        parameters, place=place, bucket_elements=options.bucket_elements, shards=shards,
        crossing=None if options.offload == "none" else partial(_crossing, place.device),
    )  # fmt: skip


def _crossing(device: torch.device, dtype: torch.dtype, numel: int) -> Crossing:
    return NoCrossing() if device.type == "cpu" else StreamCrossing(device, dtype, numel)
