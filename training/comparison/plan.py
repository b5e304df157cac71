"""The plan of a comparison: models, learning rates and seeds on one recipe, checked and sized before anything is trained."""

import copy
import logging
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from modeling_nlq.configuration import find
from modeling_nlq.training.comparison.statistics import power_warning
from modeling_nlq.training.files import check_keys, read_section, read_yaml
from modeling_nlq.training.models import load_config
from modeling_nlq.training.parameters import Size, matching_intermediate_size, measure
from modeling_nlq.training.run.recipe import ResolvedRecipe, check_recipe, override_words, resolve_recipe
from modeling_nlq.training.text import align, one_line
from modeling_nlq.training.traces import without_folders


_FIELDS = ("name", "recipe", "baseline", "models", "learning_rates", "seeds", "sweep_seed", "match", "training", "switches")
_MODEL_FIELDS = ("model", "trainable", "lora", "switches", "training", "learning_rates", "match")
_MATCHES = ("parameters", "flops")
# These differ between the runs of one model; `seeds` and `learning_rates` set them
_SET_BY_RUN = ("learning_rate", "seed", "data_seed")


@contextmanager
def _without_gpu_advice() -> Iterator[None]:
    """Drops a message of `TrainingArguments`: that compiling helps most on newer GPUs than this machine has.

    A plan may be read on another machine than it runs on, and makes the arguments of many runs. A run that trains gives the
    message once, in its own log.
    """

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "speedups for torchdynamo" not in record.getMessage()

    logger = logging.getLogger("transformers.training_args")
    logger.addFilter(is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_no_advice)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: a name of the comparison.
        learning_rate, seed: settings of the run.
        is_sweep: whether it chooses the learning rate and is not reported.
    """

    model: str
    learning_rate: float
    seed: int
    is_sweep: bool

    @property
    def name(self) -> str:
        """Unique in its comparison; also its folder's path there."""
        return f"{self.model}/{'sweep-' if self.is_sweep else ''}rate-{self.learning_rate:g}-seed-{self.seed}"


@dataclass
class Variant:
    """A model of a comparison.

    Attributes:
        content: its recipe without learning rate and seed, as `resolve_recipe` takes it.
        learning_rates: the rates to choose among.
        size: parameters and FLOPs per token.
        intermediate_size: the MLP width, after matching.
        steps: number of optimizer steps of each run.
        tokens: number of training tokens of each run, if every batch is full.
        tokenizer: the tokenizer of its recipe.
        given: its entry in the comparison's file.
    """

    content: dict[str, Any]
    learning_rates: list[float]
    size: Size
    intermediate_size: int | None
    steps: int
    tokens: int
    tokenizer: str
    given: dict[str, Any]


