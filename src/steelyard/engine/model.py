"""A base model, loaded once, and the LoRA adapters that share it."""

from __future__ import annotations

import inspect
import itertools
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from steelyard.engine.adapter import ALPHA, Adapter, LoraSettings
from steelyard.engine.datum_tensors import DatumLimits
from steelyard.engine.model_sources import Source
from steelyard.errors import InputError
from steelyard.penalties.from_logits.lm_head import overheard

# How far rounding may move logits, as a part of the largest.
_ROUNDING, _HALF_ROUNDING = 1e-4, 5e-2
_GROUPS = {
    "attn": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "fc1", "fc2"),
}


class Model:
    """One copy of the base weights with any number of adapters. Not for several threads at once.

    Args:
        source: where the base model comes from.
        device: where it runs.
        dtype: of the base weights.
    """

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        self.source = source
        self.device = device
        base = source.model(dtype).eval().requires_grad_(requires_grad=False).to(device)
        self.config = base.config
        self.end_tokens = _end_tokens(base)
        self._groups = _groups(base)
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._net: Any = base
        self._names = (f"a{number}" for number in itertools.count())
        self._adapters: set[str] = set()
        self._active: str | None = None

    @property
    def limits(self) -> DatumLimits:
        """The sizes of its vocabulary and of its context."""
        context = getattr(self.config, "max_position_embeddings", None) or 2**31
        return DatumLimits(self.config.vocab_size, context)

    @cached_property
    def packs(self) -> bool:
        """Whether sequences that share a row stay apart, as positions that start again tell.

        Tried out: some kinds of model take no positions, or do not heed them.
        """
        if not self._takes_positions:
            return False
        tokens = torch.arange(6, device=self.device)[None] % self.config.vocab_size
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)
        with torch.inference_mode():
            together = self(None, input_ids=tokens, position_ids=positions, use_cache=False).logits
            alone = self(None, input_ids=tokens[:, 3:], use_cache=False).logits
        apart = (together[:, 3:] - alone).abs().max() / alone.abs().max()
        return bool(apart < (_HALF_ROUNDING if alone.dtype.itemsize == 2 else _ROUNDING))  # noqa: PLR2004 - bytes

    @cached_property
    def projects(self) -> bool:
        """Whether its logits are what its output layer gives, and nothing is done to them after.

        Tried out: some kinds of model scale or cap them.
        """
        if not isinstance(self.output_layer, nn.Module):
            return False
        row = torch.linspace(-100, 100, self.limits.vocabulary, device=self.device)
        tokens = torch.arange(2, device=self.device)[None] % self.config.vocab_size
        told: list[Tensor] = []

        def tell(hidden: Tensor) -> Tensor:
            told.append(row.to(hidden.dtype).expand(*hidden.shape[:-1], -1))
            return told[0]

        with torch.inference_mode(), overheard(self.output_layer, tell):
            given = self(None, input_ids=tokens, use_cache=False).logits
        return len(told) == 1 and torch.equal(given, told[0].to(given.dtype))

    @property
    def output_layer(self) -> Any:
        """The layer that makes logits, with the adapters in it; None if there is none."""
        peeled = isinstance(self._net, peft.PeftModel)
        net = self._net.get_base_model() if peeled else self._net
        return net.get_output_embeddings()

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.source.tokenizer()

    def add(self, settings: LoraSettings) -> Adapter:
        """A fresh adapter: the model with it is the base model, until it is trained.

        Raises:
            InputError: the model has no layers of a group that is to be trained.
        """
        if settings.seed is None:
            settings = replace(settings, seed=secrets.randbits(63))
        name = next(self._names)
        config = self.lora_config(settings)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            # Its weights are added to the output of a tied layer, so nothing comes untied.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # peft finds out for each layer which way round its weights are.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            torch.manual_seed(settings.seed or 0)
            if isinstance(self._net, peft.PeftModel):
                self._net.add_adapter(name, config)
            else:
                self._net = peft.get_peft_model(self._net, config, adapter_name=name)
                self._net.eval()
                self._active = name
        self._adapters.add(name)
        marker = f".{name}."
        parameters = {
            key.replace(marker, "."): parameter
            for key, parameter in self._net.named_parameters()
            if marker in key
        }
        return Adapter(name, settings, parameters)

    def remove(self, adapter: Adapter) -> None:
        """Give the memory of an adapter back, unless it is the only one: peft keeps one."""
        others = self._adapters - {adapter.name}
        if adapter.name in self._adapters and others:
            self._activate(min(others))
            self._net.delete_adapter(adapter.name)
            self._adapters = others

    def lora_config(self, settings: LoraSettings) -> peft.LoraConfig:
        """What peft calls an adapter with these settings.

        Raises:
            InputError: the model has no layers of a group that is to be trained.
        """
        for group in settings.groups:
            if not self._groups[group]:
                raise InputError(
                    f"train_{group} needs layers of that kind, and {self.source.name!r} has none "
                    f"that Steelyard knows: pass train_{group}=False."
                )
        return peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            target_modules=[n for group in settings.groups for n in self._groups[group]],
        )

    def __call__(self, adapter: Adapter | None, **inputs: Any) -> Any:
        """What transformers gives for `inputs`, with an adapter or as the base model."""
        if adapter is not None:
            self.activate(adapter)
            return self._net(**inputs)
        with self._without_adapter():
            return self._net(**inputs)

    def activate(self, adapter: Adapter) -> None:
        """Put an adapter to use; peft switches off the gradients of the others."""
        self._activate(adapter.name)

    def own_memory(self) -> set[int]:
        """The addresses of all weights: what is not made anew in a forward pass."""
        tensors: Iterator[Tensor] = itertools.chain(self._net.parameters(), self._net.buffers())
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _activate(self, name: str) -> None:
        if self._active != name:
            self._net.set_adapter(name)
            self._active = name

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        if isinstance(self._net, peft.PeftModel):
            with self._net.disable_adapter():
                yield
        else:
            yield


def _groups(base: Any) -> Mapping[str, Sequence[str]]:
    """The names of the layers that LoRA can train, by the part of the model they belong to."""
    output = base.get_output_embeddings()
    found: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in base.named_modules():
        if module is output:
            found["unembed"].append(name)
        elif isinstance(module, nn.Linear | Conv1D):
            for group, words in _GROUPS.items():
                if any(word in name.lower() for word in words):
                    found[group].append(name)
                    break
    return found


def _end_tokens(base: Any) -> frozenset[int]:
    ends = base.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
