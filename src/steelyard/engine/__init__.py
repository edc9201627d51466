"""The embedded engine: a real model, trained and sampled in this process, with the SDK's methods.

`service_client` finds a base model (`model_sources`, `tiny`), loads it (`model`), and starts a
`worker_thread` for it. `training_client` and `sampling_client` check their arguments
(`datum_tensors`) and queue calls on that thread. There, `trainer` packs sequences into rows
(`packing`) within the token budget (`memory`), runs them forward and backward (`forward`), applies
a named loss or lets a custom loss supply the gradients, and accumulates gradients in an `adapter`.
`sampler` batches the requests that wait on that thread: `decoding` runs the model on rows that join
and leave, and `token_choice` draws tokens and ends samples. `checkpoints` stores
`checkpoint_contents` on disk by name; `model_export` writes a checkpoint for other libraries.
`server` puts all of it behind the wire protocol of the Tinker SDK.
Importing this package loads none of these modules: the processes of
`server.uploaded_loss` need neither transformers nor peft, which take seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steelyard._extras import EXTRAS as _EXTRAS
from steelyard._extras import require as _require
from steelyard.engine.server import serve

if TYPE_CHECKING:
    from steelyard.engine.sampling_client import LocalSamplingClient
    from steelyard.engine.service_client import LocalServiceClient
    from steelyard.engine.training_client import LocalTrainingClient

__all__ = [
    "LocalSamplingClient",
    "LocalServiceClient",
    "LocalTrainingClient",
    "serve",
]

_MODULE_OF = {
    "LocalSamplingClient": "sampling_client",
    "LocalServiceClient": "service_client",
    "LocalTrainingClient": "training_client",
}

for _module in ("torch", "tinker", *(name for name, extra in _EXTRAS.items() if extra == "engine")):
    _require(_module, "steelyard.engine", extra="engine")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steelyard.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"steelyard.engine.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
