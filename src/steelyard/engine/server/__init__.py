"""HTTP server that puts the engine behind Tinker's own wire protocol, for the unmodified SDK.

`lifecycle` starts and stops it; its web server, `http_server`, also serves the page of `steelyard
watch`. Path of a request: `connections` receives it; `app` authorizes it (`hosts`) and dispatches
it to a handler in `*_routes`; `http_bodies` and `codec` decode it; `state` creates a future for it
(`futures`) and queues it in its model's `sequencer`; the engine runs it; the SDK polls
`future_routes` for the result. `uploaded_loss` validates and interprets the losses that clients
upload, within a budget.
"""

from steelyard.engine.server.serving import serve

__all__ = ["serve"]
