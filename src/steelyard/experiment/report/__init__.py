"""The report: one self-contained HTML page about a run, several runs, or an ablation.

The way of the data: `folders` reads what runs left behind; `findings` says what the numbers
mean; `single` and `several` make the charts (`figure`); `ablation`, `samples` and `settings`
the tables; `page` puts them together, with `page.html`, `page.css` and `page.js`.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.report.write import summary, write_report
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment.report", error, extra="report") from error

__all__ = ["summary", "write_report"]
