"""What other programs ask of a model: Transformers' releases, PEFT's adapters, parallelism and continuous batching."""

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import fields

from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from .parts_base_nlq import SplitByHeads
from .parts_builtin_nlq import parts_of


try:
    from peft.utils import constants as peft_constants
except ImportError:
    peft_constants = None

logger = logging.get_logger(__name__)

# Transformers 5.24 renamed `past_key_values` to `cache` in outputs, mask functions and `generate`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"

# The tensors and objects that a call may pass and no file of the model reads by name, and why that changes no result.
IGNORED_ARGUMENTS = {
    "cache_position": "the positions of the new tokens, which the cache knows",
    "num_items_in_batch": "Trainer's number of labels; the loss of the language model reads it",
    "shift_labels": "labels of sequence parallelism; the loss of the language model reads them",
    "tokenizer": "what `transformers serve` hands to `generate`, which reads it for stop strings",
    "token_type_ids": "tokenizers of other models; NLQ models have one type of token",
}
# By `masking_nlq.read_sequences`, and by Transformers' `capture_outputs`, which takes lists of layers too
_READ_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "output_attentions", "output_hidden_states"}


def accept_old_names(forward: Callable) -> Callable:
    """Decorates a `forward`, which then takes the cache by its old names with Transformers' warning, where they are old."""
    if CACHE_NAME != "cache":
        return forward
    old, renaming = ("past_key_values", "cache_params"), forward
    for name in old:
        renaming = deprecate_kwarg(name, "5.40.0", new_name="cache")(renaming)

    @functools.wraps(forward)
    def accepting(self, *args, **kwargs):
        given = {name: value for name, value in kwargs.items() if value is not None or name not in ("cache", *old)}
        # Given two names, Transformers' decorator would ignore one of them
        return (forward if "cache" in given else renaming)(self, *args, **given)

    return accepting


def choose_cache(
    cache: Cache | PagedAttentionCache | None, past_key_values: Cache | PagedAttentionCache | None
) -> Cache | PagedAttentionCache | None:
    """Returns the cache, under whichever name it was given.

    Raises:
        ValueError: if both are given and are not the same object.
    """
    if cache is None:
        return past_key_values
    if past_key_values is not None and past_key_values is not cache:
        raise ValueError("cache and past_key_values are two names for one argument; give one of them")
    return cache


def check_arguments(arguments: dict) -> None:
    """Checks the arguments of a call that `forward` does not name.

    A renamed cache or mask would otherwise be lost, and the model would compute something else in silence. Switches and numbers
    are let through, and so is everything that continuous batching passes beside its paged cache.

    Raises:
        ValueError: if one of them holds a cache, a mask or a tensor and is not in `IGNORED_ARGUMENTS`.
    """
    for name, value in arguments.items():
        is_known = name in IGNORED_ARGUMENTS or name in _READ_ARGUMENTS or value is None
        if not is_known and not isinstance(value, (bool, int, float, str)):
            raise ValueError(
                f"{name}: NLQ models do not know this argument, and must not ignore what it holds, a {type(value).__name__}. "
                "Leave it out. If Transformers passed it, this version of Transformers is too new: see docs/versions.md"
            )


# Queries and values, as for Llama. A model has those that its projections need.
DEFAULT_TARGETS = [f"{name}_{layer}" for name in "qv" for layer in ("proj", "bottleneck.fc1", "bottleneck.fc2")]
# IA3 scales the output of keys and values, and the input of the MLP's last layer
_IA3_FEEDFORWARD = ["mlp.fc2", "mlp.down_proj"]
_IA3_TARGETS = [*(f"{name}_{layer}" for name in "kv" for layer in ("proj", "bottleneck.fc2")), *_IA3_FEEDFORWARD]
# By the names of PEFT's tables
_DEFAULTS = {
    **dict.fromkeys(("ADALORA_TARGET", "LOHA_TARGET", "LORA_TARGET", "OFT_TARGET", "VERA_TARGET"), DEFAULT_TARGETS),
    "IA3_TARGET": _IA3_TARGETS,
    "IA3_FEEDFORWARD": _IA3_FEEDFORWARD,
}


def register_default_targets(model_type: str) -> None:
    """Tells PEFT which layers its methods adapt where `target_modules` is not given."""
    for name, layers in _DEFAULTS.items():
        getattr(peft_constants, f"TRANSFORMERS_MODELS_TO_{name}_MODULES_MAPPING", {}).setdefault(model_type, layers)


