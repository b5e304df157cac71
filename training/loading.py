"""Loads models by name: a shipped configuration, a config.json, or a folder or Hub name."""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import CONFIG_NAME, cached_file, logging
from transformers.utils.hub import extract_commit_hash

from modeling_nlq import NLQSeq2SeqConfig
from modeling_nlq.parts_user_nlq import check_kernels

from ..configuration import find, names, suggestion
from .disk import check_no_symlinks, open_file, read_text, resolve_user_path, safe_join
from .files import (
    CONVERSION_FILE,
    WEIGHTS,
    differences,
    files_in,
    flatten,
    merged,
    read_json,
    read_yaml,
    relative_imports,
)
from .size import ModelKind, kind_of, listed
from .text import first_line, one_line
from .trust import run_parts


# Fields of a saved configuration about who saved it, and how it is run
_NOT_COMPARED = {"architectures", "nlq_version", "transformers_version", "use_cache", "_name_or_path"}
_NOT_LOADED = " is not a local folder and cannot be loaded from the Hub"


def is_saved_model(name: str) -> bool:
    """Tells whether a name is a folder or on the Hub, not a configuration."""
    if name in names("models"):
        return False
    return Path(name).is_dir() or ("/" in name and not Path(name).is_file() and not name.endswith(".json"))


def check_saved(folder: str | Path) -> None:
    """Raises `ValueError` if a folder holds no saved model."""
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}")
    if not Path(folder, CONFIG_NAME).is_file():
        raise ValueError(f"{folder} lacks {CONFIG_NAME}: it is not a saved model, or its training did not finish")


def check_model_exists(name: str) -> None:
    """Raises `ValueError` for a folder without a model, or a run that is not here, before a network is asked."""
    if Path(name).is_dir():
        check_saved(name)
    elif Path(name).parts[:1] == ("runs",) and is_saved_model(name):
        runs = [str(folder) for folder in Path(name).parent.glob("*/") if (folder / CONFIG_NAME).is_file()]
        hint = suggestion(str(Path(name)), runs) if runs else f"{Path(name).parent} has no saved models"
        raise ValueError(f"model {name!r} is not a local folder; {hint}")


