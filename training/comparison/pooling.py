"""Pools measurements of the same change: by other people, with other seeds, on another text or at another size.

Sources with the same file and text are analysed as one study, with the seeds of all. Two studies are compared. Three
or more are combined by a random-effects model: true improvements may vary from study to study. Studies count as
independent. Improvements are in percent of the baseline's loss.
"""

import itertools
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from matplotlib import rc_context, rcParamsDefault
from scipy import stats

from modeling_nlq import NLQConfig
from modeling_nlq.configuration_seq2seq_nlq import DIRECTIONS

from ...configuration import find, names
from ..disk import add_to_manifest, write_text
from ..files import RESULTS_FILE, check_keys, differences, flatten, is_nonempty, merged, read_json
from ..loading import load_config
from ..run.recipe import without_defaults
from ..text import count, one_line
from ..values import Value, to_json
from .config import read_made_from, with_sections
from .figures import draw_intervals, figure_section
from .inference import ALPHA, ROUNDING, Effect, Estimate, Verdict, analyse, holm, verdict_of
from .ledger import Ledger, RunRow, VerdictRow, place_of
from .publication import read_ledger
from .render import Rows, Section, write_sections
from .report import table_lines
from .sections import SINGLE
from .sentences import in_line
from .tables import p_value, with_interval
from .trend import add


# Studies of one change may differ in these. A change says only whether it makes them larger
_SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"}
_SIZES |= {"intermediate_size", "vocab_size", "max_position_embeddings"}
# The fields of a recipe that their baselines share
_COMMON = {"model", "switches", "parts", "objective", "trainable", "lora", "parametrization", "initializer_scale"}
_NOT_SET = "not set"
_SHARED_TEXT = "Studies share a test text, and the interval takes their noise from it as independent."


@dataclass(frozen=True)
class Study(Value):
    """A model beside its baseline, from one source, or from several with the same file and text."""

    label: str
    model: str
    baseline: str
    non_embedding: int
    tokens: int
    optimizer: str
    effect: Effect

    @property
    def improvement(self) -> Estimate:
        widest, percent = self.effect.widest(ALPHA), 100 / abs(self.effect.paired_loss)
        return Estimate(-percent * widest.value, percent * widest.standard_error, widest.degrees_of_freedom)


@dataclass(frozen=True)
class Summary(Value):
    """The difference of two studies, or the mean of more, with what `combine` says of how they vary."""

    value: float
    standard_error: float
    interval: tuple[float, float]
    p: float
    q: float | None = None
    q_p: float | None = None
    i2: float | None = None  # percent
    tau: float | None = None
    prediction: tuple[float, float] | None = None


@dataclass(frozen=True)
class Pooled(Value):
    """The content of `results.json`; `summary` is `None` if all sources are one study."""

    studies: list[Study]
    summary: Summary | None
    shares_text: bool
    version: int = 1


@dataclass(frozen=True)
class _Source:
    """What one source says of a model at one scale or under one condition."""

    name: str
    row: VerdictRow
    runs: list[RunRow]
    file: dict[str, Any]
    baseline: dict[str, Any]
    change: dict[str, Any]

    @property
    def label(self) -> str:
        return self.name if (place := place_of(self.row)) == SINGLE else f"{self.name}, {place}"

    def has_text_of(self, other: "_Source") -> bool:
        texts = {run.data for run in self.runs}
        return texts == {run.data for run in other.runs} and None not in texts

    def repeats(self, other: "_Source") -> bool:
        is_same = (place_of(self.row), self.row.model) == (place_of(other.row), other.row.model)
        return is_same and self.has_text_of(other) and not differences(self.file, other.file)


def pool(ledgers: Mapping[str, Ledger], models: Collection[str] = (), scales: Collection[str] = ()) -> Pooled:
    """Pools a change over comparisons by name.

    Args:
        models: names of the model; a comparison of several needs one of them.
        scales: of the scales and conditions, only these.

    Raises:
        ValueError: if sources share runs or seeds, measure different changes, or lack a verdict.
        ImportError: for three studies without statsmodels.
    """
    measured = {row.model for ledger in ledgers.values() for row in ledger.verdicts}
    if unknown := [model for model in models if model not in measured]:
        raise ValueError(f"--model {unknown[0]!r} is in no source; there are {in_line(sorted(measured))}")
    sources = [each for name, ledger in ledgers.items() for each in _sources_in(name, ledger, models, scales)]
    if len(sources) < 2:
        raise ValueError(f"{in_line([*ledgers])}: there is one study; name two or more")
    for first, second in itertools.combinations(sources, 2):
        _check_independent(first, second)
        _check_same(first, second)
    groups: list[list[_Source]] = []
    for source in sources:
        group = next((group for group in groups if source.repeats(group[0])), None)
        if group is None:
            groups.append(group := [])
        group.append(source)
    studies = [_study(group) for group in groups]
    shares_text = any(one[0].has_text_of(other[0]) for one, other in itertools.combinations(groups, 2))
    return Pooled(studies, _summarise(studies), shares_text)


