"""The file of a comparison as typed values: what it may hold, and how it is read and written."""

import functools
import itertools
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from scipy.stats.qmc import Halton
from transformers import TrainingArguments

from modeling_nlq import NLQConfig
from modeling_nlq.activations_nlq import did_you_mean
from modeling_nlq.configuration_nlq import check_kernels

from ...configuration import find
from ..disk import resolve_user_path
from ..files import check_keys, merged, read_section, read_yaml
from ..run.objectives import objective_in
from ..run.recipe import Recipe, check_trusted, override_words, without_defaults, without_private
from ..run.tasks import check_tasks
from ..sharing.scrub import without_folders
from ..size import ModelKind
from ..text import QUOTE_IT, check_name, check_number
from ..values import Value
from .inference import FIRST_INTERIM
from .lr_search import LEARNING_RATE, LIMIT, Range, Rates


SECTIONS = ("switches", "training")
# A comparison without `scales` and `conditions` has one scale, of a name that no file can give
SINGLE = "(single)"
# These differ between the runs of one model; `seeds` and `learning_rates` set them
_SET_BY_RUN = ("learning_rate", "seed", "data_seed")


class Axis(StrEnum):
    """Names the fields that cross models with something, and their folders of results."""

    SCALES = "scales"
    CONDITIONS = "conditions"

    @property
    def one(self) -> str:
        return self.removesuffix("s")


@dataclass(frozen=True)
class _Section(Value):
    """Fields of a file and their checked values; `None` if the file leaves a field out.

    `nulls` are the fields that are null in the file: a field of a recipe then has its default.
    """

    def __post_init__(self):
        super().__post_init__()
        self.rates  # noqa: B018 - raises for values that are not allowed
        check_set_by_run("training: ", getattr(self, "training", None) or {})
        seeds = getattr(self, "seeds", None)
        if seeds is not None:
            if not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):
                raise ValueError(f"seeds={seeds!r} must be a list of at least one whole number from 0 to 2**32 - 1")
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"seeds={seeds!r} holds a seed twice")
        ratio = getattr(self, "tokens_per_parameter", None)
        if ratio is not None and not 0 < ratio < math.inf:
            raise ValueError(f"tokens_per_parameter={ratio:g} must be a number above 0")

    @classmethod
    def read(cls, content: Any, source: str):
        content = read_section(content, source)
        known = cls.__dataclass_fields__
        check_keys(source, content, known.keys() - {"nulls"})
        values = {name: _read_field(name, value, source) for name, value in content.items()}
        if "nulls" in known:
            values["nulls"] = tuple(name for name, value in content.items() if value is None)
        try:
            return cls(**values)
        except ValueError as error:
            hint = f"; {QUOTE_IT}" if " must be text" in str(error) else ""
            raise ValueError(f"{source}: {error}{hint}") from None

    @property
    def rates(self) -> Rates | None:
        value = getattr(self, "learning_rates", None)
        if isinstance(value, SearchConfig):
            return Rates(start=value.start, factor=value.factor or 2.0, limit=value.limit or LIMIT)
        rates = value if isinstance(value, list) else [] if value is None else [value]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"learning_rates={rates!r} must be a list of numbers above 0")
        if len({f"{rate:g}" for rate in rates}) < len(rates):
            raise ValueError(f"learning_rates={rates!r} holds a rate twice")
        return Rates(listed=tuple(sorted(rates))) if rates else None

    def names(self) -> set[str]:
        """Returns the names of all fields that it sets of a recipe, its `switches` and its `training`."""
        return {*self.recipe_fields(), *(name for part in SECTIONS for name in getattr(self, part, None) or {})}

    def recipe_fields(self) -> dict[str, Any]:
        """Returns the fields that a recipe has too, without its sections; `None` is its default."""
        known = Recipe.__dataclass_fields__.keys() - {*SECTIONS}
        return {name: value for name, value in self.to_dict().items() if name in known}

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as in a file; `read` makes an equal section of them."""
        fields = {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}
        nulls = fields.pop("nulls", ())
        return {name: _plain(value) for name, value in fields.items() if value is not None or name in nulls}


def _read_field(name: str, value: Any, source: str) -> Any:
    """Reads the sections in a field; `Value` checks any other value."""
    if name == "learning_rates" and isinstance(value, list):
        return [float(rate) if type(rate) is int else rate for rate in value]
    if name == "contrast" and isinstance(value, Mapping):
        return {model: float(weight) if type(weight) is int else weight for model, weight in value.items()}
    if name in _SECTION_OF and isinstance(value, Mapping):
        return _SECTION_OF[name].read(value, f"{source}: {name}")
    if name in _SECTIONS_OF and value is not None:
        entries, entry = read_section(value, f"{source}: {name}"), f"{source}: {name.removesuffix('s')}"
        for key in entries:
            check_name(entry, key)
        return {key: _SECTIONS_OF[name].read(content, f"{entry} {key!r}") for key, content in entries.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, _Section):
        return value.to_dict()
    return {name: _plain(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def check_set_by_run(source: str, fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a field that differs between runs of one model."""
    if fixed := [name for name in _SET_BY_RUN if name in fields]:
        raise ValueError(f"{source}{', '.join(fixed)}: set seeds and learning_rates in the comparison's file instead")


