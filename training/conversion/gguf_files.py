"""Reads what Transformers' reader leaves out of GGUF files, the format of llama.cpp."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.utils import is_gguf_available

from ..loading import source_named
from ..size import empty_model
from ..text import one_line
from .draft import load_model, read_source


# Transformers does not read `starcoder2` and `gpt2` completely. Files of Mistral models say `llama`
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Read below, or seen from shapes of tensors
_ALSO_READ = ("attention.key_length", "attention.value_length", "vocab_size")
_NOTHING = (0, "", "none", [])  # values of a feature that the model does not use
# Values that Transformers assumes
_USUAL = {"attention.causal": True, "tensor_data_layout": "Meta AI original pth"}
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_TOKENIZER = "tokenizer.ggml."
_NOT_READ = ": Transformers does not read it from GGUF files"
_NOT_QUANTISED = ("F32", "F16", "BF16")
# Values of `tokenizer.ggml.pre` that split text as GPT-2 does, or into single digits first
_AS_GPT2 = ("gpt-2", "olmo")
_DIGITS = ("smollm", "starcoder")


@dataclass
class GGUF:
    """The header of a file, with the type of most of its quantised weights, if any.

    `tokenizer` has the fields below `tokenizer.ggml`, and `not_read` those that Transformers does not read, in words.
    """

    path: Path
    quantised: str | None
    tensors: list[str]
    head_size: int
    tokenizer: dict[str, Any]
    not_read: list[str]


def read_gguf(path: Path) -> GGUF:
    """Reads the header; raises `ValueError` if it is damaged, or of an unsupported model."""
    if not is_gguf_available():
        raise ImportError(f'{path} needs the package gguf: pip install "modeling-nlq[gguf]"')
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if name not in _LONG}
    except Exception as error:  # the reader raises many types
        raise ValueError(f"{path} is truncated or damaged; fetch it again") from error
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path}: general.architecture={architecture!r} must be one of {', '.join(ARCHITECTURES)}")
    prefix = f"{architecture}."
    values = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    head_size = values.get("attention.key_length", values["embedding_length"] // values["attention.head_count"])
    usual = {**_USUAL, "rope.dimension_count": head_size}
    known = {*GGUF_CONFIG_MAPPING[architecture], *_ALSO_READ} - usual.keys()
    not_read = [
        f"{prefix}{name}={value!r}{_NOT_READ}"
        for name, value in values.items()
        if name not in known and value not in ([usual[name]] if name in usual else _NOTHING)
    ]
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in _NOT_QUANTISED:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return GGUF(
        path,
        quantised=max(sizes, key=sizes.get, default=None),
        tensors=[tensor.name for tensor in reader.tensors],
        head_size=head_size,
        tokenizer={name.removeprefix(_TOKENIZER): fields[name] for name in fields if name.startswith(_TOKENIZER)},
        not_read=not_read,
    )


def load_gguf(gguf: GGUF) -> tuple[PreTrainedModel, list[str]]:
    """Loads the model in float32, and lists what Transformers does not read, in words."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    folder = str(gguf.path.parent)
    file = str(gguf.path.resolve())  # Transformers looks for a bare name in the current directory first
    config, model_class = read_source(folder, gguf_file=file)
    config.head_dim = gguf.head_size
    # SentencePiece uses the ids that are the default of Llama's class
    if gguf.tokenizer.get("model") != "llama":
        for kind in ("bos", "eos"):
            setattr(config, f"{kind}_token_id", gguf.tokenizer.get(f"{kind}_token_id"))
    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    parameters = empty_model(config, model_class=model_class).state_dict()
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in parameters}
    lost = [*gguf.not_read, *(f"{name}{_NOT_READ}" for name in gguf.tensors if name not in known)]
    quantization = GgufConfig(dequantize=True)
    return load_model(folder, config, model_class, gguf_file=file, quantization_config=quantization), lost


def load_gguf_tokenizer(gguf: GGUF) -> PreTrainedTokenizerBase:
    """Rebuilds the tokenizer; raises `ValueError` if Transformers cannot, or would split text otherwise."""
    path = gguf.path
    file = str(path.resolve())
    try:
        with source_named(str(path.parent)):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=file, trust_remote_code=False)
    except Exception as error:  # the reader expects every field, and raises many types
        raise ValueError(f"{path}: the tokenizer cannot be rebuilt ({one_line(error)}); give --tokenizer") from error
    # Transformers reads these two from 5.23 on
    for name, default in {"add_bos_token": gguf.tokenizer.get("model") == "llama", "add_eos_token": False}.items():
        value = gguf.tokenizer.get(name, default)
        if getattr(tokenizer, name) != value:
            setattr(tokenizer, name, value)
    backend = tokenizer.backend_tokenizer
    split = gguf.tokenizer.get("pre")
    # Transformers falls back on this
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        if split in _DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif split not in _AS_GPT2:
            raise ValueError(f"{path}: Transformers cannot split text by {_TOKENIZER}pre={split!r}; give --tokenizer")
    return tokenizer
