"""The `steelyard` command: parses arguments, calls the library, prints. Only this folder prints.

`app` lists the commands, one file each. `display` picks how a run is shown: `live_display` on a
terminal, `text_display` in files and pipes, both from the rows of `term_table`. `trained_run`
opens a run for the commands that use its model. `interruption` handles Ctrl-C, `exit_codes` turns
errors into exit codes, `usage_errors` lists the options where one is unknown.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.cli.app import main
except ModuleNotFoundError as error:
    raise _cure("the steelyard command", error, extra="cli") from error

__all__ = ["main"]