def load_config(name: str, switches: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Loads a configuration by name, and sets switches; raises `ValueError` for what is unknown or not allowed."""
    check_model_exists(name)
    path = name if is_saved_model(name) else str(find("models", name))
    try:
        values, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, RecursionError) as error:
        where = "" if Path(path).exists() else _NOT_LOADED
        raise ValueError(f"model {name!r}{where}: {first_line(error)}") from error
    check_kernels(values, path)
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"{path}: model_type={model_type!r} is not a model type of Transformers")
    config = CONFIG_MAPPING[model_type].from_dict(values)  # checks what only a saved model has
    if not switches:
        return config
    _check_switches(name, config, switches)
    if isinstance(config, NLQSeq2SeqConfig):
        return config.from_dict(values, **switches)  # sets the fields of both halves
    return AutoConfig.for_model(**merged(values, switches))


def _check_switches(name: str, config: PreTrainedConfig, switches: dict[str, Any]) -> None:
    for key, value in switches.items():
        if key in config.sub_configs:
            if not isinstance(value, dict):
                raise ValueError(f"{key}={value!r} must be the switches that differ there")
            _check_switches(f"{name}: {key}", getattr(config, key), value)
        elif key != "per_layer_config" and not config._hasattr_without_heterogeneous_validation(key):
            halves = []
            for half in config.sub_configs:
                part = getattr(config, half)
                if part and part._hasattr_without_heterogeneous_validation(key):
                    halves.append(half)
            if halves and isinstance(config, NLQSeq2SeqConfig):
                continue  # sets it in both
            known = config.to_dict().keys() - PreTrainedConfig().to_dict().keys()
            hint = f"set it in {' or '.join(halves)}" if halves else suggestion(key, known)
            raise ValueError(f"model {name!r} of type {config.model_type!r} has no field {key!r}; {hint}")


@torch.no_grad()
def initialize_by_name(model: PreTrainedModel, seed: int) -> None:
    """Initializes each module from a stream seeded by its name and the seed; models that share it begin alike."""
    with torch.random.fork_rng(devices=[]):
        owners = {"": model}
        # A model inside another initializes its modules itself, as in Transformers
        for name, module in model.named_modules():
            owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        # Children first, as Transformers does
        for name, module in reversed(list(model.named_modules())):
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1)
            owners[name]._init_weights(module)


def config_differences(before: dict[str, Any], now: dict[str, Any], with_dtype: bool = False) -> str:
    """Lists the fields of both configurations that differ; one that the half of a pair lacks has its default.

    `with_dtype` is for configurations of one source: a saved model has the `dtype` of its weights.
    """
    free = _NOT_COMPARED | (set() if with_dtype else {"dtype"})

    def values(fields: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
        flat = flatten({name: fields[name] for name in known}).items()
        # Null and float32 are defaults
        return {name: each for name, each in flat if each not in (None, "float32") and name.split(".")[-1] not in free}

    known = before.keys() & now.keys()
    return differences(values(before, known), values(now, known))


def weights_fingerprint(name: str) -> dict[str, str]:
    """Returns hashes of a model's weights by file, or its commit on the Hub; empty for a configuration."""
    if not is_saved_model(name):
        return {}
    if not Path(name).is_dir():
        return {"commit": extract_commit_hash(cached_file(name, CONFIG_NAME), None)}
    hashes = {}
    for path in sorted(files_in(resolve_user_path(name), WEIGHTS)):
        with open_file(path) as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def read_record(name: str, file: str) -> dict[str, Any] | None:
    """Reads a JSON or YAML file beside a saved model; returns `None` if it is missing."""
    try:
        path = _find_beside(name, file)
    except OSError:  # the model itself is missing
        return None
    read = read_yaml if file.endswith(".yaml") else read_json
    return path and read(path)


def _find_beside(name: str, file: str) -> Path | None:
    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return path and resolve_user_path(Path(path).parent) / file


def added_parameters(model: str, conversion: dict[str, Any] | None) -> list[str]:
    """Returns the parameters that a conversion added; raises `ValueError` for none."""
    if conversion is None:
        raise ValueError(
            f"trainable='new' trains what `nlq convert` added, but model {model!r} has no {CONVERSION_FILE}"
        )
    if conversion["enlarged"] or not conversion["added"]:
        effect = f"enlarged {listed(conversion['enlarged'])}" if conversion["enlarged"] else "added no parameters"
        raise ValueError(f"trainable='new' trains new parameters, but the conversion of model {model!r} {effect}")
    return conversion["added"]


def load_parts(files: Iterable[str], models: Iterable[str] = (), trust: bool = False) -> None:
    """Runs files of attention parts, and those beside saved models; raises as `load_attention_parts`.

    Without `trust`, of the latter only those in folders, which this user has run before.
    """
    for file in files:
        run_parts(file)
    for name in filter(is_saved_model if trust else os.path.isdir, models):
        if path := _find_beside(name, "parts_nlq.py"):
            for module in sorted(relative_imports(path)):
                file = _find_beside(name, f"{module}.py") or path.with_name(f"{module}.py")
                run_parts(file, read_text(file), only_known=not trust)  # the text's hash says whether it runs


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer; raises `ValueError` where it would run code."""
    with source_named(name, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def check_model_folder(name: str) -> None:
    """Raises `ValueError` if a model's folder has a link, or its index of weights names a file outside it."""
    if not os.path.isdir(name):
        return
    folder = resolve_user_path(name)
    check_no_symlinks([*folder.iterdir(), *folder.glob("additional_chat_templates/*")], allow_hub=True)
    for index in folder.glob("*.index.json"):
        shards = read_json(index).get("weight_map")
        for file in shards.values() if isinstance(shards, dict) else ():
            safe_join(folder, str(file))


@contextmanager
def source_named(name: str, what: str = "") -> Iterator[None]:
    """Names a model or tokenizer in errors of libraries; raises as `check_model_folder`."""
    check_model_folder(name)
    try:
        yield
    except UnpicklingError:  # PyTorch's message advises to run the code
        raise ValueError(f"{name!r}: the weights are damaged, or hold code") from None
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name!r} brings its own code; if you trust it, `nlq generate`, `evaluate` and `explore` run it with "
                "--trust-remote-code"
            ) from None
        # `tokenizers` raises plain exceptions
        is_reading_error = isinstance(error, ValueError | KeyError | RecursionError | SafetensorError)
        if name in str(error) or not (is_reading_error or type(error) is Exception):
            raise
        raise ValueError(f"{what}{name!r} cannot be read: {one_line(error)}") from error


def load_model(
    name: str, trust_remote_code: bool = False, kinds: Collection[ModelKind] = ModelKind, purpose: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a saved language model and its tokenizer.

    `trust_remote_code` runs the code beside the model, if Transformers does not know its type. Raises `ValueError` if
    the model is missing, not a language model, needs code that is not trusted, or is not of `kinds`, where `purpose`
    says what needs a decoder.
    """
    if name.endswith(".gguf"):
        raise ValueError(f"model {name!r} is a GGUF file; make a model of it first: nlq convert {name} TARGET")
    check_model_exists(name)
    try:
        with source_named(name):
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            check_kernels(config, name)
            kind = kind_of(config)
        if kind not in kinds:
            raise ValueError(f"{name!r} is {kind.description}: {purpose} needs a decoder")
        return load_weights(name, config, trust_remote_code=trust_remote_code), load_tokenizer(name, trust_remote_code)
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise ValueError(f"model {name!r}{_NOT_LOADED}: {one_line(error)}") from error


def load_weights(name: str, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Loads a language model; raises `ValueError` if weights are damaged or missing."""
    with source_named(name), _without_bars():
        model, info = kind_of(config).auto_class.from_pretrained(
            name, config=config, output_loading_info=True, **options
        )
    if missing := sorted(info["missing_keys"]):  # they would be new, without a word
        raise ValueError(f"model {name!r} is not a language model: its weights lack {listed(missing)}")
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keeps Transformers from showing a bar for each of the many models that a command loads."""
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def peft_task(model: PreTrainedModel) -> str | None:
    """Returns PEFT's task type, and `None` for an encoder, which PEFT must not wrap."""
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    return task if model.can_generate() else None
