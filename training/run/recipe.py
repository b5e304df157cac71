"""Recipes say what to train, on which data, and how. The command line overrides any field of their YAML files."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
import yaml
from transformers import PreTrainedConfig, TrainingArguments

from modeling_nlq.parts_user_nlq import check_kernels

from ...configuration import find, names
from ..disk import read_text, resolve_user_path, results_folder
from ..files import CONVERSION_FILE, check_keys, merged, parse_yaml, read_section, read_yaml
from ..loading import is_saved_model, load_config, read_record
from ..text import QUOTE_IT, check_number, escape, unescape
from ..trust import run_parts
from ..values import Value, check_type
from .objectives import OBJECTIVES, Answers, Masked, Objective, OfTask, PackedText, Seq2Seq, objective_in
from .synthetic import Task, task_of


# Fields of `TrainingArguments` with the user's folders, names and tokens
_PRIVATE = ("output_dir", "resume_from_checkpoint", "push_to_hub", "run_name", "project")
_PRIVATE += ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
_PRIVATE_PREFIX = "hub_"
# The bytes, and the tokens for end-of-text, padding and masks, which each new tokenizer has
SMALLEST_VOCABULARY = 256 + 3
# The field of a configuration that `initializer_scale` sets
INITIALIZER_RANGE = "initializer_range"
# Metrics of an evaluation that are better if greater
_MORE_IS_BETTER = ("token_accuracy", "chrf", "samples_per_second", "steps_per_second")
# What reads fields about text, and fields about models of one stack
_TEXT, _ONE_STACK = (PackedText, Seq2Seq), (PackedText, Answers)


def _field(
    affects: str,
    default: Any = dataclasses.MISSING,
    objective: type[Objective] | tuple[type[Objective], ...] = Objective,
    is_shape: bool = False,
    **options: Any,
) -> Any:
    """Returns a field of `Recipe` that objectives of this class, or of these, read.

    `affects` is `data`, `model`, `training`, or `nothing`: then a run resumes with another value. `is_shape` marks how
    texts are cut and shown to the model.
    """
    metadata = {"affects": affects, "objective": objective, "is_shape": is_shape}
    return dataclasses.field(default=default, metadata=metadata, **options)


@dataclass(frozen=True)
class Recipe(Value):
    """Everything that says what a run is. Equal recipes make equal runs, and have equal hashes."""

    model: str = _field("model")
    """A shipped model configuration, a config.json, or a saved model (folder or Hub name) to go on from."""
    dataset: str = _field("data", "python-stdlib")
    """A built-in corpus, a Hub dataset, a local folder, or a .txt (blank lines part documents), .jsonl, .csv or
    .parquet; or `synthetic:TASK`."""
    task: dict[str, Any] | None = _field("data", None, OfTask)
    """With `dataset: synthetic:TASK`, the sizes of the task that differ from its defaults."""
    dataset_config: str | None = _field("data", None, _TEXT)
    """The configuration of a Hub dataset."""
    text_column: str = _field("data", "text", PackedText)
    """The column of text, in which a special token, as <|endoftext|>, is text, not a boundary."""
    text_template: str | None = _field("data", None, PackedText)
    """Joins columns to one text, as `"{instruction}\\n{output}"` does; a missing value is empty."""
    source_column: str = _field("data", "source", Seq2Seq, is_shape=True)
    """With `seq2seq`, the column of the texts that the encoder reads."""
    target_column: str = _field("data", "target", Seq2Seq, is_shape=True)
    """With `seq2seq`, the column of the texts that are to be written."""
    streaming: bool = _field("data", False, PackedText)
    """Read the dataset while training instead of storing it; needs `max_steps`."""
    validation_fraction: float = _field("data", 0.02)
    """Share of documents held out, by a hash of their text, where the dataset has no validation split."""
    max_validation_documents: int | None = _field("data", None)
    """Hold out at most this many documents."""
    test_fraction: float = _field("data", 0.0)
    """The same for a final test; 0 leaves it out."""
    tokenizer: str | None = _field("data", None, _TEXT)
    """`bpe:SIZE`, trained on the corpus, or a saved one; by default that of a saved model, else `bpe:8192`."""
    parts: dict[str, str] | None = _field("model", None)
    """Python files with the attention parts that the model's `attention_parts` name."""
    block_size: int = _field("data", 1024, PackedText, is_shape=True)
    """Length of a training sample, in tokens."""
    max_source_length: int = _field("data", 512, Seq2Seq, is_shape=True)
    """With `seq2seq`, the longest source in tokens, with end-of-text; longer ones are cut."""
    max_target_length: int = _field("data", 128, Seq2Seq, is_shape=True)
    """The same for targets, and the longest text that is generated for chrF."""
    packing: Literal["stream", "documents"] = _field("data", "stream", PackedText, is_shape=True)
    """`stream`: documents are joined by end-of-text; `documents`: attention and positions also restart at each."""
    objective: Literal[*OBJECTIVES] = _field("data", "causal")
    """`causal` predicts the next token, `masked` hidden ones, and `seq2seq` a target from a source."""
    mask_probability: float = _field("data", 0.3, Masked, is_shape=True)
    """With `masked`, the share of tokens that are to be predicted."""
    num_proc: int | None = _field("nothing", None)
    """Processes that prepare the data."""
    trainable: Literal["all", "new"] = _field("training", "all")
    """`all`: every parameter; `new`: those that a conversion added to the saved model."""
    lora: dict[str, Any] | None = _field("training", None)
    """Fields of PEFT's `LoraConfig`: only a LoRA is trained, and added to the saved model's weights at the end."""
    optimizer: Literal["adamw", "muon"] = _field("training", "adamw")
    """`adamw`, or what `optim` names; `muon`: Muon for matrices inside the blocks, AdamW for the rest (arXiv
    2502.16982)."""
    parametrization: Literal["standard", "completep"] = _field("training", "standard", _ONE_STACK)
    """`completep` lets a learning rate of a model of `base_sizes` suit this one too (arXiv 2505.01618)."""
    base_sizes: dict[str, Any] | None = _field("training", None)
    """Such as `{hidden_size: 64, num_hidden_layers: 2}`."""
    attn_implementation: str | None = _field("training", None)
    """Attention backend; by default the model's own choice."""
    record_stability: bool = _field("training", False, _ONE_STACK)
    """Record entropy, normaliser and scores of every attention layer while training."""
    stability_steps: int = _field("training", 50)
    """Optimizer steps between two records."""
    explore: bool = _field("nothing", False)
    """Write the page of `nlq explore` on held-out text at the end."""
    initializer_scale: float | None = _field("model", None)
    """Initial weights have the standard deviation `initializer_scale / sqrt(hidden_size)`, which suits any width; a
    saved model has its own."""
    switches: dict[str, Any] = _field("model", default_factory=dict)
    """Fields of the model's configuration."""
    training: dict[str, Any] = _field("training", default_factory=dict)
    """Fields of `transformers.TrainingArguments`."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("validation_fraction", "mask_probability"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if not 0.0 <= self.test_fraction < 1.0 - self.validation_fraction:
            raise ValueError(f"test_fraction={self.test_fraction} must be at least 0, and leave documents to train on")
        for name in ("block_size", "max_source_length", "max_target_length"):
            check_number(name, getattr(self, name), 2)
        for name in ("max_validation_documents", "stability_steps"):
            check_number(name, getattr(self, name), 1)
        if self.initializer_scale is not None:
            if not 0 < self.initializer_scale < math.inf:
                raise ValueError(f"initializer_scale={self.initializer_scale:g} must be a number above 0")
            if INITIALIZER_RANGE in self.switches:
                raise ValueError(f"initializer_scale and the switch {INITIALIZER_RANGE} exclude each other")
        if (self.parametrization == "completep") != (self.base_sizes is not None):
            raise ValueError(
                f"base_sizes={self.base_sizes!r}: parametrization='completep' needs the sizes of its base model, and "
                "'standard' takes none"
            )
        self.synthetic  # noqa: B018 - raises for sizes that are not allowed

    def __hash__(self) -> int:
        return hash(self.digest())

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def affecting(cls, *what: str) -> list[str]:
        return [item.name for item in dataclasses.fields(cls) if item.metadata["affects"] in what]

    @classmethod
    def read_by(cls, objective: type[Objective]) -> list[str]:
        return [item.name for item in dataclasses.fields(cls) if issubclass(objective, item.metadata["objective"])]

    @property
    def text_columns(self) -> dict[str, str]:
        """The columns of text, by the field that names each."""
        return {name: getattr(self, name) for name in objective_in(vars(self)).columns}

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """The tokens of a full training sample: of a block, or of source and target."""
        if self.synthetic is not None:
            return self.synthetic.sample_lengths
        return tuple(getattr(self, name) for name in objective_in(vars(self)).lengths)

    @functools.cached_property
    def synthetic(self) -> Task | None:
        """The synthetic task, if the rows are made."""
        return task_of(self.dataset, self.task)

    @property
    def has_weights(self) -> bool:
        return is_saved_model(self.model)

    @property
    def tokenizer_name(self) -> str:
        made = "bpe:8192" if self.synthetic is None else self.dataset
        return self.tokenizer or (self.model if self.has_weights else made)

    @property
    def new_vocabulary_size(self) -> int | None:
        """The size of the tokenizer that is trained on the corpus, if one is."""
        kind, _, size = self.tokenizer_name.partition(":")
        return max(int(size), SMALLEST_VOCABULARY) if kind == "bpe" and size.isdecimal() else None

    @property
    def output_dir(self) -> str:
        return self.training["output_dir"]

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model, to be copied before changes; raises as `load_config`."""
        switches = self.switches
        # A configuration of the user's own has the size that it says, and so have the halves of a pair
        is_set = self.model not in names("models") or any(
            isinstance(half, Mapping) and "vocab_size" in half for half in switches.values()
        )
        if self.synthetic is not None and not self.has_weights:
            switches = {"vocab_size": len(self.synthetic.tokens), **switches}
        elif self.new_vocabulary_size is not None and not is_set:
            switches = {"vocab_size": self.new_vocabulary_size, **switches}
        config = load_config(self.model, switches)
        if self.initializer_scale is not None and not self.has_weights:
            halves = [getattr(config, half) for half in config.sub_configs] or [config]
            for half in halves:
                # Under CompleteP, initial weights are those of the base model until its factors scale them
                width = (self.base_sizes or {}).get("hidden_size", getattr(half, "hidden_size", None))
                if width is None or not hasattr(half, INITIALIZER_RANGE):
                    needed = f"hidden_size and {INITIALIZER_RANGE}, which {config.model_type!r} lacks"
                    raise ValueError(f"initializer_scale={self.initializer_scale:g} needs {needed}")
                setattr(half, INITIALIZER_RANGE, self.initializer_scale / math.sqrt(width))
        return config

    @functools.cached_property
    def conversion(self) -> dict[str, Any] | None:
        """The record of the conversion that made the saved model, if one did."""
        return read_record(self.model, CONVERSION_FILE) if self.has_weights else None

    @functools.cached_property
    def arguments(self) -> TrainingArguments:
        """The arguments of `Trainer`; raises `ValueError` for values that they do not allow."""
        has_gpu = torch.cuda.is_available()
        # `logging_steps` and `eval_steps` are shares of all steps
        defaults = {
            "logging_steps": 0.05,
            "eval_steps": 0.2,
            "eval_strategy": "steps",
            "dataloader_pin_memory": has_gpu,
        }
        # Without it, processes of `accelerate launch` do not find each other on a CPU
        defaults["use_cpu"] = not torch.accelerator.is_available()
        if not {"bf16", "fp16"} & set(self.training):
            defaults["bf16"] = has_gpu and torch.cuda.is_bf16_supported()
        for name in ("logging_steps", "eval_steps", "save_steps"):
            check_number(name, self.training.get(name), 0)
        # What `RecordingTrainer` and its metrics need
        fields = defaults | self.training | {"batch_eval_metrics": True, "logging_nan_inf_filter": False}
        metric = fields.get("metric_for_best_model")
        if metric is not None and fields.get("greater_is_better") is None:
            fields["greater_is_better"] = metric.removeprefix("eval_") in _MORE_IS_BETTER
        return TrainingArguments(**fields)

    def load_parts(self) -> None:
        """Runs the files of `parts`, so that this process knows them."""
        for name, text in (self.parts or {}).items():
            run_parts(name, text)

    def replace(self, **changes: Any) -> "Recipe":
        """Returns a recipe with other fields, where `switches` and `training` add to its own."""
        for section in _SECTIONS:
            changes[section] = merged(getattr(self, section), changes.get(section, {}))
        return dataclasses.replace(self, **changes)

    def with_fields(self, values: Mapping[str, Any]) -> "Recipe":
        """Returns a recipe with fields of its own, of `TrainingArguments`, or of the model's configuration."""
        values = {
            name: _read_value("recipe", name, value) if name in _TYPES else value for name, value in values.items()
        }
        fields = {name: value for name, value in values.items() if name in _RECIPE_FIELDS}
        training = {name: value for name, value in values.items() if name in _TRAINING_FIELDS - _RECIPE_FIELDS}
        switches = {name: value for name, value in values.items() if name not in fields | training}
        return self.replace(**fields, training=training, switches=switches)

    def without_tokens(self) -> "Recipe":
        """Returns the recipe without the user's names and tokens on the Hub."""
        training = {name: value for name, value in self.training.items() if not name.startswith(_PRIVATE_PREFIX)}
        return dataclasses.replace(self, training=training)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, without private ones."""
        return without_defaults(self.__getstate__()) | {"training": without_private(self.training)}

    def digest(self, *affects: str) -> str:
        """Returns a hash of all fields that change a run, or of those that affect any of these."""
        names = self.affecting(*(affects or ("data", "model", "training")))
        values = {name: value for name, value in self.to_dict().items() if name in names}
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# Fields of files and of the command line, and their types
_SECTIONS = ("switches", "training")
_RECIPE_FIELDS = {item.name for item in dataclasses.fields(Recipe)} - {*_SECTIONS}
_TRAINING_FIELDS = {item.name for item in dataclasses.fields(TrainingArguments) if item.init}
_TYPES = get_type_hints(TrainingArguments) | get_type_hints(Recipe)


def read_overrides(words: list[str]) -> dict[str, Any]:
    """Reads the overrides of a recipe from a command line, with those of `--set` under `"switches"`.

    The words of an option are read as a file's value; without any, the value is true.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--set", action="append", nargs="*", default=[])
    for name in _RECIPE_FIELDS | _TRAINING_FIELDS:
        parser.add_argument(f"--{name}", nargs="*")
        if bool in _kinds(name):  # as `HfArgumentParser` does
            parser.add_argument(f"--no_{name}", dest=name, action="store_const", const=["false"])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        names = [word.removeprefix("--").split("=")[0] for word in unknown if word.startswith("--")]
        check_keys("command line", names, _RECIPE_FIELDS | _TRAINING_FIELDS | {"set"})
        raise ValueError(f"command line: cannot read {' '.join(unknown)!r}")
    overrides = vars(arguments)
    texts = [text for values in overrides.pop("set") for text in values or [""]]
    for name, values in overrides.items():
        kinds = _kinds(name)
        if not values and bool not in kinds:
            raise ValueError(f"--{name} needs a value")
        is_list = len(values) > 1 or (list[str] in kinds and str not in kinds)
        overrides[name] = _read_value("command line", name, values if is_list else (values or [True])[0])
    if "text_template" in overrides:
        overrides["text_template"] = unescape(overrides["text_template"])
    return overrides | ({"switches": read_switches(texts)} if texts else {})


