"""The page of runs: live in a browser on this machine, or frozen in one file, `report.html`.

Both are one front end, in `static`, that draws one document in JSON. A document is made in this
order: `load` reads a run folder through `plain_files`, and `series` its metrics as they grow;
`run_statistics` computes means, shares and cosines, `sentences` and `formatting` turn them into
text; `charts` says which metrics are drawn together; `run_document` is the document of one run,
`comparison` that of several, with `ablation_table` and `search`; `records` has the samples,
answers, driving examples, log and config.

Live, `server` starts `app`, which asks `security` about each request, lists the runs of
`run_index`, and answers with the documents that `run_views` keeps. `frozen` writes a document and
the front end to a file.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.page.frozen import summary, write_report
    from steelyard.experiment.page.server import serve_page
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment.page", error, extra="cli") from error

__all__ = ["serve_page", "summary", "write_report"]
