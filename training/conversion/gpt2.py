"""Converts GPT-2 models of Transformers to NLQ models and back: the same numbers under other names.

An NLQ model with `query_projection="linear"` and `attention_activation="softmax"` is a GPT-2 (Radford et al. 2019).
Transformers stores its matrices transposed (`Conv1D`, input x output), and query, key and value in one matrix, `c_attn`.
"""

import copy
import math
import re
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedConfig,
    PreTrainedModel,
)

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQPreTrainedModel,
)
from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES
from modeling_nlq.training.conversion.upcycling import restructure
from modeling_nlq.training.parameters import check_parameters


# (class of GPT-2, class of NLQ, names of the head's parameters there and here)
_CLASSES = (
    (GPT2LMHeadModel, NLQForCausalLM, ("lm_head", "lm_head")),
    (GPT2Model, NLQModel, None),
    (GPT2ForSequenceClassification, NLQForSequenceClassification, ("score", "score")),
    (GPT2ForTokenClassification, NLQForTokenClassification, ("classifier", "score")),
    (GPT2ForQuestionAnswering, NLQForQuestionAnswering, ("qa_outputs", "qa_outputs")),
)

GPT2_CLASSES = (*(gpt2_class for gpt2_class, _, _ in _CLASSES), GPT2DoubleHeadsModel)
NLQ_CLASSES = tuple(nlq_class for _, nlq_class, _ in _CLASSES)

# (field of GPT2Config, field of NLQConfig) where the values are the same
_FIELDS = (
    ("vocab_size", "vocab_size"),
    ("n_positions", "max_position_embeddings"),
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_inner", "intermediate_size"),
    ("activation_function", "hidden_act"),
    ("resid_pdrop", "residual_dropout"),
    ("embd_pdrop", "embedding_dropout"),
    ("attn_pdrop", "attention_dropout"),
    ("layer_norm_epsilon", "layer_norm_eps"),
    ("initializer_range", "initializer_range"),
    ("use_cache", "use_cache"),
    ("tie_word_embeddings", "tie_word_embeddings"),
    ("bos_token_id", "bos_token_id"),
    ("eos_token_id", "eos_token_id"),
    ("pad_token_id", "pad_token_id"),
)
# Fields of any Transformers model, and of its head
_LIBRARY_FIELDS = ("id2label", "label2id", "problem_type", "classifier_dropout")

# (name in GPT-2 and the paper's code, name in NLQ) of the modules of a block, and of the body around the blocks
BLOCK_NAMES = (
    ("ln_1", "self_attn_norm"),
    ("attn.c_proj", "self_attn.o_proj"),
    ("ln_2", "mlp_norm"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)
BODY_NAMES = (("wte", "embed_tokens"), ("wpe", "embed_positions"), ("ln_f", "norm"))
_FUSED = "attn.c_attn"
_SPLIT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class LossyConversion(ValueError):
    """A conversion would lose something, which the message names."""

    def __init__(self, lost: list[str]):
        super().__init__(f"the model cannot be converted exactly: {'; '.join(lost)}")
        self.lost = lost


def from_gpt2(model: PreTrainedModel, allow_lossy: bool = False) -> NLQPreTrainedModel:
    """Makes an NLQ model that computes the same as a GPT-2 model, with the same head.

    Args:
        model: any of Transformers' GPT-2 models.
        allow_lossy: leave out the parts that an NLQ model does not have.

    Raises:
        ValueError: if the model is no GPT-2.
        LossyConversion: if it has cross-attention or a second head.
    """
    config = model.config
    if config.model_type != "gpt2":
        raise ValueError(f"a model of type {config.model_type!r} is no GPT-2")
    lost = []
    if config.add_cross_attention:
        lost.append("add_cross_attention=True: NLQ models have no cross-attention")
    target, head = NLQForCausalLM, ("lm_head", "lm_head")
    for gpt2_class, nlq_class, head_names in _CLASSES:
        if isinstance(model, gpt2_class):
            target, head = nlq_class, head_names
    state = model.state_dict()
    if any("multiple_choice_head" in name for name in state):
        lost.append("multiple_choice_head: NLQ models have one head, the language-modelling head is kept")
    if lost and not allow_lossy:
        raise LossyConversion(lost)

    body = {name.removeprefix("transformer."): value for name, value in state.items()}
    new_state = {}
    for name, value in body.items():
        if (renamed := to_nlq_name(name)) is not None:
            new_state[renamed] = _transposed(name, value)
        elif _FUSED in name:
            parts = _transposed(name, value).chunk(3)
            new_state.update(zip([to_nlq_name(name, part) for part in _SPLIT], parts))
    if target is not NLQModel:
        new_state = {f"model.{name}": value for name, value in new_state.items()}
    if head is not None:
        new_state.update({name.replace(*head, 1): value for name, value in state.items() if name.startswith(f"{head[0]}.")})
    return build(target, _to_nlq_config(config), new_state, model)


def to_gpt2(model: NLQPreTrainedModel, allow_lossy: bool = False) -> PreTrainedModel:
    """Makes a GPT-2 model of Transformers that computes the same as an NLQ model, with the same head.

    Grouped queries are expanded, `"identity"` and `"residual"` projections become matrices, and factors of scores and outputs
    move into the weights.

    Args:
        model: an NLQ model.
        allow_lossy: convert even if GPT-2 cannot compute the same.

    Raises:
        ValueError: if there is no GPT-2 of its shape.
        LossyConversion: if GPT-2 lacks something it uses.
    """
    config = model.config
    if not isinstance(config, NLQConfig):
        raise ValueError(f"a model of type {config.model_type!r} is no NLQ model")
    scalings = [layer.score_scaling for layer in config.per_layer_config]
    by_layer = len(scalings) > 1 and scalings == [scalings[0] / (index + 1) for index in range(len(scalings))]
    usual = 1.0 / math.sqrt(config.head_dim)
    scaling = 1.0 if scalings[0] == 1.0 else usual  # any other is moved into the weights
    # The defaults of the layers' switches are GPT-2, but for the queries
    own = (*PER_LAYER_SWITCHES, "per_layer_config")
    plain = {name: value for name, value in config.to_dict().items() if name not in own}
    plain.update(
        query_projection="linear",
        attention_scaling=scaling,
        sublayer_activation=None,
        residual_activation=None,
        num_key_value_heads=config.num_attention_heads,
        position_embedding="learned",
        norm_position="pre",
        use_bias=True,
        head_dim=config.hidden_size // config.num_attention_heads,
    )
    if by_layer:
        plain["per_layer_config"] = _scaling_by_layer(scaling, config.num_hidden_layers)
    model, lost = restructure(model, NLQConfig(**plain))
    if lost and not allow_lossy:
        raise LossyConversion(lost)

    target, head = next((gpt2_class, names) for gpt2_class, nlq_class, names in _CLASSES if isinstance(model, nlq_class))
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    new_state = {}
    for name, value in state.items():
        if (renamed := _to_gpt2_name(name)) is not None:
            new_state[renamed] = _transposed(renamed, value)
        elif _SPLIT[0] in name:
            parts = [state[name.replace(_SPLIT[0], part)] for part in _SPLIT]
            renamed = _to_gpt2_name(name.replace(_SPLIT[0], _FUSED))
            new_state[renamed] = _transposed(renamed, torch.cat(parts))
    if target is not GPT2Model:
        new_state = {f"transformer.{name}": value for name, value in new_state.items()}
    if head is not None:
        theirs, ours = head
        new_state.update({name.replace(ours, theirs, 1): value for name, value in state.items() if name.startswith(f"{ours}.")})
    if target is GPT2ForTokenClassification:  # NLQ's may have no bias
        new_state.setdefault("classifier.bias", torch.zeros_like(new_state["classifier.weight"][:, 0]))
    gpt2_config = GPT2Config(
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS},
        **_library_fields(config),
        scale_attn_weights=scaling == usual,
        scale_attn_by_inverse_layer_idx=by_layer,
    )
    if gpt2_config.n_inner == 4 * gpt2_config.n_embd:
        gpt2_config.n_inner = None
    return build(target, gpt2_config, new_state, model)


