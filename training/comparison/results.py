"""The outcome of a comparison: what its runs measured, and their analysis."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import STATE_FILE, read_json
from ..result import RunResult
from ..run.objectives import Objective, objective_in
from ..run.stability import loss_spikes, read_stability
from ..run.synthetic import Task, difficulty, task_of
from ..sharing.scrub import without_folders
from ..size import Size
from ..values import from_json
from .comparison import Run, RunStore, ScaleProgress
from .conditions import Interaction, Primary, analyse_interactions, correct, judge_primary, plan_primary
from .config import ComparisonConfig
from .inference import Analysis, Interim, analyse, analyse_early, noise_from_text
from .sections import SINGLE, Axis, TuneConfig
from .trend import COMPUTE, ScaleLosses, Trend, analyse_trend


VERSION = 2
# The accuracy with which a task counts as learned
MASTERED = 0.99
# Fields of a scale and of a model in files of version 1 and older; runs have them now
_SHARED = ("dataset_fingerprint", "train_tokens", "validation_tokens", "test_tokens", "device", "versions")
_SHARED += ("parameters", "trained_parameters", "non_embedding_parameters", "flops_per_token")
_RUNS = ("tried", "runs")

Curve = list[tuple[int, float | None]]


@dataclass(frozen=True)
class History:
    """The curves of a run, of points `(step, value)`, where None is not finite; losses are in nats per token."""

    train_loss: Curve = field(default_factory=list)
    validation_loss: Curve = field(default_factory=list)
    gradient_norm: Curve = field(default_factory=list)
    loss_spikes: list[int] = field(default_factory=list)
    stability: dict[str, dict[str, Curve]] = field(default_factory=dict)
    mastered_at: int | None = None  # the step of the first evaluation with an accuracy of `MASTERED`


@dataclass(frozen=True)
class RunOutcome:
    folder: str  # in that of its scale
    seed: int
    learning_rate: float
    result: RunResult
    history: History
    trial: int | None = None  # the number of its point in `tune`
    point: dict[str, Any] = field(default_factory=dict)  # the values there, without the learning rate

    @staticmethod
    def fields_in(content: dict[str, Any]) -> dict[str, Any]:
        """In files without a version the result has no group."""
        return {"result": content, **content}

    @property
    def test_loss(self) -> float | None:
        """In nats per token; `None` if the run diverged or it is not finite."""
        return self.result.test_loss

    @property
    def test_loss_parts(self) -> list[float] | None:
        return self.result.losses.test.loss_parts

    @property
    def validation_loss(self) -> float | None:
        return self.result.losses.validation.loss

    @property
    def diverged(self) -> bool:
        return self.test_loss is None

    @property
    def accuracy(self) -> float:
        """The share of right answers in the test of a synthetic task; 0 if the run diverged."""
        return 0.0 if self.diverged else self.result.losses.test.token_accuracy or 0.0


@dataclass(frozen=True)
class ModelOutcome:
    given: dict[str, Any]  # its entry in the comparison's file
    intermediate_size: int | None
    learning_rates: list[float]
    search: dict[str, float] | None  # None for a list of rates
    boundaries: dict[int, str]  # `smallest` or `largest`, for the seeds whose rate is at the boundary of those tried
    tried: list[RunOutcome]  # made only to choose a rate
    runs: list[RunOutcome]  # reported
    kernels: list[str] = field(default_factory=list)
    keeps_rate: bool = False  # each seed has the rate that it chose at a smaller scale

    @property
    def size(self) -> Size:
        return self.runs[0].result.size

    @property
    def finished(self) -> list[RunOutcome]:
        return [run for run in self.runs if not run.diverged]

    @property
    def untuned(self) -> dict[int, RunOutcome]:
        """By seed that tried points, the run with the recipe's own values, which `tune` tries first."""
        rate = self.search["start"] if self.search else self.learning_rates[0]
        runs = (*self.tried, *self.runs)
        seeds = {run.seed for run in runs if run.trial == 1}  # others took a point over, perhaps that of trial 0
        return {run.seed: run for run in runs if run.seed in seeds and run.trial == 0 and run.learning_rate == rate}

    @property
    def chosen(self) -> list[RunOutcome]:
        """The reported runs whose rate was chosen or given; a seed that diverged at every rate chose none."""
        return self.runs if len(self.learning_rates) == 1 else self.finished

    @property
    def has_choice(self) -> bool:
        """Whether seeds searched for a learning rate at this scale."""
        return len(self.learning_rates) > 1 and not self.keeps_rate

    @property
    def is_tuned(self) -> bool:
        return any(run.trial is not None for run in self.runs)

    def losses_by_rate(self) -> dict[float, list[float | None]]:
        """The validation losses of all runs; none where each seed has rates of its own."""
        losses: dict[float, list[float | None]] = {}
        if self.is_tuned or self.keeps_rate:
            return losses
        for run in sorted([*self.tried, *self.runs], key=lambda run: run.learning_rate):
            losses.setdefault(run.learning_rate, []).append(None if run.diverged else run.validation_loss)
        return losses


