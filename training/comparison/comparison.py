"""The plan of a comparison: models, learning rates and seeds on one recipe, at one scale or at several.

Every model is sized, and every run checked, before anything is trained. Which runs come next follows from the results.
"""

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import TrainerState

from ..files import METRICS_FILE
from ..result import RunResult
from ..run.conflicts import check_recipe, emulated_bf16
from ..run.lora import choose_trained
from ..run.recipe import Recipe, read_recipe, without_private
from ..run.synthetic import Task, difficulty
from ..size import Size, matching_intermediate_size, measure
from ..text import align, one_line
from .config import ComparisonConfig, ComparisonFile, as_written, with_sections
from .inference import FIRST_INTERIM, analyse, power_warning
from .lr_search import Rates, Results, Run, Tuning, tune
from .sections import SINGLE, Axis, ModelConfig, ScaleConfig


if TYPE_CHECKING:
    from .publication import Published


@dataclass(frozen=True)
class Variant:
    """A model of a comparison, at one scale. In an outline it has neither recipe nor size."""

    config: ModelConfig  # with the changes of the scale
    rates: Rates
    match: str | None = None
    starts_anew: bool = False  # the scale says where the search of rates begins
    recipe: Recipe | None = None
    size: Size | None = None

    @property
    def intermediate_size(self) -> int | None:
        return getattr(self.recipe.config, "intermediate_size", None)

    @property
    def steps(self) -> int:
        return self.recipe.arguments.max_steps

    @property
    def tokens(self) -> int:
        """The training tokens of a run on one device."""
        arguments = self.recipe.arguments
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        return arguments.max_steps * rows * sum(self.recipe.sample_lengths)

    @property
    def model_config(self) -> dict[str, Any]:
        return json.loads(self.recipe.config.to_json_string(use_diff=False))


