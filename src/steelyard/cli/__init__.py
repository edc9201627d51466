"""The `steelyard` command: parses, calls, prints. The only place that prints.

`app` lists the commands, one file each; `live` and `plain` show a run, `rows` is what they show;
`interruption` is Ctrl-C, `failures` turns errors into exit codes.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.cli.app import main
except ModuleNotFoundError as error:
    raise _cure("the steelyard command", error, extra="cli") from error

__all__ = ["main"]