@dataclass(frozen=True)
class TaskOutcome:
    """The scores of the reported runs in one metric of a downstream task."""

    items: int | None
    chance: float | None
    higher_is_better: bool
    scores: dict[str, dict[int, float | None]]  # by model and seed; None where a run diverged
    statistics: Analysis | None = None


@dataclass(frozen=True)
class ScaleOutcome:
    name: str
    baseline: str
    seeds: list[int]
    tokens_per_run: int  # the most that a run saw; the plan's if every run was stopped early
    comparison: dict[str, Any]
    token_streams: dict[int, str]  # by seed, the hash of the tokens that its runs saw, in order
    same_tokens: bool | None  # the same in the same order for all models; None if every run was stopped early
    models: dict[str, ModelOutcome]
    statistics: Analysis  # of the test losses; with `stop: early` at each model's last analysis
    interim: dict[str, list[Interim]] | None = None
    noise_from_text: float | None = None
    added_seeds: list[int] = field(default_factory=list)
    tasks: dict[str, dict[str, TaskOutcome]] = field(default_factory=dict)

    @staticmethod
    def fields_in(content: dict[str, Any]) -> dict[str, Any]:
        """Older files say once what each run says now."""
        try:
            models = {}
            for name, model in content["models"].items():
                shared = {key: fields[key] for fields in (content, model) for key in _SHARED if key in fields}
                models[name] = model | {kind: [shared | run for run in model[kind]] for kind in _RUNS}
        except (AttributeError, KeyError, TypeError):  # of another type, which `from_json` names
            return content
        return {**content, "models": models}

    @property
    def sample(self) -> RunResult:
        model = next(iter(self.models.values()))
        return [*model.tried, *model.runs][0].result

    @property
    def losses(self) -> dict[str, dict[int, float | None]]:
        return {name: {run.seed: run.test_loss for run in model.runs} for name, model in self.models.items()}

    @property
    def accuracies(self) -> dict[str, list[float]]:
        """The accuracy of each seed of each model on a synthetic task; nothing for text."""
        if self.objective.has_parts:
            return {}
        return {name: [run.accuracy for run in model.runs] for name, model in self.models.items()}

    @property
    def tested(self) -> list[str]:
        return [name for name, effect in self.statistics.effects.items() if effect.p is not None]

    @property
    def has_choice(self) -> bool:
        return any(model.has_choice for model in self.models.values())

    @property
    def keeps_rates(self) -> bool:
        return any(model.keeps_rate for model in self.models.values())

    @property
    def tuned(self) -> TuneConfig | None:
        tune = self.comparison.get("tune")
        return None if tune is None else TuneConfig.read(tune, "tune")

    @property
    def counts_text(self) -> bool:
        return all(run.test_loss_parts is not None for model in self.models.values() for run in model.finished)

    @property
    def objective(self) -> type[Objective]:
        recipe = self.comparison.get("recipe")
        return objective_in(recipe if isinstance(recipe, dict) else {})

    @property
    def task(self) -> Task | None:
        recipe = self.comparison["recipe"]
        return task_of(recipe.get("dataset"), recipe.get("task"))

    def flops(self, model: str) -> int:
        return self.models[model].size.flops_per_token * self.tokens_per_run