@dataclass(frozen=True)
class Scale:
    """One scale of a comparison, with all overrides applied: models that see the same tokens."""

    name: str  # of the comparison, and of the scale if there are several
    config: ComparisonConfig
    variants: dict[str, Variant]
    family: int  # the number of tests that are corrected together
    takes_points: bool = False  # those that seeds chose at a smaller scale

    @property
    def shares_points(self) -> bool:
        """Whether all models take the points of the baseline, as the rows of a screening do."""
        return self.config.tune is not None and self.config.tune.at == "baseline"

    @property
    def baseline(self) -> str:
        return self.config.baseline

    @property
    def seeds(self) -> list[int]:
        return self.config.seeds

    @property
    def has_choice(self) -> bool:
        return any(len(variant.rates.first) > 1 for variant in self.variants.values())

    @property
    def keeps_rates(self) -> bool:
        """Whether seeds keep the rates that they chose at a smaller scale."""
        return any(variant.rates.keeps for variant in self.variants.values())

    @property
    def or_more(self) -> str:
        """What a sentence adds to the number of runs."""
        may_go_on = any(variant.rates.may_go_on for variant in self.variants.values())
        return ", more if a search goes on" if may_go_on else ""

    @property
    def tokens_per_run(self) -> int:
        return self.variants[self.baseline].tokens

    @property
    def task(self) -> Task | None:
        return self.variants[self.baseline].recipe.synthetic

    @property
    def steps_per_run(self) -> int:
        return self.variants[self.baseline].steps

    def flops_of(self, model: str) -> int:
        return self.variants[model].size.flops_per_token * self.tokens_per_run

    def runs_of(self, model: str) -> int:
        variant, runs = self.variants[model], len(self.variants[model].rates.first)
        takes = (self.shares_points and model != self.baseline) or (self.takes_points and not variant.starts_anew)
        if self.config.tune is not None and not takes:
            runs += self.config.tune.trials - 1  # the best point is among the rates around it
        return len(self.seeds) * runs

    @property
    def runs(self) -> int:
        return sum(map(self.runs_of, self.variants))

    @property
    def flops(self) -> int:
        return sum(self.runs_of(model) * self.flops_of(model) for model in self.variants)

    def recipe_of(self, run: Run, folder: Path) -> Recipe:
        settings = {"learning_rate": run.learning_rate, "seed": run.seed, "output_dir": str(folder)}
        recipe = self.variants[run.model].recipe
        if self.config.tune is not None:
            recipe = recipe.with_fields(self.config.tune.changes(run.trial))
        return recipe.replace(training=settings)

    def power_warning(self) -> str | None:
        return power_warning(len(self.seeds), len(self.variants) - 1, self.config.stop is not None, self.family)

    def describe(self) -> Iterator[str]:
        rows = [self._describe_model(name, variant) for name, variant in self.variants.items()]
        hidden = {"trained"} if all(row["trained"] == row["parameters"] for row in rows) else set()
        columns = [column for column in rows[0] if column not in hidden and any(row[column] for row in rows)]
        yield from align([columns, *([row[column] for column in columns] for row in rows)])
        counts = f"{self.runs} runs of {self.tokens_per_run:,} tokens, {self.flops:.3g} FLOPs in all{self.or_more}"
        yield f"{counts}; seeds {' '.join(map(str, self.seeds))}"
        yield self.describe_tuning()
        if self.config.stop:
            yield f"these are the runs of all seeds; from {FIRST_INTERIM} seeds on, a model leaves at its verdict"
        if warning := self.power_warning():
            yield f"warning: {warning}"
        if any(len(variant.rates.first) == 2 for variant in self.variants.values()):
            two = "of two learning rates the best is always at the boundary, without a verdict"
            yield f"warning: {two}; list one, or three"
        found = [(each.model_config, replace(each.recipe, switches={}), each.rates) for each in self.variants.values()]
        for (name, one), (other, same) in itertools.combinations(zip(self.variants, found), 2):
            if one == same:
                yield f"warning: models {name!r} and {other!r} are the same; change a field of one"

    def describe_tuning(self) -> str:
        tuned = self.config.tune
        if tuned is None:
            kept = "each seed keeps the learning rate that it chose last" if self.keeps_rates else "nothing is tuned"
            choice = "a learning rate is chosen" if self.has_choice else kept
            return (
                f"{choice}; a verdict may hang on other values of the recipe, which `tune` would search for each model"
            )
        if self.takes_points:
            rate = ", and keeps the learning rate that it chose last" if self.keeps_rates else ""
            again = ", and searches the learning rate again" if self.has_choice else rate
            return f"each seed takes over its point of the first scale{again}"
        ranges = ", ".join(f"{name} {entry}" for name, entry in tuned.ranges.items())
        if self.shares_points:
            return f"the baseline tries {tuned.trials} points with each seed, and all rows take the best: {ranges}"
        then = ", then rates around its best" if self.has_choice else ""
        return f"each seed tries {tuned.trials} points for each model{then}: {ranges}"

    def _describe_model(self, name: str, variant: Variant) -> dict[str, str]:
        size, width = variant.size, variant.intermediate_size
        return {
            "model": f"{name} (baseline)" if name == self.baseline else name,
            "parameters": f"{size.total:,}",
            "trained": f"{size.trained:,}",
            "non-embedding": f"{size.non_embedding:,}",
            "MLP width": "" if width is None else f"{width:,}",
            "FLOPs per token": f"{size.flops_per_token:,}",
            "FLOPs per run": f"{self.flops_of(name):.3g}",
            "learning rates": str(variant.rates),
            "runs": f"{self.runs_of(name)} or more" if variant.rates.may_go_on else str(self.runs_of(name)),
        }


