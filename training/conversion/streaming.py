"""Reads and writes the weights of a model shard by shard, so that a conversion needs memory for one shard."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging
from transformers.utils.hub import get_checkpoint_shard_files

from ..disk import write_text
from ..size import check_shapes


# The types of weights, as safetensors names them
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that old versions of Transformers saved, and every class ignores
_OLD_BUFFERS = r"rotary_emb\.inv_freq"

Load = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """Functions that read or compute each tensor of a model, and type, size and largest file of their source."""

    tensors: dict[str, Load]
    dtype: torch.dtype
    nbytes: int
    largest_shard: int
    are_in_memory: bool = False

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> "Weights":
        nbytes = sum(value.nbytes for value in state.values())
        tensors = {name: lambda value=value: value for name, value in state.items()}
        return cls(tensors, next(iter(state.values())).dtype, nbytes, largest_shard=nbytes, are_in_memory=True)


def saved_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the state without tied parameters, as a file holds it."""
    return {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


class _StoredTensor(NamedTuple):
    """A tensor in a safetensors file, by its header."""

    file: Path
    name: str
    type_name: str
    shape: torch.Size

    def load(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as content:
            return content.get_tensor(self.name)


def find_weights(source: str, model: PreTrainedModel) -> Weights | None:
    """Opens the safetensors files of a folder or of the Hub for an empty model.

    Returns `None` without such files, or if Transformers has to translate their names. Raises `ValueError` for a
    parameter that is missing, or has another shape or type.
    """
    state = model.state_dict()
    renamings = get_model_conversion_mapping(model)
    shapes = {name: value.shape for name, value in saved_state(model).items()}
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS}
    stored: dict[str, _StoredTensor] = {}
    for tensor in _stored_tensors(source):
        # Old versions saved other names, and some files lack the prefix of the body
        name, _ = rename_source_key(tensor.name, renamings, [], model.base_model_prefix, state)
        if name in shapes or not any(re.search(pattern, name) for pattern in ignored):
            stored[name] = tensor
    for name, other in model.all_tied_weights_keys.items():
        if {name, other} <= stored.keys() and not torch.equal(stored.pop(name).load(), stored[other].load()):
            raise ValueError(f"tie_word_embeddings=True, but {name} differs from {other}")
    if not stored or stored.keys() - shapes.keys():
        return None
    check_shapes(shapes, {name: tensor.shape for name, tensor in stored.items()})
    sizes: Counter[Path] = Counter()
    for name, tensor in stored.items():
        if tensor.type_name not in _DTYPES:
            raise ValueError(f"{name} has the type {tensor.type_name}, not one of {', '.join(_DTYPES)}")
        sizes[tensor.file] += _DTYPES[tensor.type_name].itemsize * tensor.shape.numel()
    dtype = _DTYPES[next(iter(stored.values())).type_name]
    return Weights({name: tensor.load for name, tensor in stored.items()}, dtype, sizes.total(), max(sizes.values()))


def _stored_tensors(source: str) -> Iterator[_StoredTensor]:
    options = {"_raise_exceptions_for_missing_entries": False}
    if (file := cached_file(source, SAFE_WEIGHTS_NAME, **options)) is not None:
        files = [file]
    elif (index := cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **options)) is not None:
        files, _ = get_checkpoint_shard_files(source, index)
    else:
        return
    for file in map(Path, files):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is not a mapping
                view = content.get_slice(name)
                yield _StoredTensor(file, name, view.get_dtype(), torch.Size(view.get_shape()))


def write_weights(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    """Writes the weights of an empty model, in about as many files as the source."""
    shapes = {name: value.shape for name, value in saved_state(model).items()}
    sizes = {name: weights.dtype.itemsize * shape.numel() for name, shape in shapes.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max(1, -(-weights.largest_shard * sum(sizes.values()) // weights.nbytes)),
    )
    files = {}
    total_size = 0
    shards = split.filename_to_tensors.items()
    for file, names in logging.tqdm(shards, desc="Writing shards", disable=not split.is_sharded):
        shard = {name: weights.tensors[name]().detach().contiguous() for name in names}
        check_shapes({name: shapes[name] for name in names}, {name: value.shape for name, value in shard.items()})
        shard = revert_weight_conversion(model, shard)
        save_file(shard, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        total_size += sum(value.nbytes for value in shard.values())
        del shard  # before the next is read
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), "total_size": total_size}
        index = {"metadata": metadata, "weight_map": files}
        write_text(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