def read_switches(texts: list[str]) -> dict[str, Any]:
    """Reads the values of `--set`, each of the form `switch=value` in YAML."""
    switches = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"--set {text!r} must have the form switch=value")
        if name in switches:
            raise ValueError(f"--set {name} is given twice")
        switches[name] = None if value == "None" else parse_yaml(value)
    return switches


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Writes overrides as a command line: the inverse of `read_overrides`."""
    words = []
    for name, value in overrides.items():
        if name == "switches":
            for switch, setting in value.items():
                words += ["--set", f"{switch}={_word(setting)}"]
        elif name == "text_template" and value is not None:
            words += [f"--{name}", escape(value)]
        else:
            words += [f"--{name}", *map(_word, value if isinstance(value, list) else [value])]
    return words


def _word(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) or value is None else json.dumps(value)


def load_recipe(source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False) -> Recipe:
    """Reads a recipe, by the name of a shipped one or of a YAML file, and applies overrides.

    These are fields of `Recipe` and `TrainingArguments`, and `switches`, a mapping. `trust_parts` runs the parts that
    the file contains as code.
    """
    path = find("recipes", str(source))
    content = read_yaml(resolve_user_path(path))
    check_trusted(content, overrides or {}, str(path), trust_parts)
    return read_recipe(content, overrides, str(path))


def check_trusted(content: Mapping[str, Any], overrides: Mapping[str, Any], source: str, trust_parts: bool) -> None:
    """Raises `ValueError` if YAML, which may come from elsewhere, holds the code of parts, or names a kernel."""
    check_kernels(content, source)
    parts = content.get("parts")  # a list names files of this machine
    if isinstance(parts, Mapping) and not trust_parts and "parts" not in overrides:
        files = ", ".join(map(str, parts))
        raise ValueError(
            f"{source} holds code, which was not run: the attention parts in {files}; read it, and if you trust it "
            "add --trust-parts, or --parts with files of your own"
        )


def read_recipe(
    content: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, source: str = "recipe"
) -> Recipe:
    """Makes a recipe from the content of its file, `source`, whose stem names the default `output_dir`."""
    fields = dict(content)
    overrides = {name: str(value) if isinstance(value, Path) else value for name, value in (overrides or {}).items()}
    training = read_section(fields.pop("training", None), f"{source}: training")
    switches = read_section(fields.pop("switches", None), f"{source}: switches")
    check_keys(source, fields, _RECIPE_FIELDS | {*_SECTIONS})
    check_keys(f"{source}: training", training, _TRAINING_FIELDS)
    check_keys("arguments", overrides, _RECIPE_FIELDS | _TRAINING_FIELDS | {"switches"})
    switches = merged(switches, read_section(overrides.pop("switches", None), "arguments: switches"))
    for name, value in overrides.items():
        (fields if name in _RECIPE_FIELDS else training)[name] = value
    if fields.get("parts"):
        fields["parts"] = read_parts(fields["parts"], Path(source).parent)
    training.setdefault("output_dir", f"runs/{Path(source).stem}")
    check_type("output_dir", training["output_dir"], str)
    training["output_dir"] = str(results_folder(training["output_dir"]))
    if "model" not in fields:
        raise ValueError(f"{source}: the field 'model' is missing")
    for section in (fields, training):
        section.update({name: _read_value(source, name, value) for name, value in section.items()})
    recipe = Recipe(**fields, switches=switches, training=training)
    recipe.arguments  # noqa: B018 - a value that is not allowed is an error here
    return recipe


def _kinds(name: str) -> set[Any]:
    """Returns the type of a field, and those in it."""
    return {_TYPES[name], *get_args(_TYPES[name])}


def _read_value(source: str, name: str, value: Any) -> Any:
    """Returns a value of a file as its field's type, with a text such as `1e-3` as a number.

    Raises `ValueError` for what YAML did not read as text, such as `save_strategy: no`.
    """
    kind, kinds = _TYPES[name], _kinds(name)
    if str in kinds:
        # Optional text in `TrainingArguments` may be something else, as `fsdp: true`
        is_other = kinds & {bool, dict, dict[str, Any]} or (kind == str | None and name not in _RECIPE_FIELDS)
        if not is_other and isinstance(value, int | float | date):  # true and false are integers too
            raise ValueError(f"{source}: {name}={value!r} must be text; {QUOTE_IT}")
        if name == "metric_for_best_model":
            check_type(name, value, kind)
        return value
    if isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            value = parse_yaml(value)
        value = float(value) if type(value) is int and float in kinds else value
    # Null of a flag is false
    is_allowed = (type(value) is int and float in kinds) or (value is None and bool in kinds)
    if not is_allowed and {*(get_args(kind) or [kind])} <= {bool, int, float, type(None)}:
        check_type(name, value, kind)
    return value


def read_parts(parts: Sequence[str] | Mapping[str, str], folder: Path) -> dict[str, str]:
    """Loads attention parts from files, beside the recipe or in the working directory, or from texts by name.

    Returns their texts by name, for other machines.
    """
    if not isinstance(parts, Mapping):
        parts = parts if isinstance(parts, list | tuple) else [parts]
        parts = [str(each) if isinstance(each, Path) else each for each in parts]
    check_type("parts", parts, dict[str, str] if isinstance(parts, Mapping) else list[str])
    if not isinstance(parts, Mapping):
        texts = {}
        for name in parts:
            path = folder / name if (folder / name).is_file() else Path(name)
            if not path.is_file():
                raise ValueError(f"parts: there is no file {name}")
            texts[path.name] = read_text(resolve_user_path(path))
        parts = texts
    for name, text in parts.items():
        run_parts(name, text)
    return dict(parts)


def without_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the fields of a recipe's file that have their defaults."""
    return {name: value for name, value in content.items() if value != getattr(Recipe, name, ...)}


def without_private(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the fields of `TrainingArguments` with the user's folders, names and tokens."""
    return {
        name: value for name, value in fields.items() if name not in _PRIVATE and not name.startswith(_PRIVATE_PREFIX)
    }