def build(
    target: type[PreTrainedModel],
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    source: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Makes a model from all its weights, in evaluation mode.

    Args:
        target: class of the model.
        config: configuration of the model.
        state: parameters by name; they are copied.
        source: the model it is made from, whose generation settings it takes over.

    Raises:
        ValueError: naming parameters that are missing, unknown, or of another shape.
    """
    with torch.device("meta"):
        model = target(copy.deepcopy(config))
    check_parameters(model, {name: value.shape for name, value in state.items()})
    copied = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    model.load_state_dict(copied, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = model.dtype
    if getattr(source, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def to_nlq_name(name: str, split_as: str = "") -> str | None:
    """Translates the name of a parameter of a GPT-2 body to NLQ; `None` if NLQ has no such parameter.

    Args:
        name: without the prefix `transformer.`.
        split_as: name of the wanted part of the fused `c_attn`.
    """
    return _rename(
        name, r"h\.(\d+)\.", "layers.{}.", (*BLOCK_NAMES, (_FUSED, split_as)) if split_as else BLOCK_NAMES, BODY_NAMES
    )


def _to_gpt2_name(name: str) -> str | None:
    turned = [tuple((ours, theirs) for theirs, ours in pairs) for pairs in ((*BLOCK_NAMES, (_FUSED, _FUSED)), BODY_NAMES)]
    return _rename(name, r"layers\.(\d+)\.", "h.{}.", *turned)


def _rename(name: str, block: str, new_block: str, block_names, body_names) -> str | None:
    match = re.match(block, name)
    rest = name[match.end() :] if match else name
    for before, after in block_names if match else body_names:
        if rest.removesuffix(".weight").removesuffix(".bias") == before:
            return (new_block.format(match[1]) if match else "") + after + rest.removeprefix(before)
    return None


def _transposed(name: str, value: torch.Tensor) -> torch.Tensor:
    """Transposes the weights of a `Conv1D`, which are input x output."""
    return value.t() if name.endswith(".weight") and re.search(r"\.(c_attn|c_proj|c_fc)\.", name) else value


def _to_nlq_config(config: GPT2Config) -> NLQConfig:
    scaling = 1.0 / math.sqrt(config.n_embd // config.n_head) if config.scale_attn_weights else 1.0
    fields: dict[str, Any] = {
        "query_projection": "linear",
        "use_bias": True,
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS},
        **_library_fields(config),
    }
    if config.scale_attn_by_inverse_layer_idx:
        fields["per_layer_config"] = _scaling_by_layer(scaling, config.n_layer)
    if not config.scale_attn_weights:
        fields["attention_scaling"] = scaling
    return NLQConfig(**fields)


def _library_fields(config: PreTrainedConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name, None) for name in _LIBRARY_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _scaling_by_layer(scaling: float, layers: int) -> dict[int, dict[str, float]]:
    """The switches for `scale_attn_by_inverse_layer_idx`; the first layer has the usual scaling."""
    return {index: {"attention_scaling": scaling / (index + 1)} for index in range(1, layers)}