@dataclass(frozen=True)
class ScaleProgress:
    """The choices of each model, by seed. A model that leaves early has fewer."""

    scale: Scale
    tunings: dict[str, list[Tuning]]

    @property
    def finished(self) -> int:
        return sum(len(tuning.losses) for tunings in self.tunings.values() for tuning in tunings)

    @property
    def ready(self) -> list[Run]:
        """The runs that can begin now, seed by seed, so that early results cover all models."""
        runs = [run for tunings in self.tunings.values() for tuning in tunings for run in tuning.ready]
        return sorted(runs, key=lambda run: self.scale.seeds.index(run.seed))

    @property
    def at_boundary(self) -> list[str]:
        return [model for model, tunings in self.tunings.items() if any(tuning.boundary for tuning in tunings)]

    def reported(self, model: str) -> list[Run]:
        """Returns the finished runs that are reported; one for each seed in the end."""
        return [tuning.reported for tuning in self.tunings[model] if tuning.is_finished]

    def tried(self, model: str) -> list[Run]:
        """Returns the finished runs that only choose."""
        reported = self.reported(model)
        runs = (run for tuning in self.tunings[model] for run in tuning.losses)
        runs = sorted(runs, key=lambda run: (self.scale.seeds.index(run.seed), run.trial or 0, run.learning_rate))
        return [run for run in runs if run not in reported]


def progress_of(
    scale: Scale, results: Results, starts: Mapping[str, Mapping[int, Tuning]] | None = None
) -> ScaleProgress:
    """Finds which runs of a scale come next, from the finished runs alone.

    The first interim analysis of `stop: early` waits for the runs of the first `FIRST_INTERIM` seeds. A model without
    a verdict gets the next seed, and so does the baseline as long as such a model is left. `starts` are the choices of
    each model and seed at another scale: a search begins there unless the scale sets its own.
    """
    most = len(scale.seeds)
    counts = dict.fromkeys(scale.variants, most if scale.config.stop is None else FIRST_INTERIM)
    progress = ScaleProgress(scale, {model: [] for model in scale.variants})
    while True:
        for model in dict.fromkeys((scale.baseline, *scale.variants)):  # others may take the points of the baseline
            variant, tunings = scale.variants[model], progress.tunings[model]
            tuned = scale.config.tune
            points, is_new = tuned and tuned.points, variant.starts_anew or (tuned and tuned.at == "each")
            known = {} if is_new else (starts or {}).get(model, {})
            for index in range(len(tunings), counts[model]):
                seed, before = scale.seeds[index], known.get(scale.seeds[index])
                if scale.shares_points and model != scale.baseline:
                    of_baseline = progress.tunings[scale.baseline][index]
                    if not of_baseline.is_finished:
                        tunings.append(Tuning({}, []))
                        continue
                    before = of_baseline
                tunings.append(tune(model, seed, variant.rates, results, points, before))
        seen = max(counts.values())
        in_question = [model for model, count in counts.items() if count == seen]
        if seen >= most or scale.baseline not in in_question or progress.ready:
            return progress
        found = {model: {run.seed: results[run.name] for run in progress.reported(model)} for model in scale.variants}
        losses = {name: {seed: run.test_loss for seed, run in each.items()} for name, each in found.items()}
        parts = {
            name: {seed: run.losses.test.loss_parts for seed, run in each.items()} for name, each in found.items()
        }
        analysis = analyse(losses, scale.baseline, at_boundary=progress.at_boundary, most=most, parts=parts)
        open_models = [model for model in analysis.open_models() if model in in_question]
        if not open_models:
            return progress
        counts |= dict.fromkeys([scale.baseline, *open_models], seen + 1)


