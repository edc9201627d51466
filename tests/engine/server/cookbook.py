"""tinker-cookbook, unmodified: its loops with plain clients and with a KL term.

    python cookbook.py URL FOLDER

It runs in a separate process, as it configures logging and more for the whole process. The folder
`served` has the runs on the server, `embedded` those on the engine in this process. Beside them,
`results.json` has the values of each run's KL term, and how far the trained model has moved.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import chz
import datasets
import tinker
import torch
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.rl import train as train_rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as train_supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer

from steelyard import RegularizerSpec, regularize, telemetry
from steelyard.clients import RegularizedClient
from steelyard.engine import LocalServiceClient, tiny
from steelyard.regularizers import KLToReference

MODEL = tiny.NAME
STEPS, BATCH = 4, 4
ROWS = range(STEPS * BATCH)
PROMPT, ANSWER = [72, 105], 6
GROUPS, GROUP = 2, 8
CHATS = [  # prompts and answers, as the renderer "role_colon" writes them
    ("User: What is 3?\n\nAssistant:", " It is 3."),
    ("User: Can you do 3?\n\nAssistant:", " Yes, gladly."),
    ("User: Can you do 3?\n\nAssistant:", " No way!"),
]


class OddTokens(Env):
    """One answer; its reward is the share of tokens with an odd number."""

    async def initial_observation(self) -> Any:
        return tinker.ModelInput.from_ints(PROMPT), []

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        reward = sum(token % 2 for token in action) / len(action)
        return StepResult(reward, True, tinker.ModelInput.from_ints([]), [])


class OddTokensGroup(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [OddTokens() for _ in range(GROUP)]


class OddTokensBatches(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [OddTokensGroup() for _ in range(GROUPS)]

    def __len__(self) -> int:
        return 100


@chz.chz
class OddTokensBuilder(RLDatasetBuilder):
    async def __call__(self) -> Any:
        return OddTokensBatches(), None


@chz.chz
class Prompts(RLDatasetBuilder):
    """Prompts without rewards, for distillation."""

    async def __call__(self) -> Any:
        tokenizer = get_tokenizer(MODEL)
        renderer = get_renderer("role_colon", tokenizer=tokenizer)
        prompts = [f"What is {number}?" for number in ROWS]
        return PromptOnlyDataset(prompts, GROUPS, GROUP, renderer, tokenizer), None


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


def logprobs_of(client: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of each token of each sequence, requested all at once; None for the first token."""
    inputs = [tinker.ModelInput.from_ints(list(tokens)) for tokens in sequences]
    return [request.result() for request in [client.compute_logprobs(each) for each in inputs]]


