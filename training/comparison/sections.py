"""The sections of a comparison's file as typed values: models, scales, conditions, and what is searched."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from scipy.stats.qmc import Halton

from ..files import check_keys, read_section
from ..run.recipe import Recipe
from ..text import QUOTE_IT, check_name, check_number
from ..values import Value
from .inference import FIRST_INTERIM
from .lr_search import LEARNING_RATE, LIMIT, Range, Rates


if TYPE_CHECKING:
    from .config import ComparisonConfig


SECTIONS = ("switches", "training")
# A comparison without `scales` and `conditions` has one scale, of a name that no file can give
SINGLE = "(single)"
# These differ between the runs of one model; `seeds` and `learning_rates` set them
SET_BY_RUN = ("learning_rate", "seed", "data_seed")
SEEDS = 2**32  # of NumPy, from 0


class Axis(StrEnum):
    """Names the fields that cross models with something, and their folders of results."""

    SCALES = "scales"
    CONDITIONS = "conditions"

    @property
    def one(self) -> str:
        return self.removesuffix("s")


@dataclass(frozen=True)
class SectionConfig(Value):
    """Fields of a file and their checked values; `None` if the file leaves a field out.

    `nulls` are the fields that are null in the file: a field of a recipe then has its default.
    """

    def __post_init__(self):
        super().__post_init__()
        self.rates  # noqa: B018 - raises for values that are not allowed
        check_set_by_run("training: ", getattr(self, "training", None) or {})
        seeds = getattr(self, "seeds", None)
        if seeds is not None:
            if not seeds or not all(type(seed) is int and 0 <= seed < SEEDS for seed in seeds):
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
    if name == "contrasts" and isinstance(value, Mapping):
        for key in value:
            check_name(f"{source}: {name}", key)
        entries = {key: read_section(weights, f"{source}: {name}: {key}") for key, weights in value.items()}
        return {key: _read_field("contrast", weights, source) for key, weights in entries.items()}
    if name in _SECTION_OF and isinstance(value, Mapping):
        return _SECTION_OF[name].read(value, f"{source}: {name}")
    if name in _SECTIONS_OF and value is not None:
        entries, entry = read_section(value, f"{source}: {name}"), f"{source}: {name.removesuffix('s')}"
        for key in entries:
            check_name(entry, key)
        return {key: _SECTIONS_OF[name].read(content, f"{entry} {key!r}") for key, content in entries.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, SectionConfig):
        return value.to_dict()
    return {name: _plain(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def check_set_by_run(source: str, fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a field that differs between runs of one model."""
    if fixed := [name for name in SET_BY_RUN if name in fields]:
        raise ValueError(f"{source}{', '.join(fixed)}: set seeds and learning_rates in the comparison's file instead")


@dataclass(frozen=True)
class SearchConfig(SectionConfig):
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
class TuneConfig(SectionConfig):
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
class FactorConfig(SectionConfig):
    """The fields of a change in `factors`."""

    switches: dict[str, Any] | None = None
    """Fields of the model's configuration."""
    training: dict[str, Any] | None = None
    """Fields of `transformers.TrainingArguments`."""


@dataclass(frozen=True)
class ModelConfig(SectionConfig):
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

    def match_in(self, comparison: "ComparisonConfig") -> str | None:
        """What its MLP width is matched by; its own null turns off what the comparison says."""
        return self.match if "match" in self.nulls else self.match or comparison.match

    def with_changes(self, more: "ModelConfig", source: str) -> "ModelConfig":
        before, changes = self.to_dict(), more.to_dict()
        for section in SECTIONS:
            if section in changes:
                changes[section] = {**(before.get(section) or {}), **(changes[section] or {})}
        return self.read({**before, **changes}, source)