def pool_and_report(
    sources: Sequence[str], models: Collection[str], scales: Collection[str], folder: Path | None = None
) -> tuple[Pooled, Path]:
    """Pools folders or repositories, and returns the result and its folder, by default `runs/pool-MODEL`.

    Writes `results.json` and the report. Raises as `pool`, and `ValueError` for a folder with something else.
    """
    pooled = pool({source: read_ledger(source) for source in sources}, models, scales)
    folder = folder or Path(f"runs/pool-{pooled.studies[0].model}")
    file = folder / RESULTS_FILE
    if is_nonempty(folder) and not (file.is_file() and "studies" in read_json(file)):
        raise ValueError(f"{folder} holds something else; choose another --output_dir")
    add_to_manifest(folder)
    write_text(file, to_json(pooled))
    _write_report(pooled, folder)
    return pooled, folder


def pooled_lines(published: Ledger, own: Ledger) -> list[str]:
    """Returns a line for each model and scale of a comparison and its repetition, with the seeds of both.

    Holm's method corrects the p-values of all pairs that are analysed as one study.
    """
    effects, lines = {}, []
    for row in published.verdicts:
        label = row.model if place_of(row) == SINGLE else f"{row.model}, {place_of(row)}"
        try:
            pooled = pool({"published": published, "repeated": own}, [row.model], [place_of(row)])
        except ValueError as error:
            lines.append(f"{label}: not pooled: {error}")
        else:
            if pooled.summary is None:
                effects[label] = pooled.studies[0]
            else:
                lines += [f"{label}: {sentence}" for sentence in sentences(pooled)]
    for (label, study), p in zip(effects.items(), holm(study.effect.p for study in effects.values())):
        verdict = verdict_of(replace(study.effect, holm_p=p), len(effects), ALPHA)
        seeds = count(study.effect.pairs, "seed")
        lines.append(f"{label}: {_improvement(study)} % over {seeds}, Holm {_equation(p)}: {verdict}")
    return lines


def combine(improvements: Sequence[Estimate]) -> Summary:
    """Combines three independent studies or more by a random-effects model.

    tau is Paule and Mandel's (1982). The standard error is the larger of Hartung and Knapp's (2001) and the plain one,
    both with Student's distribution. The prediction interval, for the true improvement in one more study, has k - 2
    degrees of freedom (Higgins, Thompson and Spiegelhalter 2009).
    """
    try:
        from statsmodels.stats.meta_analysis import combine_effects
    except ImportError as error:
        raise ImportError('three studies need the package statsmodels: pip install "modeling-nlq[pool]"') from error
    values, errors = np.array([(each.value, each.standard_error) for each in improvements]).T
    with np.errstate(divide="ignore"):  # its own I2 divides by Q
        result = combine_effects(values, errors**2, method_re="pm", use_t=True)
    freedom, q = len(values) - 1, float(result.q)
    mean = Estimate(float(result.mean_effect_re), float(max(result.sd_eff_w_re, result.sd_eff_w_re_hksj)), freedom)
    further = Estimate(mean.value, math.sqrt(result.tau2 + mean.standard_error**2), freedom - 1)
    return Summary(
        value=mean.value,
        standard_error=mean.standard_error,
        interval=mean.interval(1 - ALPHA),
        p=mean.p(),
        q=q,
        q_p=float(stats.chi2.sf(q, freedom)),
        i2=100 * (1 - freedom / q) if q > freedom else 0.0,
        tau=math.sqrt(result.tau2),
        prediction=further.interval(1 - ALPHA),
    )


def _summarise(studies: Sequence[Study]) -> Summary | None:
    if len(studies) < 2:
        return None
    improvements = [study.improvement for study in studies]
    for study, improvement in zip(studies, improvements):
        if improvement.standard_error <= ROUNDING:
            raise ValueError(f"{study.label}: all seeds differ equally, so the noise is unknown")
    if len(studies) > 2:
        return combine(improvements)
    first, second = improvements
    difference = add([first, replace(second, value=-second.value)])
    return Summary(difference.value, difference.standard_error, difference.interval(1 - ALPHA), difference.p())