@dataclass(frozen=True)
class SearchConfig(_Section):
    """The fields of a search for the learning rate, which each seed makes by itself."""

    start: float | None = None
    """The middle of the first three rates; needed."""
    factor: float | None = None
    """The ratio of neighbouring rates, from 1.05 to 100; by default 2."""
    limit: int | None = None
    """The most rates that a seed tries, at least 3; by default 8."""

    def __post_init__(self):
        super().__post_init__()
        if self.start is None:
            raise ValueError(f"start is missing; a search is {{start: RATE, factor: 2, limit: {LIMIT}}}")
        if not 0 < self.start < math.inf:
            raise ValueError(f"start={self.start:g} must be a number above 0")
        check_number("factor", self.factor, 1.05, 100)
        check_number("limit", self.limit, 3)


@dataclass(frozen=True)
class TuneConfig(_Section):
    """The fields of `tune`: nuisance parameters, which each seed searches for each model in the same way.

    The points are Halton's (1960), without scrambling, so that every version of SciPy makes the same.
    """

    trials: int | None = None
    """The points that are tried, at least 2: the recipe's own values, then quasi-random ones."""
    fields: dict[str, Any] | None = None
    """Fields of a recipe, of `TrainingArguments` or of the model's configuration, each `[low, high]`, evenly by
    logarithm, `{linear: [low, high]}`, or `{values: [...]}`."""
    at: Literal["first", "each", "baseline"] | None = None
    """The scales at which points are tried; by default the `first`, whose choices the larger ones take over. With
    `baseline`, which the rows of a screening have, all models take those of the baseline."""

    def __post_init__(self):
        super().__post_init__()
        if self.trials is None:
            raise ValueError("trials is missing; it must be a whole number, at least 2")
        check_number("trials", self.trials, 2)
        if not self.ranges:
            raise ValueError("fields holds nothing to tune")
        for name, entry in self.ranges.items():
            for value in entry.values:
                if all(point[name] != value for point in self.points[1:]):
                    enough = next(
                        count
                        for count in itertools.count(self.trials)
                        if value in [point.get(name) for point in self._points(count)]
                    )
                    raise ValueError(f"trials={self.trials} leaves out {name}={value!r}; set trials: {enough}")

    @functools.cached_property
    def ranges(self) -> dict[str, Range]:
        return {name: Range.read(name, content) for name, content in (self.fields or {}).items()}

    @functools.cached_property
    def points(self) -> list[dict[str, Any]]:
        """The values of each point by field; the first has none, for they are the recipe's."""
        return self._points(self.trials)

    def _points(self, trials: int) -> list[dict[str, Any]]:
        sampler = Halton(len(self.ranges), scramble=False)
        sampler.fast_forward(1)  # of the origin
        shares = sampler.random(trials - 1)
        names = self.ranges.items()
        return [{}, *({name: entry.at(share) for (name, entry), share in zip(names, point)} for point in shares)]

    def changes(self, trial: int | None) -> dict[str, Any]:
        """Returns the values of a point, without the learning rate, which is searched from there."""
        values = {} if trial is None else self.points[trial]
        return {name: value for name, value in values.items() if name != LEARNING_RATE}


