"""Reads and writes the weights of saved models shard by shard, so that a conversion needs memory for one shard.

Tensors are mapped from the files of the source, and copied only where their elements move.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging
from transformers.utils.hub import get_checkpoint_shard_files

from ..parameters import check_names, check_shapes
from ..text import first_line
from .renaming import ParameterSource, parameter_shapes


# The types of weights, as safetensors names them
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that old versions of Transformers saved, and every class ignores
_OLD_BUFFERS = r"rotary_emb\.inv_freq"


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: its place, its name there, its type, as safetensors names it, and its shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


class Weights:
    """The weights of a saved model in safetensors files. Only their headers are read until a tensor is needed.

    Args:
        files: all files of the model.

    Raises:
        ValueError: for a file that is missing or damaged.
    """

    def __init__(self, files: list[Path]):
        self.stored: dict[str, _Stored] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as content:
                    for name in content.keys():  # noqa: SIM118 - it is no mapping
                        header = content.get_slice(name)
                        self.stored[name] = _Stored(file, name, header.get_dtype(), tuple(header.get_shape()))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file.name}: the weights cannot be read: {first_line(error)}") from error

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return sum(stored.bytes for stored in self.stored.values())

    @cached_property
    def largest_shard(self) -> int:
        """The size of the tensors of the largest file, in bytes."""
        sizes: dict[Path, int] = {}
        for stored in self.stored.values():
            sizes[stored.file] = sizes.get(stored.file, 0) + stored.bytes
        return max(sizes.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor."""
        return _DTYPES[next(iter(self.stored.values())).dtype]

    def load(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Maps tensors from their files; a page is read when it is used."""
        tensors = {}
        for file in dict.fromkeys(self.stored[name].file for name in names):
            there = {name: self.stored[name].name for name in names if self.stored[name].file == file}
            with safe_open(file, framework="pt") as content:
                tensors.update({name: content.get_tensor(name_there) for name, name_there in there.items()})
        return tensors

    def belong_to(self, model: PreTrainedModel) -> bool:
        """Tells whether these are the parameters of an empty model, after dropping what it ignores.

        Returns `False` for names of another class or version, which Transformers may know.

        Raises:
            ValueError: naming a parameter that is missing, or has another shape or type.
        """
        shapes, state, renamings = parameter_shapes(model), model.state_dict(), get_model_conversion_mapping(model)
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS}
        stored, self.stored = self.stored, {}
        for name, tensor in stored.items():
            # Some names in files are those of an old version, or lack the prefix of the body
            renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
            if renamed in shapes or not any(re.search(pattern, renamed) for pattern in ignored):
                self.stored[renamed] = tensor
        for name, other in model.all_tied_weights_keys.items():
            if name in self.stored and other in self.stored:
                if not torch.equal(*self.load([name, other]).values()):
                    raise ValueError(f"tie_word_embeddings=True, and yet {name} differs from {other}")
                del self.stored[name]
        if self.stored.keys() - shapes.keys():
            return False
        check_names(shapes.keys(), self.stored.keys())
        check_shapes(shapes, {name: stored.shape for name, stored in self.stored.items()})
        for name, stored in self.stored.items():
            if stored.dtype not in _DTYPES:
                raise ValueError(f"{name} has the type {stored.dtype}, which must be one of {', '.join(_DTYPES)}")
        return True


def find_weights(source: str) -> Weights | None:
    """Opens the safetensors files of a folder or of a model of the Hub; `None` if it has none.

    Raises:
        ValueError: for an index or a file that is missing or damaged.
    """

    def find(name: str) -> str | None:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False)

    if (file := find(SAFE_WEIGHTS_NAME)) is not None:
        return Weights([Path(file)])
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return None
    try:
        files, _ = get_checkpoint_shard_files(source, index)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{SAFE_WEIGHTS_INDEX_NAME} is damaged: {first_line(error)}") from error
    return Weights([Path(file) for file in files])


def add_new_parameters(
    origins: dict[str, ParameterSource], model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, ParameterSource]:
    """Adds origins of the parameters that the source lacks: the values that the model gives them at first."""

    def initial(name: str) -> torch.Tensor:
        module_name, _, kind = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(module_name)).to_empty(device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        return getattr(module, kind).detach().to(dtype)

    new = [name for name in parameter_shapes(model) if name not in origins]
    return {**origins, **{name: ParameterSource((), lambda _, name=name: initial(name)) for name in new}}


def write_weights(folder: Path, model: PreTrainedModel, weights: Weights, origins: Mapping[str, ParameterSource]) -> None:
    """Writes the weights of a new model in as many files as the source has.

    Args:
        folder: where to write them.
        model: the new model, empty.
        weights: those of the source.
        origins: what each parameter of the new model is made from.
    """
    shapes = parameter_shapes(model)

    def size(name: str) -> int:
        sources = origins[name].sources
        dtype = _DTYPES[weights.stored[sources[0]].dtype] if sources else weights.dtype
        return dtype.itemsize * shapes[name].numel()

    sizes = {name: size(name) for name in shapes}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max(1, -(-weights.largest_shard * sum(sizes.values()) // weights.bytes)),
    )
    places = {}
    for file, names in logging.tqdm(split.filename_to_tensors.items(), desc="Writing shards", disable=not split.is_sharded):
        written = _write_shard(folder / file, model, weights, {name: origins[name] for name in names})
        places.update(dict.fromkeys(written, file))
    if split.is_sharded:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": places}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shard(path: Path, model: PreTrainedModel, weights: Weights, origins: Mapping[str, ParameterSource]) -> list[str]:
    """Writes one file, and returns the names of its tensors. Nothing of it stays in memory."""
    mapped = weights.load(list(dict.fromkeys(source for origin in origins.values() for source in origin.sources)))
    tensors = {name: origin.make([mapped[source] for source in origin.sources]) for name, origin in origins.items()}
    expected = parameter_shapes(model)
    check_shapes({name: expected[name] for name in tensors}, {name: tensor.shape for name, tensor in tensors.items()})
    tensors = revert_weight_conversion(model, {name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    save_file(tensors, path, metadata={"format": "pt"})
    return list(tensors)
