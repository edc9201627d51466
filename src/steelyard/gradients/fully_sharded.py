"""Gradients of a module under FSDP2 (`torch.distributed.fsdp.fully_shard`), term by term.

The forward pass computes with whole parameters, which FSDP gathers and frees; they are the leaves
of the graph. Hooks of FSDP average their gradients over the processes, and store each process's
part in `grad` of the sharded parameter. `torch.autograd.grad` passes these hooks by: it finds no
path to the sharded parameters. So a term is differentiated by a backward pass of its own, and what
training has accumulated is put aside meanwhile.

FSDP has no public access to its gathered parameters, nor to gradients that wait for a reduction;
the private names used here are those of torch 2.13, and others are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from steelyard.errors import GradientError
from steelyard.gradients.algebra import Row

# What a backward pass reads and changes, with what it should find: of the whole module, of a group
# of parameters that FSDP gathers together, and of one of its parameters.
_OF_MODULE: dict[str, Any] = {"is_last_backward": True}  # it waits for the reductions
_OF_GROUP: dict[str, Any] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "_partial_reduce_output": None,
}
_OF_PARAMETER: dict[str, Any] = {"unsharded_accumulated_grad": None}


class FullyShardedParameters:
    """The trained parameters of a module that `fully_shard` was applied to.

    Args:
        module: the module, after a forward pass.

    Attributes:
        parameters: the sharded parameters that require a gradient, each a `DTensor`.

    Raises:
        GradientError: a trained parameter is not managed by FSDP within the module, or torch's
            FSDP is not the one that is known here.
    """

    def __init__(self, module: nn.Module) -> None:
        self._contexts, self._groups = _state_of(module)
        every = [each for group in self._groups for each in group.fsdp_params]
        # After a forward pass a module may still have its gathered parameters.
        known = {id(tensor): each for each in every for tensor in _tensors_of(each)}
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if id(parameter) not in known:
                raise GradientError(
                    f"norms with respect to a module under FSDP need fully_shard on the module "
                    f"itself, got the parameter {name!r}, which it does not manage: pass the "
                    f"module that fully_shard was applied to, or wrt=None."
                )
        self._managed = [known[id(p)] for p in trained.values()]
        self.parameters: list[Tensor] = [each.sharded_param for each in self._managed]

    def differentiate(self, loss: Tensor) -> Row:
        """This process's part of the gradient of `loss`, averaged over the processes.

        A collective operation: every process calls it, with a loss of the same modules.
        """
        leaves = [tensor for each in self._managed for tensor in _tensors_of(each)]
        gathered = [group for group in self._groups if group.is_unsharded]
        with self._gradients_put_aside(leaves):
            Variable._execution_engine.run_backward(  # noqa: SLF001 - as in `algebra`
                (loss,),
                (torch.ones_like(loss),),
                keep_graph=True,
                create_graph=False,
                inputs=tuple(leaves),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            row = [p.grad for p in self.parameters]
        # The backward pass has freed them, and another may begin with a term that reads them.
        for group in gathered:
            group.unshard()
            group.wait_for_unshard()
        return row

    @contextmanager
    def _gradients_put_aside(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        wanted: list[tuple[Any, str, Any]] = [(leaf, "grad", None) for leaf in leaves]
        for owners, values in (
            (self._contexts, _OF_MODULE),
            (self._groups, _OF_GROUP),
            (self._managed, _OF_PARAMETER),
        ):
            wanted += [(owner, *item) for owner in owners for item in values.items()]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        _set(wanted)
        try:
            yield
        finally:
            _set(before)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module or a part of it; also FSDP1, which is refused later."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        hasattr(each, "_is_fsdp_managed_module") or isinstance(each, fsdp.FullyShardedDataParallel)
        for each in module.modules()
    )


def named_shards(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of a module by name, each as it is trained.

    After a forward pass FSDP leaves some of its parameters gathered in their modules: whole tensors
    without the shards' gradients. Their shards are returned in their place.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    if not is_fully_sharded(module):
        return parameters
    managed = [each for group in _state_of(module)[1] for each in group.fsdp_params]
    shards = {id(tensor): each.sharded_param for each in managed for tensor in _tensors_of(each)}
    return {name: shards.get(id(tensor), tensor) for name, tensor in parameters.items()}


def _state_of(module: nn.Module) -> tuple[Sequence[Any], Sequence[Any]]:
    """State that the parts of a module share, and the groups that FSDP2 gathers together."""
    contexts, groups = dict[int, Any](), dict[int, Any]()
    try:
        for each in module.modules():
            of_module: Any = getattr(each, "_get_fsdp_state", None)
            if of_module is not None:
                state = of_module()
                contexts[id(state._state_ctx)] = state._state_ctx  # noqa: SLF001
                groups |= {id(group): group for group in state._fsdp_param_groups}  # noqa: SLF001
        known = [(context, _OF_MODULE) for context in contexts.values()]
        for group in groups.values():
            known += [(group, _OF_GROUP), (group.fsdp_params[0], _OF_PARAMETER)]
        for owner, names in known:
            for name in names:
                getattr(owner, name)
    except AttributeError as error:
        raise GradientError(
            f"norms with respect to a module under FSDP need the FSDP2 of torch 2.13, got torch "
            f"{torch.__version__}, which differs ({error}): use wrt=None."
        ) from error
    return list(contexts.values()), list(groups.values())


def _tensors_of(managed: Any) -> list[Tensor]:
    """A parameter as FSDP stores it: the sharded one and, after a forward pass, the whole one."""
    whole = getattr(managed, "_unsharded_param", None)
    return [managed.sharded_param] if whole is None else [managed.sharded_param, whole]


def _set(values: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        setattr(owner, name, value)
