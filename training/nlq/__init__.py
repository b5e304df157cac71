"""The command `nlq`, by Typer: a function for each command.

Every function imports what it needs, so help and completion do not wait seconds for `modeling_nlq`.
"""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal


# Ctrl-C in this first moment ends the program, without a traceback of what Typer imports
_interrupt = signal.getsignal(signal.SIGINT)
_is_program = _interrupt is signal.default_int_handler and threading.current_thread() is threading.main_thread()
if _is_program:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import typer  # noqa: E402
from typer.core import TyperCommand  # noqa: E402


if _is_program:
    signal.signal(signal.SIGINT, _interrupt)

app = typer.Typer(
    help="Train, compare, convert, publish and use NLQ models.",
    # `--max_new_tokens` and `--max-new-tokens` are the same option
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),
    },
)


def _argument(help: str, default: Any = ..., metavar: str | None = None, shipped: str | None = None) -> Any:
    return typer.Argument(default, help=help, metavar=metavar, autocompletion=shipped and _complete(shipped))


def _complete(shipped: str) -> Callable[[str], list[str]]:
    """Completes the names of shipped configurations, found without an import of PyTorch, which takes seconds."""

    def complete(incomplete: str) -> list[str]:
        package = Path(find_spec("modeling_nlq").origin).parent
        # In a wheel and in a clone
        files = [file for root in (package, package.parent) for file in root.glob(f"configuration/{shipped}/*.*")]
        return sorted(file.stem for file in files if file.stem.startswith(incomplete) and file.suffix != ".py")

    return complete


def _option(help: str, default: Any = None, *names: str, metavar: str | None = None, panel: str | None = None) -> Any:
    return typer.Option(default, *names, help=help, metavar=metavar, rich_help_panel=panel)


_flag = partial(_option, default=False)
_on_ray, _of_text, _of_tasks = (partial(_option, panel=panel) for panel in ("With --engine ray", "Text", "Tasks"))


def _options_of(context: typer.Context, panel: str) -> dict[str, Any]:
    options = [option for option in context.command.params if getattr(option, "rich_help_panel", None) == panel]
    return {option.name: context.params[option.name] for option in options}


# Options of several commands
_ENGINE = _option("local: on this machine; ray: on the cluster that Ray finds.", "local")
_MAX_RETRIES = _on_ray("How often a run is retried that lost its node or ran out of memory; by default 3.")
_PARTS = _option("Run a file that defines parts of the model; may be repeated.", [], metavar="FILE.py")
_TRUST_PARTS = _flag("Run the files of attention parts that lie beside the model.")
_TRUST_RECORD = _flag("Run the attention parts whose code the file itself holds, as the record of a run does.")
_TRUST_REMOTE_CODE = _flag("Run the code that lies beside a model of a type that Transformers does not know.")
_MODEL = _argument("Folder or Hub name of a saved model.")
_MODELS = _argument("Shipped configuration, config.json, or saved model.", metavar="MODEL...", shipped="models")
_COMPARISONS = _argument("Results folder of nlq compare, or a published one.", metavar="FOLDER_OR_NAME...")
_TESTED = _option("The model, where a comparison has several; may be repeated for other names.", [])
_SCALES = _option("Take only this scale or condition; may be repeated.", [])
_SWITCHES = _option("Set a switch; refused if the outputs would change.", [], "--set", metavar="SWITCH=VALUE")


