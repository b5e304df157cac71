"""The weights of models, in memory or in safetensors files, and what the parameters of another model are made from.

Tensors are mapped from files, and written shard by shard, so that a conversion needs memory for one shard. A model in
memory is the case of one shard.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
# Of the weights of a model in memory, in bytes: as Transformers saves them, and the Hub takes them
_LARGEST_SHARD = 50 * 10**9


@dataclass(frozen=True)
class ParameterSource:
    """What a parameter is made from.

    Attributes:
        sources: names of other parameters.
        make: function from their tensors to the tensor of this parameter.
    """

    sources: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda tensors: tensors[0]


def empty_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Makes a model on the meta device, with a copy of the configuration."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def parameter_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Returns names and shapes of the parameters that a model's file holds, without tied ones."""
    return {name: value.shape for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: its place, its name there, its type, as safetensors names it, and its shape."""

    file: Path
    name: str
    type_name: str
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.type_name]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


@dataclass(frozen=True)
class Weights:
    """The weights of a model. Of those in files, only the headers are read until a tensor is needed.

    Attributes:
        stored: by name, a tensor, or its place in a file.
    """

    stored: dict[str, torch.Tensor | _Stored]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Weights":
        """Those of a model in memory, which are not copied."""
        state = model.state_dict()
        return cls({name: state[name] for name in parameter_shapes(model)})

    @property
    def are_in_memory(self) -> bool:
        """Whether there is no file to read."""
        return all(isinstance(stored, torch.Tensor) for stored in self.stored.values())

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return sum(stored.nbytes for stored in self.stored.values())

    @property
    def largest_shard(self) -> int:
        """The size of the tensors of the largest file, in bytes."""
        if self.are_in_memory:
            return min(self.bytes, _LARGEST_SHARD)
        sizes: dict[Path, int] = {}
        for stored in self.stored.values():
            sizes[stored.file] = sizes.get(stored.file, 0) + stored.nbytes
        return max(sizes.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor."""
        return next(iter(self.stored.values())).dtype

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Maps tensors from their files; a page is read when it is used."""
        tensors = {name: self.stored[name] for name in names}
        for file in dict.fromkeys(stored.file for stored in tensors.values() if isinstance(stored, _Stored)):
            there = {name: stored.name for name, stored in tensors.items() if getattr(stored, "file", None) == file}
            with safe_open(file, framework="pt") as content:
                tensors.update({name: content.get_tensor(name_there) for name, name_there in there.items()})
        return tensors


def find_weights(source: str, model: PreTrainedModel) -> Weights | None:
    """Opens the safetensors files of a folder or of a model of the Hub, for a model without weights.

    `None` if there are none, or they have names of another class or version, which Transformers may know.

    Raises:
        ValueError: naming a parameter that is missing, or has another shape or type.
    """
    shapes, state, renamings = parameter_shapes(model), model.state_dict(), get_model_conversion_mapping(model)
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS}
    stored = {}
    for tensor in _read_headers(source):
        # Some names in files are those of an old version, or lack the prefix of the body
        name, _ = rename_source_key(tensor.name, renamings, [], model.base_model_prefix, state)
        if name in shapes or not any(re.search(pattern, name) for pattern in ignored):
            stored[name] = tensor
    weights = Weights(stored)
    for name, other in model.all_tied_weights_keys.items():
        if name in stored and other in stored:
            if not torch.equal(*weights.load([name, other]).values()):
                raise ValueError(f"tie_word_embeddings=True, and yet {name} differs from {other}")
            del stored[name]
    if not stored or stored.keys() - shapes.keys():
        return None
    check_names(shapes.keys(), stored.keys())
    check_shapes(shapes, {name: tensor.shape for name, tensor in stored.items()})
    for name, tensor in stored.items():
        if tensor.type_name not in _DTYPES:
            raise ValueError(f"{name} has the type {tensor.type_name}, which must be one of {', '.join(_DTYPES)}")
    return weights


def _read_headers(source: str) -> list[_Stored]:
    """Lists the tensors in the safetensors files of a source."""

    def find(name: str) -> str | None:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False)

    files, tensors = [find(SAFE_WEIGHTS_NAME)], []
    if files == [None] and (index := find(SAFE_WEIGHTS_INDEX_NAME)) is not None:
        files, _ = get_checkpoint_shard_files(source, index)
    for file in map(Path, filter(None, files)):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is no mapping
                header = content.get_slice(name)
                tensors.append(_Stored(file, name, header.get_dtype(), torch.Size(header.get_shape())))
    return tensors


def write_weights(
    folder: Path, model: PreTrainedModel, weights: Weights, origins: Mapping[str, ParameterSource]
) -> None:
    """Writes the weights of an empty model, made from those of the source, in as many files as these are in."""
    shapes = parameter_shapes(model)

    def size(name: str) -> int:
        sources = origins[name].sources
        dtype = weights.stored[sources[0]].dtype if sources else weights.dtype
        return dtype.itemsize * shapes[name].numel()

    sizes = {name: size(name) for name in shapes}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max(1, -(-weights.largest_shard * sum(sizes.values()) // weights.bytes)),
    )
    places = {}
    for file, names in logging.tqdm(
        split.filename_to_tensors.items(), desc="Writing shards", disable=not split.is_sharded
    ):
        # Nothing of one file stays in memory
        mapped = weights.load(list(dict.fromkeys(source for name in names for source in origins[name].sources)))
        tensors = {name: origins[name].make([mapped[source] for source in origins[name].sources]) for name in names}
        check_shapes({name: shapes[name] for name in names}, {name: tensor.shape for name, tensor in tensors.items()})
        tensors = revert_weight_conversion(
            model, {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        )
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        del mapped, tensors
    if split.is_sharded:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": places}
        write_text(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