@dataclass
class Comparison:
    """A comparison with all overrides applied.

    Attributes:
        name: its name.
        baseline: the model that all others are compared with.
        variants: models by name.
        seeds: seeds of the reported runs, which all models share.
        sweep_seed: seed of the runs that choose the learning rate.
        tokens_per_run: number of training tokens, if every batch is full; `gather` counts the tokens that the runs saw.
        command: the command that runs it.
        given: the whole comparison with its overrides, as one mapping; equal mappings are the same comparison.
    """

    name: str
    baseline: str
    variants: dict[str, Variant]
    seeds: list[int]
    sweep_seed: int
    tokens_per_run: int
    command: str
    given: dict[str, Any]

    @property
    def default_folder(self) -> Path:
        """The results folder, unless another one is given."""
        return Path(f"runs/compare-{self.name}")

    def sweep(self, model: str) -> list[Run]:
        """The runs that choose a model's learning rate; none where there is only one."""
        rates = self.variants[model].learning_rates
        return [Run(model, rate, self.sweep_seed, True) for rate in rates] if len(rates) > 1 else []

    def reported(self, model: str, learning_rate: float) -> list[Run]:
        """The runs that are reported, at the chosen rate."""
        return [Run(model, learning_rate, seed, False) for seed in self.seeds]

    def runs_of(self, model: str) -> int:
        """The number of runs of a model."""
        return len(self.sweep(model)) + len(self.seeds)

    @property
    def steps_per_run(self) -> int:
        """The number of optimizer steps of a run, which all models share."""
        return self.variants[self.baseline].steps

    def in_order(self, runs: list[Run]) -> list[Run]:
        """Sorts runs: all sweeps first, then seed by seed, so that early results cover all models."""
        order = {seed: index for index, seed in enumerate(self.seeds)}
        return sorted(runs, key=lambda run: -1 if run.is_sweep else order[run.seed])

    @_without_gpu_advice()
    def resolve(self, run: Run, folder: Path) -> ResolvedRecipe:
        """The recipe of a run."""
        content = copy.deepcopy(self.variants[run.model].content)
        content["training"].update(learning_rate=run.learning_rate, seed=run.seed)
        return resolve_recipe(content, {"output_dir": str(folder)}, f"model {run.model!r}")

    def power_warning(self) -> str | None:
        """A warning if there are too few seeds for a verdict."""
        return power_warning(len(self.seeds), len(self.variants) - 1)

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        rows = []
        for name, variant in self.variants.items():
            size = variant.size
            rows.append(
                {
                    "model": name + (" (baseline)" if name == self.baseline else ""),
                    "parameters": f"{size.total:,}",
                    "trained": f"{size.trained:,}",
                    "non-embedding": f"{size.non_embedding:,}",
                    "MLP width": "" if variant.intermediate_size is None else f"{variant.intermediate_size:,}",
                    "FLOPs per token": f"{size.flops_per_token:,}",
                    "FLOPs per run": f"{size.flops_per_token * self.tokens_per_run:.3g}",
                    "learning rates": " ".join(f"{rate:g}" for rate in variant.learning_rates),
                    "runs": str(self.runs_of(name)),
                }
            )
        if all(row["trained"] == row["parameters"] for row in rows):
            rows = [{name: cell for name, cell in row.items() if name != "trained"} for row in rows]
        yield from align([list(rows[0]), *(list(row.values()) for row in rows)])
        runs = sum(self.runs_of(name) for name in self.variants)
        flops = (
            sum(self.runs_of(name) * item.size.flops_per_token for name, item in self.variants.items()) * self.tokens_per_run
        )
        yield (
            f"{runs} runs of {self.tokens_per_run:,} tokens, {runs * self.tokens_per_run:,} tokens, {flops:.3g} FLOPs in all; "
            f"seeds {' '.join(map(str, self.seeds))}, rates swept with seed {self.sweep_seed}"
        )
        if warning := self.power_warning():
            yield f"warning: {warning}"