class Loops:
    """The loops of the cookbook with tiny-random, on one service.

    Args:
        service: makes service clients, with the arguments of the SDK's.
        folder: of the runs.
        url: of the server.
    """

    def __init__(self, service: Any, folder: Path, url: str | None = None) -> None:
        folder.mkdir()
        self.service_class, self.folder = service, folder
        self.service = service(base_url=url)
        self.base = self.service.create_sampling_client(base_model=MODEL)
        self.results: dict[str, dict[str, Any]] = {}
        self.common: dict[str, Any] = {"model_name": MODEL, "lora_rank": 8, "base_url": url}
        self.chats = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=MODEL,
            renderer_name="role_colon",
            max_length=128,
            batch_size=BATCH,
            train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        )

    @contextmanager
    def run(self, name: str, weight: float) -> Any:
        """Run a loop with a KL term of this weight; without one, with plain clients, for 0."""
        terms = [RegularizerSpec(self.kl, weight, "kl")] if weight else []

        class ServiceClient(self.service_class):  # type: ignore[misc,name-defined]
            """The service's, except that training clients have the terms, and one seed."""

            def create_lora_training_client(
                self, base_model: str, rank: int = 32, _: Any = None, *args: Any, **kwargs: Any
            ) -> Any:
                return wrapped(
                    super().create_lora_training_client(base_model, rank, 0, *args, **kwargs)
                )

            async def create_lora_training_client_async(
                self, base_model: str, rank: int = 32, **kwargs: Any
            ) -> Any:
                return wrapped(
                    await super().create_lora_training_client_async(base_model, rank, 0, **kwargs)
                )

        def wrapped(client: Any) -> Any:
            # The engine's async method calls the other one, which has done it then.
            done = not terms or isinstance(client, RegularizedClient)
            return client if done else regularize(client, terms)

        values: list[float] = []
        stop = "steelyard.regularizer.compute.stop"
        telemetry.attach("values", stop, lambda _, numbers, *__: values.append(numbers["value"]))
        # The loops look these up in the module whenever they need one.
        seeds = count()
        tinker.ServiceClient = ServiceClient  # type: ignore[misc]
        tinker.SamplingParams = lambda **fields: Params(seed=next(seeds), **fields)  # type: ignore[assignment,misc]
        try:
            yield str(self.folder / name)
        finally:
            tinker.ServiceClient, tinker.SamplingParams = Plain, Params  # type: ignore[misc]
            telemetry.detach("values")
        self.results[name] = {"kl": values}

    def kl(self, data: Sequence[tinker.Datum], logprobs: Any) -> Any:
        """KL divergence from the base model, whose log-probs are requested all at once."""
        tokens = [
            [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]
            for datum in data
        ]
        references = [torch.tensor(row[1:]) for row in logprobs_of(self.base, tokens)]
        return KLToReference(reference=lambda _, i: references[i]).compute(data, logprobs)

    def checkpoint(self, name: str) -> dict[str, str]:
        lines = (self.folder / name / "checkpoints.jsonl").read_text().splitlines()
        found: dict[str, str] = json.loads(lines[-1])
        return found

    def compare(self, name: str) -> dict[str, float]:
        """How far the trained model is from the base model.

        `drift` is the KL divergence per token of answers sampled from the trained model, `reward`
        their mean reward, and `distance` the mean squared log-ratio of the answers of `CHATS`.
        """
        path = self.checkpoint(name)["sampler_path"]
        trained = self.service.create_sampling_client(model_path=path)
        prompt, params = tinker.ModelInput.from_ints(PROMPT), Params(max_tokens=ANSWER, seed=0)
        sampled = trained.sample(prompt, 32, params).result().sequences
        sequences = [[*PROMPT, *each.tokens] for each in sampled]
        base = [lp for row in logprobs_of(self.base, sequences) for lp in row[len(PROMPT) :]]
        own = [lp for each in sampled for lp in each.logprobs]
        encode = get_tokenizer(MODEL).encode  # one token for each letter
        chats = [encode(prompt + answer) for prompt, answer in CHATS]
        rows = zip(logprobs_of(trained, chats), logprobs_of(self.base, chats), CHATS, strict=True)
        ratios = [
            p - r
            for ours, theirs, (_, answer) in rows
            for p, r in zip(ours[-len(answer) :], theirs[-len(answer) :], strict=True)
        ]
        tokens = [token for each in sampled for token in each.tokens]
        return {
            "drift": sum(p - r for p, r in zip(own, base, strict=True)) / len(tokens),
            "reward": sum(token % 2 for token in tokens) / len(tokens),
            "distance": sum(ratio**2 for ratio in ratios) / len(ratios),
        }

    def rl(self, name: str, weight: float, steps: int, **mode: Any) -> None:
        with self.run(name, weight) as path:
            config = train_rl.Config(
                dataset_builder=OddTokensBuilder(),
                recipe_name="steelyard_rl",
                learning_rate=0.03,
                max_tokens=ANSWER,
                max_steps=steps,
                log_path=path,
                eval_every=0,
                save_every=0,
                num_groups_to_log=0,
                **self.common,
                **mode,
            )
            asyncio.run(train_rl.main(config))

    def supervised(self, name: str, weight: float) -> None:
        with self.run(name, weight) as path:
            config = train_supervised.Config(
                dataset_builder=FromConversationFileBuilder(
                    common_config=self.chats, file_path=conversations(self.folder)
                ),
                recipe_name="steelyard_supervised",
                renderer_name="role_colon",
                learning_rate=0.01,
                log_path=path,
                eval_every=0,
                save_every=2,
                **self.common,
            )
            asyncio.run(train_supervised.main(config))

    def dpo(self, name: str, weight: float) -> None:
        with self.run(name, weight) as path:
            config = train_dpo.Config(
                dataset_builder=DPODatasetBuilderFromComparisons(
                    common_config=self.chats, comparison_builder=Pairs()
                ),
                recipe_name="steelyard_dpo",
                renderer_name="role_colon",
                learning_rate=0.005,
                log_path=path,
                eval_every=0,
                save_every=0,
                **self.common,
            )
            train_dpo.main(config)

    def distillation(
        self, name: str, weight: float, steps: int, dataset: Any, teacher: Any, **options: Any
    ) -> None:
        with self.run(name, weight) as path:
            config = train_on_policy.Config(
                dataset_configs=[
                    DistillationDatasetConfig(
                        dataset_builder=dataset, teacher_config=teacher, groups_per_batch=GROUPS
                    )
                ],
                recipe_name="steelyard_distillation",
                renderer_name="role_colon",
                learning_rate=0.03,
                max_tokens=ANSWER,
                max_steps=steps,
                log_path=path,
                eval_every=0,
                save_every=0,
                **self.common,
                **options,
            )
            asyncio.run(train_on_policy.main(config))


