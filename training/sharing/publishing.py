"""`nlq publish`: uploads a model to a repository on the Hub, in one commit of exactly the files that belong to it.

A list of allowed files chooses them: a run folder also holds optimizer states, pickles, logs with names of machines,
and any other file of the user. A copy of them, with links to the opened weights, is checked and sent.
"""

import fnmatch
import html
import json
import os
import re
import tempfile
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
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

import modeling_nlq
from modeling_nlq.configuration_nlq import default_auto_map, is_derived, saved_auto_map

from ..card import converted_base, render
from ..comparison.outcome import read_outcome
from ..comparison.report import verdicts
from ..comparison.results import check_metrics
from ..comparison.status import CONFIRMATION
from ..disk import open_file, read_bytes, resolve_user_path, safe_join
from ..files import (
    ADAPTER,
    CARD_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    PAGE_FILE,
    PLOT_FILE,
    RECIPE_FILE,
    RECORDS,
    RESULTS_FILE,
    SETTINGS,
    TOKENIZER,
    VOCABULARIES,
    WEIGHTS,
    code_files,
    files_in,
    read_json,
    read_yaml,
)
from ..parameters import check_parameters, size_of
from ..run.recipe import without_private
from ..scrub import check_for_traces, without_folders
from ..text import Markdown, one_line
from .adapter import whole_modules, write_adapter


_INDEX = WEIGHTS[-1]
_COMPARISON = ("comparison/results.md", "comparison/figures/*.png")
# Fields that hold the place a tokenizer or a configuration was loaded from
_PLACES = ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "cache_dir")
_STATUS = {
    401: "the Hub does not accept the token; log in by `hf auth login`, or set HF_TOKEN",
    403: "this token may not write there; is the owner right, and may the token write?",
    404: "there is no such owner or repository, or this token may not see it",
    412: "somebody else changed the repository at the same time; run the same command again",
}


class PublishingError(OSError):
    """The Hub, or the connection to it, failed. A commit is made whole or not at all."""


@dataclass
class Publication:
    """The files of a model that are, or would be, in the repository.

    Attributes:
        files: sizes in bytes by name.
        url: address of the commit; `None` after a dry run.
        commit: id of the commit; `None` after a dry run.
    """

    files: dict[str, int]
    url: str | None = None
    commit: str | None = None


