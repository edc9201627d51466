"""The embedded engine: a real model, trained and sampled in this process, with the SDK's verbs.

A call goes this way: `service` finds a base model (`sources`) and loads it once (`model`, on a
`host` with one thread); `training` and `sampling` check what they are given (`examples`) and
queue the work; `trainer` packs sequences into rows (`packing`), runs them forward and back
(`run`), and gathers gradients in an `adapter`; `sampler` draws tokens; `checkpoints` are on disk.
`server` puts all of it behind the wire protocol of the Tinker SDK.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.engine.model_sources import KNOWN_MODELS, find_model, model_folder
    from steelyard.engine.sampling_client import LocalSamplingClient
    from steelyard.engine.server.serving import serve
    from steelyard.engine.service_client import LocalServiceClient
    from steelyard.engine.training_client import LocalTrainingClient
except ModuleNotFoundError as error:
    raise _cure("steelyard.engine", error, extra="engine") from error

__all__ = [
    "KNOWN_MODELS",
    "LocalSamplingClient",
    "LocalServiceClient",
    "LocalTrainingClient",
    "find_model",
    "model_folder",
    "serve",
]
