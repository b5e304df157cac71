"""Sources of a conversion: folders, models of the Hub, and checkpoint files."""

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..parameters import check_names
from ..text import first_line
from .families import FAMILIES
from .gguf_files import GGUF, find_gguf
from .paper import from_paper, read_checkpoint
from .renaming import classes_of


PAPER_CHECKPOINT = "ckpt.pt"


def find_checkpoint(source: str) -> Path | None:
    """The checkpoint file of a source, which is the file or its folder; `None` if there is none."""
    path = Path(source)
    if find_gguf(source) is not None:
        return None
    if path.is_dir() and not (path / "config.json").is_file() and (path / PAPER_CHECKPOINT).is_file():
        return path / PAPER_CHECKPOINT
    return path if path.is_file() else None


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
    """Reads the configuration of a folder or of a model of the Hub, and finds the class of the model.

    Raises:
        ValueError: if it is no model that can be converted.
    """
    folder, options = _place(source)
    if not options and Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} holds neither a config.json nor a {PAPER_CHECKPOINT} nor a GGUF file")
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.endswith((".pt", ".pth", ".bin", ".gguf"))):
        raise ValueError(f"there is no folder or file {source!r}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        place = "" if Path(source).exists() else "neither a folder here nor a model of the Hub, or "
        raise ValueError(f"{source!r} is {place}no model that can be read: {first_line(error)}") from error
    if config.model_type not in (known := sorted([*FAMILIES, "nlq"])):
        raise ValueError(f"{source!r} is a model of type {config.model_type!r}; only {', '.join(known)} can be converted")
    classes = classes_of(config)
    name = (config.architectures or [next(iter(classes))])[0].removeprefix("FSDP")
    if name not in classes:
        raise ValueError(f"{source!r}: architectures names {name!r}, which is none of {', '.join(classes)}")
    return config, classes[name]


def _place(source: str) -> tuple[str | Path, dict[str, str]]:
    """Where Transformers finds a source: the folder or Hub name, and other arguments of `from_pretrained`."""
    path = find_gguf(source)
    return (source, {}) if path is None else (path.parent, {"gguf_file": path.name})


def load_model(source: str, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Loads the model of a folder or of the Hub in its own precision, a quantised one from a GGUF file in float32.

    Raises:
        ValueError: for weights that cannot be read, naming the parameters that are missing, damaged or unknown.
    """
    folder, options = _place(source)
    try:
        model, found = model_class.from_pretrained(
            folder, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (SafetensorError, OSError, EOFError, RuntimeError, KeyError) as error:
        raise ValueError(f"{source!r}: the weights cannot be read: {first_line(error)}") from error
    except Exception as error:
        # torch has a long message for a pickle that holds more than tensors
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise
        raise ValueError(
            f"{source!r}: the weights ask for more than tensors, which could run code; they were not read"
        ) from None
    if found["mismatched_keys"]:
        name, there, expected = min(found["mismatched_keys"])
        raise ValueError(f"{source!r}: {name} has the shape {tuple(there)}, and config.json says {tuple(expected)}")
    missing = set(found["missing_keys"])
    # Transformers saved the value of masked scores until 4.27; it is no parameter
    unexpected = {name for name in found["unexpected_keys"] if not name.endswith(".attn.masked_bias")}
    try:
        check_names(missing, unexpected)
    except ValueError as error:
        raise ValueError(f"{source!r}: {error}") from None
    return model.eval()


def load_gguf(gguf: GGUF) -> PreTrainedModel:
    """Loads the model of a GGUF file, whose weights become float32.

    Raises:
        ValueError: for weights that cannot be read or have no place in the model.
    """
    source = str(gguf.path)
    model = load_model(source, *read_source(source))
    read = len(list(model.parameters()))
    if gguf.tensors > read:
        raise ValueError(f"{source} holds {gguf.tensors} tensors, of which Transformers reads {read}")
    # Transformers saves no model that it takes for a quantised one
    del model.config.quantization_config
    model.hf_quantizer = None
    return model