def publish(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    comparison: str | Path | None = None,
    card: str | Path | None = None,
    license: str | None = None,
    adapter: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Uploads a trained or converted model with its code, tokenizer, results and card, in one commit.

    The repository is created if it does not exist. Files of an earlier publication that this one does not have are
    deleted in the same commit; other files are left alone.

    Args:
        folder: folder of a run, a conversion, or any saved NLQ model.
        repo_id: `owner/name`.
        private: make a new repository private; by default its owner's setting counts.
        comparison: folder of `nlq compare` whose verdicts the card reports.
        card: a Markdown file to use as the card; by default the card is generated.
        license: license of the weights, for the card.
        adapter: upload only what a run with `trainable: new` trained, as an adapter of PEFT, without the model and its
            code.
        revision: the branch, which is made if it does not exist; by default the main one.
        dry_run: stop before anything is sent.

    Raises:
        ValueError: if the folder holds no complete model, or nothing that an adapter could hold, if one of its files
            tells a token or a path of this machine, or if the name of the repository is not valid.
        ImportError: for an adapter, if PEFT is not installed.
        PublishingError: if the Hub refuses, or cannot be reached. The repository is then unchanged.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as files:
        copy, target = (
            resolve_user_path(scratch) / "model",
            resolve_user_path(scratch) / "adapter" if adapter else None,
        )
        try:
            _copy(resolve_user_path(folder), copy, files)
            contents = _collect(copy, Path(folder), repo_id, comparison, card, license, target)
        except ValueError as error:
            raise ValueError(str(error).replace(str(copy), str(folder))) from error
        return _send(repo_id, contents, private, revision, dry_run)


def _copy(folder: Path, target: Path, files: ExitStack) -> None:
    """Copies what may be published, with links to the weights, which stay open; raises as `open_file`."""
    patterns = (*SETTINGS, *TOKENIZER, *RECORDS, WEIGHTS[0], _INDEX)
    names = {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    names |= {path.name for path in code_files(folder) if path.is_file()}
    if _INDEX in names and WEIGHTS[0] not in names:
        shards = json.loads(read_bytes(folder / _INDEX)).get("weight_map")
        names |= {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
    for name in names:
        source, copy = safe_join(folder, name), target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            file = files.enter_context(open_file(source))
            place = f"/proc/self/fd/{file.fileno()}"  # this file, whatever has its name now
            copy.symlink_to(place if os.path.exists(place) else os.path.realpath(folder / name))
        else:
            copy.write_bytes(read_bytes(source))


def publish_space(
    page: str | Path, repo_id: str, private: bool | None = None, revision: str | None = None, dry_run: bool = False
) -> Publication:
    """Uploads a page of `nlq explore` as a static Space, in one commit. The page quotes the text that it was made
    from.

    Args:
        page: the file, or the folder of a run or comparison that has one.

    Raises:
        ValueError: if there is no page, it tells a token or a path of this machine, or the name of the repository is
            not valid.
        PublishingError: as in `publish`.
    """
    page = resolve_user_path(page) / PAGE_FILE if Path(page).is_dir() else resolve_user_path(page)
    if not page.is_file():
        raise ValueError(f"there is no page {str(page)!r}; make one by `nlq explore`")
    text = read_bytes(page)
    title = re.search(r"<title>(.*?)</title>", text.decode(errors="replace"))
    if title is None:
        raise ValueError(f"{page} is no page of `nlq explore`")
    settings = {"title": html.unescape(title[1]), "sdk": "static", "app_file": "index.html"}
    card = f"---\n{yaml.safe_dump(settings, sort_keys=False)}---\n\nMade by `nlq explore` of modeling-nlq.\n"
    contents = {"README.md": card.encode(), "index.html": text}
    check_for_traces(page.parent, contents)
    return _send(repo_id, contents, private, revision, dry_run, "space")


def _send(
    repo_id: str,
    contents: dict[str, Path | bytes],
    private: bool | None,
    revision: str | None,
    dry_run: bool,
    kind: Literal["model", "space"] = "model",
) -> Publication:
    """Makes the repository and its branch if they do not exist, and one commit; raises as `publish` does."""
    if "/" not in repo_id:
        raise ValueError(f"repository {repo_id!r} must have the form owner/name")
    sizes = {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in contents.items()
    }
    if dry_run:
        return Publication(sizes)
    token = get_token()
    if token is None:
        raise PublishingError(
            f"{repo_id} was not published: no login was found; log in by `hf auth login`, or set HF_TOKEN"
        )
    api = HfApi(token=token)
    try:
        sdk = "static" if kind == "space" else None
        api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True, space_sdk=sdk)
        if revision is not None:
            api.create_branch(repo_id, repo_type=kind, branch=revision, exist_ok=True)
        before = api.repo_info(repo_id, repo_type=kind, revision=revision)
        if private and not before.private:
            raise ValueError(
                "the repository exists and is public; make it private on the Hub first, or leave out --private"
            )
        there = {file.rfilename for file in before.siblings or []}
        stale = sorted(name for name in there - contents.keys() if kind == "model" and _may_be_ours(name))
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        options = {"repo_type": kind, "revision": revision, "parent_commit": before.sha}
        commit = api.create_commit(repo_id, operations, commit_message="Publish", **options)
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise PublishingError(f"{repo_id} was not published: {_explain(error)}".replace(token, "***")) from None
    return Publication(sizes, commit.commit_url, commit.oid)


def _collect(
    folder: Path,
    origin: Path,
    repo_id: str,
    comparison: str | Path | None,
    card: str | Path | None,
    license: str | None,
    adapter_folder: Path | None,
) -> dict[str, Path | bytes]:
    """Collects the files to upload by name: as they are, or rewritten where they might name paths of this machine.

    `folder` holds copies of those of `origin`. Those of an adapter are made in `adapter_folder`, if one is given, and
    take the place of the model's.
    """
    records = {name: read_json(folder / name) for name in (METRICS_FILE, CONVERSION_FILE) if (folder / name).is_file()}
    if METRICS_FILE in records:
        check_metrics(folder / METRICS_FILE, records[METRICS_FILE], required=("steps", "tokens_seen"))
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json: it is no saved model, or its training diverged or did not finish"
        )
    settings = read_json(folder / "config.json")
    auto_map = saved_auto_map(folder, settings)
    # A derived configuration may have a type of its own
    if settings.get("model_type") not in ("nlq", "nlq_seq2seq") and not is_derived(auto_map["AutoConfig"]):
        raise ValueError(
            f"{folder} holds a model of type {settings.get('model_type')!r}; `nlq publish` takes NLQ models; use `hf "
            "upload`"
        )
    model, weights = _check_weights(folder, settings, auto_map)
    given = read_yaml(folder / RECIPE_FILE) if (folder / RECIPE_FILE).is_file() else None
    if given is not None:
        given["training"] = without_private(given.get("training") or {})
    contents: dict[str, Path | bytes] = {}
    if adapter_folder is None:
        code = code_files(folder)
        files, patterns = {*weights, *code}, (*SETTINGS, *TOKENIZER, *RECORDS)
        if missing := sorted(path.name for path in files if not path.is_file()):
            raise ValueError(f"{folder} lacks its code, {', '.join(missing)}; save the model anew by save_pretrained")
        for path in code:  # Transformers would look for these files on the Hub, too
            if imported := {f"{name}.py" for name in get_relative_imports(path) if name.isidentifier()} - {
                *os.listdir(folder)
            }:
                raise ValueError(f"{path}: a text looks like an import of {', '.join(imported)}, which is not sent")
    else:
        files, patterns = set(), (*TOKENIZER, *RECORDS)
        contents = {path.name: path for path in _adapter(folder, adapter_folder, model, given, records)}
    files |= files_in(folder, patterns)
    contents |= {path.relative_to(folder).as_posix(): path for path in files}
    for name in ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
        if name in contents:
            kept = {key: value for key, value in read_json(folder / name).items() if key not in _PLACES}
            if name == "config.json":
                kept["auto_map"] = auto_map
            contents[name] = _json(kept)
    for name, record in records.items():
        contents[name] = _json(without_folders(record))
    if given is not None:
        contents[RECIPE_FILE] = yaml.safe_dump(without_folders(given), sort_keys=False).encode()

    text = None
    if comparison is not None:
        text, report = _report(origin.resolve(), Path(comparison).resolve())
        contents |= report
    if card is not None:
        contents[CARD_FILE] = read_bytes(resolve_user_path(card))
    else:
        contents[CARD_FILE] = str(
            render(
                repo_id,
                model.config,
                size_of(model),
                given=given,
                metrics=records.get(METRICS_FILE),
                conversion=records.get(CONVERSION_FILE),
                comparison=text,
                license=license,
                has_plot=PLOT_FILE in contents,
                has_tokenizer=any(name in contents for name in VOCABULARIES),
                is_adapter=adapter_folder is not None,
            )
        ).encode()
    check_for_traces(origin, contents)
    return dict(sorted(contents.items()))


def _report(run: Path, folder: Path) -> tuple[Markdown, dict[str, bytes]]:
    """The verdicts of a comparison, for the card of a run that may be part of it, and the files of its report."""
    variant, name, scale = (
        (run.parent.name, run.name, run.parents[2].name) if folder in run.parents else (None, None, None)
    )
    files = files_in(folder, ("results.md", "figures/*.png"))
    contents = {f"comparison/{path.relative_to(folder).as_posix()}": read_bytes(path) for path in files}
    if (report := contents.get("comparison/results.md")) is not None:
        contents["comparison/results.md"] = without_folders(report.decode()).encode()
    results = read_json(folder / RESULTS_FILE)
    if "design" in results:
        raise ValueError(f"{folder} is a screening, without verdicts on models; name its folder {CONFIRMATION!r}")
    text = verdicts(
        read_outcome(results, folder / RESULTS_FILE), variant, name, scale if "scales" in results else None
    )
    text = f"{text}\n\nThe whole report, with every run, is in [comparison/results.md](comparison/results.md)."
    return Markdown(without_folders(text)), contents


def _adapter(
    folder: Path,
    target: Path,
    model: PreTrainedModel,
    given: dict[str, Any] | None,
    records: dict[str, dict[str, Any]],
) -> list[Path]:
    """Makes the adapter of a run in the folder `target`, and returns its files."""
    if (given or {}).get("trainable") != "new" or not records.keys() >= {METRICS_FILE, CONVERSION_FILE}:
        raise ValueError(
            f"--adapter publishes what a finished run with `trainable: new` trained, and {folder} is none (a LoRA "
            "lies in the "
            "run's folder `adapter`, for `hf upload`)"
        )
    modules = whole_modules(model, records[CONVERSION_FILE]["added"])
    return write_adapter(folder, target, modules, converted_base(given, records[METRICS_FILE]))


def _check_weights(
    folder: Path, settings: dict[str, Any], auto_map: dict[str, str]
) -> tuple[PreTrainedModel, list[Path]]:
    """Returns the model without its weights, and the files that hold them.

    The code of the folder is not run. In place of a derived class stands the class of ours that it is loaded as, with
    the parameters that the files have beside those of ours.

    Raises:
        ValueError: unless the files are complete and hold exactly the parameters of the model, if its class is ours.
    """
    name = str((settings.get("architectures") or ["NLQForCausalLM"])[0]).removeprefix("FSDP")
    ours = default_auto_map(settings)
    classes = {
        path.partition(".")[2]: ours[auto_class].partition(".")[2]
        for classes in (auto_map, ours)
        for auto_class, path in classes.items()
        if auto_class in ours
    }
    if name not in classes:
        raise ValueError(f"{folder}: architectures names {name!r}, which is none of {', '.join(sorted(classes))}")
    with torch.device("meta"):
        config_class = getattr(modeling_nlq, classes[auto_map["AutoConfig"].partition(".")[2]])
        model = getattr(modeling_nlq, classes[name])(config_class.from_pretrained(folder))
    model.config.architectures = [classes[name]]
    found = get_local_safetensors_metadata(folder)
    shapes = {key: tensor.shape for file in found.files_metadata.values() for key, tensor in file.tensors.items()}
    if classes[name] == name:
        check_parameters(model, shapes)
    else:
        added = shapes.keys() - model.state_dict().keys()
        model.added = torch.nn.ParameterList(torch.empty(shapes[key], device="meta") for key in sorted(added))
    index = [_INDEX] if found.sharded else []
    return model, [folder / file for file in (*index, *found.files_metadata)]


def _may_be_ours(name: str) -> bool:
    patterns = (*WEIGHTS, *ADAPTER, *SETTINGS, *TOKENIZER, *RECORDS, *_COMPARISON, "*_nlq.py")
    return any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _explain(error: BaseException) -> str:
    """Explains an error of the Hub or of the connection in one line."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, HTTPError):
        error = error.__cause__  # of a large file
    if isinstance(error, HfHubHTTPError):
        status, said = error.response.status_code, " ".join((error.server_message or "no reason given").split())
        return f"{status}: {_STATUS.get(status, 'the Hub refused')} ({said})"
    if isinstance(error, HTTPError):
        return f"the connection to {constants.ENDPOINT} could not be made, or broke ({type(error).__name__})"
    return one_line(error)


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
