"""Each backend works without the other two installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

EVERYTHING = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
{make}
from steelyard import penalties as p
p.l1(x); p.l2(x, clip=1.0, center="mean"); p.elastic_net(x, mask=x > -1)
p.kl_divergence(x, x); p.kl_divergence(x, x, max_log_ratio=None); p.js_divergence(x, x)
p.entropy(x, temperature=2.0)
p.orthogonality(x); p.orthogonality(x, mode="spectral"); p.consistency(x, x, metric="cosine")
p.output_magnitude_penalty(x); p.validate(x)
from steelyard.penalties import from_logits
from_logits.kl(x, x); from_logits.compose_logits(x, ["z_loss"], track_grad_norms=True)
pipeline = p.PenaltyPipeline(["l1", ("l2", {{"differentiable": False}})])
total, metrics = pipeline.compute(x)
assert metrics["total"] == float(total)
{more}
assert not {absent!r} & set(sys.modules), "imported nevertheless"
print("fine")
"""


@pytest.mark.parametrize(
    ("absent", "make", "more"),
    [
        ({"torch", "jax"}, "import numpy; x = numpy.full((2, 3), -1.0)", ""),
        (
            {"jax"},
            "import torch; x = torch.full((2, 3), -1.0)",
            "p.gradient_penalty(lambda x: x.sum(), x); pipeline.compute(x, track_grad_norms=True)",
        ),
        (
            {"torch"},
            "import jax; x = jax.numpy.full((2, 3), -1.0)",
            "p.gradient_penalty(lambda x: x.sum(), x); pipeline.compute(x, track_grad_norms=True)",
        ),
    ],
    ids=["numpy", "torch", "jax"],
)
def test_only_the_backend_in_use_is_needed(absent: set[str], make: str, more: str) -> None:
    script = EVERYTHING.format(absent=absent, make=make, more=more)
    assert run(script) == "fine\n"


def test_importing_loads_no_backend() -> None:
    script = (
        "import sys, steelyard.penalties as p; print({'torch', 'jax', 'scipy'} & {*sys.modules})"
    )
    assert run(script) == "set()\n"


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
