"""Configuration of an NLQ encoder and decoder with cross-attention between them."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_nlq import NLQConfig, __version__
from .parts_user_nlq import NLQConfigMixin, add_to_package


if TYPE_CHECKING:
    from .modeling_seq2seq_nlq import NLQSeq2SeqModel  # noqa: F401, this line makes Transformers copy the model's files


# What the place of a half decides
DIRECTIONS = {
    "encoder": {"is_causal": False, "add_cross_attention": False},
    "decoder": {"is_causal": True, "add_cross_attention": True},
}
# The fields of the decoder that follow from fields of the encoder
FROM_ENCODER = {
    "cross_attention_hidden_size": "hidden_size",
    "cross_attention_max_positions": "max_position_embeddings",
}
# Sizes of the decoder that PEFT's prompt methods read in `to_dict`
SIZES = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")


def _of_decoder(name, has_setter=False) -> property:
    setter = (lambda self, value: setattr(self.decoder, name, value)) if has_setter else None
    return property(lambda self: getattr(self.decoder, name), setter)


@strict
class NLQSeq2SeqConfig(NLQConfigMixin, PreTrainedConfig):
    r"""The architecture of an encoder and a decoder, each with every switch of `NLQConfig`.

    Args:
        encoder: the encoder; `is_causal=False` is set.
        decoder: the decoder; `add_cross_attention=True` is set, and `cross_attention_hidden_size` and
            `cross_attention_max_positions` are the encoder's sizes.
        decoder_start_token_id: the first token of the decoder; by default `bos_token_id`, or else `pad_token_id`.
        tie_word_embeddings: whether both halves and the LM head have the same token embedding.
        kwargs: fields of both halves; a field in a half's `dict` wins.
    """

    model_type = "nlq_seq2seq"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    sub_configs_defaults = {"encoder": NLQConfig, "decoder": NLQConfig}

    encoder: NLQConfig | dict | None = None
    decoder: NLQConfig | dict | None = None
    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    @classmethod
    def field_names(cls):
        return super().field_names() | NLQConfig.field_names()

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # diff with PreTrainedConfig: fields of the halves change what was saved of them
        shared = _take_shared(kwargs)
        for name in DIRECTIONS:
            if isinstance(half := kwargs.get(name) or {}, PreTrainedConfig):
                kwargs[name] = half.to_diff_dict() | shared
            else:
                NLQConfig.check_names(half)
                saved = {**(config_dict.get(name) or {}), **dict.fromkeys(FROM_ENCODER)}
                kwargs[name] = saved | shared | half
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        is_saved = kwargs.pop("nlq_version", None) is not None
        shared = {} if is_saved else _take_shared(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in SIZES}
        self.check_names(kwargs, is_saved)
        for name, directions in DIRECTIONS.items():
            half = getattr(self, name) or {}
            switches = half.to_diff_dict() | shared if isinstance(half, PreTrainedConfig) else shared | half
            fixed = {**directions, **dict.fromkeys(FROM_ENCODER)}
            if name == "decoder":
                fixed |= {field: getattr(self.encoder, origin) for field, origin in FROM_ENCODER.items()}
            for switch, value in fixed.items():
                if switches.get(switch) not in (None, value):
                    raise ValueError(f"{name}: {switch}={switches[switch]!r} must be {value}, or left out")
            setattr(self, name, NLQConfig(**{**switches, **fixed}))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.decoder, name))
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id if self.bos_token_id is None else self.bos_token_id
        super().__post_init__(**kwargs)
        self.name_code(kwargs.get("auto_map"), __version__)

    @property
    def vocab_size(self) -> int:
        """The decoder's vocabulary size. Setting it sets both halves'."""
        return self.decoder.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.encoder.vocab_size = self.decoder.vocab_size = size

    hidden_size, head_dim, num_attention_heads, num_key_value_heads = map(_of_decoder, SIZES)
    num_layers = _of_decoder("num_hidden_layers")
    num_hidden_layers = _of_decoder("num_hidden_layers", has_setter=True)  # early exit sets it
    use_cache = _of_decoder("use_cache", has_setter=True)

    @property
    def max_position_embeddings(self) -> int:
        return min(half.max_position_embeddings for half in (self.encoder, self.decoder))

    def to_dict(self):
        return super().to_dict() | {name: getattr(self, name) for name in SIZES}

    def to_diff_dict(self):
        return {name: value for name, value in super().to_diff_dict().items() if name not in SIZES}

    def validate_architecture(self):
        for name in ("vocab_size", "hidden_size"):
            sizes = [getattr(half, name) for half in (self.encoder, self.decoder)]
            if self.tie_word_embeddings and sizes[0] != sizes[1]:
                raise ValueError(f"tie_word_embeddings=True: {name} of encoder and decoder, {sizes}, must be equal")
        if (start := self.decoder_start_token_id) is not None and not 0 <= start < self.vocab_size:
            raise ValueError(f"decoder_start_token_id={start} must be from 0 to below vocab_size={self.vocab_size}")


def _take_shared(kwargs) -> dict[str, Any]:
    names = NLQConfig.field_names() | {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    names -= {field.name for field in fields(NLQSeq2SeqConfig)}
    shared = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    for name in ("is_causal", "add_cross_attention", *FROM_ENCODER):
        if name in shared:
            raise ValueError(f"{name}={shared[name]!r} is fixed by the half that has it; leave it out")
    if "num_layers" in kwargs:
        raise ValueError(f"num_layers={kwargs['num_layers']!r} cannot be set; set num_hidden_layers")
    return shared


NLQSeq2SeqConfig.register_for_auto_class()
add_to_package(__name__)
