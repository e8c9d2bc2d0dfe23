"""Makes the Linears of an unchanged script 4D, like AxoNN's auto_parallelize."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from axonn_ext.models.parallelize.agreement import agree_on_parameters, report_failure
from axonn_ext.models.parallelize.become import become
from axonn_ext.models.parallelize.row_linear import RowLinear
from axonn_ext.models.parallelize.units import own_parameters
from axonn_ext.nn.sharded import ParameterSpec, declaration_of, declare
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import ALGORITHMS, check_choice

Holders = dict[int, list[tuple[nn.Module, str]]]  # by the id of a parameter
WORLD_SUM = ("x", "y", "z", "data")


@dataclass(frozen=True)
class Constructed:
    """The outcome for a module that was constructed inside the block.

    name    its name within the modules made in the block, as far as known
    kind    the name of its class; for a Linear, also its features
    is_4d   whether the grid splits it
    reason  why a Linear is not split; empty for other modules
    """

    name: str
    kind: str
    is_4d: bool
    reason: str
    num_elements: int


class auto_parallelize:
    """Makes every nn.Linear that is constructed inside the block 4D, when the block ends.

        with axonn_ext.auto_parallelize(grid) as made:
            model = Model()
        print(made.summary())

    Input and output of each Linear are then this rank's own rows of the batch with all features, as
    with torch's DistributedDataParallel (see RowLinear for shapes and collectives); ranks along all
    axes have different rows. Modules and parameters stay the same objects, under the same names,
    but each rank keeps only a block of each split parameter. All other parameters stay whole on
    every rank, and `sync_gradients` sums their gradients over all ranks. Gradients are sums, not
    means: compute the loss with `global_mean(..., axes=("x", "y", "z", "data"))`, or divide it by
    the number of ranks to get the same as with DistributedDataParallel.

    Torch constructs the modules as usual; they are split when the block ends. So their values are
    those of the plain model after the same torch.manual_seed, whatever their constructors do, and
    all whole weights exist on every rank until then; a block around a part of the model holds only
    that part. Modules on the meta device are split there.

    A Linear stays plain, and `summary` says why, if the grid does not divide its features, if
    another module has the same parameter (tied embeddings), or if it is an instance of a subclass.
    `made.modules` has name, kind, is_4d, reason and num_elements of each module made in the block.

    How modules are found: torch's registration hooks for parameters and modules, which are added
    when the block begins and removed when it ends, even by an exception. They ignore all threads
    but the one that entered the block. Nothing in torch is replaced. Copied (`copy.deepcopy`) or
    older modules count as made in the block if they are put into a module there.

    Args:
        algorithm, save_gathered: of the Linears, as for nn.Linear.
        verbose: rank 0 prints the summary at the end of the block.

    Collectives: none. At the end of the block, ranks compare their modules through the c10d store.

    Raises:
        TypeError, ValueError: grid is not a Grid; algorithm is unknown.
        RuntimeError: blocks are nested, or a block is entered twice; on every rank, if ranks made
            different modules or values, or if the block raised on one of them.
    Source: AxoNN, https://github.com/axonn-ai/axonn, its `auto_parallelize`.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        algorithm: str = "auto",
        save_gathered: bool = False,
        verbose: bool = False,
    ) -> None:
        if not isinstance(grid, Grid):
            raise TypeError(f"auto_parallelize: grid must be a Grid, got {type(grid).__name__}")
        grid.shape.refuse_pipe("auto_parallelize")
        check_choice("algorithm", algorithm, ALGORITHMS)
        self.grid, self.verbose = grid, verbose
        self.algorithm, self.save_gathered = algorithm, save_gathered
        self.modules: tuple[Constructed, ...] = ()
        self._thread: int | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # Weak, so that modules that the block drops are freed. In order of construction.
        self._made: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._parents: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], str]] = (
            WeakKeyDictionary()
        )

    # --- The block -------------------------------------------------------------------------------

    def __enter__(self) -> auto_parallelize:
        thread = threading.get_ident()
        if self._thread is not None:
            raise RuntimeError("auto_parallelize: a block cannot be entered twice; make another")
        # Torch's own registry shows which blocks are open, so we need no global state.
        for hook in torch_module._global_parameter_registration_hooks.values():
            other = getattr(hook, "__self__", None)
            if isinstance(other, auto_parallelize) and other._thread == thread:
                raise RuntimeError("auto_parallelize: blocks cannot be nested")
        self._thread = thread
        self._hooks = [
            torch_module.register_module_parameter_registration_hook(self._parameter_registered),
            torch_module.register_module_module_registration_hook(self._module_registered),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if error is not None:
            if isinstance(error, Exception):
                report_failure(what="auto_parallelize")
            return
        gc.collect()  # dropped modules in reference cycles may still be alive on some ranks
        self._add_the_rest()
        owners = self._owners()
        parameters = [
            (f"{self._name(module)}.{name}", parameter)
            for module in owners
            for name, parameter in own_parameters(module).items()
        ]
        agree_on_parameters(parameters, what="auto_parallelize")
        holders = _holders(owners)
        self.modules = tuple(self._convert(module, holders) for module in owners)
        if self.verbose and self.grid.rank == 0:
            print(self.summary())

    def adopt(self, module: nn.Module) -> None:
        """Treats an existing model, and all modules in it, as if constructed in the block.

        Raises RuntimeError outside of the block, and ValueError if the model is already on a grid.
        """
        if not self._hooks:
            raise RuntimeError("auto_parallelize: adopt must be called inside the block")
        for name, owner in module.named_modules():
            if declaration_of(owner) is not None:
                raise ValueError(f"auto_parallelize: {name or 'the model'} is on a grid already")
        self._made.setdefault(module, None)  # its submodules are added at the end of the block

    def _parameter_registered(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._made.setdefault(module, None)

    def _module_registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() == self._thread and child is not None:
            self._parents[child] = (ref(parent), name)

    def _owners(self) -> list[nn.Module]:
        """Returns the plain modules of the block that have parameters, in order of construction."""
        return [m for m in self._made if own_parameters(m) and declaration_of(m) is None]

    def _add_the_rest(self) -> None:
        """Adds the modules inside those that the hooks saw.

        copy.deepcopy registers nothing, so the hooks have not seen the modules inside a copy.
        """
        for top in [*self._made, *self._parents]:
            for module in top.modules():
                self._made.setdefault(module, None)
                for name, child in module.named_children():
                    if child not in self._parents:
                        self._parents[child] = (ref(module), name)

    def _name(self, module: nn.Module) -> str:
        """Returns the module's name within the block's modules; its class if it is in none."""
        names: list[str] = []
        at: nn.Module | None = module
        while at is not None and at in self._parents and len(names) < 100:
            parent, name = self._parents[at]
            names.append(name)
            at = parent()
        return ".".join(reversed(names)) or f"({type(module).__name__})"

    # --- Splitting -------------------------------------------------------------------------------

    def _convert(self, module: nn.Module, holders: Holders) -> Constructed:
        """Makes a Linear 4D if possible, and declares the parameters of any other module."""
        name, kind = self._name(module), type(module).__name__
        num_elements = sum(p.numel() for p in own_parameters(module).values())
        reason = ""
        if isinstance(module, nn.Linear):
            kind = f"{kind} {module.in_features} -> {module.out_features}"
            reason = self._make_4d(module, name, holders)
            if not reason:
                return Constructed(name, kind, True, "", num_elements)
        declare(module, self.grid, {n: _whole_spec(p) for n, p in own_parameters(module).items()})
        return Constructed(name, kind, False, reason, num_elements)

    def _make_4d(self, linear: nn.Linear, name: str, holders: Holders) -> str:
        """Splits the Linear in place, or returns why it stays plain."""
        own = own_parameters(linear)
        if type(linear) is not nn.Linear:
            return f"it is a {type(linear).__name__}, which may use its weight in its own way"
        if own.keys() - {"bias"} != {"weight"}:
            return f"its parameters are {', '.join(own)} instead of weight and bias"
        for key, parameter in own.items():
            others = [(m, n) for m, n in holders[id(parameter)] if m is not linear]
            if others:
                return f"its {key} is also {self._name(others[0][0])}.{others[0][1]}"
        if not linear.weight.is_floating_point():
            return f"its weight has dtype {linear.weight.dtype}"
        try:
            split = RowLinear(
                linear.in_features, linear.out_features, grid=self.grid, bias="bias" in own,
                label=f"{name} (Linear {linear.in_features} -> {linear.out_features})",
                save_gathered=self.save_gathered, algorithm=self.algorithm,
                dtype=linear.weight.dtype, device=linear.weight.device,
            )  # fmt: skip
        except ValueError as error:
            return str(error).replace("RowLinear.weight", "weight")
        become(linear, split)
        return ""

    # --- The summary -----------------------------------------------------------------------------

    def summary(self) -> str:
        """Returns a list of the 4D Linears, the plain ones with reasons, and the whole modules."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        linears = [m for m in self.modules if "->" in m.kind]
        split = [m for m in linears if m.is_4d]
        total = sum(m.num_elements for m in self.modules)
        held = sum(m.num_elements for m in split)
        yield (
            f"auto_parallelize on {self.grid.shape.short()}: {len(split)} of {len(linears)} "
            f"Linears are 4D, with {held:,} of {total:,} parameters"
        )
        for m in split:
            yield f"  4D     {m.name} ({m.kind})"
        for m in linears:
            if not m.is_4d:
                yield f"  plain  {m.name} ({m.kind}): {m.reason}"
        for m in self.modules:
            if "->" not in m.kind:
                yield f"  whole  {m.name} ({m.kind}, {m.num_elements:,} parameters)"


def _holders(modules: Sequence[nn.Module]) -> Holders:
    """Returns, for each parameter, the modules and names under which it is registered."""
    found: Holders = {}
    for module in modules:
        for name, parameter in own_parameters(module).items():
            found.setdefault(id(parameter), []).append((module, name))
    return found


def _whole_spec(parameter: nn.Parameter) -> ParameterSpec:
    """For a parameter that is whole on every rank; its gradient comes from the rank's own rows."""
    return ParameterSpec(tuple(parameter.shape), {}, WORLD_SUM, None)
