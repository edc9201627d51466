"""The same, where people really work: in a Jupyter kernel, which has a running event loop."""

from __future__ import annotations

from typing import Any

import nbclient
import nbformat

CELL = """
import torch, steelyard
from steelyard import RegularizerSpec, acompute, compute
factor = 2.0
def term(data, logprobs):
    return factor * logprobs[0].sum()
async def later(data, logprobs):
    return term(data, logprobs)
specs = [RegularizerSpec(term, 1.0, "process", run_in="process"),
         RegularizerSpec(lambda d, lp: term(d, lp), 1.0, "thread", run_in="thread"),
         RegularizerSpec(later, 1.0, "async")]
args = ([], [torch.ones(3)], lambda d, lp: lp[0].sum())
print(compute(*args, regularizers=specs).loss_total)
print((await acompute(*args, regularizers=specs)).gradients[0].tolist())
"""


def test_a_notebook_cell() -> None:
    v4: Any = nbformat.v4  # it has no types
    notebook = v4.new_notebook(cells=[v4.new_code_cell(CELL)])
    nbclient.NotebookClient(
        notebook, timeout=600, startup_timeout=600, kernel_name="python3"
    ).execute()
    (cell,) = notebook.cells
    printed = "".join(out["text"] for out in cell["outputs"])  # a slow kernel sends it in pieces
    assert printed == "21.0\n[7.0, 7.0, 7.0]\n"
