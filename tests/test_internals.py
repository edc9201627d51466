"""Private parts of other libraries: which there are, and that each still does what we rely on.

Those of transformers and TRL are in `integrations/huggingface/test_internals.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import steelyard
from steelyard import _torch_internals as internals
from steelyard.errors import GradientError
from steelyard.penalties.from_logits import entropy

SOURCE = Path(steelyard.__file__).parent
# The only files that may read private parts of other libraries.
ALLOWED = {
    "_torch_internals.py": {"torch"},
    "execution/process_lifecycle.py": {"multiprocessing"},
    "execution/ray_tasks.py": {"ray"},
    "integrations/huggingface/internals.py": {"transformers", "trl"},
}
# Documented although they begin with an underscore: the standard library's, and those of tuples.
DOCUMENTED = {"_exit", "_getframe", "_replace", "_asdict", "_fields"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file of ours defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def reaches(tree: ast.AST, known: set[str]) -> list[str]:
    """Private names that a file reads and that are none of ours."""
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                names.append(name)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                if module.partition(".")[0] != "steelyard":
                    names += [*module.split("."), *(alias.name for alias in aliases)]
            case ast.Import(names=aliases):
                names += [part for alias in aliases for part in alias.name.split(".")]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names.append(name)
    return [name for name in names if is_private(name) and name not in known]


def test_only_the_files_of_the_list_read_private_parts_of_other_libraries() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    known = {name for tree in trees.values() for name in own_names(tree)}
    reached = {
        path.relative_to(SOURCE).as_posix(): reaches(tree, known) for path, tree in trees.items()
    }
    assert {path: names for path, names in reached.items() if names}.keys() == ALLOWED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch._inductor",
        "from trl import _x",
        "trial._trial_id",
        "getattr(model, '_hooks', None)",
    ],
)
def test_a_reach_is_found(source: str) -> None:
    assert len(reaches(ast.parse(source), set())) == 1


def test_active_transforms() -> None:
    seen: list[list[str]] = []

    def function(x: Tensor) -> Tensor:
        seen.append(internals.active_transforms())
        return (x * x).sum()

    x = torch.ones(2, 3)
    function(x)
    torch.func.grad(function)(x)
    torch.vmap(torch.func.grad(function))(x)
    assert seen == [[], ["Grad"], ["Vmap", "Grad"]]


def test_active_transforms_is_left_alone_by_the_compiler() -> None:
    def function(x: Tensor) -> Tensor:
        return x + len(internals.active_transforms())

    compiled: Any = torch.compile(function, backend="eager")
    assert torch.vmap(compiled)(torch.zeros(2)).tolist() == [1.0, 1.0]
    with pytest.raises(Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(2))


def test_a_penalty_in_a_transform_fails_clearly_if_torch_does_not_name_transforms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 5)
    expected = torch.func.grad(entropy)(x)
    monkeypatch.delattr(torch._C._functorch, "get_interpreter_stack")
    assert internals.active_transforms() == []
    assert torch.isfinite(entropy(x))
    with pytest.raises((RuntimeError, GradientError)):
        torch.func.grad(entropy)(x)
    monkeypatch.undo()
    torch.testing.assert_close(torch.func.grad(entropy)(x), expected)


@pytest.mark.parametrize("retain", [False, True])
def test_graph_is_retained(retain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            seen.append(internals.graph_is_retained())
            return gradient

    apply: Any = Recorded.apply  # untyped in torch

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        apply(x).sum().backward(retain_graph=retain)

    backward()
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    backward()
    assert seen == [retain, True]


def test_has_forward_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert not internals.has_forward_hooks(layer)
    handle = layer.register_forward_hook(lambda *_: None)
    assert internals.has_forward_hooks(layer)
    handle.remove()
    assert not internals.has_forward_hooks(layer)


def test_dispatch_mode_sees_each_operation_before_it_runs() -> None:
    mode: Any = internals.TorchDispatchMode  # untyped in torch

    class Refuses(mode):  # type: ignore[misc]  # as above
        def __torch_dispatch__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            raise InterruptedError(str(func))

    x = torch.ones(2)
    with Refuses(), pytest.raises(InterruptedError, match=r"aten\.mul_"):
        x.mul_(2)
    assert x.tolist() == [1.0, 1.0]