@dataclass(frozen=True)
class Comparison:
    """The same models at one scale or more, with all overrides applied."""

    name: str
    config: ComparisonConfig  # of the same comparison if there are no `differences`
    scales: dict[str, Scale]  # from the smallest to the largest; or conditions, in the order of the file
    command: str = ""
    published: "Published | None" = None  # what this repeats

    @property
    def baseline(self) -> str:
        return self.config.baseline

    @property
    def largest(self) -> Scale:
        return list(self.scales.values())[-1]

    def progress(self, results: Mapping[str, Results]) -> dict[str, ScaleProgress]:
        """Returns how far each scale is that has begun, by name. A scale begins when those before it are finished.

        Each seed begins its search where it ended at the last scale that has it: choices of seeds stay independent.
        All conditions begin at once, where the file says.
        """
        if self.config.axis is Axis.CONDITIONS:
            return {name: progress_of(scale, results[name]) for name, scale in self.scales.items()}
        starts: dict[str, dict[int, Tuning]] = {}
        progress: dict[str, ScaleProgress] = {}
        for name, scale in self.scales.items():
            progress[name] = progress_of(scale, results[name], starts)
            if progress[name].ready:
                break
            for model, tunings in progress[name].tunings.items():
                chosen = {tuning.chosen.seed: tuning for tuning in tunings if tuning.chosen is not None}
                starts[model] = starts.get(model, {}) | chosen
        return progress

    def by_scale(self, lines: Mapping[str, Iterable[str]]) -> Iterator[str]:
        """Yields lines below the names of scales if there are several."""
        for name, about in lines.items():
            if len(self.scales) == 1:
                yield from about
            else:
                yield from (f"{self.config.axis.one} {name}", *(f"  {line}" for line in about))

    def describe(self) -> Iterator[str]:
        yield from self.by_scale({name: scale.describe() for name, scale in self.scales.items()})
        if len(self.scales) > 1:
            total = sum(scale.flops for scale in self.scales.values())
            shares = ", ".join(f"{name} {scale.flops / total:.0%}" for name, scale in self.scales.items())
            yield f"{total:.3g} FLOPs in all: {shares}"

    @property
    def machine_warning(self) -> str | None:
        variants = (variant for scale in self.scales.values() for variant in scale.variants.values())
        return next(filter(None, (emulated_bf16(variant.recipe.training) for variant in variants)), None)


def outline(config: ComparisonConfig, source: str) -> Comparison:
    """Returns the plan without recipes and sizes."""
    scales = {}
    for name, entry in config.scale_configs.items():
        here, changes = config.at_scale(name, config.source_of(name, source)), entry.models or {}
        variants = {}
        for model, fields in here.models.items():
            if (rates := fields.rates or here.rates) is None:
                raise ValueError(f"{source}: learning_rates is missing")
            starts_anew = model in changes and changes[model].learning_rates is not None
            if entry.keep_learning_rates:
                at = f"{config.source_of(name, source)}: keep_learning_rates excludes"
                if starts_anew:
                    raise ValueError(f"{at} the learning_rates of its model {model!r}")
                if here.tune is not None and here.tune.at in ("each", "baseline"):
                    raise ValueError(f"{at} tune: at: {here.tune.at}, with which no choice is taken over")
                rates = replace(rates, keeps=True)
            variants[model] = Variant(fields, rates, fields.match_in(here), starts_anew)
        scales[name] = Scale(here.name, here, variants, config.family)
    return Comparison(config.name, config, scales)


def read_comparison(file: ComparisonFile) -> Comparison:
    """Makes the plan of a comparison, and checks that every run of it can be made."""
    config, scales = file.config, {}
    for name, scale in outline(config, file.source).scales.items():
        entry, source = config.scale_configs[name], config.source_of(name, file.source)
        for model, variant in scale.variants.items():
            _check_overrides(file.overrides, variant.config, f"{source}: model {model!r}")
        if config.axis is Axis.CONDITIONS:
            _check_overrides(file.overrides, entry, source)
        recipe = with_sections(file.recipe, entry, file.recipe_source)
        recipe_source = file.recipe_source if config.axis is None else source
        scales[name] = size_scale(scale, read_shared_recipe(recipe, file.overrides, recipe_source), source)
    if config.axis is Axis.SCALES:
        heights = heights_of(scales)
        takes_points = config.tune is not None and config.tune.at != "each"
        first, *others = sorted(scales, key=heights.get)
        scales = {first: scales[first]} | {name: replace(scales[name], takes_points=takes_points) for name in others}
        _check_scales(file.source, scales)
        config = replace(config, scales={name: config.scales[name] for name in scales})
    elif config.axis is Axis.CONDITIONS:
        _check_conditions(file.source, scales)
    if config.axis is None:
        config = scales[SINGLE].config
    else:
        recipe = read_recipe(file.recipe, file.overrides, file.recipe_source).to_dict()
        config = replace(config, recipe=as_written(recipe))
    return Comparison(config.name, config, scales, file.command)