def own_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the layers that this pipeline stage computes; all of them without stages."""
    return [layer for layer in layers if not isinstance(layer, PipelineIdentityLayer)]


def check_distribution(config: PreTrainedConfig, distributed_config: DistributedConfig, can_be_staged: bool = True) -> None:
    """Checks that a model can be split.

    Args:
        config: the `NLQConfig` of the model.
        distributed_config: the sizes `tp_size` and `pp_size`.
        can_be_staged: whether the class of the model can be split into pipeline stages.

    Raises:
        ValueError: if not.
    """
    tp_size, pp_size = distributed_config.tp_size, distributed_config.pp_size
    if config.num_attention_heads % tp_size or config.num_key_value_heads % tp_size:
        raise ValueError(
            f"tp_size={tp_size} must divide num_attention_heads={config.num_attention_heads} and "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if tp_size > 1 and isinstance(distributed_config.tp_plan, dict):
        raise ValueError("tp_plan: NLQ models are split by their own plan only; leave it out, or set it to 'auto'")
    if tp_size > 1 and pp_size > 1:
        # Transformers 5.23 looks for the layers of the other stages when it splits those of this one
        raise ValueError(f"tp_size={tp_size} with pp_size={pp_size} is not supported by Transformers; set one of them to 1")
    if pp_size > config.num_hidden_layers:
        raise ValueError(f"pp_size={pp_size} must be at most num_hidden_layers={config.num_hidden_layers}")
    if pp_size > 1 and not can_be_staged:
        raise ValueError(f"pp_size={pp_size}: pipeline stages exist for NLQForCausalLM only; use tp_size for this class")
    for index, layer in enumerate(config.per_layer_config):
        for part in parts_of(layer):
            if tp_size > 1 and (reason := part.refuse_split(layer)):
                raise ValueError(f"tp_size={tp_size}: {part.name} (layer {index}) cannot be split: {reason}")
            if pp_size > 1 and part.needs_first_values:
                reason = "a later pipeline stage does not have the values of the first layer"
                raise ValueError(f"pp_size={pp_size}: {part.name} (layer {index}) cannot be distributed: {reason}; use tp_size")


def _flat_keywords(forward: Callable) -> Callable:
    """Returns a `forward` that also takes its keyword arguments in one dictionary named `kwargs`.

    Transformers' pipeline passes those arguments of a call so that `forward` does not name. A model would not find them.
    """

    @functools.wraps(forward)
    def flat_forward(*args, kwargs: dict | None = None, **others):
        return forward(*args, **others, **(kwargs or {}))

    return flat_forward


def _refuse_lost_outputs(forward: Callable) -> Callable:
    """Returns the `forward` of a pipeline, which returns logits and the cache only, with an error where more is asked for."""

    @functools.wraps(forward)
    def pipeline_forward(*args, **inputs):
        for name in ("labels", "output_attentions", "output_hidden_states"):
            value = inputs.get(name)
            if value is not None and value is not False:
                raise ValueError(f"{name}: a pipeline of Transformers returns logits and the cache only; load without pp_size")
        return forward(*args, **inputs)

    return pipeline_forward


class NLQIntegrationMixin:
    """Before `PreTrainedModel` among the bases: what Transformers splits over processes, and which layers PEFT adapts."""

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        # diff with PreTrainedModel: modules cut the parts of their heads that no linear layer computes, and learned positions
        # belong to the first stage, as token embeddings do
        if mesh_manager is None:
            return model
        check_distribution(model.config, distributed_config, can_be_staged=isinstance(model, NLQGenerationMixin))
        is_staged = distributed_config.pp_size > 1
        if is_staged:
            for module in (model, model.model):
                module.forward = _flat_keywords(module.forward)
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if distributed_config.tp_size > 1 and model.tp_plan:
            for module in model.modules():
                if isinstance(module, SplitByHeads):
                    module.tp_mesh = mesh_manager.get_mesh("tp")
        if is_staged:
            model.forward = _refuse_lost_outputs(model.forward)
            if not model._pp_stage.pp_is_first_stage:
                model.model.embed_positions = model.model.embed_norm = None
                model.model.dropout = nn.Identity()
                model._keys_to_ignore_on_load_unexpected |= {r"^model\.embed_positions\.", r"^model\.embed_norm\."}
        return model

    @property
    def peft_config(self) -> dict:
        """PEFT's configurations by adapter, which PEFT sets here after it has added its layers.

        An adapter for layers that do not exist gets a warning. PEFT adapts the others in silence, and leaves the queries alone.
        """
        if "peft_config" not in vars(self):
            raise AttributeError("peft_config")  # PEFT asks by `hasattr`
        return vars(self)["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: dict) -> None:
        vars(self)["peft_config"] = configs
        names = [name for name, _ in self.named_modules()]
        for config in configs.values():
            targets = getattr(config, "target_modules", None)
            if not isinstance(targets, set | list) or set(targets) in map(set, _DEFAULTS.values()):
                continue
            if missing := sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)):
                nonlinear = {name.partition("self_attn.")[2] for name in names if name.endswith(("neck.fc1", "neck.fc2"))}
                more = f"; its nonlinear projections are {', '.join(sorted(nonlinear))}" if nonlinear else ""
                logger.warning_once(f"target_modules: no layer of this model is named {', '.join(missing)}{more}")

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("peft_config", None)


class NLQGenerationMixin(GenerationMixin):
    """Transformers' generation, whose continuous batching takes every attention activation with keys and values.

    Continuous batching is `generate_batch`, `init_continuous_batching` and Transformers' server. Transformers runs the
    requests. This class chooses the attention that it uses meanwhile, and refuses requests that do not fit into the learned
    positions, because a single failing request would stop the thread that serves all of them.
    """

    def _get_static_cache_init_shape(self):
        # diff with GenerationMixin: what parts keep beside the keys makes them wider, so the first keys say how wide
        has_states = any(part.has_hook("token_state") for layer in self.config.per_layer_config for part in parts_of(layer))
        return None if has_states else super()._get_static_cache_init_shape()

    def init_continuous_batching(self, *args, **kwargs) -> ContinuousBatchingManager:
        """Returns Transformers' manager of requests; `generate_batch` and the context manager call this too.

        Until the manager stops, `attn_implementation` is one that takes the paged cache. Then the manager sets the model's own
        again.

        Raises:
            ValueError: for linear attention, for windows that differ, for a pipeline stage, and if the model's
                `attn_implementation` has no continuous batching.
        """
        if hasattr(self, "_pp_stage"):
            raise ValueError("continuous batching is not supported with pipeline parallelism; use tp_size, or generate")
        original = self.config._attn_implementation
        paged = self._choose_paged_implementation()
        if paged != original:
            self.set_attn_implementation(paged)
        try:
            manager = super().init_continuous_batching(*args, **kwargs)
        except Exception:
            self.set_attn_implementation(original)
            raise
        if paged != original:
            manager._original_attn_impl = original
        is_new = "add_request" not in vars(manager)  # Transformers may return the manager of an earlier call
        if self.config.has_learned_positions and is_new:
            manager.add_request = _keep_within_positions(manager, self.config)
        return manager

    @contextmanager
    def continuous_batching_context_manager(self, *args, **kwargs) -> Generator[ContinuousBatchingManager]:
        """As in Transformers. The model's own `attn_implementation` returns also where the manager fails before it starts."""
        original = self.config._attn_implementation
        try:
            with super().continuous_batching_context_manager(*args, **kwargs) as manager:
                yield manager
        finally:
            if self.config._attn_implementation != original:
                self.set_attn_implementation(original)

    def generate_batch(self, inputs: Sequence[Sequence[int]], *args, **kwargs) -> dict:
        """As in Transformers, after a check of the prompts: there, a prompt that fails ends the generation of all others.

        Raises:
            ValueError: for a prompt that is no list of token ids or has none, one longer than the learned positions, and what
                `init_continuous_batching` refuses.
        """
        for prompt in inputs:
            _check_prompt(prompt, self.config)
        return super().generate_batch(inputs, *args, **kwargs)


