"""Sources of a conversion: folders, models of the Hub, and checkpoint files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, GgufConfig, PreTrainedConfig, PreTrainedModel

from ..models import source_named
from ..parameters import check_names
from ..text import first_line, one_line
from .families import FAMILIES
from .gguf_files import GGUF, is_gguf, tensors_not_read
from .nanogpt import from_paper, read_checkpoint
from .renaming import LossyConversion, classes_of
from .streaming import empty_model


PAPER_CHECKPOINT = "ckpt.pt"


def find_checkpoint(source: str) -> Path | None:
    """The checkpoint file of a source, which is the file or its folder; `None` if there is none."""
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file() and (path / PAPER_CHECKPOINT).is_file():
        return path / PAPER_CHECKPOINT
    return path if path.is_file() and not is_gguf(path) else None


def load_checkpoint(path: Path) -> PreTrainedModel:
    """Makes a model from a checkpoint of the paper's code or of nanoGPT.

    Raises:
        ValueError: if it is no such checkpoint, naming the parts that are missing, damaged or unknown.
    """
    try:
        return from_paper(read_checkpoint(path))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def read_source(source: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Reads the configuration of a folder, a GGUF file or a model of the Hub, and finds the class of the model.

    Raises:
        ValueError: if it is no model that can be converted.
    """
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} holds neither a config.json nor a {PAPER_CHECKPOINT} nor a GGUF file")
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.endswith((".pt", ".pth", ".bin", ".gguf"))):
        raise ValueError(f"there is no folder or file {source!r}")
    try:
        with _place(source) as (folder, options):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        place = "" if Path(source).exists() else "neither a folder here nor a model of the Hub, or "
        raise ValueError(f"{source!r} is {place}no model that can be read: {one_line(error)}") from error
    if config.model_type not in (known := sorted([*FAMILIES, "nlq"])):
        raise ValueError(f"{source!r} is a model of type {config.model_type!r}; only {', '.join(known)} can be converted")
    classes = classes_of(config)
    name = (config.architectures or [next(iter(classes))])[0].removeprefix("FSDP")
    if name not in classes:
        raise ValueError(f"{source!r}: architectures names {name!r}, which is none of {', '.join(classes)}")
    return config, classes[name]


@contextmanager
def _place(source: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where Transformers finds a source: the folder or Hub name, and other arguments of `from_pretrained`."""
    path = Path(source)
    if not is_gguf(path):
        yield source, {}
        return
    # An empty folder, for what lies beside the file is not its own; and the whole path, for a name alone would be looked for in
    # the current directory first
    with TemporaryDirectory() as empty:
        yield empty, {"gguf_file": str(path.resolve())}


def load_model(source: str, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Loads the model of a folder or of the Hub in its own precision, or that of a GGUF file in float32.

    Raises:
        ValueError: for weights that cannot be read, naming the parameters that are missing, damaged or unknown.
    """
    try:
        with _place(source) as (folder, options), source_named(source):
            if options:
                options["quantization_config"] = GgufConfig(dequantize=True)
            model, found = model_class.from_pretrained(
                folder, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (SafetensorError, OSError, EOFError, RuntimeError, KeyError) as error:
        raise ValueError(f"{source!r}: the weights cannot be read: {first_line(error)}") from error
    if found["mismatched_keys"]:
        name, there, expected = min(found["mismatched_keys"])
        raise ValueError(f"{source!r}: {name} has the shape {tuple(there)}, and its configuration says {tuple(expected)}")
    missing = set(found["missing_keys"])
    # Transformers saved the value of masked scores until 4.27; it is no parameter
    unexpected = {name for name in found["unexpected_keys"] if not name.endswith(".attn.masked_bias")}
    try:
        check_names(missing, unexpected)
    except ValueError as error:
        raise ValueError(f"{source!r}: {error}") from None
    return model.eval()


def load_gguf(gguf: GGUF, allow_lossy: bool) -> tuple[PreTrainedModel, list[str]]:
    """Loads the model of a GGUF file, whose weights become float32, and returns with it what Transformers does not read.

    Raises:
        LossyConversion: if there is something and `allow_lossy` is not set.
        ValueError: for weights that cannot be read.
    """
    source = str(gguf.path)
    config, model_class = read_source(source)
    if (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) != gguf.head_size:
        config.head_dim = gguf.head_size
    if not gguf.has_pieces:  # those of SentencePiece have the ids that are the default of Llama's class
        for kind in ("bos", "eos"):
            setattr(config, f"{kind}_token_id", gguf.tokenizer.get(f"{kind}_token_id"))
    names = empty_model(model_class, config).state_dict()
    lost = [*gguf.not_read, *tensors_not_read(gguf, names, config.num_hidden_layers)]
    if lost and not allow_lossy:
        raise LossyConversion(lost)
    return load_model(source, config, model_class), lost