class _Command(TyperCommand):
    """Imports the `module` of a command, loads parts, and lists `shipped` configurations in its help."""

    def __init__(self, *, module: str, shipped: str | None = None, **options: Any):
        super().__init__(**options)
        self.module = module
        self.shipped = shipped
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help)  # the terminal wraps the lines
        # Commands with shipped configurations take the fields of a recipe as options
        self.ignore_unknown_options = self.allow_extra_args = shipped is not None
        for parameter in self.params:
            parameter.secondary_opts = []  # Typer would add `--no-upcycle` to `--upcycle`

    def format_help(self, context: typer.Context, formatter: Any) -> None:
        if self.shipped is not None:
            from modeling_nlq.configuration import descriptions

            lines = [f"{name:<24} {text}".replace("[", r"\[") for name, text in descriptions(self.shipped).items()]
            self.epilog = "\n".join([f"Shipped {self.shipped}:", *lines])
        super().format_help(context, formatter)

    def invoke(self, context: typer.Context) -> int | None:
        options = context.params
        try:
            # The status can be seen on a machine without the engine, the models and the data
            import_module(f"modeling_nlq.training.{'comparison.status' if options.get('status') else self.module}")
            _escape_logs()
            if "parts" in options:
                from modeling_nlq.training.loading import load_parts

                models = [*options.get("models", ()), *map(options.get, ("model", "other", "source", "folder"))]
                load_parts(options["parts"], filter(None, models), options["trust_parts"])
            return super().invoke(context)
        except KeyboardInterrupt:
            from tqdm import tqdm

            for bar in list(tqdm._instances):  # which would be drawn again after this line
                bar.close()
            print(f"nlq: interrupted{_what_resumes(context.obj)}", file=sys.stderr)
            return 130


def _what_resumes(folder: Path | None) -> str:
    """Says what the same command would do after an interruption, if it writes into a folder."""
    if folder is None:
        return ""
    from modeling_nlq.training.run.run_folder import describe_interrupted

    return f": {describe_interrupted(folder)}"


def _escape_logs() -> None:
    """Escapes control characters in log lines, as `_say` does."""
    from modeling_nlq.training.text import printable

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(re.sub(r"\x1b\[[0-9;]*m", "", super().format(record)))  # without Transformers' colors

    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in (logging.lastResort, *getattr(logger, "handlers", ())):
            handler.setFormatter(Formatter())


def _say(*lines: str, **options: Any) -> None:
    """Prints lines with control characters escaped, because a part may be somebody else's."""
    from modeling_nlq.training.text import printable

    print(printable("\n".join(lines)), **options)


def _command(panel: str, module: str, shipped: str | None = None) -> Any:
    return app.command(cls=partial(_Command, module=module, shipped=shipped), rich_help_panel=panel)


@_command("Try an idea", "ideas")
def new(
    file: str = _argument("The file to write, by whose name the idea is known.", metavar="FILE.py"),
    source: str = _option(
        "bias, cap, gate, previous, query, stream or temperature.", "bias", "--from", metavar="IDEA"
    ),
) -> None:
    """Copy a file with an idea for attention, and write a comparison of models with and without it."""
    from modeling_nlq.training.ideas import new_idea

    file, comparison = new_idea(file, source)
    _say(f"{file}: the idea, to be changed as you like; `nlq check {file}` tests it")
    _say(f"{comparison}: `nlq compare {comparison}` says whether it helps; --dry-run says how long that takes here")


@_command("Try an idea", "checking")
def check(
    file: str = _argument("A file with subclasses of AttentionPart.", metavar="FILE.py"),
    seed: int | None = _option("Repeat the random cases of this seed; drawn by default, and printed.", None),
) -> int:
    """Check the attention parts of a file on small random models, and name the first invariant that fails."""
    import torch
    from transformers.utils import logging

    from modeling_nlq.training.checking import describe

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are so small that threads would wait for each other
    lines, holds = describe(file, seed)
    _say(*lines)
    return 0 if holds else 1


@_command("Set up", "text")
def build() -> int:
    """Compile the C++ code, which makes models on a Linux CPU faster. Without this, its first use compiles it."""
    from modeling_nlq.kernels.cpu.build import is_enabled
    from modeling_nlq.kernels.cpu.cpu_ops import is_built

    if is_enabled() and not is_built():  # a warning said why
        return 1
    _say("C++ code: ready" if is_enabled() else "nothing to compile: the C++ code needs Linux without NLQ_CPP=0")
    return 0