@_without_gpu_advice()
def load_comparison(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Comparison:
    """Reads a comparison, applies overrides, and checks that every run of it can be made.

    Args:
        source: the name of a shipped comparison or a YAML file, such as the `comparison.yaml` of a results folder.
        overrides: for the recipe that all models share, as in `load_recipe`.

    Raises:
        ValueError: for an unknown field, name or value.
    """
    path = find("comparisons", str(source))
    given = read_yaml(path)
    check_keys(str(path), given, _FIELDS)
    models = read_section(given.get("models"), f"{path}: models")
    for name in ("recipe", "baseline"):
        if not given.get(name):
            raise ValueError(f"{path}: the field {name!r} is missing")
    baseline = given["baseline"]
    if not isinstance(baseline, str) or baseline not in models:
        raise ValueError(
            f"{path}: baseline={baseline!r} must be one of the models {', '.join(map(str, models)) or '(none given)'}"
        )
    if len(models) < 2:
        raise ValueError(f"{path}: models holds only the baseline {baseline!r}; there is nothing to compare it with")
    seeds, sweep_seed = given.get("seeds"), given.get("sweep_seed", 1000)
    _check_seeds(path, seeds, sweep_seed)
    learning_rates = _check_learning_rates(f"{path}: learning_rates", given.get("learning_rates"))

    # The recipe that all models share
    overrides = dict(overrides or {})
    _check_set_by_run("arguments", overrides)
    shared, recipe_source = given["recipe"], f"{path}: recipe"
    if not isinstance(shared, dict):
        recipe_source = str(find("recipes", str(shared)))
        shared = read_yaml(Path(recipe_source))
    shared = {"test_fraction": 0.02, "record_stability": True, **shared}
    for section in ("training", "switches"):
        own = read_section(given.get(section), f"{path}: {section}")
        _check_set_by_run(f"{path}: {section}", own)
        shared[section] = {**read_section(shared.get(section), f"{recipe_source}: {section}"), **own}
    shared = resolve_recipe(shared, overrides, recipe_source).given

    if len({str(name).casefold() for name in models}) < len(models):
        raise ValueError(f"{path}: two models have the same name but for capitals: they would share a folder on some machines")
    variants = {}
    for name in sorted(models, key=lambda name: name != baseline):  # the baseline first: others may be matched to it
        budget = variants[baseline].size if name != baseline else None
        variants[name] = _read_model(path, name, models[name], shared, learning_rates, given.get("match"), budget)
        if (tokens := variants[name].tokens) != variants[baseline].tokens:
            seen = f"{tokens:,} tokens, the baseline {variants[baseline].tokens:,}"
            raise ValueError(f"{path}: model {name!r} would see {seen}: that compares the amount of data too")
        if (tokenizer := variants[name].tokenizer) != variants[baseline].tokenizer:
            other = variants[baseline].tokenizer
            raise ValueError(
                f"{path}: model {name!r} has the tokenizer {tokenizer!r}, the baseline {other!r}: all must read the same "
                "tokens; name one tokenizer in the recipe"
            )
    variants = {name: variants[name] for name in models}

    own_name = " ".join(str(given.get("name") or path.stem).split())  # a heading has one line
    resolved = {name: value for name, value in given.items() if name not in ("training", "switches")}
    resolved.update(
        name=own_name, recipe=shared, sweep_seed=sweep_seed, models={name: item.given for name, item in variants.items()}
    )
    shown = Path(source).name if Path(source).is_file() else str(source)
    command = shlex.join(["nlq", "compare", shown, *override_words(without_folders(overrides))])
    return Comparison(own_name, baseline, variants, list(seeds), sweep_seed, variants[baseline].tokens, command, resolved)


def outline(given: Mapping[str, Any]) -> Comparison:
    """A comparison without its models: names, rates and seeds, as the `comparison.yaml` of a results folder has them."""
    shared = _check_learning_rates("learning_rates", given.get("learning_rates"))
    variants = {}
    for name, entry in given["models"].items():
        rates = _check_learning_rates("learning_rates", (entry or {}).get("learning_rates")) or shared
        variants[name] = Variant({}, rates, Size(0, 0, 0, 0), None, 0, 0, "", entry or {})
    seeds, sweep_seed = given["seeds"], given["sweep_seed"]
    return Comparison(given["name"], given["baseline"], variants, seeds, sweep_seed, 0, "", dict(given))


def _check_set_by_run(source: str, fields: Iterable[str]) -> None:
    if fixed := [name for name in _SET_BY_RUN if name in fields]:
        raise ValueError(f"{source}: {', '.join(fixed)}: set seeds and learning_rates in the comparison's file instead")


def _is_seed(seed: Any) -> bool:
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32


def _check_seeds(path: Path, seeds: Any, sweep_seed: Any) -> None:
    if not isinstance(seeds, list) or not seeds or not all(map(_is_seed, seeds)):
        raise ValueError(f"{path}: seeds={seeds!r} must be a list of at least one whole number from 0 to 2**32 - 1")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: seeds={seeds!r} holds a seed twice")
    if not _is_seed(sweep_seed):
        raise ValueError(f"{path}: sweep_seed={sweep_seed!r} must be a whole number from 0 to 2**32 - 1")
    if sweep_seed in seeds:
        raise ValueError(
            f"{path}: sweep_seed={sweep_seed} is one of the seeds: a rate must not be chosen by a run that is reported"
        )


def _check_learning_rates(source: str, rates: Any) -> list[float]:
    rates = rates if isinstance(rates, list) else [] if rates is None else [rates]
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf for rate in rates):
        raise ValueError(f"{source}={rates!r} must be a list of numbers above 0")
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError(f"{source}={rates!r} holds a rate twice")
    return sorted(float(rate) for rate in rates)


