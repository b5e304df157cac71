"""Configuration of an NLQ encoder and decoder with cross-attention between them."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_nlq import SEQ2SEQ_AUTO_MAP, NLQConfig, NLQConfigMixin, __version__, is_derived


if TYPE_CHECKING:
    # Transformers copies the files that it finds in import lines. With this line it copies the model with any configuration
    from .modeling_seq2seq_nlq import NLQSeq2SeqModel  # noqa: F401


# What the place of a half decides
DIRECTIONS = {
    "encoder": {"is_causal": False, "add_cross_attention": False},
    "decoder": {"is_causal": True, "add_cross_attention": True},
}
# Fields of the halves that only a constructor takes, for rotary positions
ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def _of_decoder(name: str) -> property:
    return property(lambda self: getattr(self.decoder, name), doc=f"`{name}` of the decoder.")


@strict
class NLQSeq2SeqConfig(NLQConfigMixin, PreTrainedConfig):
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
        kwargs: fields of `NLQConfig` that both halves get, but one whose `dict` names another value.

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

    @classmethod
    def field_names(cls) -> set[str]:
        return super().field_names() | NLQConfig.field_names()

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        shared = _take_shared(given)
        saved = {**saved, **{name: _switches(saved.get(name)) for name in DIRECTIONS}}
        if saved["decoder"].get("cross_attention_hidden_size") == saved["encoder"].get("hidden_size"):
            saved["decoder"].pop("cross_attention_hidden_size", None)  # follows a width that the caller gives
        for name in DIRECTIONS:
            half = given.get(name)
            if isinstance(half, PreTrainedConfig):
                given[name] = _switches(half) | shared
            else:
                NLQConfig.check_names(half or ())
                given[name] = saved[name] | shared | (half or {})
        return saved | given

    def __post_init__(self, **kwargs):
        is_saved = kwargs.pop("nlq_version", None) is not None
        shared = {} if is_saved else _take_shared(kwargs)
        self.check_names(kwargs, is_saved)
        for name, directions in DIRECTIONS.items():
            half = getattr(self, name)
            switches = _switches(half) | shared if isinstance(half, PreTrainedConfig) else shared | _switches(half)
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
        self.auto_map = SEQ2SEQ_AUTO_MAP | {
            name: path for name, path in (kwargs.get("auto_map") or {}).items() if is_derived(path)
        }
        self.nlq_version = __version__

    @property
    def vocab_size(self) -> int:
        """That of the decoder; set, it is that of both halves."""
        return self.decoder.vocab_size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.encoder.vocab_size = self.decoder.vocab_size = size

    @property
    def num_hidden_layers(self) -> int:
        """That of the decoder; Transformers' early exit sets it."""
        return self.decoder.num_hidden_layers

    @num_hidden_layers.setter
    def num_hidden_layers(self, number: int) -> None:
        self.decoder.num_hidden_layers = number

    hidden_size, num_attention_heads = map(_of_decoder, ("hidden_size", "num_attention_heads"))
    num_layers = _of_decoder("num_hidden_layers")

    @property
    def max_position_embeddings(self) -> int:
        """The smaller of both halves."""
        return min(half.max_position_embeddings for half in (self.encoder, self.decoder))

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


def _switches(half: NLQConfig | dict[str, Any] | None) -> dict[str, Any]:
    return half.to_diff_dict() if isinstance(half, PreTrainedConfig) else dict(half or {})


def _take_shared(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields of both halves out of what a caller gives; raises `ValueError` for one that their places decide."""
    own = {field.name for field in fields(NLQSeq2SeqConfig)}
    shared = {name: given.pop(name) for name in (NLQConfig.field_names() | ROPE_KEYS) - own & given.keys()}
    for name in ("is_causal", "add_cross_attention", "cross_attention_hidden_size"):
        if name in shared:
            raise ValueError(f"{name}={shared[name]!r}: the places of encoder and decoder decide it; leave it out")
    return shared


NLQSeq2SeqConfig.register_for_auto_class()