def _check_prompt(prompt: Sequence[int], config: PreTrainedConfig) -> None:
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise ValueError("inputs: each prompt must be a list of token ids")
    if unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
        raise ValueError(f"inputs: token id {unknown[0]} is not in the vocabulary, vocab_size={config.vocab_size}")
    if len(prompt) == 0:
        raise ValueError("inputs: a prompt contains no tokens; give each prompt at least one")
    if config.has_learned_positions and len(prompt) > config.max_position_embeddings:
        raise ValueError(
            f"inputs: a prompt of {len(prompt)} tokens is longer than the learned positions, "
            f"max_position_embeddings={config.max_position_embeddings}"
        )


def _keep_within_positions(manager: ContinuousBatchingManager, config: PreTrainedConfig) -> Callable[..., str | None]:
    """Returns the manager's `add_request`, which ends requests at the last learned position, with a warning.

    A longer request would fail in the thread that serves all requests, and Transformers offers no other place for a check.
    """
    add_request = manager.add_request

    @functools.wraps(add_request)
    def add_request_within_positions(input_ids, request_id=None, max_new_tokens=None, *args, **kwargs):
        _check_prompt(input_ids, config)
        wanted = manager.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        possible = config.max_position_embeddings - len(input_ids) + 1  # the last token needs no position
        if wanted is None or wanted > possible:
            logger.warning_once(
                f"max_new_tokens={wanted}: requests end at the last learned position, max_position_embeddings="
                f"{config.max_position_embeddings}"
            )
            wanted = possible
        return add_request(input_ids, request_id, wanted, *args, **kwargs)

    return add_request_within_positions
