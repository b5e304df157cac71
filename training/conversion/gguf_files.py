"""Models in GGUF files, the format of llama.cpp: what Transformers' reader of them leaves out, and their tokenizers."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.utils import is_gguf_available

from ..text import first_line, one_line


# Those whose reader in Transformers is complete, and whose class NLQ knows. It forgets the base of rotary positions of
# `starcoder2` and the inner size of `gpt2`; models of Mistral call themselves `llama`
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Fields that repeat what shapes of tensors say
_REPEATED = ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size")
# Values by which a field says that the model lacks something
_NOTHING = (0, "", "none", [])
_ROTARY_SCALING = "rope_freqs.weight"
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
# How a vocabulary's text is cut before its merges, as `tokenizer.ggml.pre` names it: as GPT-2's, and digit by digit before that
_AS_GPT2 = ("default", "gpt-2", "olmo")
_DIGITS = ("smollm", "starcoder")


@dataclass
class GGUF:
    """The header of a file.

    Attributes:
        path: the file.
        weights: the type of most of its weights, as llama.cpp names it.
        tensors: how many there are, but for the scaling of rotary positions.
        not_read: what the file says of the model and Transformers does not read, in words.
        pre_tokenizer: how text is cut before the merges of the vocabulary, as llama.cpp names it.
    """

    path: Path
    weights: str
    tensors: int
    not_read: list[str] = field(default_factory=list)
    pre_tokenizer: str = _AS_GPT2[0]

    @property
    def is_quantised(self) -> bool:
        return self.weights not in ("F32", "F16", "BF16")


def find_gguf(source: str) -> Path | None:
    """The GGUF file of a source, which is the file or its folder; `None` if there is none.

    Raises:
        ValueError: for a folder with several of them.
    """
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{source} holds {len(files)} GGUF files ({', '.join(file.name for file in files)}); name one of them")
    return files[0] if files else None


def read_gguf(path: Path) -> GGUF:
    """Reads the header of a file.

    Raises:
        ImportError: without the package gguf.
        ValueError: for a file that is damaged, or holds another kind of model.
    """
    if not is_gguf_available():
        raise ImportError(f'{path} needs the package gguf: pip install "modeling-nlq[gguf]"')
    from gguf import GGUFReader

    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file: it begins with {magic!r}, which must be b'GGUF'")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if name not in _LONG}
    except Exception as error:  # of many kinds, from wherever the reader was when the file ended
        raise ValueError(f"{path} is truncated or damaged: {first_line(error)}") from error
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{path}: general.architecture={architecture!r} must be one of {', '.join(ARCHITECTURES)}")
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    read = {f"{architecture}.{name}" for name in (*GGUF_CONFIG_MAPPING[architecture], *_REPEATED)}
    not_read = [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name.startswith(f"{architecture}.") and name not in read and value not in _NOTHING
    ]
    tensors = [tensor.name for tensor in reader.tensors]
    not_read += [name for name in tensors if name == _ROTARY_SCALING]
    return GGUF(
        path,
        max(sizes, key=sizes.get, default="none"),
        sum(name != _ROTARY_SCALING for name in tensors),
        [f"{name}: Transformers does not read it from GGUF files" for name in not_read],
        fields.get("tokenizer.ggml.pre", _AS_GPT2[0]),
    )


def load_gguf_tokenizer(gguf: GGUF) -> PreTrainedTokenizerBase:
    """Rebuilds the tokenizer that a file describes.

    Raises:
        ValueError: if Transformers cannot, or would cut text in another way.
    """
    path = gguf.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    except Exception as error:  # of many kinds, because the reader expects every field to be there
        raise ValueError(f"{path}: the tokenizer cannot be rebuilt ({one_line(error)}); give one by --tokenizer") from error
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):  # what Transformers takes where it does not know the cut
        if gguf.pre_tokenizer in _DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif gguf.pre_tokenizer not in _AS_GPT2:
            raise ValueError(
                f"{path}: Transformers cannot cut text as tokenizer.ggml.pre={gguf.pre_tokenizer!r} says; give a tokenizer by "
                "--tokenizer"
            )
    return tokenizer
