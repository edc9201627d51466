"""Lightning: a mixin for your own module, and a callback for a module that stays as it is.

* `module`: `RegularizedModule`, which composes the loss inside the steps that you write
* `callback`: `RegularizerCallback`, which adds terms to the loss of a training step
* `steps`: the fields of a batch as named inputs, and the components of the loss in the log
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.lightning.callback import RegularizerCallback
    from steelyard.integrations.lightning.module import RegularizedModule
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.lightning", error, extra="lightning") from error

__all__ = ["RegularizedModule", "RegularizerCallback"]
