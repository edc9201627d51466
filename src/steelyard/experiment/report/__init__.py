"""The report: one self-contained HTML page about a run, several runs, an ablation or a search.

Data flows in this order: `load` reads run folders; `metrics` computes means, shares and flags, with
`reward_metrics` for on-policy runs; `charts`, `detail_charts` and `reward_charts` (one run),
`compare_charts` (several) and `search_charts` make the charts out of `figure`; `ablation_table`,
`driving_examples`, `answers`, `samples` and `config_diff` make the tables and texts; `formatting`
turns numbers into text, `sentences` makes the summary; `page` renders everything with `page.html`,
`page.css` and `page.js`; `write` saves it.
"""

from steelyard._extras import cure as _cure

try:
    from steelyard.experiment.report.write import summary, write_report
except ModuleNotFoundError as error:
    raise _cure("steelyard.experiment.report", error, extra="report") from error

__all__ = ["summary", "write_report"]
