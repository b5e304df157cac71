"""Uploads a model, a page of `nlq explore` or a comparison to the Hub, in one commit.

A run folder also contains optimizer states, logs, and files of the user. So a list of allowed files decides what is
published. Each is opened once, so that what was checked is sent.
"""

import fnmatch
import html
import json
import re
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_local_safetensors_metadata,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

import modeling_nlq
from modeling_nlq import NLQConfig
from modeling_nlq.parts_user_nlq import default_auto_map, is_derived, saved_auto_map

from ..disk import open_file, read_bytes, resolve_user_path
from ..files import (
    ADAPTER,
    CARD_FILE,
    COMPARISON_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    PAGE_FILE,
    PLOT_FILE,
    RECIPE_FILE,
    RECORDS,
    REPORT_FILES,
    RUNS_FILE,
    SETTINGS,
    TOKENIZER,
    VERDICTS_FILE,
    VOCABULARIES,
    WEIGHTS,
    code_files,
    files_in,
    read_json,
    read_yaml,
)
from ..loading import check_model_folder, check_saved, peft_task
from ..result import RunResult
from ..size import auto_class_of, check_parameters, listed, size_of
from ..text import Markdown, one_line
from .card import converted_base, metric_names, render
from .eval_results import EEE_FILE, HUB_FILE, eval_results
from .scrub import check_for_traces, without_folders


_REPORT = tuple(f"comparison/{name}" for name in REPORT_FILES)
# What an earlier publication may have uploaded, as patterns by the kind of repository
_PUBLISHED = {
    "model": (*WEIGHTS, *ADAPTER, *SETTINGS, *TOKENIZER, *RECORDS, *_REPORT, HUB_FILE, EEE_FILE, "*_nlq.py"),
    "dataset": (COMPARISON_FILE, RUNS_FILE, VERDICTS_FILE, *REPORT_FILES, "parts/*.py"),
    "space": (),
}
# Fields with the path that a tokenizer or a configuration was loaded from
_PATH_FIELDS = ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "cache_dir")
_STATUS = {
    401: "the Hub does not accept the token; log in by `hf auth login`, or set HF_TOKEN",
    403: "this token may not write there; is the owner right, and may the token write?",
    404: "there is no such owner or repository, or this token may not see it",
    412: "somebody else changed the repository at the same time; run the same command again",
}


class PublishingError(OSError):
    """The Hub refused, or could not be reached. The repository is unchanged."""


@dataclass
class Publication:
    """The published files with their sizes in bytes; after a dry run, without address and id of a commit."""

    files: dict[str, int]
    url: str | None = None
    commit: str | None = None


@dataclass
class CardOptions:
    """A file to publish as the card, or the license and verdicts for a generated one, and a report's files by name.

    `over_seeds` is what the comparison says of the model in one line, for the results beside the card.
    """

    file: str | Path | None = None
    license: str | None = None
    verdicts: Markdown | None = None
    report: dict[str, bytes] | None = None
    over_seeds: str | None = None


