"""Exported checkpoints, loaded by transformers and peft: their logits are those of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from steelyard.engine import LocalServiceClient, tiny
from steelyard.engine.model_export import export_checkpoint
from steelyard.errors import CheckpointError, InputError, ModelError

from .data import create, datum, logprobs, train
from .tied_model import TEMPLATE, write_tied_model

# peft says so whenever it loads LoRA of a tied output layer, for good reason: see the test below.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

TOKENS = [1, 2, 3, 104, 105, 256, 7]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tied_model(tmp_path_factory.mktemp("tied"))


class Trained:
    """A checkpoint of a trained adapter, and the log-probs that the engine has for it."""

    def __init__(self, root: Path, base_model: str, *, steps: int = 3, **settings: Any) -> None:
        self.root = root
        with LocalServiceClient(checkpoint_dir=root, device="cpu", dtype="float32") as service:
            client = create(service, base_model, **settings)
            train(client, steps)
            self.path = client.save_state("s").result().path
            asked = [datum(TOKENS[:-1], TOKENS[1:])]
            self.logprobs = logprobs(client.forward(asked, "cross_entropy").result())[0]

    def export(self, folder: Path, **options: Any) -> Path:
        return export_checkpoint(self.root, self.path, folder, device="cpu", **options)


@pytest.fixture(scope="module")
def of_tied(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("checkpoints"), str(tied))


@pytest.fixture(scope="module")
def of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("checkpoints"), "tiny-random")


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_by_peft(folder: Path) -> Any:
    return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    return logits


def assert_engine_logprobs(model: Any, trained: Trained) -> None:
    found = logits_of(model).log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, trained.logprobs.to(found), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["of_tied", "of_tiny"])
@pytest.mark.parametrize("loader", [load, load_by_peft])
def test_an_exported_adapter_has_the_logprobs_of_the_engine(
    name: str, loader: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trained: Trained = request.getfixturevalue(name)
    assert_engine_logprobs(loader(trained.export(tmp_path / "out")), trained)


@pytest.mark.parametrize("name", ["of_tied", "of_tiny"])
def test_a_merged_model_has_the_logits_of_the_adapter(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trained: Trained = request.getfixturevalue(name)
    model = load(trained.export(tmp_path / "whole", merge=True))
    assert_engine_logprobs(model, trained)
    adapter = load_by_peft(trained.export(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(model), logits_of(adapter), rtol=0, atol=1e-4)
    assert not any("lora" in key for key, _ in model.named_parameters())


def test_a_tied_output_layer_is_untied_only_if_it_was_trained(
    of_tied: Trained, tied: Path, tmp_path: Path
) -> None:
    whole = load(of_tied.export(tmp_path / "whole", merge=True))
    base = load(tied)
    assert base.config.tie_word_embeddings
    assert not whole.config.tie_word_embeddings
    assert torch.equal(whole.get_input_embeddings().weight, base.get_input_embeddings().weight)
    # What merging without untying does.
    with pytest.warns(UserWarning, match="Model with `tie_word_embeddings=True`"):
        plain = load_by_peft(of_tied.export(tmp_path / "adapter")).merge_and_unload()
    assert (logits_of(plain) - logits_of(whole)).abs().max() > 0.1

    inner = Trained(tmp_path / "inner", str(tied), train_unembed=False)
    model = load(inner.export(tmp_path / "tied", merge=True))
    assert model.config.tie_word_embeddings
    assert_engine_logprobs(model, inner)


def test_a_tied_output_layer_stays_tied_if_training_left_it_as_it_was(
    tied: Path, tmp_path: Path
) -> None:
    fresh = Trained(tmp_path / "fresh", str(tied), steps=0)
    whole, base = load(fresh.export(tmp_path / "whole", merge=True)), load(tied)
    assert whole.config.tie_word_embeddings
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert torch.equal(logits_of(whole), logits_of(base))
    sizes = [(f / "model.safetensors").stat().st_size for f in (tmp_path / "whole", tied)]
    assert sizes[0] == sizes[1]


def test_tokenizer_and_chat_template_are_in_the_folder(of_tied: Trained, tmp_path: Path) -> None:
    for merge in (False, True):
        folder = of_tied.export(tmp_path / str(merge), merge=merge)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == TEMPLATE
        assert tokenizer.encode("hi") == tiny.tokenizer().encode("hi")


def test_the_base_model_has_an_absolute_path(
    of_tied: Trained, of_tiny: Trained, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for trained, base in ((of_tied, tied), (of_tiny, tmp_path / "tiny-random" / "base")):
        folder = Path(base.name if base == tied else "tiny-random")
        written = trained.export(folder)
        assert written == tmp_path / folder
        config = json.loads((written / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)


def test_the_hub_id_of_the_base_model_takes_the_place_of_its_path(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--a-model--tied" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    write_tied_model(snapshot)
    trained = Trained(tmp_path / "checkpoints", str(snapshot))
    folder = trained.export(tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/a-model--tied"
    assert json.loads((folder / "steelyard.json").read_text()) == {
        "base_model": str(snapshot), "base_model_path": str(snapshot)
    }  # fmt: skip
    model = peft.PeftModel.from_pretrained(load(snapshot), folder)
    assert_engine_logprobs(model, trained)


def test_nothing_of_ours_is_added_where_the_config_says_it_all(
    of_tied: Trained, tmp_path: Path
) -> None:
    folder = of_tied.export(tmp_path / "out")
    assert not (folder / "steelyard.json").exists()
    assert not (folder / "README.md").exists()
    carded = export_checkpoint(of_tied.root, of_tied.path, tmp_path / "card", card="# It\n")
    assert (carded / "README.md").read_text() == "# It\n"


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_writing_shows_no_progress_bars_and_leaves_the_setting(
    of_tiny: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str], merge: bool, shown: bool
) -> None:
    logging: Any = transformers.utils.logging
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        of_tiny.export(tmp_path / "out", merge=merge)
        assert logging.is_progress_bar_enabled() == shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert "Writing model shards" not in capfd.readouterr().err


def test_a_merged_model_has_the_dtype_that_was_asked_for(of_tied: Trained, tmp_path: Path) -> None:
    folder = of_tied.export(tmp_path / "half", merge=True, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = load(of_tied.export(tmp_path / "exact", merge=True))
    rounded = {key: p.to(torch.bfloat16) for key, p in exact.named_parameters()}
    assert all(torch.equal(p, rounded[key]) for key, p in model.named_parameters())


@pytest.mark.parametrize("merge", [False, True])
def test_files_have_the_mode_of_the_umask(of_tiny: Trained, tmp_path: Path, merge: bool) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    folder = of_tiny.export(tmp_path / "out", merge=merge)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {plain.stat().st_mode}
    assert [path for path in files if path.suffix == ".safetensors"]


def test_an_empty_folder_is_used(of_tiny: Trained, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (of_tiny.export(tmp_path / "out") / "adapter_config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_what_is_there_is_not_overwritten(of_tiny: Trained, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "folder":
        (target / "mine").mkdir(parents=True)
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"must be new or empty, and .*/out is not"):
        of_tiny.export(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_written_is_an_error(of_tiny: Trained, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"must be one that can be written, and writing .*/file/o"):
        of_tiny.export(tmp_path / "file" / "out")


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    base = write_tied_model(tmp_path / "base")
    trained = Trained(tmp_path / "checkpoints", str(base))
    (base / "tokenizer.json").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelError, match="cannot"):
        trained.export(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_missing_checkpoint_and_an_unknown_dtype_are_errors(
    of_tiny: Trained, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="must be that of a checkpoint"):
        export_checkpoint(of_tiny.root, "tinker://x/weights/y", tmp_path / "out")
    with pytest.raises(InputError, match="dtype must be one of"):
        of_tiny.export(tmp_path / "out", dtype="int8")
    assert not list(tmp_path.iterdir())


def test_a_base_model_of_another_shape_is_an_error(tmp_path: Path) -> None:
    base = write_tied_model(tmp_path / "base")
    trained = Trained(tmp_path / "checkpoints", str(base))
    other: Any = tiny.build(torch.float32).config
    other.num_hidden_layers = 1
    transformers.LlamaForCausalLM(other).save_pretrained(base)  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match="does not fit"):
        trained.export(tmp_path / "out", merge=True)
