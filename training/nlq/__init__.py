"""The command `nlq`, by Typer: one function a command, over the functions of `modeling_nlq.training`; errors in one
line.

This folder is installed as a package of its own, `nlq`, because importing `modeling_nlq` takes seconds. Help,
completion and wrong arguments do not wait for that, so every function imports what it needs.
"""

import logging
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal

import typer
from typer.core import TyperCommand


app = typer.Typer(
    help="Train, compare, convert, publish and use NLQ models.",
    # `--max_new_tokens` and `--max-new-tokens` are the same option
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),
    },
)


def _argument(help: str, default: Any = ..., metavar: str | None = None) -> Any:
    return typer.Argument(default, help=help, metavar=metavar)


def _option(help: str, default: Any = None, *names: str, metavar: str | None = None, panel: str | None = None) -> Any:
    return typer.Option(default, *names, help=help, metavar=metavar, rich_help_panel=panel)


_flag = partial(_option, default=False)
_on_ray, _of_text, _of_tasks = (partial(_option, panel=panel) for panel in ("With --engine ray", "Text", "Tasks"))
# Options of several commands
_ENGINE = _option("local: on this machine; ray: on the cluster that Ray finds.", "local")
_MAX_RETRIES = _on_ray("How often a run is retried that lost its node or ran out of memory; by default 3.")
_PARTS = _option("Run a file that defines parts of the model; may be repeated.", [], metavar="FILE.py")
_TRUST_PARTS = _flag("Run the files of attention parts that lie beside the model.")
_TRUST_RECORD = _flag("Run the attention parts whose code the file itself holds, as the record of a run does.")
_TRUST_REMOTE_CODE = _flag("Run the code that lies beside a model of a type that Transformers does not know.")
_MODEL = _argument("Folder or Hub name of a saved model.")
_MODELS = _argument("Shipped configuration, config.json, or saved model.", metavar="MODEL...")
_SWITCHES = _option("Set a switch; refused if the outputs would change.", [], "--set", metavar="SWITCH=VALUE")


class _Command(TyperCommand):
    """A command: it loads the parts that its models need, and ends in one line if it is interrupted.

    Args:
        module: the module of `modeling_nlq.training` that takes long to import.
        shipped: the kind of configurations that the help lists, with a line for each.
    """

    def __init__(self, *, module: str, shipped: str | None = None, **options: Any):
        super().__init__(**options)
        self.module, self.shipped = module, shipped
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help)  # a terminal has lines of another length
        # A command with fields of a recipe goes on where it was interrupted
        self.goes_on = self.ignore_unknown_options = self.allow_extra_args = shipped in ("recipes", "comparisons")
        for parameter in self.params:
            parameter.secondary_opts = []  # Typer makes `--no-upcycle` of `--upcycle`

    def format_help(self, context: typer.Context, formatter: Any) -> None:
        if self.shipped is not None:
            from modeling_nlq.configuration import descriptions

            lines = [f"{name:<24} {text}".replace("[", r"\[") for name, text in descriptions(self.shipped).items()]
            self.epilog = "\n".join([f"Shipped {self.shipped}:", *lines])
        super().format_help(context, formatter)

    def invoke(self, context: typer.Context) -> int | None:
        given = context.params
        try:
            # The status can be seen on a machine without the engine, the models and the data
            import_module(f"modeling_nlq.training.{'comparison.status' if given.get('status') else self.module}")
            _escape_logs()
            if "parts" in given:
                from modeling_nlq.training.models import load_parts

                models = [given.get(name) for name in ("model", "other", "source", "folder")] + given.get("models", [])
                load_parts(given["parts"], filter(None, models), given["trust_parts"])
            return super().invoke(context)
        except KeyboardInterrupt:
            from tqdm import tqdm

            hint = ": the same command goes on from the last checkpoint"
            for bar in list(tqdm._instances):  # an open progress bar would be drawn again after this line
                bar.close()
            print(f"nlq: interrupted{hint if self.goes_on and not given.get('dry_run') else ''}", file=sys.stderr)
            return 130


def _escape_logs() -> None:
    """Lets no log line act on the terminal: a name in it may come from a file that somebody else wrote."""
    from modeling_nlq.training.text import printable

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(re.sub(r"\x1b\[[0-9;]*m", "", super().format(record)))  # without colors of Transformers

    for handler in (logging.lastResort, *logging.getLogger("transformers").handlers):
        handler.setFormatter(Formatter())


