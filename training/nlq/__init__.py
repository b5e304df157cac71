"""The command `nlq`: arguments, and errors in one line, over the functions of `modeling_nlq.training`.

This folder is installed as a package of its own, `nlq`, because importing `modeling_nlq` takes seconds. Help and wrong
arguments do not wait for that, and Ctrl-C meanwhile ends in one line too.
"""

import argparse
import contextlib
import os
import signal
import sys
import textwrap
from importlib import import_module


_WIDTH = 100
ENGINES = ("local", "ray")
# These commands go on where they were interrupted
_RESUMABLE = ("train", "compare")
_TRUST_IN_FILE = "run the attention parts whose code the file itself holds, as the record of a run does"


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="nlq", description="Train, compare, convert, publish and use NLQ models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _add_listing_parser(
        commands,
        "train",
        help="train a model from a recipe",
        description="Train a model from a recipe. Run again, the same command goes on where it was interrupted.",
        epilog="Any field of a recipe and of transformers.TrainingArguments can be set: --learning_rate 1e-3. "
        "A model switch is set by --set query_projection=linear. Several processes: accelerate launch --config_file "
        "configuration/accelerate/cpu-two-processes.yaml -m modeling_nlq.training train RECIPE",
        kind="recipes",
    )
    command.add_argument("recipe", help="name of a shipped recipe, or a YAML file")
    _add_trust_parts(command, _TRUST_IN_FILE)
    command.add_argument(
        "--engine", choices=ENGINES, default="local", help="local: this process; ray: workers on the cluster that Ray finds"
    )
    command.add_argument("--workers", type=int, help="with --engine ray: processes that train together; by default 1")
    command.add_argument("--cpus-per-worker", "--cpus_per_worker", type=int, help="with --engine ray; by default 1")
    command.add_argument("--gpus-per-worker", "--gpus_per_worker", type=float, help="with --engine ray; by default 0")
    _add_max_retries(command)
    command.set_defaults(run=_train, module="api")

    command = _add_listing_parser(
        commands,
        "compare",
        help="compare models over learning rates and seeds",
        description="Train the models of a comparison, each at its own best learning rate and over several seeds, and report "
        "which differ from the baseline by more than noise. Run again, the same command goes on where it was interrupted.",
        epilog="Fields of the recipe that all models share can be set as in `nlq train`: --max_steps 100. Several processes "
        "share the runs between them, each on a device of its own: accelerate launch --config_file "
        "configuration/accelerate/multi-gpu.yaml -m modeling_nlq.training compare COMPARISON, or the same command in several "
        "terminals.",
        kind="comparisons",
    )
    command.add_argument("comparison", help="name of a shipped comparison, or a YAML file")
    _add_trust_parts(command, _TRUST_IN_FILE)
    command.add_argument(
        "--output_dir",
        default=None,
        help="results folder; by default runs/compare-NAME. With --engine ray also an address, such as s3://bucket/results",
    )
    command.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="local: one run after another on this machine; ray: on the cluster that Ray finds",
    )
    command.add_argument(
        "--cpus-per-run",
        "--cpus_per_run",
        type=int,
        help="threads of a run; with --engine ray, the CPUs it reserves. By default as many as PyTorch takes here",
    )
    command.add_argument("--gpus-per-run", "--gpus_per_run", type=float, help="with --engine ray; by default 0")
    command.add_argument(
        "--workers-per-run",
        "--workers_per_run",
        type=int,
        help="with --engine ray: processes that train a run together, and share its CPUs and GPUs; by default 1",
    )
    _add_max_retries(command)
    command.add_argument("--status", action="store_true", help="print what is finished, running and waiting, and stop")
    command.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="print the plan, its time here by a few steps of each model, and the smallest difference it can find, and stop",
    )
    command.add_argument(
        "--noise-floor",
        "--noise_floor",
        metavar="PERCENT",
        help="with --dry-run: the standard deviation of the baseline's loss over seeds, in percent, or the results folder of "
        "an earlier comparison that measured it. It makes the smallest difference a percentage",
    )
    command.set_defaults(run=_compare, module="comparison.run")

    command = commands.add_parser("generate", help="continue a text", allow_abbrev=False)
    command.add_argument("model", help="folder or Hub name of a saved model")
    command.add_argument("prompt", help="text to continue; a special token written in it is read as one")
    command.add_argument(
        "--max_new_tokens", type=int, default=None, help="in tokens; by default 100, or as many as fit the model"
    )
    command.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    command.add_argument("--top_k", type=int, default=50, help="sample among the k likeliest tokens; 0: among all")
    command.add_argument("--seed", type=int, default=0)
    _add_parts(command)
    _add_trust(command)
    command.set_defaults(run=_generate, module="run.generation")

    command = _add_listing_parser(
        commands,
        "evaluate",
        help="loss, perplexity, bits per byte and token accuracy on text, or downstream tasks",
        description="Evaluate a saved model on held-out text: loss, perplexity, bits per byte and token accuracy. With "
        "--tasks, evaluate it on downstream tasks by lm_eval instead.",
        epilog="--tasks takes the tasks of lm_eval too; `lm-eval ls tasks` lists them.",
        kind="tasks",
    )
    command.add_argument("model", help="folder or Hub name of a saved model")
    command.add_argument("--batch_size", type=int, default=8, help="blocks or texts per device")
    text = command.add_argument_group("text")
    text.add_argument("--dataset", help="as in a recipe; its validation split is evaluated. By default that of the run")
    text.add_argument("--dataset_config")
    text.add_argument("--text_column", help="by default that of the run for its own dataset, else text")
    text.add_argument(
        "--validation_fraction", type=float, help="as in a recipe; by default that of the run. A local file is evaluated whole"
    )
    text.add_argument("--max_validation_documents", type=int, help="evaluate at most this many documents")
    text.add_argument("--block_size", type=int, help="in tokens; by default that of the run")
    text.add_argument("--packing", choices=["stream", "documents"], help="as in a recipe; by default that of the run")
    tasks = command.add_argument_group("tasks")
    tasks.add_argument("--tasks", metavar="TASK,...", help="names of tasks or groups, or YAML files of lm_eval")
    tasks.add_argument("--num_fewshot", type=int, help="solved examples before each item; by default as the task says")
    tasks.add_argument("--limit", type=float, help="evaluate this many items of each task, or below 1 this share")
    tasks.add_argument("--output", metavar="FILE", help="write lm_eval's results there, as JSON")
    _add_parts(command)
    _add_trust(command)
    command.set_defaults(run=_evaluate, module="run.evaluation")

    command = commands.add_parser(
        "explore",
        help="see what attention does with a text, in one model or in two side by side",
        description="Write an HTML page that works from disk: the loss of each token, the attention map of each head, entropy, "
        "sinks, scores, and what removing a head costs. The page quotes the text.",
        allow_abbrev=False,
    )
    command.add_argument("model", help="folder or Hub name of a saved model: NLQ, or any causal model of Transformers")
    command.add_argument("other", nargs="?", help="a second model with the same tokenizer")
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="the text")
    text.add_argument("--file", help="a file of text instead; two models are compared on all of it")
    command.add_argument("--output", metavar="PAGE.html", help="by default explore.html in this folder")
    command.add_argument(
        "--max_tokens", type=int, help="show the first tokens of the text; by default 512, or as many as the models take"
    )
    command.add_argument("--serve", action="store_true", help="serve the page with a field for the text; needs Gradio")
    command.add_argument("--host", help="with --serve: the address to listen at; by default 127.0.0.1, this machine alone")
    command.add_argument("--port", type=int, help="with --serve; by default the first free one from 7860")
    _add_parts(command)
    _add_trust(command)
    command.set_defaults(run=_explore, module="explorer.exploring")

    command = commands.add_parser("params", help="count parameters and FLOPs per token of models", allow_abbrev=False)
    command.add_argument("models", nargs="+", metavar="MODEL", help="shipped configuration, config.json, or saved model")
    command.add_argument("--context", type=int, default=None, help="in tokens; by default the model's")
    command.add_argument("--match", metavar="MODEL_OR_NUMBER", help="print the MLP width that matches this budget, too")
    _add_parts(command)
    command.set_defaults(run=_params, module="parameters")

    command = commands.add_parser(
        "convert",
        help="convert models of other families to NLQ, and back",
        description="Write a model of another family (GPT-2, Llama, Mistral, Qwen 2 and 3, SmolLM 3, OLMo 2, GPT-NeoX), a "
        "checkpoint of the paper's code or of nanoGPT, or an NLQ model as an NLQ model that computes the same, or as a model "
        "of one of these families.",
        allow_abbrev=False,
    )
    command.add_argument("source", help="folder or Hub name of a saved model, a .gguf file, or a ckpt.pt")
    command.add_argument("target", help="folder to write")
    command.add_argument(
        "--to", metavar="FAMILY", default="nlq", help="the type to write, as Transformers names it: llama; by default nlq"
    )
    command.add_argument("--upcycle", action="store_true", help="give it queries X W + f(X), where f(X) = 0 at first")
    command.add_argument(
        "--set", action="append", metavar="SWITCH=VALUE", help="set another switch; refused if the outputs would change"
    )
    command.add_argument("--tokenizer", default=None, help="folder or Hub name; by default the source's own")
    command.add_argument("--allow-lossy", "--allow_lossy", action="store_true", help="convert even if something is lost")
    command.add_argument("--overwrite", action="store_true", help="replace the model in the target")
    _add_parts(command)
    command.set_defaults(run=_convert, module="conversion.converting")

    command = commands.add_parser(
        "publish",
        help="upload a trained or converted model to the Hub",
        description="Upload weights, configuration, code, tokenizer, results and card in one commit, and nothing else.",
        allow_abbrev=False,
    )
    command.add_argument(
        "folder", metavar="RUN", help="folder of a run, a conversion or another saved NLQ model; with --space, or a page"
    )
    command.add_argument("repo_id", metavar="REPO_ID", help="owner/name")
    command.add_argument(
        "--adapter",
        action="store_true",
        help="upload only what a run with `trainable: new` trained, as an adapter of PEFT, without the model",
    )
    command.add_argument(
        "--space", action="store_true", help="upload the page of `nlq explore` as a Space, and no model; it quotes its text"
    )
    command.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    command.add_argument("--revision", default=None, help="branch to publish to; by default the main one")
    command.add_argument("--comparison", default=None, help="results folder of `nlq compare`, whose verdicts go into the card")
    command.add_argument("--card", default=None, help="a Markdown file to use as the card; by default the card is generated")
    command.add_argument(
        "--license", default=None, help="license of the weights, as the Hub names it; by default apache-2.0 for new weights"
    )
    command.add_argument("--dry-run", "--dry_run", action="store_true", help="list the files and their sizes, and stop")
    _add_parts(command)
    command.set_defaults(run=_publish, module="sharing.publishing")

    command = commands.add_parser(
        "check",
        help="check an attention part of your own",
        description="Check the attention parts that a Python file defines on small random models: the future, padding, "
        "batches, packed documents, caches, backends, training, types, devices, saving. The first invariant that fails is "
        "named, with the smallest case found.",
        allow_abbrev=False,
    )
    command.add_argument("file", metavar="FILE.py", help="a file with subclasses of AttentionPart")
    command.set_defaults(run=_check, module="checking")
    return parser