@_command("Train and compare", "api", shipped="recipes")
def train(
    context: typer.Context,
    recipe: str = _argument("Name of a shipped recipe, or a YAML file.", shipped="recipes"),
    source: str | None = _option("Start from a saved model and its tokenizer.", None, "--from", metavar="RUN"),
    trust_parts: bool = _TRUST_RECORD,
    engine: Literal["local", "ray"] = _ENGINE,
    workers: int | None = _on_ray("Processes that train together; by default 1."),
    cpus_per_worker: int | None = _on_ray("By default 1."),
    gpus_per_worker: float | None = _on_ray("By default 0."),
    max_retries: int | None = _MAX_RETRIES,
) -> None:
    """Train a model from a recipe.

    Set any field of a recipe, as --dataset, --block_size or --explore, or of transformers.TrainingArguments, as
    --output_dir, --seed, --max_steps or --learning_rate 1e-3, and any switch of the model, as in --set
    query_projection=linear. The same command continues after an interruption.
    """
    from modeling_nlq.training.api import train_with
    from modeling_nlq.training.run.recipe import load_recipe, read_overrides

    overrides = read_overrides(context.args)
    if source is not None:
        overrides = {"model": source, "tokenizer": source, **overrides}
    loaded = load_recipe(recipe, overrides, trust_parts)
    context.obj = Path(loaded.output_dir)
    result = train_with(engine, loaded, **_options_of(context, "With --engine ray"))
    if loaded.arguments.process_index > 0:
        return
    losses, size = result.losses, result.size
    text = _describe_evaluation(losses.validation, "held-out ")
    if losses.diverged_at is not None:
        text = f"diverged: the loss was infinite or not a number after step {losses.diverged_at}"
    elif size.trained < size.total and not text.startswith("diverged"):
        text += f", {size.trained:,} of {size.total:,} parameters were trained"
    _say(f"{loaded.output_dir}: {text}")


@_command("Train and compare", "screening.run", shipped="comparisons")
def compare(
    context: typer.Context,
    comparison: str = _argument(
        "Name of a shipped comparison, a YAML file, or owner/name of a published comparison.", shipped="comparisons"
    ),
    trust_parts: bool = _TRUST_RECORD,
    seeds: Literal["fresh", "original"] | None = _option(
        "Of a published comparison: fresh ones, as many as it has, by default; original: its own."
    ),
    output_dir: str | None = _option(
        "Results folder, which all nodes of Ray's cluster must see; by default runs/compare-NAME."
    ),
    engine: Literal["local", "ray"] = _ENGINE,
    cpus_per_run: int | None = _option("Threads of a run, or CPUs that it reserves; by default PyTorch's number."),
    jobs: int | None = _option("Runs at a time on this machine; by default cores / --cpus-per-run, and 1 without it."),
    gpus_per_run: float | None = _on_ray("By default 0."),
    workers_per_run: int | None = _on_ray("Processes that train a run, and share its CPUs and GPUs; by default 1."),
    max_retries: int | None = _MAX_RETRIES,
    status: bool = _flag("Print what is finished, running and waiting, and stop."),
    dry_run: bool = _flag("Time a few steps of each model, print the plan and what it can find, and stop."),
    noise_floor: float | None = _option(
        "With --dry-run: the baseline's standard deviation over seeds, from a report.", metavar="PERCENT"
    ),
) -> None:
    """Compare models over learning rates and seeds.

    Each is trained at its own best learning rate, and the report says which differ from the baseline by more than
    noise. Fields of the recipe can be set as in nlq train, as --max_steps 100, or --explore false for no page of
    attention; models and learning rates are those of the file. The same command continues after an
    interruption.
    """
    from modeling_nlq.training.comparison.config import default_folder, read_default_folder
    from modeling_nlq.training.comparison.publication import find_published
    from modeling_nlq.training.disk import results_folder

    if noise_floor is not None and not dry_run:
        raise ValueError("--noise-floor needs --dry-run")
    published = None if status and output_dir else find_published(comparison, seeds)
    if status:
        from modeling_nlq.training.comparison.status import describe_status

        folder = default_folder(published.content["name"]) if published else None
        _say(*describe_status(results_folder(output_dir or folder or read_default_folder(comparison))))
        return
    from modeling_nlq.training.api import load_plan
    from modeling_nlq.training.comparison.estimate import describe_estimate
    from modeling_nlq.training.comparison.ledger import ledger_of
    from modeling_nlq.training.comparison.pooling import pooled_lines
    from modeling_nlq.training.comparison.report import describe
    from modeling_nlq.training.comparison.run import is_main_process, make_engine, run_and_report
    from modeling_nlq.training.run.recipe import read_overrides

    plan = load_plan(comparison, read_overrides(context.args), trust_parts, published)
    folder = results_folder(output_dir or default_folder(plan.name))
    made = make_engine(engine, cpus_per_run=cpus_per_run, jobs=jobs, **_options_of(context, "With --engine ray"))
    if is_main_process():
        _say(*([published.describe()] if published else []), *plan.describe(), flush=True)
        if dry_run:
            for line in describe_estimate(plan, cpus_per_run, noise_floor):
                _say(line, flush=True)
        elif engine == "local" and plan.machine_warning:
            _say(f"warning: {plan.machine_warning}", flush=True)
    if dry_run:
        return
    context.obj = folder
    results = run_and_report(plan, folder, made)
    if is_main_process():
        _say(f"\n{describe(results)}\n")
        if published:
            own = ledger_of(results)
            _say(*published.verdict_lines(own), "")
            if seeds != "original":
                _say("both together:", *pooled_lines(published.ledger, own), "")
        _say(f"report: {folder}/report.html")


