"""Lightning under the name it has here: `lightning.pytorch`, or else `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError as missing:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ModuleNotFoundError:
            raise missing from None

__all__ = ["Callback", "LightningModule", "Trainer"]
