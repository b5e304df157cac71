"""Configuration of an NLQ encoder and decoder with cross-attention between them."""

from typing import TYPE_CHECKING

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_nlq import NLQConfig, __version__
from .parts_user_nlq import add_to_package


if TYPE_CHECKING:
    # Transformers copies the files that it finds in import lines. With this line it copies the model with any configuration
    from .modeling_seq2seq_nlq import NLQSeq2SeqModel  # noqa: F401


SEQ2SEQ_AUTO_MAP = {
    "AutoConfig": "configuration_seq2seq_nlq.NLQSeq2SeqConfig",
    "AutoModel": "modeling_seq2seq_nlq.NLQSeq2SeqModel",
    "AutoModelForSeq2SeqLM": "modeling_seq2seq_nlq.NLQForConditionalGeneration",
}
# What the place of a half decides
DIRECTIONS = {
    "encoder": {"is_causal": False, "add_cross_attention": False},
    "decoder": {"is_causal": True, "add_cross_attention": True},
}


@strict
class NLQSeq2SeqConfig(PreTrainedConfig):
    r"""
    The architecture of an encoder and a decoder, each with every switch of `NLQConfig`.

    Args:
        encoder (`dict` or `NLQConfig`, *optional*): the encoder; `is_causal=False` is set.
        decoder (`dict` or `NLQConfig`, *optional*): the decoder; `add_cross_attention=True` is set, and
            `cross_attention_hidden_size` to the width of the encoder.
        decoder_start_token_id (`int`, *optional*): the first token of the decoder; by default `bos_token_id`, or else
            `pad_token_id`.
        bos_token_id, eos_token_id, pad_token_id (`int`, *optional*): token ids; by default those of the decoder.
        tie_word_embeddings (`bool`, defaults to `True`): whether both halves and the LM head have the same token embedding.

    Raises:
        ValueError: for a direction of a half other than its own, for embeddings of different shapes that are tied, and for a
            `decoder_start_token_id` without an embedding.
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

    def __post_init__(self, **kwargs):
        for name, directions in DIRECTIONS.items():
            half = getattr(self, name) or {}
            switches = half.to_diff_dict() if isinstance(half, PreTrainedConfig) else half
            for switch, value in directions.items():
                if switches.get(switch, value) != value:
                    raise ValueError(f"{name}: {switch}={switches[switch]!r} must be {value}, or left out")
            width = {} if name == "encoder" else {"cross_attention_hidden_size": self.encoder.hidden_size}
            if (given := switches.get("cross_attention_hidden_size")) not in (None, *width.values()):
                raise ValueError(f"{name}: cross_attention_hidden_size={given} follows from the encoder; leave it out")
            setattr(self, name, NLQConfig(**{**switches, **directions, **width}))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.decoder, name))
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id if self.bos_token_id is None else self.bos_token_id
        super().__post_init__(**kwargs)
        self.auto_map = SEQ2SEQ_AUTO_MAP
        self.nlq_version = __version__

    @property
    def vocab_size(self) -> int:
        """That of the decoder; set, it is that of both halves."""
        return self.decoder.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.encoder.vocab_size = self.decoder.vocab_size = size

    @property
    def hidden_size(self) -> int:
        """That of the decoder."""
        return self.decoder.hidden_size

    def validate_architecture(self):
        """Checks that what is shared has one shape, and that the first token has an embedding."""
        for name in ("vocab_size", "hidden_size"):
            sizes = [getattr(half, name) for half in (self.encoder, self.decoder)]
            if self.tie_word_embeddings and sizes[0] != sizes[1]:
                raise ValueError(
                    f"tie_word_embeddings=True shares one embedding, but {name} is {sizes[0]} in the encoder and {sizes[1]} in "
                    "the decoder; use tie_word_embeddings=False"
                )
        if (start := self.decoder_start_token_id) is not None and not 0 <= start < self.vocab_size:
            raise ValueError(f"decoder_start_token_id={start} must be at least 0 and below vocab_size={self.vocab_size}")


NLQSeq2SeqConfig.register_for_auto_class()
add_to_package(__name__)
