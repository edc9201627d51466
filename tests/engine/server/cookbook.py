"""tinker-cookbook, unmodified: supervised training from a file, then DPO, on a server.

    python cookbook.py URL MODEL FOLDER

It runs in a separate process, as it configures logging and more for the whole process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import chz
import datasets
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

STEPS, BATCH = 4, 4
ROWS = range(STEPS * BATCH)


@chz.chz
class Pairs(ComparisonDatasetBuilder):
    """Comparisons that prefer polite answers."""

    def get_train_and_test_datasets(self) -> Any:
        rows = [{"question": f"Can you do {number}?"} for number in ROWS]
        return datasets.Dataset.from_list(rows), None

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison:
        comparison = Comparison(
            prompt_conversation=[{"role": "user", "content": example["question"]}],
            completion_A=[{"role": "assistant", "content": "Yes, gladly."}],
            completion_B=[{"role": "assistant", "content": "No way!"}],
        )
        return LabeledComparison(comparison=comparison, label="A")


def conversations(folder: Path) -> str:
    file = folder / "conversations.jsonl"
    with file.open("w") as lines:
        for number in ROWS:
            messages = [
                {"role": "user", "content": f"What is {number}?"},
                {"role": "assistant", "content": f"It is {number}."},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return str(file)


def main(url: str, model: str, folder: Path) -> None:
    data = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name="role_colon",
        max_length=128,
        batch_size=BATCH,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    common: dict[str, Any] = {
        "model_name": model,
        "renderer_name": "role_colon",
        "learning_rate": 0.01,
        "lora_rank": 8,
        "base_url": url,
        "eval_every": 0,
    }
    supervised = train.Config(
        log_path=str(folder / "supervised"),
        recipe_name="steelyard_supervised",
        dataset_builder=FromConversationFileBuilder(
            common_config=data, file_path=conversations(folder)
        ),
        save_every=2,
        **common,
    )
    asyncio.run(train.main(supervised))
    preferred = train_dpo.Config(
        log_path=str(folder / "dpo"),
        recipe_name="steelyard_dpo",
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=data, comparison_builder=Pairs()
        ),
        save_every=0,
        **common,
    )
    train_dpo.main(preferred)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