def _add_parts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--parts",
        nargs="+",
        default=[],
        metavar="FILE.py",
        help="run these files, which define parts of the model",
    )
    _add_trust_parts(command, "run the files of attention parts that lie beside the model")


def _add_trust_parts(command: argparse.ArgumentParser, help: str) -> None:
    command.add_argument("--trust-parts", "--trust_parts", action="store_true", help=help)


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="run the code that lies beside a model of a type that Transformers does not know",
    )


def _add_max_retries(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-retries",
        "--max_retries",
        type=int,
        help="with --engine ray: how often a run is retried that lost its node or ran out of memory; by default 3",
    )


def _add_listing_parser(commands, name: str, help: str, description: str, epilog: str, kind: str) -> argparse.ArgumentParser:
    """Adds a command whose help lists the shipped configurations of a kind, with a line for each."""
    command = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, _WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def format_help() -> str:
        from modeling_nlq.configuration import descriptions

        listed = descriptions(kind)
        width = max(map(len, listed))
        lines = [
            f"  {shipped:<{width}}  {textwrap.shorten(text, _WIDTH - width - 4, placeholder=' ...')}"
            for shipped, text in listed.items()
        ]
        command.epilog = "\n".join([f"shipped {kind}:", *lines, "", textwrap.fill(epilog, _WIDTH, break_long_words=False)])
        return argparse.ArgumentParser.format_help(command)

    command.format_help = format_help
    return command


