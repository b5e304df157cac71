"""The fields of a comparison's file: what the reader accepts, and what the reference of the documentation shows."""

from typing import Any, Literal, TypedDict


class SearchOfRates(TypedDict, total=False):
    """A search for the learning rate, which each seed makes by itself."""

    start: float
    """The middle of the first three rates."""
    factor: float
    """The ratio of neighbouring rates, from 1.05 to 100; by default 2."""
    limit: int
    """The most rates that a seed tries, at least 3; by default 8."""


class ModelFields(TypedDict, total=False):
    """The fields of a model in `models`: how it differs from the recipe. A text alone is its `model`."""

    model: str
    """As in a recipe."""
    trainable: Literal["all", "new"]
    """As in a recipe."""
    lora: dict[str, Any]
    """As in a recipe."""
    parametrization: Literal["standard", "completep"]
    """As in a recipe."""
    base_sizes: dict[str, int]
    """As in a recipe."""
    switches: dict[str, Any]
    """Fields of the model's configuration."""
    training: dict[str, Any]
    """Fields of `transformers.TrainingArguments`."""
    learning_rates: float | list[float] | SearchOfRates
    """In place of those of the comparison."""
    match: Literal["parameters", "flops"] | None
    """In place of that of the comparison; `null` keeps the model's own MLP width."""


class ScaleFields(TypedDict, total=False):
    """The fields of a scale in `scales`, in place of those of the comparison."""

    model: str
    """As in a recipe."""
    tokenizer: str
    """As in a recipe."""
    block_size: int
    """As in a recipe."""
    switches: dict[str, Any]
    """Fields of the configuration of all models at this scale."""
    training: dict[str, Any]
    """Fields of `transformers.TrainingArguments` of all models at this scale."""
    models: dict[str, ModelFields]
    """What differs at this scale, by the names of the comparison's models."""
    tokens_per_parameter: float
    """As in the comparison."""
    seeds: list[int]
    """As in the comparison."""


class ComparisonFields(TypedDict, total=False):
    """The fields of a comparison's file."""

    name: str
    """By default the name of the file."""
    recipe: str | dict[str, Any]
    """A shipped recipe, a YAML file, or the fields of one: what all models share."""
    baseline: str
    """The model that the others are compared with."""
    models: dict[str, ModelFields]
    """The models by name."""
    factors: dict[str, ModelFields]
    """In place of `models`: changes that are screened, each with `switches` and `training`."""
    confirm: dict[str, Any]
    """With `factors`: `learning_rates`, `seeds` and `stop` of the comparison that confirms what survives."""
    scales: dict[str, ScaleFields]
    """The sizes at which the models are compared, from the smallest to the largest."""
    tokens_per_parameter: float
    """The tokens of a run for each non-embedding parameter of the baseline, in place of `max_steps`."""
    learning_rates: float | list[float] | SearchOfRates
    """One rate for all models, a list that each seed tries, or a search."""
    seeds: list[int]
    """Each model is trained with every seed."""
    stop: Literal["early"]
    """Models leave at interim analyses, as soon as there is a verdict about them."""
    tasks: list[str]
    """Downstream tasks on which every reported run is evaluated."""
    match: Literal["parameters", "flops"]
    """The MLP of each model gets the width that meets the baseline's budget."""
    training: dict[str, Any]
    """Fields of `transformers.TrainingArguments`, for all models."""
    switches: dict[str, Any]
    """Fields of the configuration, for all models."""
