"""NLQ: what attention could be, as switches of one Transformers model. Importing it registers the Auto classes."""

import transformers

from . import kernels  # noqa: F401, it adds the C++ code to the tables
from .activations_nlq import ATTENTION_ACTIVATIONS, register_attention_activation
from .configuration_nlq import PROJECTIONS, NLQConfig, __version__
from .configuration_seq2seq_nlq import NLQSeq2SeqConfig
from .modeling_nlq import (
    NLQForCausalLM,
    NLQForMaskedLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
    NLQPreTrainedModel,
)
from .modeling_seq2seq_nlq import NLQForConditionalGeneration, NLQSeq2SeqModel, NLQSeq2SeqPreTrainedModel
from .parts_base_nlq import AttentionCall, AttentionPart, ScoreBias, TokenContext
from .parts_builtin_nlq import ATTENTION_PARTS
from .parts_files import load_attention_parts, register_attention_part
from .parts_user_nlq import AUTO_MAP, SEQ2SEQ_AUTO_MAP


for _config_class, _auto_map in ((NLQConfig, AUTO_MAP), (NLQSeq2SeqConfig, SEQ2SEQ_AUTO_MAP)):
    transformers.AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    for _auto_class, _path in _auto_map.items():
        if _auto_class != "AutoConfig":
            getattr(transformers, _auto_class).register(
                _config_class, globals()[_path.partition(".")[2]], exist_ok=True
            )

__all__ = [
    "ATTENTION_ACTIVATIONS",
    "ATTENTION_PARTS",
    "PROJECTIONS",
    "AttentionCall",
    "AttentionPart",
    "NLQConfig",
    "NLQForCausalLM",
    "NLQForConditionalGeneration",
    "NLQForMaskedLM",
    "NLQForQuestionAnswering",
    "NLQForSequenceClassification",
    "NLQForTokenClassification",
    "NLQModel",
    "NLQPreTrainedModel",
    "NLQSeq2SeqConfig",
    "NLQSeq2SeqModel",
    "NLQSeq2SeqPreTrainedModel",
    "ScoreBias",
    "TokenContext",
    "__version__",
    "load_attention_parts",
    "register_attention_activation",
    "register_attention_part",
]
