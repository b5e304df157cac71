"""Writes the parameters that a run with `trainable: new` trained as an adapter of PEFT."""

from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from modeling_nlq import NLQConfig

from ..files import ADAPTER
from ..loading import peft_task
from ..size import auto_class_of, listed


def whole_modules(model: PreTrainedModel, names: Collection[str]) -> list[str]:
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


def write_adapter(run: Path, target: Path, modules: Collection[str], base: str | None) -> list[Path]:
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
