"""The `steelyard` command: parses arguments, calls the library, prints. Only this folder prints.

`app` lists the commands: `train`, `compare`, `page`, `doctor`, `trained_run`, `config` and `engine`
have them. `display` shows a run while it goes on, in a live table on a terminal and as lines of
text in files and pipes.
`exit_codes` handles Ctrl-C, and turns errors into exit codes.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.cli.app import main as main
except ModuleNotFoundError as error:
    raise _cure("the steelyard command", error, extra="cli") from error
