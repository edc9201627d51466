"""Import Lightning under whichever name is installed: `lightning.pytorch` or `pytorch_lightning`.

The two packages hold separate copies of every class: a module of one does not train in the other.
"""

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