@dataclass(frozen=True)
class Outcome:
    """The results of a comparison, which `results.json` holds; a single scale is called `SINGLE`.

    `scales` holds the conditions if there are `interactions`.
    """

    name: str
    baseline: str
    command: str
    comparison: dict[str, Any]
    scales: dict[str, ScaleOutcome]
    trend: Trend | None = None
    version: int = VERSION
    interactions: list[Interaction] | None = None
    primary: list[Primary] = field(default_factory=list)

    @staticmethod
    def fields_in(content: dict[str, Any]) -> dict[str, Any]:
        """Files without a version hold a single scale. Others may hold one primary test, or null."""
        primary = content.get("primary") or []
        return {"scales": {SINGLE: content}, **content, "primary": [primary] if isinstance(primary, dict) else primary}

    @property
    def axis(self) -> Axis | None:
        return Axis.SCALES if self.trend else Axis.CONDITIONS if self.interactions else None

    @property
    def largest(self) -> ScaleOutcome:
        return list(self.scales.values())[-1]


def read_outcome(file: Path) -> Outcome:
    """Reads `results.json`; raises `ValueError` for a field that is missing or of another type."""
    return from_json(Outcome, read_json(file), f"{file}: ")


def gather(progress: ScaleProgress, finished: RunStore, **more: Any) -> ScaleOutcome:
    scale, models = progress.scale, {}
    for name, variant in scale.variants.items():
        tunings = progress.tunings[name]
        tried = [_read_run(finished, run, scale.config.tune) for run in progress.tried(name)]
        reported = [_read_run(finished, run, scale.config.tune) for run in progress.reported(name)]
        models[name] = ModelOutcome(
            given=without_folders(variant.config.to_dict()),
            intermediate_size=variant.intermediate_size,
            learning_rates=sorted({run.learning_rate for tuning in tunings for run in tuning.losses}),
            search=variant.rates.search,
            boundaries={tuning.reported.seed: tuning.boundary for tuning in tunings if tuning.boundary},
            kernels=sorted({run.result.attention.kernels or "not recorded" for run in (*tried, *reported)}),
            tried=tried,
            runs=reported,
            keeps_rate=variant.rates.keeps,
        )
    runs = [run for model in models.values() for run in (*model.tried, *model.runs)]
    # A run that was stopped early saw only the first tokens
    whole = [run for run in runs if run.result.losses.diverged_at is None]
    streams: dict[int, set[str]] = {}
    for run in whole:
        streams.setdefault(run.seed, set()).add(run.result.data.token_stream)
    has_same_documents = len({run.result.data.fingerprint for run in runs}) == 1
    has_same_order = all(len(stream) == 1 for stream in streams.values())
    analysis, interims, from_text = judge(models, scale.baseline, scale.seeds, scale.config.stop)
    return ScaleOutcome(
        name=scale.name,
        baseline=scale.baseline,
        seeds=scale.seeds,
        tokens_per_run=max((run.result.data.tokens_seen for run in whole), default=scale.tokens_per_run),
        comparison=without_folders(scale.config.to_dict()),
        token_streams={seed: min(stream) for seed, stream in sorted(streams.items())},
        same_tokens=has_same_documents and has_same_order if streams else None,
        models=models,
        statistics=analysis,
        interim=interims,
        noise_from_text=from_text,
        **more,
    )


