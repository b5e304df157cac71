"""Support for other programs: Transformers' releases, PEFT's adapters, parallelism and continuous batching."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils.deprecation import deprecate_kwarg

from .cache_nlq import CACHE_NAME
from .parts_builtin_nlq import parts_of


try:
    from peft.utils import constants as peft_constants
except ImportError:
    peft_constants = None


def accept_both_cache_names(forward: Callable) -> Callable:
    """Lets `forward` take the cache by both names, with a warning where Transformers warns."""
    if CACHE_NAME == "past_key_values":
        return forward
    return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)(forward)


# Tensors and objects that a call may pass although `forward` does not name them
KNOWN_ARGUMENTS = {
    "cache_position",  # the cache knows it
    *("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"),  # read by `read_sequences`
    *("num_items_in_batch", "shift_labels"),  # read by the losses
    *("output_attentions", "output_hidden_states"),  # read by `capture_outputs`
    "token_type_ids",
    "tokenizer",  # `transformers serve` hands it to `generate`
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an object that `forward` does not name, such as a mask that Transformers renamed."""
    for name, value in arguments.items():
        if name not in KNOWN_ARGUMENTS and not isinstance(value, (bool, int, float, str, type(None))):
            kind = type(value).__name__
            raise ValueError(f"{name}: NLQ models do not know this argument, a {kind}; see docs/versions.md")


# Queries and values, as for Llama
DEFAULT_TARGETS = [f"{name}_{layer}" for name in "qv" for layer in ("proj", "bottleneck.fc1", "bottleneck.fc2")]
_IA3_FEEDFORWARD = ["mlp.fc2", "mlp.down_proj"]
_IA3_TARGETS = [*(f"{name}_{layer}" for name in "kv" for layer in ("proj", "bottleneck.fc2")), *_IA3_FEEDFORWARD]
# By PEFT's table
_DEFAULTS = {
    **dict.fromkeys(("ADALORA_TARGET", "LOHA_TARGET", "LORA_TARGET", "OFT_TARGET", "VERA_TARGET"), DEFAULT_TARGETS),
    "IA3_TARGET": _IA3_TARGETS,
    "IA3_FEEDFORWARD": _IA3_FEEDFORWARD,
}


def register_default_targets(model_type: str) -> None:
    for name, layers in _DEFAULTS.items():
        getattr(peft_constants, f"TRANSFORMERS_MODELS_TO_{name}_MODULES_MAPPING", {}).setdefault(model_type, layers)


def check_distribution(config: PreTrainedConfig, distributed_config: DistributedConfig) -> None:
    tp_size = distributed_config.tp_size
    if distributed_config.pp_size > 1:
        raise ValueError(f"pp_size={distributed_config.pp_size}: NLQ models have no pipeline stages; use tp_size")
    if config.num_attention_heads % tp_size or config.num_key_value_heads % tp_size:
        raise ValueError(
            f"tp_size={tp_size} must divide num_attention_heads={config.num_attention_heads} and "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    for index, layer in enumerate(config.per_layer_config):
        for attention in filter(None, (layer, layer.cross_attention_config)):
            for part in parts_of(attention):
                if tp_size > 1 and (reason := part.refuse_split(attention)):
                    raise ValueError(f"tp_size={tp_size}: {part.name} (layer {index}) cannot be split: {reason}")


class NLQIntegrationMixin:
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NLQDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        # diff with PreTrainedModel: modules cut the heads that no linear layer computes
        if mesh_manager is not None:
            for config in [getattr(model.config, name) for name in model.config.sub_configs] or [model.config]:
                check_distribution(config, distributed_config)
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if mesh_manager is not None and distributed_config.tp_size > 1 and model.tp_plan:
            for module in model.modules():
                if hasattr(module, "tp_mesh"):
                    module.tp_mesh = mesh_manager.get_mesh("tp")
        return model


class NLQGenerationMixin(GenerationMixin):
    def _get_static_cache_init_shape(self):
        # diff with GenerationMixin: where keys are wider, or values narrower, the cache reads that from the first ones
        layers = self.config.per_layer_config
        has_states = any(part.has_hook("token_state") for layer in layers for part in parts_of(layer))
        has_others = has_states or any(layer.caches_keys_alone for layer in layers)
        return None if has_others else super()._get_static_cache_init_shape()

    def create_masks_for_generate(
        self, config, inputs_embeds, attention_mask, cache=None, past_key_values=None, **kwargs
    ):
        # diff with Llama: the model makes the masks, from a padding mask as long as a static cache
        if attention_mask is None:
            return None
        cache = past_key_values if cache is None else cache
        layers = range(config.get_text_config(decoder=True).num_hidden_layers)
        length = max(cache.get_mask_sizes(inputs_embeds.shape[1], layer_idx)[0] for layer_idx in layers)
        return F.pad(attention_mask, (0, max(length - attention_mask.shape[-1], 0)))

    def init_continuous_batching(self, *args, **kwargs) -> ContinuousBatchingManager:
        """Returns Transformers' manager of requests.

        Until it stops, `attn_implementation` is one that takes the paged cache. `ValueError` if there is none.
        """
        original, paged = self.config._attn_implementation, self._choose_paged_implementation()
        if paged != original:
            self.set_attn_implementation(paged)
        try:
            manager = super().init_continuous_batching(*args, **kwargs)
        except Exception:
            self.set_attn_implementation(original)
            raise
        if paged != original:
            manager._original_attn_impl = original
        # The manager may come from an earlier call
        if self.config.has_learned_positions and "add_request" not in vars(manager):
            manager.add_request = _keep_within_positions(manager, self.config)
        return manager

    def generate_batch(self, inputs, *args, **kwargs):
        for prompt in inputs:
            _check_prompt(prompt, self.config)
        return super().generate_batch(inputs, *args, **kwargs)


def _check_prompt(prompt, config):
    most = config.max_position_embeddings
    if config.has_learned_positions and len(prompt) > most:
        raise ValueError(f"inputs: a prompt of {len(prompt)} tokens is longer than max_position_embeddings={most}")


def _keep_within_positions(manager, config) -> Callable[..., str | None]:
    """Returns an `add_request` that ends requests at the last learned position.

    A longer request would fail in the thread that serves all.
    """
    add_request = manager.add_request

    @functools.wraps(add_request)
    def add_request_within_positions(input_ids, request_id=None, max_new_tokens=None, *args, **kwargs):
        _check_prompt(input_ids, config)
        wanted = manager.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        possible = config.max_position_embeddings - len(input_ids) + 1  # the last token is not read
        count = possible if wanted is None else min(wanted, possible)
        return add_request(input_ids, request_id, count, *args, **kwargs)

    return add_request_within_positions
