"""What is saved with a model beside its weights: the classes that load it, and its author's attention parts."""

import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .activations_nlq import did_you_mean
from .parts_base_nlq import AttentionPart
from .parts_nlq import PARTS


logger = logging.get_logger(__name__)

_TASKS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
AUTO_MAP = {
    "AutoConfig": "configuration_nlq.NLQConfig",
    "AutoModel": "modeling_nlq.NLQModel",
    **{f"AutoModelFor{task}": f"modeling_nlq.NLQFor{task}" for task in _TASKS},
}
SEQ2SEQ_AUTO_MAP = {
    "AutoConfig": "configuration_seq2seq_nlq.NLQSeq2SeqConfig",
    "AutoModel": "modeling_seq2seq_nlq.NLQSeq2SeqModel",
    "AutoModelForSeq2SeqLM": "modeling_seq2seq_nlq.NLQForConditionalGeneration",
}


def default_auto_map(settings: Mapping[str, Any]) -> dict[str, str]:
    return SEQ2SEQ_AUTO_MAP if settings.get("is_encoder_decoder") else AUTO_MAP


def is_derived(path: str | list[str | None]) -> bool:
    """Tells whether an entry of `auto_map` is a model's class that is not of this code. Tokenizers have lists."""
    return isinstance(path, str) and path.rpartition("--")[2] not in (*AUTO_MAP.values(), *SEQ2SEQ_AUTO_MAP.values())


