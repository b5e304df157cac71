"""Recipes: what to train, on which data, how. A YAML file whose every field the command line can override."""

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from modeling_nlq.configuration import find


def is_saved_model(name: str) -> bool:
    """Whether a recipe's `model` names weights to go on from (a folder, or a Hub name) rather than a configuration."""
    return Path(name).is_dir() or ("/" in name and not Path(name).is_file() and not name.endswith(".json"))


@dataclass
class Recipe:
    """The part of a recipe that is not `TrainingArguments`."""

    model: str = field(
        metadata={"help": "A shipped model configuration, a config.json, or a saved model (folder or Hub name) to go on from."}
    )
    dataset: str = field(
        default="python-stdlib",
        metadata={
            "help": "`python-stdlib`, `python-site-packages`, a Hub dataset or a local folder of one, or a local .txt "
            "(documents between blank lines), .jsonl or .parquet; text in UTF-8."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of a Hub dataset."})
    text_column: str = field(
        default="text",
        metadata={
            "help": "The dataset's column of text. A special token written in it, as <|endoftext|>, is text, not a boundary."
        },
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the dataset while training instead of storing it; needs max_steps."}
    )
    validation_fraction: float = field(
        default=0.02,
        metadata={
            "help": "Share of documents held out, chosen by a hash of their text, where the dataset has no validation split."
        },
    )
    max_validation_documents: int | None = field(default=None, metadata={"help": "Hold out at most so many documents."})
    test_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Share of documents held out once more, for a result that no choice was made by, where the dataset has no "
            "test split; 0 leaves the result out."
        },
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "`bpe:SIZE`, trained on the corpus, or a saved tokenizer (folder or Hub name); by default that of a saved "
            "model, else `bpe:8192`."
        },
    )
    block_size: int = field(default=1024, metadata={"help": "Length of a training sample, in tokens."})
    packing: Literal["stream", "documents"] = field(
        default="stream",
        metadata={
            "help": "`stream`: documents joined by end-of-text and cut into blocks; `documents`: the same blocks, where "
            "attention and positions restart at each document."
        },
    )
    num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the data."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention backend; by default the model's own choice."}
    )
    record_stability: bool = field(
        default=False, metadata={"help": "Record entropy, normaliser and scores of every attention layer while training."}
    )
    stability_steps: int = field(default=50, metadata={"help": "Record them every so many optimizer steps."})

    def __post_init__(self):
        for name in ("model", "dataset", "text_column"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a text")
        if self.tokenizer is None:
            self.tokenizer = self.model if is_saved_model(self.model) else "bpe:8192"
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction={self.validation_fraction} must be between 0 and 1")
        if not 0.0 <= self.test_fraction < 1.0 - self.validation_fraction:
            raise ValueError(f"test_fraction={self.test_fraction} must be at least 0, and leave documents to train on")
        if self.max_validation_documents is not None and self.max_validation_documents < 1:
            raise ValueError(f"max_validation_documents={self.max_validation_documents} must be at least 1")
        if self.stability_steps < 1:
            raise ValueError(f"stability_steps={self.stability_steps} must be at least 1")
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(f"block_size={self.block_size!r} must be a whole number of at least 2 tokens")
        if self.packing not in ("stream", "documents"):
            raise ValueError(f"packing={self.packing!r} must be 'stream' or 'documents'")


@dataclass
class ResolvedRecipe:
    """A recipe after the command line.

    Attributes:
        recipe: model, data and packing.
        switches: fields of the model configuration that the recipe sets.
        training_arguments: for `Trainer`.
        given: all that was given in the file and on the command line, but for `output_dir` and the like, as one mapping.
    """

    recipe: Recipe
    switches: dict[str, Any]
    training_arguments: TrainingArguments
    given: dict[str, Any]


class _RecipeParser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 takes `2e-5` for text: the number needs `2.0e-5` there. Here both are numbers.

    And of a key that is given twice it keeps the last without a word; here that is an error.
    """

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := sorted({key for key in keys if isinstance(key, str) and keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def check_keys(source: str, keys, known) -> None:
    """Raises `ValueError` for a key that is not known, with the nearest that is."""
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"
            raise ValueError(f"{source}: unknown field {key!r}{hint}")


def read_section(section: Any, source: str) -> dict[str, Any]:
    """A copy of a mapping in a YAML file, empty if it is not there.

    Raises:
        ValueError: if it is anything else.
    """
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"{source} must hold fields and values, not {section!r}")
    return dict(section or {})


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: if the file cannot be read or holds anything else.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_YamlLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold fields and values, not {type(content).__name__}")
    return content


def load_recipe(source: str, overrides: list[str] | None = None) -> ResolvedRecipe:
    """Reads a recipe and applies the command line.

    Args:
        source: the name of a shipped recipe or a YAML file.
        overrides: `--field value` for any field of `Recipe` or `TrainingArguments`, `--set switch=value` for the model.

    Raises:
        ValueError: for an unknown recipe, field or value.
    """
    path = find("recipes", source)
    return resolve_recipe(read_yaml(path), overrides, str(path))


def resolve_recipe(content: dict[str, Any], overrides: list[str] | None = None, source: str = "recipe") -> ResolvedRecipe:
    """A recipe from what its file holds.

    Args:
        content: the fields of `Recipe`, with `training` and `switches` as mappings of their own.
        overrides: as in `load_recipe`.
        source: where the content is from, for error messages; its stem names the default `output_dir`.

    Raises:
        ValueError: for an unknown field or value.
    """
    content = dict(content)
    training, switches = (read_section(content.pop(name, None), f"{source}: {name}") for name in ("training", "switches"))
    recipe_fields = {item.name for item in dataclasses.fields(Recipe)}
    training_fields = {item.name for item in dataclasses.fields(TrainingArguments) if item.init}
    check_keys(source, content, recipe_fields | {"training", "switches"})
    check_keys(f"{source}: training", training, training_fields)

    # argparse tells what the command line gives from what it fills in only by a first pass without defaults
    given_parser = _make_parser()
    given_parser.set_defaults(**dict.fromkeys(recipe_fields | training_fields, None))
    arguments, unknown = given_parser.parse_known_args(overrides or [])
    if unknown:
        options = {f"--{name}" for name in recipe_fields | training_fields | {"set"}}
        check_keys("command line", [word.split("=")[0] for word in unknown if word.startswith("--")], options)
        raise ValueError(f"command line: cannot read {' '.join(unknown)!r}")
    command_line = {name: value for name, value in vars(arguments).items() if value is not None and name != "set"}
    switches = {**switches, **dict(parse_switch(text) for text in arguments.set or [])}

    content.update({name: value for name, value in command_line.items() if name in recipe_fields})
    training.update({name: value for name, value in command_line.items() if name in training_fields})
    training.setdefault("output_dir", f"runs/{Path(source).stem}")
    parser = _make_parser()
    # What suits the device, unless the recipe says otherwise
    has_gpu = torch.cuda.is_available()
    # Without `use_cpu`, processes that `accelerate launch` starts on a machine without accelerator do not find each other
    device_defaults = {"dataloader_pin_memory": has_gpu, "use_cpu": not torch.accelerator.is_available()}
    if not {"bf16", "fp16"} & set(training):
        device_defaults["bf16"] = has_gpu and torch.cuda.is_bf16_supported()
    parser.set_defaults(**{**device_defaults, **content, **training})
    if "model" not in content:
        raise ValueError(f"{source}: the field 'model' is missing")
    namespace = parser.parse_args([])  # converts what YAML gave as text, such as 1e-3
    recipe, training_arguments = (
        kind(**{item.name: getattr(namespace, item.name) for item in dataclasses.fields(kind) if item.init})
        for kind in (Recipe, TrainingArguments)
    )
    # Where a run lies, where it goes on and whom it is shared with is no part of what it is; a token must not be written down
    private = ("output_dir", "resume_from_checkpoint", "push_to_hub")
    training = {name: value for name, value in training.items() if name not in private and not name.startswith("hub_")}
    return ResolvedRecipe(recipe, switches, training_arguments, {**content, "switches": switches, "training": training})


def _make_parser() -> _RecipeParser:
    parser = _RecipeParser((Recipe, TrainingArguments), add_help=False, allow_abbrev=False)
    for action in parser._actions:
        action.required = False
    parser.add_argument("--set", action="append", metavar="SWITCH=VALUE")
    return parser


def parse_switch(text: str) -> tuple[str, Any]:
    """Name and value of `switch=value`, the value read as YAML."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"--set {text!r} must have the form switch=value")
    return name, None if value == "None" else yaml.load(value, Loader=_YamlLoader)
