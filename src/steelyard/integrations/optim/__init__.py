"""Gradient transforms for any `torch.optim.Optimizer`: `attach` them, and step as before.

* `attaching`: `attach` and the `Attachment` it gives: order, closures, state
* `decay`: `l2_decay`, `l1_decay`, `elastic_net_decay`
* `clipping`: `clip_by_global_norm`, `adaptive_clip`
* `noise`: `gradient_noise`; `centring`: `centralize`
* `transform`: what they have in common; `slots`: parameters beside their gradients
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.optim.centralization import centralize
    from steelyard.integrations.optim.clipping import adaptive_clip, clip_by_global_norm
    from steelyard.integrations.optim.decay import elastic_net_decay, l1_decay, l2_decay
    from steelyard.integrations.optim.hooks import Attachment, attach
    from steelyard.integrations.optim.noise import gradient_noise
    from steelyard.integrations.optim.param_lists import Slot
    from steelyard.integrations.optim.transform import Transform
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.optim", error) from error

__all__ = [
    "Attachment",
    "Slot",
    "Transform",
    "adaptive_clip",
    "attach",
    "centralize",
    "clip_by_global_norm",
    "elastic_net_decay",
    "gradient_noise",
    "l1_decay",
    "l2_decay",
]