def _train(arguments: argparse.Namespace, words: list[str]) -> None:
    from modeling_nlq.training.api import train_with
    from modeling_nlq.training.files import PAGE_FILE
    from modeling_nlq.training.run.recipe import load_recipe, read_overrides
    from modeling_nlq.training.storage import open_folder

    resolved = load_recipe(arguments.recipe, read_overrides(words), arguments.trust_parts)
    options = ("workers", "cpus_per_worker", "gpus_per_worker", "max_retries")
    metrics = train_with(arguments.engine, resolved, **{name: getattr(arguments, name) for name in options})
    if resolved.training_arguments.process_index == 0:
        place = resolved.training_arguments.output_dir
        print(f"{place}: {_describe(metrics)}")
        if (open_folder(place) / PAGE_FILE).is_file():
            print(f"what its attention does: {place}/{PAGE_FILE}")


def _compare(arguments: argparse.Namespace, words: list[str]) -> None:
    from modeling_nlq.training.comparison.reading import load_comparison, read_default_folder
    from modeling_nlq.training.run.recipe import read_overrides
    from modeling_nlq.training.storage import normalized, open_folder

    if arguments.noise_floor is not None and not arguments.dry_run:
        raise ValueError("--noise-floor needs --dry-run")
    if arguments.status:  # also on a machine without the engine, the models and the data
        from modeling_nlq.training.comparison.status import describe_status

        folder = open_folder(arguments.output_dir or read_default_folder(arguments.comparison))
        print("\n".join(describe_status(folder)))
        return
    from modeling_nlq.training.comparison.plan import default_folder
    from modeling_nlq.training.comparison.report import describe
    from modeling_nlq.training.comparison.run import is_main_process, make_engine, run_and_report
    from modeling_nlq.training.comparison.screening import Screening
    from modeling_nlq.training.comparison.screening_report import describe_screening

    comparison = load_comparison(arguments.comparison, read_overrides(words), arguments.trust_parts)
    place = normalized(arguments.output_dir or default_folder(comparison.name))
    options = ("cpus_per_run", "gpus_per_run", "workers_per_run", "max_retries")
    engine = make_engine(arguments.engine, **{name: getattr(arguments, name) for name in options})
    if arguments.dry_run:
        if is_main_process():
            _describe_plan(comparison, arguments)
        return
    if is_main_process():
        print("\n".join(comparison.describe()), flush=True)
        if arguments.engine == "local":
            from modeling_nlq.training.comparison.estimate import machine_warning

            runs = comparison.runs if isinstance(comparison, Screening) else comparison
            if warning := machine_warning(runs):
                print(f"warning: {warning}", flush=True)
    results = run_and_report(comparison, open_folder(place), engine)
    if is_main_process():
        outcome = (describe_screening if isinstance(comparison, Screening) else describe)(results)
        print(f"\n{outcome}\n\nreport: {place}/report.html")


