"""What a recipe trains: all parameters, those that a conversion added, or a LoRA (arXiv 2106.09685) by PEFT."""

from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel, Trainer

from ..disk import atomic_dir, delete
from ..files import CARD_FILE
from ..loading import added_parameters, peft_task
from ..size import freeze_all_but
from ..text import one_line
from .recipe import Recipe


def choose_trained(recipe: Recipe, model: PreTrainedModel) -> PreTrainedModel:
    """Freezes what the recipe does not train, in place, and returns the model to train: a `peft.PeftModel` for a LoRA.

    The model may be on the meta device. Raises `ValueError` if PEFT is not installed, or a LoRA does not fit.
    """
    if recipe.trainable == "new":
        freeze_all_but(model, added_parameters(recipe.model, recipe.conversion))
    if recipe.lora is None:
        return model
    if find_spec("peft") is None:
        raise ValueError("lora needs the package peft: pip install peft")
    from peft import LoraConfig, get_peft_model

    try:
        return get_peft_model(model, LoraConfig(task_type=peft_task(model), **recipe.lora))
    except (TypeError, ValueError) as error:
        raise ValueError(f"lora={recipe.lora!r} does not fit the model: {one_line(error)}") from error


def merge_lora(trainer: Trainer) -> None:
    """Saves the LoRA of a model in the run's folder `adapter`, and adds it to the weights."""
    if trainer.is_world_process_zero():
        with atomic_dir(Path(trainer.args.output_dir) / "adapter") as folder:
            trainer.model.save_pretrained(folder)
            delete(folder / CARD_FILE)  # PEFT's template, which nobody has filled in
    trainer.model = trainer.model.merge_and_unload()
