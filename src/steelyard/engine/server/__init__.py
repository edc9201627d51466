"""The engine behind Tinker's own wire protocol, for the unmodified SDK.

A request goes this way: `app` lets it in and finds its route (`*_routes`); `exchange` and `wire`
read it; the `desk` hands out a ticket (`tickets`) and lets it wait in its model's `line`; then
the engine works, and the SDK comes back for the answer. `uploads` checks the losses that clients
upload, and `graphs` runs them.
"""

from steelyard.engine.server.serving import serve

__all__ = ["serve"]
