"""The file of a comparison as typed values, and how it is read."""

import itertools
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainingArguments

from modeling_nlq import NLQConfig
from modeling_nlq.activations_nlq import did_you_mean
from modeling_nlq.parts_user_nlq import check_kernels

from ...configuration import find
from ..disk import resolve_user_path
from ..files import check_keys, merged, read_section, read_yaml
from ..run.objectives import objective_in
from ..run.recipe import Recipe, check_trusted, override_words, without_defaults, without_private
from ..run.tasks import check_tasks
from ..sharing.scrub import without_folders
from ..size import ModelKind
from ..text import check_name
from .inference import FIRST_INTERIM
from .lr_search import LEARNING_RATE
from .sections import (
    SECTIONS,
    SEEDS,
    SET_BY_RUN,
    SINGLE,
    Axis,
    ConditionConfig,
    ConfirmConfig,
    FactorConfig,
    ModelConfig,
    PrimaryConfig,
    ScaleConfig,
    SearchConfig,
    SectionConfig,
    TuneConfig,
    check_set_by_run,
)


if TYPE_CHECKING:
    from .publication import Published


@dataclass(frozen=True)
class ComparisonConfig(SectionConfig):
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
    """The test or the contrasts that the comparison is made for."""
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
        return models * (many + others) - (not self.primary.by_name)

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

    @property
    def all_seeds(self) -> list[int]:
        """The seeds of all scales and conditions."""
        sections = (self, *self.scale_configs.values())
        return sorted({seed for section in sections for seed in section.seeds or ()})

    def with_fresh_seeds(self) -> "ComparisonConfig":
        """Returns the comparison with as many others: the next after its largest, where equal ones stay equal.

        After the largest that there is come those from 0.
        """
        known = self.all_seeds
        others = (seed % SEEDS for seed in itertools.count(known[-1] + 1) if seed % SEEDS not in known)
        fresh = dict(zip(known, others))

        def renewed(section: Any) -> Any:
            return replace(section, seeds=section.seeds and [fresh[seed] for seed in section.seeds])

        scales = {name: renewed(entry) for name, entry in self.scale_configs.items()}
        return replace(renewed(self), **({self.axis: scales} if self.axis else {}))

    def without_seeds(self) -> "ComparisonConfig":
        scales = {name: replace(entry, seeds=None) for name, entry in self.scale_configs.items()}
        return replace(self, seeds=None, **({self.axis: scales} if self.axis else {}))


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
    source: str | Path,
    overrides: Mapping[str, Any] | None = None,
    trust_parts: bool = False,
    published: "Published | None" = None,
) -> ComparisonFile:
    """Reads the file of a comparison or a screening, and the recipe of its models; arguments as for `load_recipe`.

    With `published`, the source is that comparison of the Hub.
    """
    path = find("comparisons", str(source)) if published is None else published.file
    content = read_yaml(resolve_user_path(path)) if published is None else published.content
    misplaced = TrainingArguments.__dataclass_fields__.keys() - {*ComparisonConfig.__dataclass_fields__, *SET_BY_RUN}
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
    defaults = {"test_fraction": 0.02, **_stability(recipe, published is None)}
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
    """Reads the `comparison.yaml` of a results folder, with the defaults that this version writes."""
    config = ComparisonConfig.read(content, source)
    if not isinstance(config.recipe, dict):
        return config
    return replace(config, recipe=as_written(config.recipe))


def as_written(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the defaults of a recipe, except where comparisons have other defaults."""
    others = {"test_fraction": recipe.get("test_fraction", Recipe.test_fraction)}
    return without_defaults(recipe) | others | _stability(recipe, recipe.get("record_stability", False))


def _stability(recipe: Mapping[str, Any], value: bool) -> dict[str, bool]:
    return {"record_stability": value} if "record_stability" in Recipe.read_by(objective_in(recipe)) else {}


def with_sections(recipe: Mapping[str, Any], section: SectionConfig, source: str) -> dict[str, Any]:
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
    check_name(f"{path}: set name, because the file's is refused:" if name == path.stem else f"{path}: name", name)
    return name