def judge(
    models: dict[str, ModelOutcome], baseline: str, seeds: list[int], stop: str | None
) -> tuple[Analysis, dict[str, list[Interim]] | None, float | None]:
    """Returns `statistics`, `interim` and `noise_from_text` of a `ScaleOutcome`."""
    losses = {name: {run.seed: run.test_loss for run in model.runs} for name, model in models.items()}
    parts = {name: {run.seed: run.test_loss_parts for run in model.finished} for name, model in models.items()}
    boundaries = {name: model.boundaries for name, model in models.items() if model.boundaries}
    if stop is not None:
        analysis, interim = analyse_early(losses, baseline, seeds, boundaries, parts=parts)
    else:
        analysis, interim = analyse(losses, baseline, at_boundary=boundaries, parts=parts), None
    return analysis, interim, noise_from_text(list(parts[baseline].values())) if analysis.counts_text else None


def conclude(outcome: Outcome, config: ComparisonConfig) -> Outcome:
    """Adds what scales or conditions tell together and primary tests, and corrects the tests that are a family."""
    scales, primary, plans, is_crossed = outcome.scales, [], [], config.axis is Axis.CONDITIONS
    losses = {name: scale.losses for name, scale in scales.items()}
    analyses = {name: scale.statistics for name, scale in scales.items()}
    interactions = analyse_interactions(losses, analyses) if is_crossed else None
    trend = None if is_crossed else trend_of(scales)
    if config.primary is not None:
        plans = plan_primary(config, dict.fromkeys(scales, 1.0) if trend is None else trend.flops)
        primary = judge_primary(plans, losses, analyses, config.primary.margin)
    if plans or is_crossed:
        analyses, trend, interactions = correct(analyses, trend, interactions, plans)
    scales = {name: replace(scale, statistics=analyses[name]) for name, scale in scales.items()}
    return replace(outcome, scales=scales, trend=trend, interactions=interactions, primary=primary)


def trend_of(scales: dict[str, ScaleOutcome]) -> Trend | None:
    """Returns the trend of the test losses, with the intervals of each scale's analysis."""
    if len(scales) < 2:
        return None
    losses, climbs = [], difficulty([scale.task for scale in scales.values()])
    for index, (name, scale) in enumerate(scales.items()):
        flops = {model: scale.flops(model) if climbs is None else climbs[1][index] for model in scale.models}
        at_boundary = [model for model, outcome in scale.models.items() if outcome.boundaries]
        losses.append(ScaleLosses(name, flops, scale.losses, at_boundary))
    trend = analyse_trend(losses, next(iter(scales.values())).baseline, axis=climbs[0] if climbs else COMPUTE)
    for name, scale in scales.items():
        for model, effect in scale.statistics.effects.items():
            steps = trend.models[model].steps
            steps[name] = replace(steps[name], improvement_interval=effect.loss_improvement_interval)
    return trend


def _read_run(finished: RunStore, run: Run, tuned: TuneConfig | None) -> RunOutcome:
    result = finished[run.name]
    log = read_json(finished.folder_of(run) / STATE_FILE)["log_history"]
    loss, validation_loss, norm = (
        [(entry["step"], entry[key]) for entry in log if key in entry] for key in ("loss", "eval_loss", "grad_norm")
    )
    stability = {
        layer: {name: _without_nan(curve) for name, curve in curves.items()}
        for layer, curves in read_stability(log).items()
    }
    curves = map(_without_nan, (loss, validation_loss, norm))
    mastered = [entry["step"] for entry in log if entry.get("eval_token_accuracy", 0.0) >= MASTERED]
    history = History(*curves, loss_spikes(loss), stability, min(mastered, default=None))
    result = replace(result, data=replace(result.data, trained_on=without_folders(result.data.trained_on)))
    point = {} if tuned is None else tuned.changes(run.trial)
    return RunOutcome(f"runs/{run.name}", run.seed, run.learning_rate, result, history, run.trial, point)


def _without_nan(curve: Iterable[tuple[int, float]]) -> Curve:
    """JSON has neither NaN nor infinity."""
    return [(step, value if math.isfinite(value) else None) for step, value in curve]
