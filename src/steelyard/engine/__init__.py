"""The embedded engine: a real model, trained and sampled in this process, with the SDK's methods.

`service_client` finds a base model (`model_sources`, `hub`, `smollm2`, `tiny`), loads it (`model`),
and starts a `worker_thread` for it. `training_client` and `sampling_client` check their arguments
(`datum_tensors`) and queue calls on that thread. There, `trainer` packs sequences into rows
(`packing`) within the token budget (`memory`), runs them forward and backward (`forward`), applies
a named loss, and accumulates gradients in an `adapter`; `forward_pass` lets a custom loss supply
the gradients. `sampler` batches the requests that wait on that thread: `decoding` runs the model
on rows that join and leave (`grouped_attention`), `token_choice` draws tokens, `stop_condition`
ends samples, and `prompt_logprobs` has what a request asks about its prompt. `checkpoint_contents`
is what `checkpoints` stores on disk, as `checkpoint_files`; `model_export` writes a checkpoint for
other libraries. `server` puts all of it behind the wire protocol of the Tinker SDK.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.engine.checkpoints import remove_checkpoint
    from steelyard.engine.model_export import export_checkpoint
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
    "export_checkpoint",
    "find_model",
    "model_folder",
    "remove_checkpoint",
    "serve",
]