def _describe_plan(comparison, arguments: argparse.Namespace) -> None:
    from modeling_nlq.training.comparison.estimate import describe_estimate, read_noise_floors
    from modeling_nlq.training.comparison.screening import Screening

    given = arguments.noise_floor
    noise_floors = None if given is None else read_noise_floors(given, comparison)
    print("\n".join(comparison.describe()), flush=True)
    if isinstance(comparison, Screening):
        for line in describe_estimate(comparison.runs, arguments.cpus_per_run, has_verdicts=False):
            print(line, flush=True)
        print("confirmation, without what its factors add to the time:")
        comparison = comparison.confirmation
    for line in describe_estimate(comparison, arguments.cpus_per_run, noise_floors):
        print(line, flush=True)


def _describe(metrics: dict, kind: str = "held-out perplexity") -> str:
    if metrics.get("diverged_at") is not None:
        return f"diverged: the loss was infinite or not a number after step {metrics['diverged_at']}"
    if metrics.get("eval_perplexity") is None:
        return "diverged: the loss at the end is infinite, not a number, or too large for a perplexity"
    parts = [f"{kind} {metrics['eval_perplexity']:.2f}"]
    if metrics.get("unigram_perplexity"):
        parts.append(f"unigram baseline {metrics['unigram_perplexity']:.2f}")
    parts.append(f"loss {metrics['eval_loss']:.4f} nats per token")
    if metrics.get("eval_bits_per_byte"):
        parts.append(f"{metrics['eval_bits_per_byte']:.3f} bits per byte")
    parts.append(f"token accuracy {metrics['eval_token_accuracy']:.1%}")
    if metrics.get("trained_parameters", 0) < metrics.get("parameters", 0):
        parts.append(f"{metrics['trained_parameters']:,} of {metrics['parameters']:,} parameters were trained")
    return ", ".join(parts)


