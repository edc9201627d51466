from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steelyard.gradients import Leaf, flatten


def leaf_of(*rows: list[float]) -> Leaf:
    return Leaf.of(*flatten([torch.tensor(row) for row in rows]))


def test_the_gradient_is_one_vector() -> None:
    leaf = leaf_of([1.0, 2.0], [3.0])
    loss = leaf.views[0].square().sum() + 5 * leaf.views[1].sum()
    gradient = leaf.gradients_of(loss)[0]
    assert gradient is not None
    assert gradient.tolist() == [2.0, 4.0, 5.0]


def test_a_datum_that_is_not_used_has_a_zero_gradient() -> None:
    leaf = leaf_of([1.0, 2.0], [3.0])
    gradient = leaf.gradients_of(leaf.views[1].sum())[0]
    assert gradient is not None
    assert gradient.tolist() == [0.0, 0.0, 1.0]


def test_no_path_no_gradient() -> None:
    leaf = leaf_of([1.0])
    assert leaf.gradients_of(torch.tensor(1.0))[0] is None
    other = torch.tensor(1.0, requires_grad=True)
    assert leaf.gradients_of(other * 2)[0] is None


def test_terms_may_share_a_part_of_the_graph() -> None:
    leaf = leaf_of([1.0, 2.0])
    shared = leaf.views[0].exp()
    assert leaf.gradients_of(shared.sum())[0] is not None
    assert leaf.gradients_of(shared.prod())[0] is not None


def test_writing_to_a_view_is_refused() -> None:
    leaf = leaf_of([1.0], [2.0])
    with pytest.raises(RuntimeError, match="view"):
        leaf.views[0].mul_(2.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_the_caller_has_switched_gradients_off(mode: type) -> None:
    def gradient() -> Tensor | None:
        leaf = leaf_of([1.0, 2.0])
        with torch.inference_mode(mode=False), torch.enable_grad():
            return leaf.gradients_of(leaf.views[0].square().sum())[0]

    with mode():
        found = gradient()
    assert found is not None
    assert found.tolist() == [2.0, 4.0]