def heights_of(scales: Mapping[str, Scale]) -> dict[str, float]:
    """Returns what a ladder climbs, by scale: the size of a task that differs, or else the FLOPs of the baseline."""
    climbs = difficulty([scale.task for scale in scales.values()])
    values = [scale.flops_of(scale.baseline) for scale in scales.values()] if climbs is None else climbs[1]
    return dict(zip(scales, values))


def _check_overrides(overrides: Mapping[str, Any], config: ModelConfig | ScaleConfig, source: str) -> None:
    if names := config.names() & {*overrides, *overrides.get("switches", {})}:
        raise ValueError(f"command line: {', '.join(sorted(names))}: {source} sets that; change it in the file")


def read_shared_recipe(content: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> Recipe:
    """Reads the recipe that all models share, without the folders and names of a single run."""
    recipe = read_recipe(content, overrides, source)
    return replace(recipe, training=without_private(recipe.training))


def size_scale(scale: Scale, shared: Recipe, source: str) -> Scale:
    """Sizes the models of a scale, and checks that they see the same tokens."""
    config = scale.config
    if config.tokens_per_parameter is not None:
        if "max_steps" in shared.training:
            raise ValueError(f"{source}: tokens_per_parameter and max_steps both set the number of tokens; remove one")
        one_step = shared.replace(training={"max_steps": 1})
        sized = size_variant(scale.variants[scale.baseline], one_step, f"{source}: model {scale.baseline!r}")
        steps = math.ceil(config.tokens_per_parameter * sized.size.non_embedding / sized.tokens)
        shared = shared.replace(training={"max_steps": steps})
    variants: dict[str, Variant] = {}
    # The baseline comes first: others may be matched to it
    for model in dict.fromkeys((scale.baseline, *scale.variants)):
        where = f"{source}: model {model!r}"
        budget = variants[scale.baseline].size if variants else None
        variant = variants[model] = size_variant(scale.variants[model], shared, where, budget)
        if variant.tokens != variants[scale.baseline].tokens:
            tokens = f"{variant.tokens:,} tokens, the baseline {variants[scale.baseline].tokens:,}"
            raise ValueError(f"{where} would see {tokens}: that compares the amount of data too")
        _check_same_tokenizer(where, variant, "the baseline", variants[scale.baseline])
        for values in config.tune.points if config.tune is not None else []:
            _check_point(variant, values, where)
    config = replace(config, recipe=as_written(shared.to_dict()), tokens_per_parameter=None)
    return replace(scale, config=config, variants={model: variants[model] for model in scale.variants})


def _check_point(variant: Variant, values: Mapping[str, Any], source: str) -> None:
    """Raises `ValueError` if a run cannot have the values of a point, or would have other tokens or parameters."""
    where = f"{source}: tune: {', '.join(f'{name}={value}' for name, value in values.items())}"
    try:
        recipe = variant.recipe.with_fields(values)
        check_recipe(recipe)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{where}: {one_line(error)}") from error
    has_same_tokens = replace(variant, recipe=recipe).tokens == variant.tokens
    if not has_same_tokens or recipe.digest("data") != variant.recipe.digest("data"):
        raise ValueError(f"{where} changes the data, which must be the same for all runs")
    if _size_of(recipe).total != variant.size.total:
        raise ValueError(f"{where} changes the number of parameters, which must be the same for all runs of a model")


def size_variant(variant: Variant, shared: Recipe, source: str, budget: Size | None = None) -> Variant:
    """Gives a model its recipe and its size, matched to a budget."""
    try:
        recipe = read_shared_recipe(with_sections(shared.to_dict(), variant.config, "recipe"), {}, source)
        if variant.match is not None and budget is not None:
            width = matching_intermediate_size(recipe.config, budget, variant.match, recipe.sample_lengths)
            recipe = recipe.replace(switches={"intermediate_size": width})
        recipe.config, recipe.arguments  # noqa: B018 - both raise for values that are not allowed
        check_recipe(recipe)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {one_line(error).removeprefix(f'{source}: ')}") from error
    _check_can_compare(recipe, source)
    return replace(variant, recipe=recipe, size=_size_of(recipe))


def _size_of(recipe: Recipe) -> Size:
    return measure(recipe.config, recipe.sample_lengths, prepare=functools.partial(choose_trained, recipe))


def _check_can_compare(recipe: Recipe, source: str) -> None:
    """Raises `ValueError` if runs cannot be compared, or not be resumed to the same results."""
    arguments = recipe.arguments
    if arguments.max_steps <= 0:
        raise ValueError(f"{source}: the recipe needs max_steps, so that all models see the same number of tokens")
    if recipe.test_fraction == 0:
        raise ValueError(f"{source}: test_fraction=0 leaves no test split to report")
    if arguments.save_strategy == arguments.logging_strategy == "steps":
        steps = TrainerState()
        steps.compute_steps(arguments, arguments.max_steps)
        # Else a run that resumes there would report another training loss
        if steps.save_steps < arguments.max_steps and steps.save_steps % steps.logging_steps:
            both = f"save_steps={steps.save_steps} must be a multiple of logging_steps={steps.logging_steps}"
            raise ValueError(f"{source}: {both}; set one of them in training")


def _check_same_tokenizer(source: str, variant: Variant, other: str, reference: Variant) -> None:
    tokenizer, expected = variant.recipe.tokenizer_name, reference.recipe.tokenizer_name
    if tokenizer != expected:
        raise ValueError(f"{source} has the tokenizer {tokenizer!r}, {other} {expected!r}; name one in the recipe")


def _check_scales(path: str, scales: Mapping[str, Scale]) -> None:
    baselines = {name: scale.variants[scale.baseline] for name, scale in scales.items()}
    first, heights = next(iter(baselines)), heights_of(scales)
    chose: set[int] = set()
    for name, scale in scales.items():
        if scale.keeps_rates and (without := set(scale.seeds) - chose):
            seeds = ", ".join(map(str, sorted(without)))
            raise ValueError(f"{path}: scale {name!r}: keep_learning_rates: no smaller scale has the seeds {seeds}")
        chose |= set(scale.seeds)
    for smaller, larger in itertools.pairwise(scales):
        _check_same_tokenizer(f"{path}: scale {larger!r}", baselines[larger], f"scale {first!r}", baselines[first])
        if heights[larger] == heights[smaller]:
            compute = f"{heights[larger]:.3g} FLOPs a run"
            raise ValueError(f"{path}: the scales {smaller!r} and {larger!r} have the same compute, {compute}")


def _check_conditions(path: str, conditions: Mapping[str, Scale]) -> None:
    for (one, first), (other, second) in itertools.combinations(conditions.items(), 2):
        if all(variant.recipe == second.variants[model].recipe for model, variant in first.variants.items()):
            raise ValueError(f"{path}: the conditions {one!r} and {other!r} have the same recipe")


def scale_folder(folder: Path, axis: Axis | None, name: str) -> Path:
    """Returns the folder of a scale or condition in that of its comparison, which is the same for a single scale."""
    return folder if axis is None else folder / axis / name


class RunStore:
    """The results of the finished runs in the folder of a scale, by the names of the runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._results: dict[str, RunResult] = {}

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def __contains__(self, name: str) -> bool:
        return name in self._results or (self.folder / "runs" / name / METRICS_FILE).is_file()

    def __getitem__(self, name: str) -> RunResult:
        if name not in self._results:
            self._results[name] = RunResult.load(self.folder / "runs" / name)
        return self._results[name]

    def add(self, run: str, result: RunResult) -> None:
        """Adds the result of a run that was finished just now, which a shared folder may show later."""
        self._results[run] = result