def _generate(arguments: argparse.Namespace, _: list[str]) -> None:
    from modeling_nlq.training.run.generation import generate_text

    options = ("max_new_tokens", "temperature", "top_k", "seed", "trust_remote_code")
    print(generate_text(arguments.model, arguments.prompt, **{name: getattr(arguments, name) for name in options}))


_TEXT_OPTIONS = (
    "dataset",
    "dataset_config",
    "text_column",
    "validation_fraction",
    "max_validation_documents",
    "block_size",
    "packing",
)
_TASK_OPTIONS = ("num_fewshot", "limit", "output")


def _evaluate(arguments: argparse.Namespace, _: list[str]) -> None:
    of_text, of_tasks = (
        {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
        for options in (_TEXT_OPTIONS, _TASK_OPTIONS)
    )
    common = {name: getattr(arguments, name) for name in ("batch_size", "trust_remote_code")}
    if arguments.tasks is None and of_tasks:
        raise ValueError(f"--{next(iter(of_tasks))} needs --tasks")
    if arguments.tasks is not None and of_text:
        raise ValueError(f"--{next(iter(of_text))} is for text, and cannot be given with --tasks")
    if arguments.tasks is None:
        from modeling_nlq.training.run.evaluation import evaluate

        metrics = evaluate(arguments.model, **of_text, **common)
        print(f"{arguments.model}: {_describe(metrics, 'perplexity')}")  # of text that may not be held out, if it is a file
        return
    from modeling_nlq.training.run.tasks import evaluate_tasks, tabulate_tasks, write_task_results
    from modeling_nlq.training.text import align

    output = of_tasks.pop("output", None)
    results = evaluate_tasks(arguments.model, arguments.tasks, **of_tasks, **common)
    print("\n".join(align(tabulate_tasks(results))))
    if output is not None:
        write_task_results(results, output)


def _explore(arguments: argparse.Namespace, _: list[str]) -> None:
    if arguments.serve:
        if arguments.output is not None:
            raise ValueError("--output and --serve exclude each other: a served page is not written")
        from modeling_nlq.training.explorer.serving import serve

        given = {name: getattr(arguments, name) for name in ("text", "file", "max_tokens", "host", "port", "trust_remote_code")}
        serve(arguments.model, arguments.other, **given)
        return
    for name in ("host", "port"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} needs --serve")
    from modeling_nlq.training.explorer.exploring import explore
    from modeling_nlq.training.explorer.page import describe_difference
    from modeling_nlq.training.files import PAGE_FILE

    output = PAGE_FILE if arguments.output is None else arguments.output
    options = {name: getattr(arguments, name) for name in ("text", "file", "max_tokens", "trust_remote_code")}
    done = explore(arguments.model, arguments.other, output=output, **options)
    for model in done.models:
        print(f"{model.name}: {model.description}")
    if done.difference is not None:
        print(describe_difference(done.difference, [model.name for model in done.models]))
    print(f"page: {output} ({len(done.page.encode()):,} bytes)")


def _params(arguments: argparse.Namespace, _: list[str]) -> None:
    from modeling_nlq.training.models import load_config
    from modeling_nlq.training.parameters import Size, matching_intermediate_size, measure, part_size, parts_in
    from modeling_nlq.training.text import align

    budget = None
    if arguments.match is not None:
        text = arguments.match.replace(",", "").replace("_", "")
        budget = Size(0, int(text), 0, 0) if text.isdecimal() else measure(load_config(arguments.match))
    header = ["model", "parameters", "non-embedding", "FLOPs per token"] + (["matching MLP width"] if budget else [])
    rows, parts = [header], []
    for name in arguments.models:
        config = load_config(name)
        size = measure(config, arguments.context)
        row = [name, f"{size.total:,}", f"{size.non_embedding:,}", f"{size.flops_per_token:,}"]
        rows.append(row + ([f"{matching_intermediate_size(config, budget):,}"] if budget else []))
        for part in parts_in(config):
            source = f" ({part.source})" if part.source else ""
            parts.append(f"{name}: {part.name} adds {part_size(config, part):,} parameters{source}")
    print("\n".join([*align(rows), *parts]))


def _convert(arguments: argparse.Namespace, _: list[str]) -> None:
    from modeling_nlq.training.conversion.converting import convert
    from modeling_nlq.training.conversion.renaming import LossyConversion
    from modeling_nlq.training.run.recipe import read_switches

    try:
        done = convert(
            arguments.source,
            arguments.target,
            to=arguments.to,
            upcycle=arguments.upcycle,
            switches=read_switches(arguments.set or []),
            tokenizer=arguments.tokenizer,
            allow_lossy=arguments.allow_lossy,
            overwrite=arguments.overwrite,
        )
    except LossyConversion as error:
        raise ValueError(f"{error}; --allow-lossy goes on without") from None
    parts = [f"{done.target_class} from {done.source_class}", f"{done.parameters:,} parameters"]
    if done.difference is not None:
        within = f"within {done.difference:.1e} of" if done.difference else "equal to"
        parts.append(f"outputs on random tokens {within} the source's")
    if done.not_compared is not None:
        parts.append(f"outputs were not compared: {done.not_compared}")
    parts.append("tokenizer beside it" if done.has_tokenizer else "no tokenizer was found: give one by --tokenizer")
    print(f"{arguments.target}: {', '.join(parts)}")
    if done.dequantised is not None:
        print(f"weights of type {done.dequantised} became float32: the model is no longer quantised")
    for text in done.lost:
        print(f"lost: {text}")


def _publish(arguments: argparse.Namespace, _: list[str]) -> None:
    from modeling_nlq.training.sharing.publishing import publish, publish_space

    options = {name: getattr(arguments, name) for name in ("private", "revision", "dry_run")}
    of_models = {name: getattr(arguments, name) for name in ("comparison", "card", "license", "adapter")}
    if arguments.space:
        if given := [name for name, value in of_models.items() if value]:
            raise ValueError(f"--{given[0]} and --space exclude each other: a Space holds the page alone")
        done = publish_space(arguments.folder, arguments.repo_id, **options)
    else:
        done = publish(arguments.folder, arguments.repo_id, **options, **of_models)
    for name, size in done.files.items():
        print(f"{size:>14,}  {name}")
    total = f"{sum(done.files.values()):,} bytes in {len(done.files)} files"
    print(f"{total}: nothing was sent" if done.url is None else f"{total}: {done.url}")


def _check(arguments: argparse.Namespace, _: list[str]) -> int:
    import torch
    from transformers.utils import logging

    from modeling_nlq.training.checking import describe

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are so small that threads would wait for each other
    lines, holds = describe(arguments.file)
    print("\n".join(lines))
    return 0 if holds else 1


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; an error that a user can cause ends in one line on stderr and exit status 1."""
    if not os.environ.get("NLQ_TRACEBACK"):
        os.environ["RUST_BACKTRACE"] = "0"  # a panic has a hundred lines otherwise
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and parsed.command not in _RESUMABLE:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    from modeling_nlq.training.text import PrintableOutput, one_line

    output = PrintableOutput(sys.stdout) if sys.stdout.isatty() else sys.stdout
    try:
        # All that takes long to import
        import_module("modeling_nlq.training." + ("comparison.status" if getattr(parsed, "status", False) else parsed.module))
        if signal.getsignal(signal.SIGINT) is _stop_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if getattr(parsed, "parts", None):
            from modeling_nlq import load_attention_parts

            for file in parsed.parts:
                load_attention_parts(file)
        if getattr(parsed, "trust_parts", False) and parsed.command not in _RESUMABLE:
            from modeling_nlq.training.models import is_saved_model, load_parts_beside

            given = [getattr(parsed, name, None) for name in ("model", "other", "source", "folder")]
            for name in filter(is_saved_model, filter(None, [*given, *getattr(parsed, "models", ())])):
                load_parts_beside(name)
        with contextlib.redirect_stdout(output):
            return parsed.run(parsed, rest) or 0
    except (ValueError, OSError, ImportError, StrictDataclassError, SafetensorError) as error:
        print(f"nlq: error: {one_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:  # a library raised it, for a value that a user gave; NLQ_TRACEBACK=1 shows where
        if os.environ.get("NLQ_TRACEBACK"):
            raise
        print(f"nlq: error: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        from tqdm import tqdm

        goes_on = parsed.command in _RESUMABLE and not getattr(parsed, "dry_run", False)
        hint = ": the same command goes on from the last checkpoint" if goes_on else ""
        for bar in list(tqdm._instances):  # an open progress bar would be drawn again after this line
            bar.close()
        print(f"nlq: interrupted{hint}", file=sys.stderr)
        return 130
    except BaseException as error:  # a panic of a tokenizer's Rust, such as at a regular expression, is no `Exception`
        if type(error).__name__ != "PanicException":
            raise
        print(f"nlq: error: the tokenizer cannot read this text: {one_line(error)}", file=sys.stderr)
        return 1


def start() -> int:
    """What the console script calls: `main`, where Ctrl-C ends in one line also while libraries are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background, where a shell turns it off
        signal.signal(signal.SIGINT, _stop_at_once)
    return main()


def _stop_at_once(*_) -> None:
    """Ends the process. Libraries catch some exceptions in their imports, and then a `KeyboardInterrupt` would be lost."""
    os.write(2, b"nlq: interrupted\n")
    os._exit(130)