@dataclass(frozen=True)
class ScaleConfig(SectionConfig):
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
    keep_learning_rates: bool | None = None
    """Whether each seed keeps the rate that it chose last, at a smaller scale, without another search."""
    nulls: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConditionConfig(ScaleConfig):
    """The fields of a condition in `conditions`: a scale has these too, but only some fields of a recipe."""

    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of a recipe, which checks their values."""

    @classmethod
    def read(cls, content: Any, source: str) -> "ConditionConfig":
        content = read_section(content, source)
        own = ScaleConfig.__dataclass_fields__.keys() - {"keep_learning_rates", "nulls"}
        # One condition may neither run code of its own nor predict something else
        check_keys(source, content, own | Recipe.__dataclass_fields__.keys() - {"parts", "objective"})
        others = {name: content.pop(name) for name in content.keys() - own}
        return super().read({**content, "others": others}, source)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        return fields | fields.pop("others")


@dataclass(frozen=True)
class PrimaryConfig(SectionConfig):
    """The fields of `primary`: the test or the contrasts that the comparison is made for."""

    contrast: dict[str, float] | None = None
    """A weight for each model, 0 in all: the weighted sum of losses in percent of the baseline's loss."""
    contrasts: dict[str, dict[str, float]] | None = None
    """Several contrasts by name, each corrected for their number."""
    interaction: dict[str, list[str]] | None = None
    """A model and two conditions: its improvement under the second minus that under the first."""
    trend: str | None = None
    """A model of a ladder."""
    margin: float | None = None
    """In percent; smaller values are called equivalent."""

    @property
    def by_name(self) -> dict[str, dict[str, float]]:
        """The contrasts; a single one has no name."""
        return self.contrasts or ({} if self.contrast is None else {"": self.contrast})

    def check(self, config: "ComparisonConfig") -> None:
        of_losses = dict.fromkeys(("contrast", "contrasts"), config.axis)
        needs = {**of_losses, "interaction": Axis.CONDITIONS, "trend": Axis.SCALES}
        given = [name for name in needs if getattr(self, name) is not None]
        if len(given) != 1 or needs[given[0]] is not config.axis:
            here = ", ".join(name for name, axis in needs.items() if axis is config.axis)
            raise ValueError(f"primary holds {' and '.join(given) or 'no test'}; here it must be one of {here}")
        check_number("primary: margin", self.margin, 0)
        if self.contrasts == {}:
            raise ValueError("primary: contrasts holds nothing")
        for name, weights in self.by_name.items():
            where = f"contrasts: {name}" if name else "contrast"
            check_keys(f"primary: {where}", weights, config.models)
            if not any(weights.values()) or not abs(sum(weights.values())) <= 1e-9:  # also for NaN
                raise ValueError(f"primary: {where}={weights!r} must have weights that sum to 0, not all of them 0")
        if self.by_name:
            return
        tested = {self.trend: []} if self.interaction is None else self.interaction
        if len(tested) != 1 or not tested.keys() <= config.models.keys() - {config.baseline}:
            raise ValueError(f"primary: {given[0]}: {', '.join(tested)} must be one model besides the baseline")
        (pair,) = tested.values()
        if self.interaction and not (len(pair) == len(config.conditions.keys() & pair) == 2):
            raise ValueError(f"primary: interaction: {pair!r} must be two of {', '.join(config.conditions)}")


@dataclass(frozen=True)
class ConfirmConfig(SectionConfig):
    """The fields of `confirm`, as in a comparison; the screening chooses the others itself."""

    learning_rates: float | list[float] | SearchConfig | None = None
    seeds: list[int] | None = None
    stop: Literal["early"] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.seeds is not None and len(self.seeds) < FIRST_INTERIM:
            raise ValueError(f"seeds={self.seeds!r} must be {FIRST_INTERIM} or more; set confirm: {{seeds: ...}}")


# Fields that hold a section, and fields that hold sections by name
_SECTION_OF = {"learning_rates": SearchConfig, "confirm": ConfirmConfig, "tune": TuneConfig, "primary": PrimaryConfig}
_SECTIONS_OF = {"models": ModelConfig, "factors": FactorConfig, "scales": ScaleConfig, "conditions": ConditionConfig}