@dataclass(frozen=True)
class FactorConfig(_Section):
    """The fields of a change in `factors`."""

    switches: dict[str, Any] | None = None
    """Fields of the model's configuration."""
    training: dict[str, Any] | None = None
    """Fields of `transformers.TrainingArguments`."""


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The fields of a model in `models`: how it differs from the recipe. A text alone is its `model`."""

    model: str | None = None
    """As in a recipe."""
    trainable: Literal["all", "new"] | None = None
    """As in a recipe."""
    lora: dict[str, Any] | None = None
    """As in a recipe."""
    optimizer: Literal["adamw", "muon"] | None = None
    """As in a recipe."""
    parametrization: Literal["standard", "completep"] | None = None
    """As in a recipe."""
    base_sizes: dict[str, Any] | None = None
    """As in a recipe."""
    learning_rates: float | list[float] | SearchConfig | None = None
    """In place of those of the comparison."""
    match: Literal["parameters", "flops"] | None = None
    """In place of that of the comparison; `null` keeps the model's own MLP width."""
    switches: dict[str, Any] | None = None
    """Fields of the model's configuration."""
    training: dict[str, Any] | None = None
    """Fields of `transformers.TrainingArguments`."""
    nulls: tuple[str, ...] = ()

    @classmethod
    def read(cls, content: Any, source: str) -> "ModelConfig":
        return super().read({"model": content} if isinstance(content, str) else content, source)

    def with_changes(self, more: "ModelConfig", source: str) -> "ModelConfig":
        before, changes = self.to_dict(), more.to_dict()
        for section in SECTIONS:
            if section in changes:
                changes[section] = {**(before.get(section) or {}), **(changes[section] or {})}
        return self.read({**before, **changes}, source)


@dataclass(frozen=True)
class ScaleConfig(_Section):
    """The fields of a scale in `scales`. They replace the fields of the comparison."""

    model: str | None = None
    """As in a recipe."""
    tokenizer: str | None = None
    """As in a recipe."""
    task: dict[str, Any] | None = None
    """Fields of the recipe's `task` that differ."""
    block_size: int | None = None
    """As in a recipe."""
    switches: dict[str, Any] | None = None
    """Fields of the configuration of all models at this scale."""
    training: dict[str, Any] | None = None
    """Fields of `transformers.TrainingArguments` of all models at this scale."""
    models: dict[str, ModelConfig] | None = None
    """What differs at this scale, by the names of the comparison's models."""
    tokens_per_parameter: float | None = None
    """As in the comparison."""
    seeds: list[int] | None = None
    """As in the comparison."""
    nulls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConditionConfig(ScaleConfig):
    """The fields of a condition in `conditions`: a scale has these too, but only some fields of a recipe."""

    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of a recipe, which checks their values."""

    @classmethod
    def read(cls, content: Any, source: str) -> "ConditionConfig":
        content = read_section(content, source)
        own = ScaleConfig.__dataclass_fields__.keys() - {"nulls"}
        # One condition may neither run code of its own nor predict something else
        check_keys(source, content, own | Recipe.__dataclass_fields__.keys() - {"parts", "objective"})
        others = {name: content.pop(name) for name in content.keys() - own}
        return super().read({**content, "others": others}, source)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        return fields | fields.pop("others")


@dataclass(frozen=True)
class PrimaryConfig(_Section):
    """The fields of `primary`: one test, which the comparison is made for."""

    contrast: dict[str, float] | None = None
    """A weight for each model, 0 in all: the weighted sum of losses in percent of the baseline's loss."""
    interaction: dict[str, list[str]] | None = None
    """A model and two conditions: its improvement under the second minus that under the first."""
    trend: str | None = None
    """A model of a ladder."""
    margin: float | None = None
    """In percent; smaller values are called equivalent."""

    def check(self, config: "ComparisonConfig") -> None:
        needs = {"contrast": config.axis, "interaction": Axis.CONDITIONS, "trend": Axis.SCALES}
        given = [name for name in needs if getattr(self, name) is not None]
        if len(given) != 1 or needs[given[0]] is not config.axis:
            here = " or ".join(name for name, axis in needs.items() if axis is config.axis)
            raise ValueError(f"primary holds {' and '.join(given) or 'no test'}; here it must be one {here}")
        check_number("primary: margin", self.margin, 0)
        if (weights := self.contrast) is not None:
            check_keys("primary: contrast", weights, config.models)
            if not any(weights.values()) or not abs(sum(weights.values())) <= 1e-9:  # also for NaN
                raise ValueError(f"primary: contrast={weights!r} must have weights that sum to 0, not all of them 0")
            return
        tested = {self.trend: []} if self.interaction is None else self.interaction
        if len(tested) != 1 or not tested.keys() <= config.models.keys() - {config.baseline}:
            raise ValueError(f"primary: {given[0]}: {', '.join(tested)} must be one model besides the baseline")
        (pair,) = tested.values()
        if self.interaction and not (len(pair) == len(config.conditions.keys() & pair) == 2):
            raise ValueError(f"primary: interaction: {pair!r} must be two of {', '.join(config.conditions)}")