def publish_model(
    folder: str | Path,
    repo_id: str,
    card: CardOptions,
    adapter: bool = False,
    private: bool | None = None,
    revision: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Uploads a saved model, as `api.publish` explains."""
    check_model_folder(str(folder))
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_files:
        scratch = resolve_user_path(name) if adapter else None
        contents = _collect(resolve_user_path(folder), repo_id, card, scratch, open_files)
        check_for_traces(Path(folder), contents)
        return send(repo_id, contents, private, revision, dry_run)


def publish_space(
    page: str | Path, repo_id: str, private: bool | None = None, revision: str | None = None, dry_run: bool = False
) -> Publication:
    """Uploads a page of `nlq explore`, which quotes its text, as a static Space, in one commit.

    `page` is the file, or its folder. Raises `PublishingError`, and `ValueError` if there is no page, or it contains a
    token or a path of this machine.
    """
    page = resolve_user_path(page) / PAGE_FILE if Path(page).is_dir() else resolve_user_path(page)
    if not page.is_file():
        raise ValueError(f"there is no page {str(page)!r}; make one by `nlq explore`")
    content = read_bytes(page)
    if (title := _title_of_page(content.decode(errors="replace"))) is None:
        raise ValueError(f"{page} is not a page of `nlq explore` as this version makes it")
    settings = {"title": title, "sdk": "static", "app_file": "index.html"}
    card = f"---\n{yaml.safe_dump(settings, sort_keys=False)}---\n\nMade by `nlq explore` of modeling-nlq.\n"
    contents = {"README.md": card.encode(), "index.html": content}
    check_for_traces(page.parent, contents)
    return send(repo_id, contents, private, revision, dry_run, "space")


def _title_of_page(text: str) -> str | None:
    """Returns the title if a text is the page of `nlq explore` with texts and numbers in it, and no other script."""
    folder = Path(__file__).parents[1] / "explorer"
    names = {"page": "page.html", "style": "explorer.css", "script": "explorer.js"}
    forms = {key: re.escape((folder / name).read_text(encoding="utf-8")) for key, name in names.items()}
    checkbox = '<input type="checkbox" id="together" autocomplete="off" checked>'
    forms["together"] = f"(?:<label>{checkbox} same head in both models</label>\n)?"
    forms["notes"] = r'(?:<p class="soft">[^<]*</p>\n)*'
    pattern = re.sub(r"\\\$(\w+)", lambda match: forms.get(match[1], "[^<]*"), forms.pop("page"))
    if re.fullmatch(pattern, text) is None:
        return None
    return html.unescape(re.search(r"<title>(.*?)</title>", text)[1])


def send(
    repo_id: str,
    contents: dict[str, Path | bytes],
    private: bool | None,
    revision: str | None,
    dry_run: bool,
    kind: Literal["model", "space", "dataset"] = "model",
) -> Publication:
    """Creates the repository and its branch if they do not exist, and makes one commit; raises as `publish`."""
    if "/" not in repo_id:
        raise ValueError(f"repository {repo_id!r} must have the form owner/name")
    validate_repo_id(repo_id)
    sizes = {}
    for name, content in contents.items():
        sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
    if dry_run:
        return Publication(sizes)
    if (token := get_token()) is None:
        raise PublishingError(f"{repo_id} was not published: log in by `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    try:
        sdk = "static" if kind == "space" else None
        api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True, space_sdk=sdk)
        if revision is not None:
            api.create_branch(repo_id, repo_type=kind, branch=revision, exist_ok=True)
        before = api.repo_info(repo_id, repo_type=kind, revision=revision)
        if private and not before.private:
            raise ValueError("the repository is public; make it private on the Hub first, or leave out --private")
        existing = {file.rfilename for file in before.siblings or []}
        stale = sorted(name for name in existing - contents.keys() if _is_published(name, kind))
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        commit = api.create_commit(
            repo_id,
            [*added, *map(CommitOperationDelete, stale)],
            commit_message="Publish",
            repo_type=kind,
            revision=revision,
            parent_commit=before.sha,
        )
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise PublishingError(f"{repo_id} was not published: {explain(error)}".replace(token, "***")) from None
    return Publication(sizes, commit.commit_url, commit.oid)


def _collect(
    folder: Path, repo_id: str, options: CardOptions, adapter_folder: Path | None, open_files: ExitStack
) -> dict[str, Path | bytes]:
    """Returns the files to upload by name: paths of weights, and the bytes of others, without absolute paths.

    With `adapter_folder`, an adapter is written there and published instead of the model.
    """
    records = {path.name: read_json(path) for path in files_in(folder, (METRICS_FILE, CONVERSION_FILE))}
    conversion = records.get(CONVERSION_FILE)
    result = RunResult.load(folder) if METRICS_FILE in records else None
    recipe = read_yaml(folder / RECIPE_FILE) if (folder / RECIPE_FILE).is_file() else None
    settings, auto_map = _read_config(folder)
    model, weights = _check_weights(folder, settings, auto_map)
    paths = files_in(folder, (*TOKENIZER, *RECORDS))
    if adapter_folder is None:
        code = code_files(folder)
        if missing := sorted(path.name for path in (*weights, *code) if not path.is_file()):
            raise ValueError(f"{folder} lacks {', '.join(missing)}; save the model anew by save_pretrained")
        names = {path.name for path in code}
        for path in code:  # Transformers would look for these files on the Hub, too
            if imported := {f"{name}.py" for name in get_relative_imports(path) if name.isidentifier()} - names:
                raise ValueError(f"{path}: a text looks like an import of {', '.join(imported)}, which is not sent")
        paths |= {*weights, *code, *files_in(folder, SETTINGS)}
    contents = {path.relative_to(folder).as_posix(): _content(path, open_files) for path in paths}
    if adapter_folder is not None:
        if (recipe or {}).get("trainable") != "new" or result is None or conversion is None:
            text = "--adapter publishes what a finished run with `trainable: new` trained"
            raise ValueError(f"{text}, and {folder} is none (`hf upload` takes a LoRA, in the run's folder `adapter`)")
        modules = _whole_modules(model, conversion["added"])
        base = converted_base(recipe, result.data.base_model)
        adapter = _write_adapter(folder, adapter_folder, modules, base)
        contents |= {path.name: _content(path, open_files) for path in adapter}
    for name in {*SETTINGS, "special_tokens_map.json", "tokenizer_config.json"} & contents.keys():
        fields = {key: value for key, value in read_json(folder / name).items() if key not in _PATH_FIELDS}
        contents[name] = _json(fields | ({"auto_map": auto_map} if name == "config.json" else {}))
    contents |= {name: _json(without_folders(record)) for name, record in records.items()}
    if recipe is not None:
        contents[RECIPE_FILE] = yaml.safe_dump(without_folders(recipe), sort_keys=False).encode()
    contents |= options.report or {}
    if recipe is not None and result is not None:
        time = (folder / METRICS_FILE).stat().st_mtime
        names = metric_names(model.config)
        if found := eval_results(repo_id, recipe, result, names, time, options.over_seeds):
            contents |= {HUB_FILE: yaml.safe_dump(found[0], sort_keys=False).encode(), EEE_FILE: _json(found[1])}
    if options.file is not None:
        contents[CARD_FILE] = read_bytes(resolve_user_path(options.file))
    else:
        card = render(
            repo_id,
            model.config,
            size_of(model),
            recipe=recipe,
            result=result,
            conversion=conversion,
            comparison=options.verdicts,
            license=options.license,
            has_plot=PLOT_FILE in contents,
            has_tokenizer=any(name in contents for name in VOCABULARIES),
            is_adapter=adapter_folder is not None,
        )
        contents[CARD_FILE] = str(card).encode()
    return dict(sorted(contents.items()))


def _whole_modules(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Returns the modules made of the named parameters; raises `ValueError` if one remains."""
    modules = []
    remaining = set(names)
    for path, module in model.named_modules():  # a module comes before its children
        parameters = {f"{path}.{name}" for name, _ in module.named_parameters()}
        # PEFT does not accept a container; its children follow
        if parameters and parameters <= remaining and not isinstance(module, torch.nn.ModuleDict):
            modules.append(path)
            remaining -= parameters
    if remaining:
        text = "PEFT's adapters hold whole modules, and these new parameters are parts of others"
        raise ValueError(f"{text}: {listed(sorted(remaining))}")
    return modules


def _write_adapter(run: Path, target: Path, modules: Collection[str], base: str | None) -> list[Path]:
    """Writes modules as an adapter of `base`, if it is on the Hub, and returns its files."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    # Without target modules, the adapter is a copy of each module
    model = auto_class_of(NLQConfig.from_pretrained(run)).from_pretrained(run)
    config = LoraConfig(task_type=peft_task(model), target_modules=DUMMY_TARGET_MODULES, modules_to_save=list(modules))
    model.name_or_path = ""  # PEFT would write the path of the run into the adapter
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(target, save_embedding_layers=False)
    return [target / name for name in ADAPTER]


def _content(path: Path, open_files: ExitStack) -> Path | bytes:
    if path.suffix != ".safetensors":
        return read_bytes(path)
    # Stays this file if its name is given to another
    descriptor = Path(f"/proc/self/fd/{open_files.enter_context(open_file(path)).fileno()}")
    return descriptor if descriptor.exists() else path


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns `config.json` and its `auto_map`; raises `ValueError` unless it describes an NLQ model."""
    check_saved(folder)
    settings = read_json(folder / "config.json")
    auto_map = saved_auto_map(folder, settings)
    # A derived configuration may have its own type
    kind = settings.get("model_type")
    if kind not in ("nlq", "nlq_seq2seq") and not is_derived(auto_map["AutoConfig"]):
        raise ValueError(f"{folder} holds a model of type {kind!r}, not an NLQ model; upload it by `hf upload`")
    return settings, auto_map


def _check_weights(
    folder: Path, settings: dict[str, Any], auto_map: dict[str, str]
) -> tuple[PreTrainedModel, list[Path]]:
    """Returns the model on the meta device, and the files of its weights.

    The code in the folder does not run: a derived class is represented by its class of this package, and its further
    parameters are added. Raises `ValueError` if files are incomplete, or do not match a class of this package.
    """
    name = str((settings.get("architectures") or ["NLQForCausalLM"])[0]).removeprefix("FSDP")
    default = default_auto_map(settings)
    classes = {
        path.partition(".")[2]: default[auto_class].partition(".")[2]
        for each in (auto_map, default)
        for auto_class, path in each.items()
        if auto_class in default
    }
    if name not in classes:
        raise ValueError(f"{folder}: architectures names {name!r}, which is none of {', '.join(sorted(classes))}")
    with torch.device("meta"):
        config_class = getattr(modeling_nlq, classes[auto_map["AutoConfig"].partition(".")[2]])
        model = getattr(modeling_nlq, classes[name])(config_class.from_pretrained(folder))
    model.config.architectures = [classes[name]]
    metadata = get_local_safetensors_metadata(folder)
    shapes = {key: tensor.shape for file in metadata.files_metadata.values() for key, tensor in file.tensors.items()}
    if classes[name] == name:
        check_parameters(model, shapes)
    else:
        added = sorted(shapes.keys() - model.state_dict().keys())
        model.added = torch.nn.ParameterList(torch.empty(shapes[key], device="meta") for key in added)
    index = [WEIGHTS[-1]] if metadata.sharded else []
    return model, [folder / file for file in (*index, *metadata.files_metadata)]


def _is_published(name: str, kind: str) -> bool:
    """Tells whether `nlq publish` could have uploaded a file with this name."""
    matching = (pattern for pattern in _PUBLISHED[kind] if fnmatch.fnmatch(name, pattern))
    return any(name.count("/") == pattern.count("/") for pattern in matching)


def explain(error: BaseException) -> str:
    """Says in one line why the Hub did not do what was asked."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, HTTPError):
        error = error.__cause__  # raised for a large file
    if isinstance(error, HfHubHTTPError):
        # Without a token, the Hub answers 401 for a repository that does not exist
        status = 404 if isinstance(error, RepositoryNotFoundError) else error.response.status_code
        reason = " ".join((error.server_message or "no reason given").split())
        return f"{status}: {_STATUS.get(status, 'the Hub refused')} ({reason})"
    if isinstance(error, HTTPError):
        return f"the connection to {constants.ENDPOINT} could not be made, or broke ({type(error).__name__})"
    return one_line(error)


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
