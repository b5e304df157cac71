"""What a conversion added to a model and a run with `trainable: new` trained, as an adapter that PEFT loads."""

from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from modeling_nlq import NLQConfig

from ..files import ADAPTER
from ..parameters import auto_class_of, listed
from ..run.lora import peft_task


def whole_modules(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Finds the modules whose parameters are the given ones, and no others; `ValueError` names those that are left."""
    modules, left = [], set(names)
    for path, module in model.named_modules():  # a module comes before those that it contains
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        # PEFT takes no container; the modules in it follow
        if own and own <= left and not isinstance(module, torch.nn.ModuleDict):
            modules.append(path)
            left -= own
    if left:
        raise ValueError(
            "an adapter of PEFT holds whole modules, and these new parameters are parts of others: "
            f"{listed(sorted(left))}"
        )
    return modules


def write_adapter(run: Path, target: Path, modules: Collection[str], base: str | None) -> list[Path]:
    """Writes some modules of the model in the folder `run` as an adapter, and returns its files; PEFT writes a card as
    well.

    Args:
        run, target: folders of the model and of the adapter.
        modules: paths of the modules in the model.
        base: Hub name of the model that the adapter belongs on, if it is there.

    Raises:
        ImportError: if PEFT is not installed.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    # No layer gets a LoRA: the modules themselves are the adapter, each as a copy
    model = auto_class_of(NLQConfig.from_pretrained(run)).from_pretrained(run)
    config = LoraConfig(task_type=peft_task(model), target_modules=DUMMY_TARGET_MODULES, modules_to_save=list(modules))
    model.name_or_path = ""  # PEFT would write the path of the run into the adapter
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(target, save_embedding_layers=False)
    return [target / name for name in ADAPTER]
