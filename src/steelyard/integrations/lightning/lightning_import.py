"""Lightning under the name it has here: `lightning.pytorch`, or else `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError as missing:
        try:
            import pytorch_lightning as pl
        except ModuleNotFoundError:
            raise missing from None

Callback = pl.Callback
LightningModule = pl.LightningModule
Trainer = pl.Trainer