@_command("Train and compare", "comparison.pooling")
def pool(
    sources: list[str] = _COMPARISONS,
    model: list[str] = _TESTED,
    scale: list[str] = _SCALES,
    output_dir: str | None = _option("Results folder; by default runs/pool-MODEL."),
) -> None:
    """Pool measurements of the same change, with other seeds, by other people or at other sizes.

    Prints every study, and what they show together: one analysis, a difference, or a random-effects model.
    """
    from modeling_nlq.training.comparison.pooling import describe_pooled, pool_and_report
    from modeling_nlq.training.disk import results_folder

    folder = None if output_dir is None else results_folder(output_dir)
    pooled, folder = pool_and_report(sources, model, scale, folder)
    _say(*describe_pooled(pooled), "", f"report: {folder}/report.html")


def _describe_evaluation(evaluation, kind: str = "") -> str:
    is_masked = evaluation.pseudo_perplexity is not None
    if evaluation.perplexity is None and not is_masked:
        return "diverged: the loss at the end is infinite, NaN, or very large"
    texts = {
        f"{kind}perplexity {{:.2f}}": evaluation.perplexity,
        f"{kind}pseudo-perplexity of masked tokens {{:.2f}}": evaluation.pseudo_perplexity,
        f"loss {{:.4f}} nats per {'masked ' if is_masked else ''}token": evaluation.loss,
        "{:.3f} bits per byte": evaluation.bits_per_byte,
        "chrF {:.1f}": evaluation.chrf,
        "accuracy of masked tokens {:.1%}" if is_masked else "token accuracy {:.1%}": evaluation.token_accuracy,
    }
    return ", ".join(text.format(value) for text, value in texts.items() if value is not None)


@_command("Use and measure", "run.generation")
def generate(
    model: str = _MODEL,
    prompt: str = _argument("Text to continue; a special token written in it is read as one."),
    max_new_tokens: int | None = _option("In tokens; by default 100, or as many as fit the model."),
    temperature: float = _option("0 takes the likeliest token each time.", 0.8),
    top_k: int = _option("Sample among the k likeliest tokens; 0: among all.", 50),
    seed: int = _option("Of the random choices.", 0),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
    trust_remote_code: bool = _TRUST_REMOTE_CODE,
) -> None:
    """Continue a text."""
    from modeling_nlq.training.run.generation import generate_text

    _say(generate_text(model, prompt, max_new_tokens, temperature, top_k, seed, trust_remote_code))


