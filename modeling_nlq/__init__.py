"""NLQ: what attention could be, as switches of one Transformers model. Importing it registers the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .activations_nlq import ATTENTION_ACTIVATIONS, register_attention_activation
from .configuration_nlq import NLQConfig, __version__
from .kernels import kernelize
from .modeling_nlq import (
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQPreTrainedModel,
)
from .parts_base_nlq import AttentionCall, AttentionPart, ScoreBias, TokenContext
from .parts_builtin_nlq import ATTENTION_PARTS
from .parts_user_nlq import load_attention_parts, register_attention_part
from .projections_nlq import PROJECTIONS


AutoConfig.register(NLQConfig.model_type, NLQConfig, exist_ok=True)
AutoModel.register(NLQConfig, NLQModel, exist_ok=True)
AutoModelForCausalLM.register(NLQConfig, NLQForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NLQConfig, NLQForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(NLQConfig, NLQForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(NLQConfig, NLQForQuestionAnswering, exist_ok=True)

__all__ = [
    "ATTENTION_ACTIVATIONS",
    "ATTENTION_PARTS",
    "PROJECTIONS",
    "AttentionCall",
    "AttentionPart",
    "NLQConfig",
    "NLQForCausalLM",
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