def _sources_in(name: str, ledger: Ledger, models: Collection[str], scales: Collection[str]) -> list[_Source]:
    config = read_made_from(ledger.comparison, name)
    if not isinstance(config.recipe, dict):
        raise ValueError(f"{name}: recipe={config.recipe!r} must hold the fields of a recipe")
    if config.stop is not None:
        raise ValueError(f"{name}: stop={config.stop!r}: how many seeds it has depends on their losses; not pooled")
    measured = list(dict.fromkeys(row.model for row in ledger.verdicts))
    chosen = measured if len(measured) == 1 else [model for model in measured if model in models]
    rows = [row for row in ledger.verdicts if row.model in chosen and (not scales or place_of(row) in scales)]
    if len(chosen) != 1:
        raise ValueError(f"{name}: --model must name one of {in_line(measured)}")
    if not rows:
        places = in_line(list(dict.fromkeys(map(place_of, ledger.verdicts))))
        raise ValueError(f"{name}: --scale must name one of {places}; it may be given for each folder")
    file, sources = replace(config.without_seeds(), name=None).to_dict(), []
    for row in rows:
        place, both = place_of(row), (row.model, row.baseline)
        check_keys(f"{name}: models", both, config.models or {})
        check_keys(f"{name}: scales", [place], config.scale_configs)
        # The seeds of another source may add to too few
        if row.p is None and row.verdict != Verdict.TOO_FEW_SEEDS:
            raise ValueError(f"{name}: {row.model}: {row.verdict}")
        at_place = config.at_scale(place, name)
        recipe = with_sections(config.recipe, config.scale_configs[place], name)
        model, baseline = (_settings(with_sections(recipe, at_place.models[each], name), name) for each in both)
        change = {key: model.get(key, _NOT_SET) for key in _differing(model, baseline)}
        for key in filter(_is_size, change):
            sizes = [each.get(key) for each in (model, baseline)]
            if all(isinstance(size, int) for size in sizes):  # the defaults of a model of one's own are not known here
                change[key] = "larger" if sizes[0] > sizes[1] else "smaller"
        change["match"] = at_place.models[row.model].match_in(config)
        common = {key: baseline[key] for key in baseline if key.partition(".")[0] in _COMMON and not _is_size(key)}
        runs = [run for run in ledger.runs if run.is_reported and run.model in both and place_of(run) == place]
        sources.append(_Source(name, row, runs, file, common, change))
    return sources