@dataclass(frozen=True)
class ConfirmConfig(_Section):
    """The fields of `confirm`, as in a comparison; the screening chooses the others itself."""

    learning_rates: float | list[float] | SearchConfig | None = None
    seeds: list[int] | None = None
    stop: Literal["early"] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.seeds is not None and len(self.seeds) < FIRST_INTERIM:
            raise ValueError(f"seeds={self.seeds!r} must be {FIRST_INTERIM} or more; set confirm: {{seeds: ...}}")


@dataclass(frozen=True)
class ComparisonConfig(_Section):
    """The fields of a comparison's file."""

    recipe: str | dict[str, Any] | None = None
    """A shipped recipe, a YAML file, or the fields of one: what all models share."""
    baseline: str | None = None
    """The model that the others are compared with."""
    models: dict[str, ModelConfig] | None = None
    """The models by name."""
    factors: dict[str, FactorConfig] | None = None
    """In place of `models`: changes that are screened, each with `switches` and `training`."""
    confirm: ConfirmConfig | None = None
    """With `factors`: `learning_rates`, `seeds` and `stop` of the comparison that confirms what survives."""
    scales: dict[str, ScaleConfig] | None = None
    """The sizes at which the models are compared, from the smallest to the largest."""
    conditions: dict[str, ConditionConfig] | None = None
    """Changes of the recipe, each with its own baseline; all models are compared under each."""
    primary: PrimaryConfig | None = None
    """The test that the comparison is made for."""
    tokens_per_parameter: float | None = None
    """The tokens of a run for each non-embedding parameter of the baseline, in place of `max_steps`."""
    learning_rates: float | list[float] | SearchConfig | None = None
    """One rate for all models, a list that each seed tries, or a search."""
    tune: TuneConfig | None = None
    """Nuisance parameters that are tuned too, for each model by each seed."""
    seeds: list[int] | None = None
    """Each model is trained with every seed."""
    stop: Literal["early"] | None = None
    """Models leave at interim analyses, as soon as there is a verdict about them."""
    tasks: list[str] | None = None
    """Downstream tasks on which every reported run is evaluated."""
    match: Literal["parameters", "flops"] | None = None
    """The MLP of each model gets the width that meets the baseline's budget."""
    training: dict[str, Any] | None = None
    """Fields of `transformers.TrainingArguments`, for all models."""
    switches: dict[str, Any] | None = None
    """Fields of the configuration, for all models."""
    name: str | None = None
    """By default the name of the file."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("factors", "scales", "stop"):
            if self.conditions is not None and getattr(self, name) is not None:
                raise ValueError(f"conditions and {name} exclude each other")
            if self.primary is not None and name != "scales" and getattr(self, name) is not None:
                raise ValueError(f"primary and {name} exclude each other: it is tested once, with all runs")
        if self.factors is None:
            self._check_models()
        if self.tune is not None:
            self._check_tuned(set(self.tune.fields))
        if self.stop is not None and (self.scales is not None or self.tasks is not None):
            raise ValueError("stop: early needs a comparison at one scale, without tasks: each of them needs all runs")
        if self.stop is not None and self.seeds is not None and len(self.seeds) <= FIRST_INTERIM:
            early = f"stop: early has its first interim analysis at {FIRST_INTERIM} seeds"
            raise ValueError(f"{early}, and seeds={self.seeds!r} has no more")

    def _check_tuned(self, tuned: set[str]) -> None:
        """Raises `ValueError` if a tuned field has other values somewhere."""
        check_set_by_run("tune: fields: ", dict.fromkeys(tuned - {LEARNING_RATE}))
        named = {*Recipe.__dataclass_fields__, *TrainingArguments.__dataclass_fields__}
        for name in sorted(tuned - named - NLQConfig.__dataclass_fields__.keys()):
            if hint := did_you_mean(name, named):  # else it may be a field of another model's configuration
                raise ValueError(f"tune: fields: {name!r} is unknown; {hint.strip()}")
        if private := sorted(tuned - without_private(dict.fromkeys(tuned)).keys()):
            raise ValueError(f"tune: fields: {', '.join(private)}: folders and names cannot be tuned")
        sections = {f"model {name!r}": model for name, model in (self.models or {}).items()}
        sections |= {f"factor {name!r}": factor for name, factor in (self.factors or {}).items()}
        for name, scale in self.scale_configs.items() if self.axis else ():
            at = f"{self.axis.one} {name!r}"
            changes = {f"{at}: model {model!r}": fields for model, fields in (scale.models or {}).items()}
            sections |= {at: scale, **changes}
        for where, section in sections.items():
            if both := sorted(tuned & section.names()):
                raise ValueError(f"tune: fields: {', '.join(both)}: {where} sets that; remove one")
        if self.factors is not None:
            if LEARNING_RATE in tuned:
                raise ValueError(f"tune: fields: {LEARNING_RATE}: a screening has it as a factor; remove it")
            return
        rates = {"learning_rates": self.rates, **{where: section.rates for where, section in sections.items()}}
        for where, entry in rates.items():
            most = 1 if LEARNING_RATE not in tuned else 0
            if entry is not None and len(entry.listed) > most:
                hint = "a search, {start: RATE}" + (" or one rate" if most else "")
                raise ValueError(f"{where}: with tune, learning_rates must be {hint}; a list chooses by itself")

    def _check_models(self) -> None:
        models = self.models or {}
        if self.confirm is not None:
            raise ValueError("confirm needs factors")
        if self.baseline not in models:
            names = ", ".join(models) or "(none given)"
            raise ValueError(f"baseline={self.baseline!r} must be one of the models {names}")
        if len(models) < 2:
            raise ValueError(f"models holds only the baseline {self.baseline!r}; there is nothing to compare it with")
        for name, scale in self.scale_configs.items() if self.axis else ():
            check_keys(f"{self.axis.one} {name!r}: models", scale.models or {}, models)
        if self.axis is not None and len(self.scale_configs) < 2:
            names = ", ".join(map(repr, self.scale_configs)) or "nothing"
            needs = "a ladder needs" if self.axis is Axis.SCALES else "models are crossed with"
            raise ValueError(f"{self.axis} holds only {names}; {needs} two or more")
        if self.primary is not None:
            self.primary.check(self)

    @property
    def axis(self) -> Axis | None:
        return next((axis for axis in Axis if getattr(self, axis) is not None), None)

    @property
    def scale_configs(self) -> dict[str, ScaleConfig]:
        """The scales or conditions; without any, one that changes nothing."""
        return {SINGLE: ScaleConfig()} if self.axis is None else getattr(self, self.axis)

    @property
    def family(self) -> int:
        """The number of tests that are corrected together, at each scale or under all conditions."""
        models, many, is_crossed = len(self.models) - 1, len(self.scale_configs), self.axis is Axis.CONDITIONS
        if self.primary is None:
            return models * many if is_crossed else models
        others = math.comb(many, 2) if is_crossed else self.axis is Axis.SCALES
        return models * (many + others) - (self.primary.contrast is None)

    def source_of(self, scale: str, source: str) -> str:
        return source if self.axis is None else f"{source}: {self.axis.one} {scale!r}"

    def at_scale(self, name: str, source: str) -> "ComparisonConfig":
        """Returns the comparison at one scale, whose fields replace its own."""
        scale = self.scale_configs[name]
        seeds = scale.seeds or self.seeds
        if seeds is None:
            raise ValueError(f"{source}: seeds is missing; it must be a list of whole numbers")
        models = dict(self.models)
        for model, changes in (scale.models or {}).items():
            models[model] = models[model].with_changes(changes, f"{source}: model {model!r}")
        return replace(
            self,
            name=self.name if self.axis is None else f"{self.name}, {name}",
            models=models,
            scales=None,
            conditions=None,
            primary=self.primary if self.axis is None else None,
            seeds=seeds,
            tokens_per_parameter=scale.tokens_per_parameter or self.tokens_per_parameter,
        )

    def without_seeds(self) -> "ComparisonConfig":
        scales = {name: replace(entry, seeds=None) for name, entry in self.scale_configs.items()}
        return replace(self, seeds=None, **({self.axis: scales} if self.axis else {}))


# Fields that hold a section, and fields that hold sections by name
_SECTION_OF = {"learning_rates": SearchConfig, "confirm": ConfirmConfig, "tune": TuneConfig, "primary": PrimaryConfig}
_SECTIONS_OF = {"models": ModelConfig, "factors": FactorConfig, "scales": ScaleConfig, "conditions": ConditionConfig}


@dataclass(frozen=True)
class ComparisonFile:
    """The file of a comparison or a screening. Its recipe has the file's `switches` and `training`."""

    source: str
    config: ComparisonConfig
    recipe: dict[str, Any]
    recipe_source: str
    overrides: dict[str, Any]
    command: str