def _read_model(
    path: Path, name: Any, entry: Any, shared: dict[str, Any], learning_rates: list[float], match: Any, budget: Size | None
) -> Variant:
    """Reads an entry of `models`: `None`, the name of a configuration, or a mapping of fields that differ from the recipe."""
    source = f"{path}: model {name!r}"
    if not isinstance(name, str):
        raise ValueError(f"{source}: a name must be a text; put it in quotes")
    if not re.fullmatch(r"[\w+=]([\w+=., -]*[\w+=])?", name, flags=re.ASCII):
        raise ValueError(f"{source}: a name must be made of letters, digits, spaces and _ + = . , - (it names a folder)")
    entry = {"model": entry} if isinstance(entry, str) else read_section(entry, source)
    check_keys(source, entry, _MODEL_FIELDS)
    learning_rates = _check_learning_rates(f"{source}: learning_rates", entry.get("learning_rates")) or learning_rates
    if not learning_rates:
        raise ValueError(f"{path}: learning_rates is missing")
    match = entry.get("match", match)
    if match is not None and match not in _MATCHES:
        raise ValueError(f"{source}: match={match!r} must be one of {', '.join(_MATCHES)}, or null")

    content = {**shared, **{name: entry[name] for name in ("model", "trainable", "lora") if entry.get(name) is not None}}
    for section in ("training", "switches"):
        own = read_section(entry.get(section), f"{source}: {section}")
        _check_set_by_run(source, own)
        content[section] = {**shared[section], **own}
    try:
        resolved = resolve_recipe(content, None, source)
        recipe, arguments = resolved.recipe, resolved.training_arguments
        config = load_config(recipe.model, content["switches"])
        if match is not None and budget is not None:
            width = matching_intermediate_size(config, budget, match, recipe.block_size)
            content["switches"]["intermediate_size"] = width
            config = load_config(recipe.model, content["switches"])
        check_recipe(resolved, config)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {one_line(error).removeprefix(f'{source}: ')}") from error
    if arguments.max_steps <= 0:
        raise ValueError(f"{source}: the recipe needs max_steps, so that all models see the same number of tokens")
    if recipe.test_fraction == 0:
        raise ValueError(f"{source}: test_fraction=0 leaves no test split to report")
    if arguments.save_strategy == "steps" and arguments.save_steps % arguments.logging_steps:
        raise ValueError(
            f"{source}: save_steps={arguments.save_steps} must be a multiple of logging_steps={arguments.logging_steps}, or a "
            "run that is interrupted would report another training loss"
        )
    # Each run has one device, even if this process has several
    tokens_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * recipe.block_size
    if tokens_per_step < 1:
        raise ValueError(f"{source}: per_device_train_batch_size and gradient_accumulation_steps must be at least 1")
    size = measure(config, recipe.block_size, prepare=recipe.choose_trained)
    steps, width = arguments.max_steps, getattr(config, "intermediate_size", None)
    return Variant(content, learning_rates, size, width, steps, steps * tokens_per_step, recipe.tokenizer, entry)