@_command("Use and measure", "run.evaluation")
def evaluate(
    context: typer.Context,
    model: str = _MODEL,
    batch_size: int = _option("Blocks or texts per device.", 8),
    dataset: str | None = _of_text("Its validation split is evaluated; by default the run's dataset."),
    dataset_config: str | None = _of_text("Configuration of the dataset."),
    text_column: str | None = _of_text("By default the run's for its own dataset, else text."),
    text_template: str | None = _of_text("By default the run's for its own dataset."),
    source_column: str | None = _of_text("Of pairs; by default the run's."),
    target_column: str | None = _of_text("Of pairs; by default the run's."),
    validation_fraction: float | None = _of_text("By default the run's. A local file is evaluated whole."),
    max_validation_documents: int | None = _of_text("Evaluate at most this many documents."),
    block_size: int | None = _of_text("In tokens; by default the run's."),
    packing: Literal["stream", "documents"] | None = _of_text("By default the run's."),
    tasks: str | None = _of_tasks("Names of tasks or groups of lm_eval, or YAML files.", metavar="TASK,..."),
    num_fewshot: int | None = _of_tasks("Solved examples before each item; by default as the task says."),
    limit: float | None = _of_tasks("Evaluate this many items of each task, or below 1 this share."),
    output: str | None = _of_tasks("Write lm_eval's results there, as JSON.", metavar="FILE"),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
    trust_remote_code: bool = _TRUST_REMOTE_CODE,
) -> None:
    """Measure loss, perplexity, bits per byte and token accuracy on text, or downstream tasks."""
    from modeling_nlq.training.result import Evaluation
    from modeling_nlq.training.run.evaluation import evaluate
    from modeling_nlq.training.run.tasks import evaluate_tasks, tabulate_tasks, write_task_results
    from modeling_nlq.training.text import align, unescape

    options = {"batch_size": batch_size, "trust_remote_code": trust_remote_code}
    text_options = _options_of(context, "Text") | {"text_template": text_template and unescape(text_template)}
    if tasks is None:
        _refuse("{} needs --tasks", num_fewshot=num_fewshot, limit=limit, output=output)
        evaluation = Evaluation.from_metrics(evaluate(model, **text_options, **options), "eval")
        _say(f"{model}: {_describe_evaluation(evaluation)}")
        return
    _refuse("{} is for text, and cannot be given with --tasks", **text_options)
    results = evaluate_tasks(model, tasks, num_fewshot=num_fewshot, limit=limit, **options)
    _say(*align(tabulate_tasks(results)))
    if output is not None:
        write_task_results(results, output)