def read_file(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> ComparisonFile:
    """Reads the file of a comparison or a screening, and the recipe of its models; arguments as for `load_recipe`."""
    path = find("comparisons", str(source))
    content = read_yaml(resolve_user_path(path))
    misplaced = TrainingArguments.__dataclass_fields__.keys() - {*ComparisonConfig.__dataclass_fields__, *_SET_BY_RUN}
    if fields := [key for key in content if key in misplaced]:
        raise ValueError(f"{path}: unknown field {fields[0]!r}; set it in the section 'training'")
    config = ComparisonConfig.read({**content, "name": _name_in(content, path)}, str(path))
    overrides = dict(overrides or {})
    check_set_by_run("arguments: ", overrides)
    recipe, recipe_source = config.recipe, f"{path}: recipe"
    if not recipe:
        raise ValueError(f"{path}: the field 'recipe' is missing")
    if isinstance(recipe, str):
        recipe_source = str(find("recipes", recipe))
        recipe = read_yaml(resolve_user_path(recipe_source))
    check_trusted(recipe, overrides, recipe_source, trust_parts)
    check_kernels(content, str(path))
    objective = objective_in(recipe)
    if config.tasks is not None:
        if objective.kind is not ModelKind.DECODER:
            raise ValueError(f"{path}: tasks={config.tasks!r}: lm_eval's tasks need decoders; set objective: causal")
        check_tasks(config.tasks)
    defaults = {"test_fraction": 0.02, "record_stability": "record_stability" in Recipe.read_by(objective)}
    recipe = with_sections({**defaults, **recipe}, config, recipe_source)
    if isinstance(config.recipe, str) and (config.switches or config.training):
        recipe_source = f"{path} with {recipe_source}"
    shown = Path(source).name if Path(source).is_file() else str(source)
    command = shlex.join(["nlq", "compare", shown, *override_words(without_folders(without_private(overrides)))])
    config = replace(config, switches=None, training=None)
    if config.tune is not None:
        if both := [name for name in config.tune.fields if name in {*overrides, *overrides.get("switches", {})}]:
            raise ValueError(f"command line: {', '.join(both)}: {path}: tune sets that; change it in the file")
        if config.learning_rates is None and config.factors is None:
            rate, tuned = recipe["training"].get(LEARNING_RATE), config.tune.ranges.get(LEARNING_RATE)
            if rate is None and tuned is None:
                raise ValueError(f"{path}: learning_rates is missing")
            # The recipe's own, or the middle of the range
            start = float(tuned.at(0.5) if rate is None else rate)
            config = replace(config, learning_rates=SearchConfig(start))
    return ComparisonFile(str(path), config, recipe, recipe_source, overrides, command)


def read_made_from(content: Mapping[str, Any], source: str) -> ComparisonConfig:
    """Reads the `comparison.yaml` of a results folder, without defaults that older versions wrote."""
    config = ComparisonConfig.read(content, source)
    if not isinstance(config.recipe, dict):
        return config
    return replace(config, recipe=without_defaults(config.recipe))


def with_sections(recipe: Mapping[str, Any], section: _Section, source: str) -> dict[str, Any]:
    """Returns a recipe with the fields and sections of a comparison, a scale or a model; null is a default."""
    sections = {
        name: merged(read_section(recipe.get(name), f"{source}: {name}"), getattr(section, name) or {})
        for name in SECTIONS
    }
    fields = section.recipe_fields()
    if fields.get("task") and "dataset" not in fields:
        sections["task"] = {**(recipe.get("task") or {}), **fields["task"]}
    # All models need one, so null leaves the recipe's
    cleared = [name for name, value in fields.items() if value is None and name != "model"]
    fields = {name: value for name, value in fields.items() if value is not None}
    return {**{name: value for name, value in recipe.items() if name not in cleared}, **fields, **sections}


def default_folder(name: str) -> Path:
    return Path(f"runs/compare-{name}")


def read_default_folder(source: str) -> Path:
    """Returns the results folder by the name in a file."""
    path = find("comparisons", source)
    return default_folder(_name_in(read_yaml(resolve_user_path(path)), path))


def _name_in(content: Mapping[str, Any], path: Path) -> str:
    name = content.get("name")
    if not isinstance(name, bool):
        name = " ".join(str(name or path.stem).split())
    check_name(f"{path}: name", name)
    return name
