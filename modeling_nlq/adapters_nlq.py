"""Adapters of PEFT: the layers that its methods adapt by default, and a warning about layers that a model does not have."""

from transformers.utils import logging


try:
    from peft.utils import constants
except ImportError:
    constants = None

logger = logging.get_logger(__name__)

# Queries and values, as for Llama. A model has those that its projections need.
DEFAULT_TARGETS = [f"{name}_{layer}" for name in "qv" for layer in ("proj", "bottleneck.fc1", "bottleneck.fc2")]
# IA3 scales the output of keys and values, and the input of the MLP's last layer
_IA3_FEEDFORWARD = ["mlp.fc2", "mlp.down_proj"]
_IA3_TARGETS = [*(f"{name}_{layer}" for name in "kv" for layer in ("proj", "bottleneck.fc2")), *_IA3_FEEDFORWARD]
# By the names of PEFT's tables
_DEFAULTS = {
    **dict.fromkeys(("ADALORA_TARGET", "LOHA_TARGET", "LORA_TARGET", "OFT_TARGET", "VERA_TARGET"), DEFAULT_TARGETS),
    "IA3_TARGET": _IA3_TARGETS,
    "IA3_FEEDFORWARD": _IA3_FEEDFORWARD,
}


def register_default_targets(model_type: str) -> None:
    """Tells PEFT which layers its methods adapt where `target_modules` is not given."""
    for name, layers in _DEFAULTS.items():
        getattr(constants, f"TRANSFORMERS_MODELS_TO_{name}_MODULES_MAPPING", {}).setdefault(model_type, layers)


class NLQAdaptersMixin:
    """Warns of an adapter for layers that do not exist. PEFT adapts the others in silence, and leaves the queries alone."""

    @property
    def peft_config(self) -> dict:
        """PEFT's configurations by adapter, which PEFT sets here after it has added its layers."""
        if "peft_config" not in vars(self):
            raise AttributeError("peft_config")  # PEFT asks by `hasattr`
        return vars(self)["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: dict) -> None:
        vars(self)["peft_config"] = configs
        names = [name for name, _ in self.named_modules()]
        for config in configs.values():
            targets = getattr(config, "target_modules", None)
            if not isinstance(targets, set | list) or set(targets) in map(set, _DEFAULTS.values()):
                continue
            if missing := sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)):
                bottlenecks = {
                    name.partition("self_attn.")[2] for name in names if name.endswith(("bottleneck.fc1", "bottleneck.fc2"))
                }
                more = f"; its nonlinear projections are {', '.join(sorted(bottlenecks))}" if bottlenecks else ""
                logger.warning_once(f"target_modules: no layer of this model is named {', '.join(missing)}{more}")

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("peft_config", None)
