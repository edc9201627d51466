"""The reference's log-probs in the batches of the real `RLOOTrainer`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trl.trainer.utils import selective_log_softmax

from steelyard.integrations.huggingface.internals import keep_reference
from tests.integrations.huggingface.trl_trainers import PROMPTS, build, model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("beta", [0.3, 0.0])
def test_batches_have_the_log_probs_of_the_reference(beta: float, tmp_path: Path) -> None:
    trainer = build("RLOO", tmp_path, beta=beta)
    keep_reference(trainer)
    trainer.model.train()
    prompts = [{"prompt": text} for text in PROMPTS[:2] for _ in range(4)]
    batch = trainer._generate_and_score_completions(prompts)
    assert ("ref_per_token_logps" in batch) == (beta != 0)
    if beta:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(1)(input_ids=ids, attention_mask=attended).logits[:, :-1] / 0.7
        expected = selective_log_softmax(logits, ids[:, 1:])[:, -batch["completion_ids"].shape[1] :]
        kept = batch["completion_mask"].bool()
        torch.testing.assert_close(batch["ref_per_token_logps"][kept], expected[kept])