def _say(text: str, **options: Any) -> None:
    """Prints a text, of which a part may come from a file that somebody else wrote."""
    from modeling_nlq.training.text import printable

    print(printable(text), **options)


def _command(panel: str, module: str, shipped: str | None = None) -> Callable:
    """Adds a function as a command."""
    return app.command(cls=partial(_Command, module=module, shipped=shipped), rich_help_panel=panel)


@_command("Try an idea", "ideas")
def new(
    file: str = _argument("The file to write, by whose name the idea is known.", metavar="FILE.py"),
    source: str = _option(
        "The idea to begin with: bias, cap, gate, previous, query or temperature.", "bias", "--from", metavar="IDEA"
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
    _say("\n".join(lines))
    return 0 if holds else 1


@_command("Set up", "text")
def build() -> int:
    """Compile the C++ code, which makes models on a Linux CPU faster. Without this, its first use compiles it."""
    from modeling_nlq.kernels.cpu.build import is_enabled
    from modeling_nlq.kernels.cpu.cpu_ops import is_built

    if not is_enabled():
        _say(
            "nothing to compile: the C++ code is for Linux, and NLQ_CPP=0 turns it off; PyTorch's operators compute "
            "the same"
        )
    elif is_built():
        _say("C++ code: ready")
    else:  # a warning said why
        return 1
    return 0


@_command("Train and compare", "api", shipped="recipes")
def train(
    context: typer.Context,
    recipe: str = _argument("Name of a shipped recipe, or a YAML file."),
    source: str | None = _option(
        "Go on from the weights and the tokenizer of a saved model.", None, "--from", metavar="RUN"
    ),
    trust_parts: bool = _TRUST_RECORD,
    engine: Literal["local", "ray"] = _ENGINE,
    workers: int | None = _on_ray("Processes that train together; by default 1."),
    cpus_per_worker: int | None = _on_ray("By default 1."),
    gpus_per_worker: float | None = _on_ray("By default 0."),
    max_retries: int | None = _MAX_RETRIES,
) -> None:
    """Train a model from a recipe.

    Any field of a recipe and of transformers.TrainingArguments can be set, as by --learning_rate 1e-3, and any switch
    of the model by --set query_projection=linear; run again, the same command goes on where it was interrupted.
    """
    from modeling_nlq.training.api import train_with
    from modeling_nlq.training.run.recipe import load_recipe, read_overrides

    begun = {} if source is None else {"model": source, "tokenizer": source}
    loaded = load_recipe(recipe, begun | read_overrides(context.args), trust_parts)
    resources = {"workers": workers, "cpus_per_worker": cpus_per_worker, "gpus_per_worker": gpus_per_worker}
    result = train_with(engine, loaded, **resources, max_retries=max_retries)
    if loaded.arguments.process_index == 0:
        _say(f"{loaded.output_dir}: {_describe_run(result)}")


@_command("Train and compare", "screening.run", shipped="comparisons")
def compare(
    context: typer.Context,
    comparison: str = _argument("Name of a shipped comparison, or a YAML file."),
    trust_parts: bool = _TRUST_RECORD,
    output_dir: str | None = _option(
        "Results folder; by default runs/compare-NAME. With Ray also an address: s3://bucket/it."
    ),
    engine: Literal["local", "ray"] = _ENGINE,
    cpus_per_run: int | None = _option(
        "Threads of a run, or CPUs that it reserves; by default as many as PyTorch takes here."
    ),
    jobs: int | None = _option(
        "Runs at a time on this machine; by default as many as --cpus-per-run leaves cores for, and 1 without it."
    ),
    gpus_per_run: float | None = _on_ray("By default 0."),
    workers_per_run: int | None = _on_ray("Processes that train a run, and share its CPUs and GPUs; by default 1."),
    max_retries: int | None = _MAX_RETRIES,
    status: bool = _flag("Print what is finished, running and waiting, and stop."),
    dry_run: bool = _flag(
        "Print the plan, its time here by a few steps of each model, and what it can find, and stop."
    ),
    noise_floor: float | None = _option(
        "With --dry-run: the standard deviation of the baseline's loss over seeds, in percent, as an earlier report "
        "has it. It makes the smallest difference that can be found a percentage.",
        metavar="PERCENT",
    ),
) -> None:
    """Compare models over learning rates and seeds.

    Each is trained at its own best learning rate, and the report says which differ from the baseline by more than
    noise; fields of the recipe can be set as in nlq train, and run again, the same command goes on where it was
    interrupted.
    """
    from modeling_nlq.training.api import describe_results, load_plan, run_and_report
    from modeling_nlq.training.comparison.reading import read_default_folder
    from modeling_nlq.training.run.recipe import read_overrides
    from modeling_nlq.training.storage import normalized, open_folder

    if noise_floor is not None and not dry_run:
        raise ValueError("--noise-floor needs --dry-run")
    if status:
        from modeling_nlq.training.comparison.status import describe_status

        _say("\n".join(describe_status(open_folder(output_dir or read_default_folder(comparison)))))
        return
    from modeling_nlq.training.comparison.estimate import machine_warning
    from modeling_nlq.training.comparison.plan import default_folder
    from modeling_nlq.training.comparison.run import is_main_process, make_engine
    from modeling_nlq.training.screening.plan import Screening

    plan = load_plan(comparison, read_overrides(context.args), trust_parts)
    place = normalized(output_dir or default_folder(plan.name))
    resources = {"cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run, "workers_per_run": workers_per_run}
    made = make_engine(engine, **resources, jobs=jobs, max_retries=max_retries)
    if is_main_process() and dry_run:
        _describe_plan(plan, cpus_per_run, noise_floor)
    elif is_main_process():
        _say("\n".join(plan.describe()), flush=True)
        if engine == "local" and (warning := machine_warning(plan.runs if isinstance(plan, Screening) else plan)):
            _say(f"warning: {warning}", flush=True)
    if dry_run:
        return
    results = run_and_report(plan, open_folder(place), made)
    if is_main_process():
        _say(f"\n{describe_results(results)}\n\nreport: {place}/report.html")


def _describe_plan(comparison, cpus_per_run: int | None, noise_floor: float | None) -> None:
    from modeling_nlq.training.comparison.estimate import describe_estimate
    from modeling_nlq.training.screening.plan import Screening

    _say("\n".join(comparison.describe()), flush=True)
    if isinstance(comparison, Screening):
        for line in describe_estimate(comparison.runs, cpus_per_run, has_verdicts=False):
            _say(line, flush=True)
        _say("confirmation, without what its factors add to the time:")
        comparison = comparison.confirmation
    for line in describe_estimate(comparison, cpus_per_run, noise_floor):
        _say(line, flush=True)


def _describe_run(result) -> str:
    if result.losses.diverged_at is not None:
        return f"diverged: the loss was infinite or not a number after step {result.losses.diverged_at}"
    said, size = _describe_evaluation(result.losses.validation, "held-out "), result.size
    is_part = size.trained < size.total and not said.startswith("diverged")
    return said + f", {size.trained:,} of {size.total:,} parameters were trained" * is_part


def _describe_evaluation(found, kind: str = "") -> str:
    if found.perplexity is None and found.pseudo_perplexity is None:
        return "diverged: the loss at the end is infinite, not a number, or too large for a perplexity"
    unit = "token" if found.pseudo_perplexity is None else "masked token"
    said = {
        "perplexity": f"{kind}perplexity {{:.2f}}",
        "pseudo_perplexity": f"{kind}pseudo-perplexity of masked tokens {{:.2f}}",
        "loss": f"loss {{:.4f}} nats per {unit}",
        "bits_per_byte": "{:.3f} bits per byte",
        "chrf": "chrF {:.1f}",
        "token_accuracy": f"accuracy of {unit}s {{:.1%}}" if unit != "token" else "token accuracy {:.1%}",
    }
    values = {name: getattr(found, name) for name in said}
    return ", ".join(text.format(values[name]) for name, text in said.items() if values[name] is not None)


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
    model: str = _MODEL,
    batch_size: int = _option("Blocks or texts per device.", 8),
    dataset: str | None = _of_text("As in a recipe; its validation split is evaluated. By default that of the run."),
    dataset_config: str | None = _of_text("As in a recipe."),
    text_column: str | None = _of_text("By default that of the run for its own dataset, else text."),
    text_template: str | None = _of_text("As in a recipe; by default that of the run for its own dataset."),
    source_column: str | None = _of_text("Of pairs; by default that of the run."),
    target_column: str | None = _of_text("Of pairs; by default that of the run."),
    validation_fraction: float | None = _of_text(
        "As in a recipe; by default that of the run. A local file is taken whole."
    ),
    max_validation_documents: int | None = _of_text("Evaluate at most this many documents."),
    block_size: int | None = _of_text("In tokens; by default that of the run."),
    packing: Literal["stream", "documents"] | None = _of_text("As in a recipe; by default that of the run."),
    tasks: str | None = _of_tasks("Names of tasks or groups of lm_eval, or YAML files.", metavar="TASK,..."),
    num_fewshot: int | None = _of_tasks("Solved examples before each item; by default as the task says."),
    limit: float | None = _of_tasks("Evaluate this many items of each task, or below 1 this share."),
    output: str | None = _of_tasks("Write lm_eval's results there, as JSON.", metavar="FILE"),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
    trust_remote_code: bool = _TRUST_REMOTE_CODE,
) -> None:
    """Measure loss, perplexity, bits per byte and token accuracy on text, or downstream tasks."""
    from modeling_nlq.training.text import unescape

    common = {"batch_size": batch_size, "trust_remote_code": trust_remote_code}
    of_text = {"dataset": dataset, "dataset_config": dataset_config, "text_column": text_column, "packing": packing}
    of_text |= {"validation_fraction": validation_fraction, "max_validation_documents": max_validation_documents}
    of_text |= {"block_size": block_size, "text_template": text_template and unescape(text_template)}
    of_text |= {"source_column": source_column, "target_column": target_column}
    if tasks is None:
        from modeling_nlq.training.run.evaluation import evaluate
        from modeling_nlq.training.run.result import Evaluation

        _refuse("{} needs --tasks", num_fewshot=num_fewshot, limit=limit, output=output)
        found = Evaluation.from_metrics(evaluate(model, **of_text, **common), "eval")
        _say(f"{model}: {_describe_evaluation(found)}")  # of text that may not be held out, if it is a file
        return
    from modeling_nlq.training.run.tasks import evaluate_tasks, tabulate_tasks, write_task_results
    from modeling_nlq.training.text import align

    _refuse("{} is for text, and cannot be given with --tasks", **of_text)
    results = evaluate_tasks(model, tasks, num_fewshot=num_fewshot, limit=limit, **common)
    _say("\n".join(align(tabulate_tasks(results))))
    if output is not None:
        write_task_results(results, output)


def _refuse(message: str, **options: Any) -> None:
    """Raises `ValueError` with the name of the first option that is given."""
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise ValueError(message.format(f"--{given[0]}"))


@_command("Use and measure", "explorer.exploring")
def explore(
    model: str = _argument("Folder or Hub name of a saved model: NLQ, or of a family that converts to it."),
    other: str | None = _argument("A second model with the same tokenizer.", None),
    text: str | None = _option("The text."),
    file: str | None = _option("A text file instead."),
    target: str | None = _option(
        "With an encoder and decoder: how this target sees the text; by default a generated one."
    ),
    output: str | None = _option("By default explore.html in this folder.", metavar="PAGE.html"),
    max_tokens: int | None = _option(
        "Show the first tokens of the text; by default 512, or as many as the models take."
    ),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
    trust_remote_code: bool = _TRUST_REMOTE_CODE,
) -> None:
    """See what attention does with a text, in one model or in two side by side.

    The page works from disk, and quotes the text.
    """
    from modeling_nlq.training.explorer.exploring import explore
    from modeling_nlq.training.files import PAGE_FILE

    options = {
        "text": text,
        "file": file,
        "target": target,
        "max_tokens": max_tokens,
        "trust_remote_code": trust_remote_code,
    }
    output = PAGE_FILE if output is None else output
    done = explore(model, other, output=output, **options)
    for each in done.models:
        _say(f"{each.name}: {each.description}")
    _say(f"page: {output} ({len(done.page.encode()):,} bytes)")


@_command("Use and measure", "size")
def params(
    models: list[str] = _MODELS,
    context: int | None = _option("In tokens; by default the model's."),
    match: str | None = _option("Print the MLP width that matches this budget, too.", metavar="MODEL_OR_NUMBER"),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
) -> None:
    """Count parameters and FLOPs per token of models."""
    from modeling_nlq.training.models import load_config
    from modeling_nlq.training.size import Size, matching_intermediate_size, measure
    from modeling_nlq.training.text import align

    budget = None
    if match is not None:
        budget = Size(0, int(match), 0, 0) if match.isdecimal() else measure(load_config(match))
    rows = [["model", "parameters", "non-embedding", "FLOPs per token"] + (["matching MLP width"] if budget else [])]
    for name in models:
        config = load_config(name)
        size = measure(config, context)
        row = [name, f"{size.total:,}", f"{size.non_embedding:,}", f"{size.flops_per_token:,}"]
        rows.append(row + ([f"{matching_intermediate_size(config, budget):,}"] if budget else []))
    _say("\n".join(align(rows)))


@_command("Convert and share", "conversion.converting")
def convert(
    source: str = _argument("Folder or Hub name of a saved model, a .gguf file, or a ckpt.pt."),
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
    """Convert models of other families to NLQ, and back.

    The families are GPT-2, Llama, Mistral, Qwen 2 and 3, SmolLM 3, OLMo 2, GPT-NeoX, DiffLlama, NanoChat and EuroBERT;
    also files of GGUF and checkpoints of nanoGPT.
    """
    from modeling_nlq.training.conversion.converting import convert
    from modeling_nlq.training.run.recipe import read_switches

    options = {
        "to": to,
        "upcycle": upcycle,
        "tokenizer": tokenizer,
        "allow_lossy": allow_lossy,
        "overwrite": overwrite,
    }
    done = convert(source, target, switches=read_switches(switches), **options)
    said = [f"{done.target_class} from {done.source_class}", f"{done.parameters:,} parameters"]
    if done.difference is not None:
        within = f"within {done.difference:.1e} of" if done.difference else "equal to"
        said.append(f"outputs on random tokens {within} the source's")
    if done.not_compared is not None:
        said.append(f"outputs were not compared: {done.not_compared}")
    said.append("tokenizer beside it" if done.has_tokenizer else "no tokenizer was found: give one by --tokenizer")
    _say(f"{target}: {', '.join(said)}")
    if done.dequantised is not None:
        _say(f"weights of type {done.dequantised} became float32: the model is no longer quantised")
    for text in done.lost:
        _say(f"lost: {text}")


@_command("Convert and share", "api")
def publish(
    folder: str = _argument(
        "Folder of a run, a conversion or another saved NLQ model; with --space, or a page.", metavar="RUN"
    ),
    repo_id: str = _argument("owner/name", metavar="REPO_ID"),
    adapter: bool = _flag(
        "Upload only what a run with trainable: new trained, as an adapter of PEFT, without the model."
    ),
    space: bool = _flag("Upload the page of nlq explore as a Space, and no model; it quotes its text."),
    private: bool = _flag("Make a new repository private."),
    comparison: str | None = _option("Results folder of nlq compare, whose verdicts go into the card."),
    card: str | None = _option("A Markdown file to use as the card; by default the card is generated."),
    license: str | None = _option("Of the weights, as the Hub names it; by default apache-2.0 for new weights."),
    revision: str | None = _option("Branch to publish to; by default the main one."),
    dry_run: bool = _flag("List the files and their sizes, and stop."),
    parts: list[str] = _PARTS,
    trust_parts: bool = _TRUST_PARTS,
) -> None:
    """Upload a trained or converted model to the Hub: weights, configuration, code, tokenizer, results and card."""
    from modeling_nlq.training.api import publish
    from modeling_nlq.training.sharing.publishing import publish_space

    options = {"private": private or None, "revision": revision, "dry_run": dry_run}
    of_models = {"comparison": comparison, "card": card, "license": license, "adapter": adapter}
    if space:
        _refuse("{} and --space exclude each other: a Space holds the page alone", **of_models)
        done = publish_space(folder, repo_id, **options)
    else:
        done = publish(folder, repo_id, **options, **of_models)
    for name, size in done.files.items():
        _say(f"{size:>14,}  {name}")
    total = f"{sum(done.files.values()):,} bytes in {len(done.files)} files"
    _say(f"{total}: nothing was sent" if done.url is None else f"{total}: {done.url}")


def main(words: list[str] | None = None) -> int:
    """Runs a command. An error that a user can cause ends in one line on stderr: exit status 2 for the arguments, else
    1.

    With NLQ_TRACEBACK=1 it is raised, to show where a library raised it.
    """
    try:
        return typer.main.get_command(app).main(words, prog_name="nlq", standalone_mode=False) or 0
    except typer.TyperException as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        print(f"nlq: error: {text}; see {error.ctx.command_path if error.ctx else 'nlq'} --help", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if os.environ.get("NLQ_TRACEBACK"):
            raise
        from huggingface_hub.errors import StrictDataclassError

        from modeling_nlq.training.text import one_line

        is_plain = isinstance(error, (ValueError, OSError, ImportError, StrictDataclassError))
        _say(
            f"nlq: error: {one_line(error) if is_plain else f'{type(error).__name__}: {one_line(error)}'}",
            file=sys.stderr,
        )
        return 1
