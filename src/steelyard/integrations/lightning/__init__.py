"""Lightning: a mixin for your own module, and a callback for a module that stays as it is.

* `module`: `RegularizedModule`, which composes the loss inside the steps that you write
* `callback`: `RegularizerCallback`, which adds terms to the loss that `training_step` returns
* `batch_inputs`: names for the fields of a batch, for the callback's terms
* `metric_logging`: the components of the loss, sent to `log_dict`
* `lightning_import`: Lightning under either of its package names
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.lightning.callback import RegularizerCallback
    from steelyard.integrations.lightning.module import RegularizedModule
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.lightning", error, extra="lightning") from error

__all__ = ["RegularizedModule", "RegularizerCallback"]
