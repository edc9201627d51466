"""A base model, loaded once, and the LoRA adapters that share it."""

from __future__ import annotations

import inspect
import itertools
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import peft
import psutil
import torch
from peft.tuners.lora import Linear as LoraLayer
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from steelyard.engine import attention
from steelyard.engine.adapter import ALPHA, Adapter, HalfLora, LoraSettings
from steelyard.engine.datum_tensors import DatumLimits
from steelyard.engine.fast_paths import FastPaths, RecomputedLayers
from steelyard.engine.fused_layers import fuse
from steelyard.engine.model_sources import ModelSource
from steelyard.errors import InputError
from steelyard.penalties.from_logits.lm_head import factors, record_call

# Largest difference by rounding, relative to the largest logit: of 32 or 64 bits, and of 16.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2
# Parts of module names by which layers are assigned to a group.
_NAMES_BY_GROUP = {
    "attn": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "fc1", "fc2"),
}

_BYTES_PER_WEIGHT = 16  # in float32: a weight of an adapter, its gradient, and two moments of Adam


class Model:
    """One copy of the base weights with any number of LoRA adapters; not thread-safe.

    Args:
        source: the base model.
        device: the device of its weights.
        dtype: of the base weights.

    Attributes:
        paths: the ways in which it computes.
        fused_kinds: kinds of layers that are one kernel each.
    """

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self.source = source
        self.device = device
        self.paths = FastPaths.of(device, dtype)
        base = source.model(dtype, device).eval().requires_grad_(requires_grad=False).to(device)
        # Raised for an architecture that does not attend by torch's SDPA: it keeps its own.
        with suppress(ValueError, ImportError):
            base.set_attn_implementation(attention.NAME)
        self.config = base.config
        self.end_tokens = _end_tokens(base)
        self._layers = _layers_by_group(base)
        # A matrix of rank r beside a weight [out, in] has r (in + out) numbers.
        self._sides = {
            name: sum(base.get_submodule(name).weight.shape)
            for names in self._layers.values()
            for name in names
        }
        self._input_names = frozenset(inspect.signature(base.forward).parameters)
        self._base: Any = base  # peft puts its layers into it
        self._net: Any = base
        self.fused_kinds = fuse(base) if self.paths.fused else []
        self._recomputed = RecomputedLayers(base) if self.paths.checkpointing else None
        self._half_lora = HalfLora(dtype) if self.paths.half_lora else None
        self._names = (f"a{number}" for number in itertools.count())
        self._adapters: set[str] = set()
        self._active: str | None = None

    @property
    def limits(self) -> DatumLimits:
        """Sizes of its vocabulary and of its context."""
        context = getattr(self.config, "max_position_embeddings", None) or 2**31
        return DatumLimits(self.config.vocab_size, context)

    @cached_property
    def supports_packing(self) -> bool:
        """True if sequences that share a row, each with positions from 0, do not attend to others.

        Tested on the model, since some architectures take no positions or make no mask of them: two
        sequences of three tokens in one row must give the second the logits that it has alone.
        """
        if "position_ids" not in self._input_names:
            return False
        tokens = torch.arange(6, device=self.device)[None] % self.config.vocab_size
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)
        with torch.inference_mode():
            packed = self(None, input_ids=tokens, position_ids=positions, use_cache=False).logits
            alone = self(None, input_ids=tokens[:, 3:], use_cache=False).logits
        return _is_equal(packed[:, 3:], alone)

    @cached_property
    def packs_in_one_row(self) -> bool:
        """True if sequences lie one after another in one row, and attention gets their lengths.

        Tested on the model: its attention may be of a kind that has no kernel for it.
        """
        if not self.paths.packed_attention or "position_ids" not in self._input_names:
            return False
        tokens = torch.arange(6, device=self.device)[None] % self.config.vocab_size
        positions = torch.tensor([[0, 1, 0, 1, 2, 3]], device=self.device)
        arguments = attention.packed_arguments([2, 4], self.device)
        try:
            with torch.inference_mode():
                packed = self(
                    None, input_ids=tokens, position_ids=positions, use_cache=False, **arguments
                ).logits
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # refused by `attend`, by the kernel, or by the model's signature
        with torch.inference_mode():
            alone = self(None, input_ids=tokens[:, 2:], use_cache=False).logits
        return _is_equal(packed[:, 2:], alone)

    @cached_property
    def computes_without_logits(self) -> bool:
        """True if log-probs are computed from hidden states and the output layer."""
        if not (self.paths.without_logits and self.supports_projection):
            return False
        try:
            factors(self.output_layer)
        except InputError:  # a layer of its own kind
            return False
        return True

    @property
    def layers_to_recompute(self) -> int:
        """Number of layers that can be computed again in the backward pass."""
        return 0 if self._recomputed is None else self._recomputed.count

    @property
    def recomputes(self) -> bool:
        """True if its layers can be computed again in the backward pass."""
        return self.layers_to_recompute > 0

    def recomputing(self, recompute: bool) -> AbstractContextManager[None]:
        """Keep the inputs of layers alone within the `with` block, if `recompute`."""
        if not recompute or self._recomputed is None:
            return nullcontext()
        return self._recomputed.on()

    @cached_property
    def supports_padding(self) -> bool:
        """True if rows of a key-value cache may have padding on their left.

        That takes a mask, positions, and a cache that holds every token of a row in a slot of its
        own: no sliding window, no recurrent state. Tested on the model: a sequence of two tokens,
        padded to three beside another and then extended, must have the logits that it has alone.
        """
        if not {"position_ids", "attention_mask"} <= self._input_names:
            return False
        cache = DynamicCache(config=self.config)
        tokens = torch.arange(8, device=self.device).view(2, 4) % self.config.vocab_size
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.inference_mode():
            for part in (slice(0, 3), slice(3, 4)):
                padded = self(
                    None,
                    input_ids=tokens[:, part],
                    attention_mask=mask[:, : part.stop],
                    position_ids=positions[:, part],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            alone = self(None, input_ids=tokens[:1, 1:], use_cache=False).logits
        is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        return is_plain and _is_equal(padded[0, -1], alone[0, -1])

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache for each token, measured on one token."""
        cache = DynamicCache(config=self.config)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self(None, input_ids=token, past_key_values=cache, use_cache=True)
        # Layers with a recurrent state have neither.
        return sum(
            getattr(layer, name).nbytes
            for layer in cache.layers
            for name in ("keys", "values")
            if hasattr(layer, name)
        )

    @cached_property
    def supports_projection(self) -> bool:
        """True if the logits are the output of the output layer, unchanged.

        Tested on the model, since some architectures scale or cap their logits afterwards: the
        output layer is made to return known values from -100 to 100, which the model must return
        unchanged.
        """
        if not isinstance(self.output_layer, nn.Module):
            return False
        known = torch.linspace(-100, 100, self.limits.vocabulary, device=self.device)
        tokens = torch.arange(2, device=self.device)[None] % self.config.vocab_size
        returned: list[Tensor] = []

        def known_logits(hidden: Tensor) -> Tensor:
            returned.append(known.to(hidden.dtype).expand(*hidden.shape[:-1], -1))
            return returned[0]

        with torch.inference_mode(), record_call(self.output_layer, known_logits):
            logits = self(None, input_ids=tokens, use_cache=False).logits
        return len(returned) == 1 and torch.equal(logits, returned[0].to(logits.dtype))

    @property
    def output_layer(self) -> Any:
        """Layer that computes the logits, adapters included; None if there is none."""
        return self._base.get_output_embeddings()

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the base model, loaded when it is first used."""
        return self.source.tokenizer()

    def add_adapter(self, settings: LoraSettings) -> Adapter:
        """Add a fresh adapter, which does not change the outputs until it is trained.

        Raises:
            InputError: the model has no layers of a group in `settings`, or the memory has no room
                for its rank.
        """
        if settings.seed is None:
            settings = replace(settings, seed=secrets.randbits(63))
        name = next(self._names)
        config = self.lora_config(settings)
        self._check_memory(settings)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            # LoRA is added to the output of a tied layer; the tied weight itself does not change.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # peft finds for each layer whether its weight is [in, out] or [out, in].
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            torch.manual_seed(settings.seed or 0)
            if isinstance(self._net, peft.PeftModel):
                self._net.add_adapter(name, config)
            else:
                self._net = peft.get_peft_model(self._net, config, adapter_name=name)
                self._net.eval()
                self._activate(name)
        self._adapters.add(name)
        # Checkpoints name the matrices without the adapter, as peft's own do.
        infix = f".{name}."
        parameters = {
            key.replace(infix, "."): parameter
            for key, parameter in self._net.named_parameters()
            if infix in key
        }
        if self._half_lora is None:
            return Adapter(name, settings, parameters)
        copies = self._half_lora.add(self._net, name, self.output_layer)
        return Adapter(name, settings, parameters, copies)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Free the memory of an adapter, unless it is the only one: peft keeps at least one."""
        others = self._adapters - {adapter.name}
        if adapter.name in self._adapters and others:
            self._activate(min(others))
            self._net.delete_adapter(adapter.name)
            if self._half_lora is not None:
                self._half_lora.remove(adapter.name)
            self._adapters = others

    def merge(self, adapter: Adapter) -> Any:
        """Add an adapter to the base weights, and return the plain model; this object is used up.

        An output layer that is tied to the embeddings, and that LoRA has changed, is untied first:
        `merge_and_unload` would add the LoRA of the output to the embeddings of the input too.
        """
        self.activate(adapter)
        net = self._net.get_base_model()
        output, embeddings = net.get_output_embeddings(), net.get_input_embeddings()
        # Before the first step, and with a learning rate of 0, the product B A is 0.
        if isinstance(output, LoraLayer) and bool(output.get_delta_weight(adapter.name).any()):
            layer = output.get_base_layer()
            if layer.weight is embeddings.weight:
                layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
                for config in (net.config, net.config.get_text_config()):
                    config.tie_word_embeddings = False
        with warnings.catch_warnings():
            # Of a tied layer whose LoRA is 0, to which nothing is added.
            warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
            return self._net.merge_and_unload(adapter_names=[adapter.name])

    def _check_memory(self, settings: LoraSettings) -> None:
        rank = settings.rank
        sides = sum(self._sides[n] for group in settings.groups for n in self._layers[group])
        needed, free = _BYTES_PER_WEIGHT * rank * sides, free_bytes(self.device)
        if needed > free:
            raise InputError(
                f"rank must leave room in memory, got {rank}: its weights, their gradients and "
                f"their optimizer take {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: "
                f"use a lower rank."
            )

    def lora_config(self, settings: LoraSettings) -> peft.LoraConfig:
        """Configuration for peft of an adapter with these settings.

        Raises:
            InputError: the model has no layers of a group in `settings`.
        """
        for group in settings.groups:
            if not self._layers[group]:
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
            target_modules=[n for group in settings.groups for n in self._layers[group]],
        )

    def __call__(self, adapter: Adapter | None, **inputs: Any) -> Any:
        """Run the model on `inputs`, with an adapter or, for None, as the base model."""
        if adapter is not None:
            self.activate(adapter)
            return self._base(**inputs)
        with self.without_adapter():
            return self._base(**inputs)

    def activate(self, adapter: Adapter) -> None:
        """Make an adapter the one in use; peft then switches off the gradients of the others."""
        self._activate(adapter.name)

    def weight_addresses(self) -> set[int]:
        """Addresses of the storages of all weights and buffers, which no forward pass allocates."""
        copies = () if self._half_lora is None else self._half_lora.tensors()
        tensors: Iterator[Tensor] = itertools.chain(
            self._net.parameters(), self._net.buffers(), copies
        )
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _activate(self, name: str) -> None:
        if self._active != name:
            self._net.set_adapter(name)
            self._active = name
            if self._half_lora is not None:
                self._half_lora.active = name

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Make it the base model until the block ends."""
        if not isinstance(self._net, peft.PeftModel):
            yield
        elif self._half_lora is None:
            with self._net.disable_adapter():
                yield
        else:
            # peft walks over all modules, twice: here few layers have to be told.
            with self._half_lora.without_adapter():
                for layer in self._half_lora.others:
                    layer.enable_adapters(enabled=False)
                try:
                    yield
                finally:
                    for layer in self._half_lora.others:
                        layer.enable_adapters(enabled=True)


def _is_equal(logits: Tensor, expected: Tensor) -> bool:
    """True if logits are equal up to the rounding of their dtype."""
    difference = (logits - expected).abs().max() / expected.abs().max()
    tolerance = _TOLERANCE_16_BIT if expected.dtype.itemsize == 2 else _TOLERANCE  # noqa: PLR2004 - bytes
    return bool(difference < tolerance)


def _layers_by_group(base: Any) -> Mapping[str, Sequence[str]]:
    """Names of the layers that LoRA can train, by group."""
    output = base.get_output_embeddings()
    by_group: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in base.named_modules():
        if module is output:
            by_group["unembed"].append(name)
        elif isinstance(module, nn.Linear | Conv1D):
            for group, parts in _NAMES_BY_GROUP.items():
                if any(part in name.lower() for part in parts):
                    by_group[group].append(name)
                    break
    return by_group


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    return free


def _end_tokens(base: Any) -> frozenset[int]:
    ends = base.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