def saved_auto_map(folder: str | os.PathLike, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the classes that load a saved model, of this code or derived with a file in its folder.

    Some programs take the first one, so an encoder must not name a class of decoders.
    """
    refused = "AutoModelForMaskedLM" if settings.get("is_causal", True) else "AutoModelForCausalLM"
    classes = {name: path for name, path in default_auto_map(settings).items() if name != refused}
    for name, path in (settings.get("auto_map") or {}).items():
        module = path.partition(".")[0] if is_derived(path) else ""
        if module.isidentifier() and Path(folder, f"{module}.py").is_file():
            classes[name] = path
    return classes


# By name and hash of the code; a new configuration takes the latest
_registered: dict[tuple[str, str], type[AttentionPart]] = {}
_latest: dict[str, str] = {}
# Name and text of a file, by module
_files: dict[str, tuple[str, str]] = {}


def add_part(part):
    code = code_of(part)
    _registered[part.name, code] = part
    _latest[part.name] = code


def add_file(module, file, text):
    _files[module] = (file, text)


def add_to_package(name: str) -> None:
    """Makes a module an attribute of its package, where dill, and so `datasets.map`, looks for its classes."""
    package, _, own_name = name.rpartition(".")
    setattr(sys.modules[package], own_name, sys.modules[name])


def hash_of(text) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def code_of(part: type[AttentionPart]) -> str:
    """Returns the hash of the file that defines a part; `""` without a file."""
    if part.__module__ in _files:
        return hash_of(_files[part.__module__][1])
    if part not in PARTS:
        return ""
    return hash_of(Path(sys.modules[part.__module__].__file__).read_text(encoding="utf-8"))


def find_part(name: str, code: str | None) -> type[AttentionPart]:
    """Returns the part with this name and hash, or the latest; `ValueError` if it is unknown."""
    for part in PARTS:
        if part.name == name and code in (None, code_of(part)):
            return part
    if part := _registered.get((name, _latest.get(name) if code is None else code)):
        return part
    if code is None:
        known = ", ".join(_latest) or "none"
        near = did_you_mean(name, _latest)
        raise ValueError(
            f"attention_parts: {name!r} is unknown; {near}known parts: {known}; the recipe names files, "
            "`parts: [FILE.py]`, or load_attention_parts('FILE.py')"
        )
    raise ValueError(
        f"attention_parts: {name!r} (code {code}) is unknown; if you trust the file beside the model, load it by "
        "load_attention_parts('FILE.py') or --parts FILE.py"
    )


def save_parts(folder: str | Path, parts: Iterable[type[AttentionPart]]) -> None:
    """Writes the files of parts into the folder of a model, and a `parts_nlq.py` that imports them."""
    lines = ['"""The attention parts that the author of this model wrote."""', ""]
    names: list[str] = []
    texts: dict[str, str] = {}
    for part in parts:
        if part.__module__ not in _files:
            raise ValueError(f"attention_parts: {part.name!r} is defined in no file; load it by load_attention_parts")
        file, text = _files[part.__module__]
        if texts.setdefault(file, text) != text:
            raise ValueError(f"attention_parts: two files are named {file}; rename one of them")
        module = file.removesuffix(".py")
        names.append(f"{module}_{part.__name__}")  # two files may have one class name
        lines.append(f"from .{module} import {part.__name__} as {names[-1]}")
    for file, text in texts.items():
        Path(folder, file).write_text(text, encoding="utf-8")
    lines += ["", "", f"PARTS = ({', '.join(names)},)", ""]
    Path(folder, "parts_nlq.py").write_text("\n".join(lines), encoding="utf-8")


# Keys of config.json that are not attributes of `PreTrainedConfig`
LIBRARY_KEYS = {
    "attn_implementation",
    "auto_map",
    "classifier_dropout",
    "cls_token_id",
    "custom_pipelines",
    "experts_implementation",
    "gradient_checkpointing",
    "is_decoder",
    "mask_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rope_theta",
    "sep_token_id",
    "task_specific_params",
    "tie_last_hidden_states",
    "token_classification_bias",
}


def check_kernels(settings: Any, source: str, field: str | None = None) -> None:
    """Raises `ValueError` if settings, perhaps of a `field`, choose a kernel of the Hub, whose code would be run."""
    if field is not None and isinstance(settings, str):
        # Transformers fetches FlashAttention, unless it is installed
        package = "flash_attn_interface" if "flash_attention_3" in settings else "flash_attn"
        if "/" in settings or ("flash_attention_" in settings and find_spec(package) is None):
            raise ValueError(f"{source}: {field}={settings!r} is code from the Hub; pass it as an argument")
    fields = vars(settings) if isinstance(settings, PreTrainedConfig) else settings
    for name, value in fields.items() if isinstance(fields, dict) else ():
        check_kernels(value, source, name if "_implementation" in str(name) else field)


class NLQConfigMixin:
    """Checks the names of fields, and saves the user's parts."""

    @classmethod
    def field_names(cls) -> set[str]:
        names = {"per_layer_config", *(field.name for field in fields(cls))}
        return names - {field.name for field in fields(PreTrainedConfig)}

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # diff with PreTrainedConfig, which sets a caller's fields without a check
        check_kernels(config_dict, "config.json")
        overrides = {name: kwargs.pop(name) for name in cls.field_names() & kwargs.keys()}
        cls.check_names(kwargs, warns=False)
        return super().from_dict(config_dict | overrides, **kwargs)

    @classmethod
    def check_names(cls, keys: Iterable[str], is_saved: bool = False, warns: bool = True) -> None:
        """Raises `ValueError` for a key that looks like a misspelt field, and warns of other unknown keys.

        For a saved configuration it only warns, because newer code may have such fields.
        """
        known = LIBRARY_KEYS.union(GenerationConfig._get_default_generation_params(), (f.name for f in fields(cls)))
        for key in keys:
            if key in known or key.startswith("_") or hasattr(PreTrainedConfig, key):
                continue
            suggestion = did_you_mean(key, cls.field_names(), cutoff=0.8).strip()
            if suggestion and not is_saved:
                raise ValueError(f"{cls.__name__} has no field {key!r}; {suggestion}")
            if warns:
                logger.warning(f"{cls.__name__} has no field {key!r}: it is kept, but nothing reads it.")

    def name_code(self, auto_map: dict[str, str] | None, version: str) -> None:
        """Names this code, whatever an old file says, but for derived classes."""
        derived = {name: path for name, path in (auto_map or {}).items() if is_derived(path)}
        self.auto_map = default_auto_map(vars(self)) | derived
        self.nlq_version = version

    def save_pretrained(self, save_directory, *args, **kwargs):
        # diff with PreTrainedConfig: the files of the user's parts
        halves = [getattr(self, name) for name in self.sub_configs] or [self]
        user_parts = dict.fromkeys(part for half in halves for part in half._own_parts().values() if part not in PARTS)
        # In memory all classes stay, for another `is_causal`
        in_memory = self.auto_map
        self.auto_map = saved_auto_map(save_directory, vars(self))
        try:
            result = super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.auto_map = in_memory
        if user_parts:
            save_parts(save_directory, user_parts)
        return result
