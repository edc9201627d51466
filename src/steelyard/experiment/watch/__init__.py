"""The page of `steelyard watch`: the runs in a folder, live, in a browser on this machine.

Path of a request: `security` checks the host, the origin and the token; `app` routes it. The list
comes from `run_index`, a run from `run_view`: `series` reads its metrics, and smooths and thins
them; `chart_groups` says which are drawn together; `records` has its texts. `events` sends what
is new, `controls` changes and pauses a run. `plain_files` opens every file of a run. `server`
starts and stops all of it. The page itself is in `static`: `app.js` loads the others.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.watch.server import WatchPage, serve_page
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment.watch", error, extra="watch") from error

__all__ = ["WatchPage", "serve_page"]