Plain, Params = tinker.ServiceClient, tinker.SamplingParams


def served(url: str, folder: Path) -> Loops:
    """Every loop, and every mode of the loop for reinforcement learning."""
    loops = Loops(Plain, folder, url)
    loops.supervised("supervised", 0.0)
    loops.dpo("dpo", 0.0)
    loops.supervised("supervised with kl", 0.1)
    loops.dpo("dpo with kl", 0.1)
    loops.rl("rl with kl", 1.0, 2, num_substeps=2)
    streamed = train_rl.StreamMinibatchConfig(groups_per_batch=GROUPS, num_minibatches=2)
    loops.rl("rl streamed with kl", 1.0, 2, stream_minibatch_config=streamed)
    off_policy = train_rl.AsyncConfig(max_steps_off_policy=1, groups_per_batch=GROUPS)
    loops.rl("rl async with kl", 1.0, 2, async_config=off_policy, loss_fn="ppo")
    trained = loops.checkpoint("supervised")["sampler_path"]
    teacher = TeacherConfig(base_model=MODEL, load_checkpoint_path=trained)
    loops.distillation("distillation with kl", 1.0, 2, Prompts(), teacher)
    return loops


def embedded(folder: Path) -> Loops:
    """A toy task for each loop, with the same seeds with and without the KL term."""

    class Embedded(LocalServiceClient):
        def __init__(self, user_metadata: Any = None, **_: Any) -> None:
            super().__init__(user_metadata, checkpoint_dir=folder / "checkpoints")

    loops = Loops(Embedded, folder)
    teacher = TeacherConfig(base_model=MODEL)
    for on, name in ((0.0, ""), (1.0, " with kl")):
        loops.supervised(f"supervised{name}", 5.0 * on)
        loops.dpo(f"dpo{name}", 3.0 * on)
        loops.rl(f"rl{name}", 20.0 * on, 8)
        # The reward is that of the answers; the teacher's part in it is small.
        loops.distillation(
            f"distillation{name}", 20.0 * on, 8, OddTokensBuilder(), teacher, kl_penalty_coef=0.005
        )
    for each in loops.results:
        loops.results[each].update(loops.compare(each))
    return loops


def main(url: str, folder: Path) -> None:
    register_tokenizer(MODEL, tiny.tokenizer)
    results = {
        "served": served(url, folder / "served").results,
        "embedded": embedded(folder / "embedded").results,
    }
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
