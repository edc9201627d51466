"""Lightning: a mixin for your own module, and a callback for a module that is to stay as it is.

`module` composes inside the steps that you write; `callback` adds to the loss that a
`training_step` returns, over the `inputs` it finds; `logs` takes the numbers to `log_dict`.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.integrations.lightning.callback import RegularizerCallback
    from steelyard.integrations.lightning.module import RegularizedModule
except ModuleNotFoundError as error:
    raise _cure("steelyard.integrations.lightning", error, extra="lightning") from error

__all__ = ["RegularizedModule", "RegularizerCallback"]
