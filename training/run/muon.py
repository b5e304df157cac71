"""Muon (Jordan et al. 2024) for the matrices of a model's blocks, and AdamW for all else (Liu et al. 2025).

As in arXiv 2502.16982, Muon's step is scaled to the root mean square of AdamW's, so that one learning rate and one
weight decay suit both.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import TrainingArguments


def muon_parameters(model: nn.Module) -> list[str]:
    """Returns the names of the weights that Muon trains: those of `nn.Linear` in the entries of an `nn.ModuleList`.

    AdamW trains a weight that a module outside the blocks shares.
    """
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    every_name = model.named_parameters(remove_duplicate=False)
    outside = {parameter for name, parameter in every_name if name not in linear or not name.startswith(blocks)}
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight not in outside]


class MuonWithAdamW(torch.optim.Optimizer):
    """Combines Muon and AdamW, because `Trainer` saves and loads a single optimizer."""

    def __init__(self, matrices: Iterable[dict], others: Iterable[dict], muon: dict, adamw: dict):
        parts = [(torch.optim.Muon, [*matrices], muon), (torch.optim.AdamW, [*others], adamw)]
        # With LoRA all trained weights are matrices, so AdamW would get none
        self._parts = [optimizer(groups, **options) for optimizer, groups, options in parts if groups]
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": adamw["lr"]})
        self._share()

    def _share(self) -> None:
        """Gives both parts the groups, whose rates a scheduler changes, and the state that is saved."""
        for part in self._parts:
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) is is_muon]
            part.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # which replaces groups and state
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def make_muon(model: nn.Module, arguments: TrainingArguments, decayed: Iterable[str]) -> MuonWithAdamW:
    """Makes the optimizer of a model, with weight decay for the parameters named in `decayed`."""
    names, decayed = set(muon_parameters(model)), set(decayed)
    groups: dict[tuple[bool, bool], dict] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = arguments.weight_decay if name in decayed else 0.0
            group = groups.setdefault((name in names, name in decayed), {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
    matrices, others = ([group for key, group in groups.items() if key[0] is is_own] for is_own in (True, False))
    adamw = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon, "fused": True}
    rate = {"lr": arguments.learning_rate}
    return MuonWithAdamW(matrices, others, rate | {"adjust_lr_fn": "match_rms_adamw"}, rate | adamw)
