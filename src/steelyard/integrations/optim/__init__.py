"""Gradient transforms for any `torch.optim.Optimizer`: `attach` them, and step as before.

* `hooks`: `attach` and the `Attachment` it returns: order, closures, state
* `decay`: `l2_decay`, `l1_decay`, `elastic_net_decay`
* `clipping`: `clip_by_global_norm`, `adaptive_clip`, `centralize`
* `noise`: `gradient_noise`
* `transform`: the base class of all of them, and the parameters with their gradients
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.optim.clipping import adaptive_clip, centralize, clip_by_global_norm
    from steelyard.integrations.optim.decay import elastic_net_decay, l1_decay, l2_decay
    from steelyard.integrations.optim.hooks import attach
    from steelyard.integrations.optim.noise import gradient_noise
    from steelyard.integrations.optim.transform import Transform
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.optim", error) from error

__all__ = [
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
