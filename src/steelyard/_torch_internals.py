"""Parts of torch without a public name that the library uses; no other module reads private ones.

Checked with torch 2.11 to 2.13; `tests/test_internals.py` notices when one of them changes. Beside
this file, `gradients/sharded.py` reads the state of FSDP2.

* `TorchDispatchMode` sees each operation before it runs. "Extending PyTorch" documents it under
  its private module. Without it nothing that needs torch can be imported.
* `active_transforms` tells which transforms of `torch.func` are around a call, which `torch.func`
  does not. Without it no transform is reported: a penalty inside `vmap` or `grad` then ends with
  torch's own error about an operator that has no rule for it.
* `graph_is_retained` tells a backward pass whether another may follow. Without it the answer is
  yes: gradients are copied where they could be scaled in place.
* `has_forward_hooks` tells whether a module has hooks. Without it the answer is yes: the model
  then computes its logits.
* `fsdp_state` gives the state of FSDP2 that a backward pass of one term must not change, which has
  public setters alone. Without it norms with respect to such a module are refused.
* `is_fully_sharded` also recognises a module that FSDP2 manages as a part of another one. Without
  it such a module counts as a plain one.
"""
# ruff: noqa: SLF001  # see above

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import _C, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - exported

from steelyard.errors import GradientError


# Where a graph breaks, Dynamo would trace the function by itself, with a warning (torch 2.11).
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def active_transforms() -> list[str]:
    """Names of the transforms of `torch.func` that are active, such as "Vmap", outermost first."""
    functorch = getattr(_C, "_functorch", None)
    read_stack = getattr(functorch, "get_interpreter_stack", None)
    if read_stack is None:
        return []
    return [interpreter.key().name for interpreter in read_stack() or ()]


def graph_is_retained() -> bool:
    """Return whether the backward pass that runs was called with `retain_graph=True`."""
    # torch.compile reads it too.
    autograd = getattr(_C, "_autograd", None)
    keeps_graph = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is None or bool(keeps_graph())


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks read or change what the module returns."""
    return bool(getattr(module, "_forward_hooks", True))


# What a backward pass reads and changes, with what it should find: of the whole module, of a group
# of parameters that FSDP gathers together, and of one of its parameters.
FSDP_OF_MODULE: dict[str, Any] = {"is_last_backward": True}  # it waits for the reductions
FSDP_OF_GROUP: dict[str, Any] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "_partial_reduce_output": None,
}
FSDP_OF_PARAMETER: dict[str, Any] = {"unsharded_accumulated_grad": None}


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP manages a module or a part of it; also FSDP1, which is refused later."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        hasattr(part, "_is_fsdp_managed_module") or isinstance(part, fsdp.FullyShardedDataParallel)
        for part in module.modules()
    )


def fsdp_state(module: nn.Module) -> tuple[Sequence[Any], Sequence[Any]]:
    """State that the parts of a module share, and the groups that FSDP2 gathers together."""
    contexts, groups = dict[int, Any](), dict[int, Any]()
    fsdp: Any = sys.modules["torch.distributed.fsdp"]  # loaded: it has sharded the module
    try:
        for part in module.modules():
            state = fsdp.fully_shard.state(part) if isinstance(part, fsdp.FSDPModule) else None
            if state is not None:
                context = state._state_ctx
                contexts[id(context)] = context
                groups |= {id(group): group for group in state._fsdp_param_groups}
        known = [(context, FSDP_OF_MODULE) for context in contexts.values()]
        for group in groups.values():
            known += [(group, FSDP_OF_GROUP), (group.fsdp_params[0], FSDP_OF_PARAMETER)]
        for owner, names in known:
            for name in names:
                getattr(owner, name)
    except AttributeError as error:
        raise GradientError(
            f"norms with respect to a module under FSDP need the FSDP2 of torch 2.13, got torch "
            f"{torch.__version__}, which differs ({error}): use wrt=None."
        ) from error
    return list(contexts.values()), list(groups.values())


def fsdp_tensors(managed: Any) -> list[Tensor]:
    """A parameter as FSDP stores it: the sharded one and, after a forward pass, the whole one."""
    whole = getattr(managed, "unsharded_param", None)
    return [managed.sharded_param] if whole is None else [managed.sharded_param, whole]
