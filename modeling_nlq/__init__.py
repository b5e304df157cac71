"""NLQ: what attention could be, as switches of one Transformers model. Importing it registers the Auto classes."""

import transformers

from .activations_nlq import ATTENTION_ACTIVATIONS, register_attention_activation
from .configuration_nlq import AUTO_MAP, NLQConfig, __version__
from .kernels import kernelize
from .modeling_nlq import (
    NLQForCausalLM,
    NLQForMaskedLM,
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


transformers.AutoConfig.register(NLQConfig.model_type, NLQConfig, exist_ok=True)
for _auto_class, _path in AUTO_MAP.items():
    if _auto_class != "AutoConfig":
        getattr(transformers, _auto_class).register(NLQConfig, globals()[_path.partition(".")[2]], exist_ok=True)

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
