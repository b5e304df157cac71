"""Reads and writes the weights of a model shard by shard, so that a conversion needs memory for one shard.

Transformers' `WeightConverter` would need memory for the whole model, and has to be registered for the whole process.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging
from transformers.utils.hub import get_checkpoint_shard_files

from ..disk import write_text
from ..size import check_names, check_shapes


# The types of weights, as safetensors names them
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that old versions of Transformers saved, and every class ignores
_OLD_BUFFERS = r"rotary_emb\.inv_freq"
_LARGEST_SHARD = 50 * 10**9  # bytes of a file, as in Transformers, for a model in memory


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read or computed when it is needed."""

    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The weights of a model by name, made from a source.

    Attributes:
        dtype: type of the source's first tensor.
        nbytes: size of the source.
        largest_shard: size of its largest file, in bytes.
        are_in_memory: whether the source is a model in memory.
    """

    tensors: dict[str, LazyTensor]
    dtype: torch.dtype
    nbytes: int
    largest_shard: int
    are_in_memory: bool

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> "Weights":
        """Wraps tensors in memory without copying them."""
        tensors = {name: LazyTensor(value.dtype, lambda value=value: value) for name, value in state.items()}
        nbytes = sum(value.nbytes for value in state.values())
        first = next(iter(tensors.values()))
        return cls(tensors, first.dtype, nbytes, min(nbytes, _LARGEST_SHARD), are_in_memory=True)


class _Header(NamedTuple):
    """What a safetensors file says about a tensor."""

    file: Path
    name: str
    type_name: str
    shape: torch.Size

    def load(self) -> torch.Tensor:
        """Maps the tensor from its file: a page is read when it is used."""
        with safe_open(self.file, framework="pt") as content:
            return content.get_tensor(self.name)


def empty_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Makes a model on the meta device, with a copy of the configuration."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def saved_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the tensors that a model's file holds: its state without tied parameters."""
    return {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


def find_weights(source: str, model: PreTrainedModel) -> Weights | None:
    """Opens the safetensors files of a folder or of a model of the Hub, for a model without weights.

    Returns `None` without such files, or if Transformers has to translate names of another class or version. Raises
    `ValueError` naming a parameter that is missing, or has another shape or type.
    """
    state, renamings = model.state_dict(), get_model_conversion_mapping(model)
    shapes = {name: value.shape for name, value in saved_state(model).items()}
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS}
    headers: dict[str, _Header] = {}
    for header in _read_headers(source):
        # Old versions saved other names, and some files lack the prefix of the body
        name, _ = rename_source_key(header.name, renamings, [], model.base_model_prefix, state)
        if name in shapes or not any(re.search(pattern, name) for pattern in ignored):
            headers[name] = header
    for name, other in model.all_tied_weights_keys.items():
        if name in headers and other in headers:
            if not torch.equal(headers[name].load(), headers[other].load()):
                raise ValueError(f"tie_word_embeddings=True, and yet {name} differs from {other}")
            del headers[name]
    if not headers or headers.keys() - shapes.keys():
        return None
    check_names(shapes.keys(), headers.keys())
    check_shapes(shapes, {name: header.shape for name, header in headers.items()})
    sizes: Counter[Path] = Counter()
    for name, header in headers.items():
        if header.type_name not in _DTYPES:
            raise ValueError(f"{name} has the type {header.type_name}, which must be one of {', '.join(_DTYPES)}")
        sizes[header.file] += _DTYPES[header.type_name].itemsize * header.shape.numel()
    tensors = {name: LazyTensor(_DTYPES[header.type_name], header.load) for name, header in headers.items()}
    first = next(iter(tensors.values()))
    return Weights(tensors, first.dtype, sizes.total(), max(sizes.values()), are_in_memory=False)


def _read_headers(source: str) -> list[_Header]:
    """Lists the tensors in the safetensors files of a source."""
    options = {"_raise_exceptions_for_missing_entries": False}
    files = []
    if (file := cached_file(source, SAFE_WEIGHTS_NAME, **options)) is not None:
        files = [file]
    elif (index := cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **options)) is not None:
        files, _ = get_checkpoint_shard_files(source, index)
    headers = []
    for file in map(Path, files):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is not a mapping
                view = content.get_slice(name)
                headers.append(_Header(file, name, view.get_dtype(), torch.Size(view.get_shape())))
    return headers


def write_weights(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    """Writes the weights of an empty model, in as many files as the source has."""
    shapes = {name: value.shape for name, value in saved_state(model).items()}
    tensors = weights.tensors
    sizes = {name: tensors[name].dtype.itemsize * shape.numel() for name, shape in shapes.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max(1, -(-weights.largest_shard * sum(sizes.values()) // weights.nbytes)),
    )
    files = {}
    shards = split.filename_to_tensors.items()
    for file, names in logging.tqdm(shards, desc="Writing shards", disable=not split.is_sharded):
        shard = {name: tensors[name].load().detach().contiguous() for name in names}
        check_shapes({name: shapes[name] for name in names}, {name: value.shape for name, value in shard.items()})
        shard = revert_weight_conversion(model, shard)
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        del shard  # before the next is read
    if split.is_sharded:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": files}
        write_text(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
