"""NLQ: what attention could be, as switches of one Transformers model. Importing it registers the Auto classes."""

from transformers import AutoConfig

from .activations_nlq import ATTENTION_ACTIVATIONS, register_attention_activation
from .configuration_nlq import NLQConfig, __version__
from .kernels import kernelize
from .modeling_nlq import (
    NLQForCausalLM,
    NLQForMaskedLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQPreTrainedModel,
    register_models,
)
from .parts_base_nlq import AttentionCall, AttentionPart, ScoreBias, TokenContext
from .parts_builtin_nlq import ATTENTION_PARTS
from .parts_user_nlq import load_attention_parts, register_attention_part
from .projections_nlq import PROJECTIONS


AutoConfig.register(NLQConfig.model_type, NLQConfig, exist_ok=True)
register_models(NLQConfig)

__all__ = [
    "ATTENTION_ACTIVATIONS",
    "ATTENTION_PARTS",
    "PROJECTIONS",
    "AttentionCall",
    "AttentionPart",
    "NLQConfig",
    "NLQForCausalLM",
    "NLQForMaskedLM",
    "NLQForQuestionAnswering",
    "NLQForSequenceClassification",
    "NLQForTokenClassification",
    "NLQModel",
    "NLQPreTrainedModel",
    "ScoreBias",
    "TokenContext",
    "__version__",
    "kernelize",
    "load_attention_parts",
    "register_attention_activation",
    "register_attention_part",
]