def _refuse(message: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(message.format(f"--{name}"))


@_command("Use and measure", "explorer.exploring")
def explore(
    model: str = _argument("Folder or Hub name of a saved model: NLQ, or of a family that converts to it."),
    other: str | None = _argument("A second model with the same tokenizer.", None),
    text: str | None = _option("The text."),
    file: str | None = _option("A text file instead."),
    target: str | None = _option("With an encoder and decoder: the target; by default a generated one."),
    output: str = _option("The page to write.", "explore.html", metavar="PAGE.html"),
    max_tokens: int | None = _option("Tokens to show; by default 512, or as many as the models take."),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
    trust_remote_code: bool = _TRUST_REMOTE_CODE,
) -> None:
    """See what attention does with a text, in one model or in two side by side."""
    from modeling_nlq.training.explorer.exploring import explore

    options = {"text": text, "file": file, "target": target, "output": output, "max_tokens": max_tokens}
    exploration = explore(model, other, **options, trust_remote_code=trust_remote_code)
    _say(*(f"{explored.name}: {explored.description}" for explored in exploration.models))
    _say(f"page: {output} ({len(exploration.page.encode()):,} bytes)")


@_command("Use and measure", "size")
def params(
    models: list[str] = _MODELS,
    context: int | None = _option("In tokens; by default the model's."),
    match: str | None = _option("Print the MLP width that matches this budget, too.", metavar="MODEL_OR_NUMBER"),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
) -> None:
    """Count parameters and FLOPs per token of models."""
    from modeling_nlq.training.loading import load_config
    from modeling_nlq.training.size import Size, matching_intermediate_size, measure
    from modeling_nlq.training.text import align

    rows = [["model", "parameters", "non-embedding", "FLOPs per token"]]
    if match is not None:
        budget = Size(0, int(match), 0, 0) if match.isdecimal() else measure(load_config(match))
        rows[0].append("matching MLP width")
    for name in models:
        config = load_config(name)
        size = measure(config, context)
        numbers = [size.total, size.non_embedding, size.flops_per_token]
        if match is not None:
            numbers.append(matching_intermediate_size(config, budget))
        rows.append([name, *(f"{number:,}" for number in numbers)])
    _say(*align(rows))


@_command("Convert and share", "conversion.converting")
def convert(
    source: str = _argument("Folder or Hub name of a saved model, a .gguf file, or a ckpt.pt of nanoGPT."),
    target: str = _argument("Folder to write."),
    to: str = _option("The type to write, as Transformers names it: llama.", "nlq", metavar="FAMILY"),
    upcycle: bool = _flag("Give it queries X W + f(X), where f(X) = 0 at first."),
    switches: list[str] = _SWITCHES,
    tokenizer: str | None = _option("Folder or Hub name; by default the source's own."),
    allow_lossy: bool = _flag("Convert even if something is lost."),
    overwrite: bool = _flag("Replace the model in the target."),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
) -> None:
    """Convert GPT-2, Llama, Mistral, Qwen, SmolLM, OLMo, GPT-NeoX, EuroBERT and other models to NLQ, and back."""
    from modeling_nlq.training.conversion.converting import convert
    from modeling_nlq.training.run.recipe import read_switches

    record = convert(source, target, to, upcycle, read_switches(switches), tokenizer, allow_lossy, overwrite)
    _say(f"{target}: {record.describe()}")


@_command("Convert and share", "api")
def publish(
    folder: str = _argument(
        "Folder of a saved NLQ model or of nlq compare; with --space, the folder or a page.", metavar="RUN"
    ),
    repo_id: str = _argument("owner/name", metavar="REPO_ID"),
    adapter: bool = _flag("Upload only what a run with trainable: new trained, as an adapter of PEFT."),
    space: bool = _flag("Upload the page of nlq explore as a Space, and no model; it quotes its text."),
    private: bool = _flag("Make a new repository private."),
    comparison: str | None = _option("Results folder of nlq compare, whose verdicts go into the card."),
    card: str | None = _option("A Markdown file to use as the card; by default the card is generated."),
    license: str | None = _option(
        "Of the weights, as the Hub names it; by default apache-2.0 for new ones, trained on a built-in corpus."
    ),
    revision: str | None = _option("Branch to publish to; by default the main one."),
    dry_run: bool = _flag("List the files and their sizes, and stop."),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
) -> None:
    """Upload a model to the Hub, with code, tokenizer, results and card, or a comparison with its runs and verdicts.

    Of a comparison, upload its file, runs, verdicts and report as a data set, which nlq compare owner/name repeats.
    """
    from modeling_nlq.training.api import publish
    from modeling_nlq.training.sharing.publishing import publish_space

    options = {"private": private or None, "revision": revision, "dry_run": dry_run}
    model_options = {"comparison": comparison, "card": card, "license": license, "adapter": adapter}
    if space:
        _refuse("{} and --space exclude each other", **model_options)
        publication = publish_space(folder, repo_id, **options)
    else:
        publication = publish(folder, repo_id, **options, **model_options)
    sizes = publication.files
    _say(*(f"{size:>14,}  {name}" for name, size in sizes.items()))
    _say(f"{sum(sizes.values()):,} bytes in {len(sizes)} files: {publication.url or 'nothing was sent'}")


def main(words: list[str] | None = None) -> int:
    """Runs a command, and returns its exit status: 2 for wrong arguments, 1 for other errors.

    An error is printed in one line; NLQ_TRACEBACK=1 raises it.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    # Processes of this package and of libraries run `python -c`, which would import from the working directory
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        return _run(words)
    finally:
        os.environ.pop("PYTHONSAFEPATH", None)
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _run(words: list[str] | None) -> int:
    words = sys.argv[1:] if words is None else words
    try:
        return typer.main.get_command(app).main(words or ["--help"], prog_name="nlq", standalone_mode=False) or 0
    except typer.TyperException as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        command = error.ctx.command_path if error.ctx else "nlq"
        print(f"nlq: error: {text}; see {command} --help", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if os.environ.get("NLQ_TRACEBACK"):
            raise
        from huggingface_hub.errors import StrictDataclassError

        from modeling_nlq.training.text import one_line

        is_plain = isinstance(error, (ValueError, OSError, ImportError, StrictDataclassError))
        prefix = "" if is_plain else f"{type(error).__name__}: "
        _say(f"nlq: error: {prefix}{one_line(error)}", file=sys.stderr)
        return 1
