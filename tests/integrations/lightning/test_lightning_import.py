"""Lightning under either of its package names, and not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import steelyard.integrations
from steelyard.errors import MissingExtraError
from steelyard.integrations import CompositeLoss, term
from tests.integrations.lightning.models import batches, cross_entropy, net

OURS = "steelyard.integrations.lightning"
Reload = Callable[..., ModuleType]


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Reload:
    """Import the integration as if some packages were not installed."""

    def load(*missing: str) -> ModuleType:
        monkeypatch.setattr(steelyard.integrations, "lightning", None, raising=False)
        for name in [name for name in sys.modules if name.startswith(OURS)]:
            monkeypatch.delitem(sys.modules, name)
        for name in missing:
            monkeypatch.setitem(sys.modules, name, None)
        return importlib.import_module(OURS)

    return load


def test_missing_lightning_names_the_pip_command(reload: Reload) -> None:
    with pytest.raises(
        MissingExtraError,
        match=r"^steelyard\.integrations\.lightning needs lightning, which is not installed: "
        r'pip install "steelyard\[lightning\]"\.$',
    ):
        reload("lightning", "lightning.pytorch", "pytorch_lightning")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_pytorch_lightning_works_too(reload: Reload) -> None:
    ours: Any = reload("lightning", "lightning.pytorch")
    older: Any = importlib.import_module("pytorch_lightning")
    terms = [term(lambda logits: logits.square().mean(), 0.1, "small")]

    class Steps(older.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.composite = CompositeLoss(cross_entropy, terms, aux={"router": 0.2})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, _ = self.net(batch[0])
            return {"loss": cross_entropy(logits, batch[1]), "logits": logits}

        def configure_optimizers(self) -> Any:
            return None

    class Mixed(ours.RegularizedModule, Steps):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, _ = self.net(batch[0])
            return self.compose(logits=logits, labels=batch[1])

    totals = []
    for model, callbacks in (
        (Mixed(), []),
        (Steps(), [ours.RegularizerCallback(terms, aux={"router": 0.2})]),
    ):
        trainer = older.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        with pytest.warns(UserWarning, match="will run with no optimizer"):
            trainer.fit(model, batches(3))
        totals.append(trainer.callback_metrics["train/loss_total"].item())
    assert totals[0] == totals[1] > 0