def _settings(recipe: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the fields of a recipe and of its model's configuration, if that is a shipped one.

    Leaves out defaults, but has every size of the model, also one that follows from others.
    """
    content, sizes, defaults = without_defaults(recipe), {}, {}
    if (model := content.get("model")) in names("models"):
        try:
            config = load_config(model, _sizes_in(recipe["switches"])).to_dict()
        except (StrictDataclassError, ValueError) as error:
            raise ValueError(f"{source}: {one_line(error)}") from None
        content["switches"] = merged(read_json(find("models", content.pop("model"))), recipe["switches"])
        sizes = {key: value for key, value in flatten({"switches": config}).items() if _is_size(key)}
        defaults = {f"switches.{name}": field.default for name, field in NLQConfig.__dataclass_fields__.items()}
    fields = {key: value for key, value in flatten(content).items() if value != defaults.get(key, ...)}
    return {key: value for key, value in fields.items() if not (sizes and _is_size(key))} | sizes


def _sizes_in(switches: Mapping[str, Any]) -> dict[str, Any]:
    halves = {half: _sizes_in(switches[half]) for half in DIRECTIONS if isinstance(switches.get(half), dict)}
    return {name: switches[name] for name in _SIZES & switches.keys()} | halves


def _is_size(name: str) -> bool:
    return name.startswith(("switches.", "base_sizes")) and name.rpartition(".")[2] in _SIZES


def _check_independent(first: _Source, second: _Source) -> None:
    """Raises `ValueError` for two sources with the same runs, or with the same seeds on the same tokens."""
    if first.name == second.name and "scales" in first.file:
        return  # as in a trend
    both, is_same_file = f"{first.label} and {second.label}", first.repeats(second)
    runs = [{(run.seed, run.data, run.token_stream, run.test_loss) for run in each.runs} for each in (first, second)]
    seeds = [{(run.seed, is_same_file or run.token_stream) for run in each.runs} for each in (first, second)]
    if same := sorted({seed for seed, *_ in runs[0] & runs[1]}):
        choose = "; take one of them by --scale" if "scales" in first.file or "scales" in second.file else ""
        raise ValueError(f"{both} share runs, of the seeds {', '.join(map(str, same))}{choose}")
    if same := sorted({seed for seed, _ in seeds[0] & seeds[1]}):
        raise ValueError(f"{both} share the seeds {', '.join(map(str, same))} on the same tokens: not independent")


def _check_same(first: _Source, second: _Source) -> None:
    both, allowed = f"{first.label} and {second.label}", "only size, length, optimizer and text may differ"
    pairs = {"baselines": (first.baseline, second.baseline), "changes": (first.change, second.change)}
    for what, (one, other) in pairs.items():
        if different := _differing(one, other):
            values = ((key, one.get(key, _NOT_SET), other.get(key, _NOT_SET)) for key in different)
            shown = ", ".join(f"{key} ({reprlib.repr(left)}, {reprlib.repr(right)})" for key, left, right in values)
            raise ValueError(f"{both}: the {what} differ in {shown}; {allowed}")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key, _NOT_SET) != other.get(key, _NOT_SET))


def _study(group: Sequence[_Source]) -> Study:
    row, label = group[0].row, " + ".join(source.label for source in group)
    losses: dict[str, dict[int, float | None]] = {row.baseline: {}, row.model: {}}
    parts: dict[str, dict[int, list[float] | None]] = {row.baseline: {}, row.model: {}}
    for run in itertools.chain(*(source.runs for source in group)):
        losses[run.model][run.seed] = run.test_loss
        parts[run.model][run.seed] = run.test_loss_parts
    effect = analyse(losses, row.baseline, parts=parts).effects[row.model]
    if effect.p is None:
        raise ValueError(f"{label}: {row.model}: {effect.verdict}")
    return Study(label, row.model, row.baseline, row.non_embedding, row.tokens, row.optimizer, effect)


def _improvement(study: Study) -> str:
    return with_interval(study.improvement.value, study.improvement.interval(1 - ALPHA), "+.2f")


def _equation(p: float) -> str:
    text = p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def study_rows(pooled: Pooled) -> Rows:
    return [
        {
            "study": study.label,
            "model": study.model,
            "non-embedding": f"{study.non_embedding:,}",
            "tokens": f"{study.tokens:,}",
            "optimizer": study.optimizer,
            "seeds": str(study.effect.pairs),
            "loss improvement (%)": _improvement(study),
        }
        for study in pooled.studies
    ]


def sentences(pooled: Pooled) -> list[str]:
    """Says what the studies show together."""
    summary, effect = pooled.summary, pooled.studies[0].effect
    if summary is None:
        return [f"Same file and text, all seeds as one analysis: {_equation(effect.p)}, {effect.verdict}."]
    value = f"{with_interval(summary.value, summary.interval, '+.2f')} %, {_equation(summary.p)}"
    if summary.prediction is None:
        return [f"The two differ by {value}. A pooled improvement needs three studies."]
    spread, further = f"I² = {summary.i2:.0f} %, tau = {summary.tau:.2g} %", summary.prediction
    return [
        f"Pooled improvement of {len(pooled.studies)} studies, random effects: {value}.",
        f"Heterogeneity: Q = {summary.q:.3g}, {_equation(summary.q_p)}, {spread}.",
        f"True improvement in one more study: [{further[0]:+.2f}, {further[1]:+.2f}] % (95 % prediction interval).",
        *([_SHARED_TEXT] if pooled.shares_text else []),
    ]


def describe_pooled(pooled: Pooled) -> list[str]:
    return [*table_lines(study_rows(pooled)), *sentences(pooled)]


@rc_context(rcParamsDefault)
def _write_report(pooled: Pooled, folder: Path) -> None:
    summary, model = pooled.summary, pooled.studies[0].model
    rows = [(study.label, study.improvement.value, study.improvement.interval(1 - ALPHA)) for study in pooled.studies]
    added = []
    if summary is not None and summary.prediction is not None:
        added = [("pooled", summary.value, summary.interval), ("one more study", summary.value, summary.prediction)]
    figure = draw_intervals(f"{model}: every study", "improvement of test loss (%)", [*rows, *added], len(added))
    caption = "The improvement of each study with its 95 % interval; dark, what they say together."
    sections = [
        Section("", [*sentences(pooled), study_rows(pooled)]),
        figure_section(folder, "forest", "Forest plot", caption, figure),
    ]
    write_sections(folder, f"{model}, pooled", sections)
