"""Random models and batches: hypothesis draws the switches of every layer, sizes, padding and packed documents.

The values of a switch come from the type of its field, and `NLQConfig` refuses what does not go together. So a new
part, or a new value of a switch, is drawn without an entry here.
"""

import torch
from hypothesis import strategies as st
from support.model_cases import (
    ELEMENTWISE_KINDS,
    KINDS,
    OF_MODEL,
    PART_OF,
    SIZES,
    VOCABULARY,
    is_accepted,
    values_of,
)
from support.reference import NON_NEGATIVE

from modeling_nlq import NLQConfig
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, request_of
from modeling_nlq.configuration_nlq import CROSS_ATTENTION_SWITCHES, PER_LAYER_SWITCHES


# A decoder, an encoder, and a decoder that also attends to an encoder's tokens
ROLES = {"decoder": {}, "encoder": {"is_causal": False}, "source": {"add_cross_attention": True}}
# On the CPU and in float64 but for `nlq_cpp`, which has float32
BACKENDS = ("eager", "nlq", "sdpa", "nlq_rows", "nlq_tiled", "flex_attention")


def kind_for(kind: str, implementation: str) -> dict:
    """Returns the switches of a kind of layer, with a normaliser that the backend computes."""
    is_flex = implementation == "flex_attention" and kind in ELEMENTWISE_KINDS
    return KINDS[kind] | ({"attention_normalization": "sum"} if is_flex else {})


def computes(implementation: str, switches: dict) -> bool:
    """Tells whether `NLQConfig` accepts the switches, and the backend all layers."""
    if not is_accepted(switches):
        return False
    config = NLQConfig(**{**SIZES, **switches})
    layers = [each for layer in config.per_layer_config for each in (layer, layer.cross_attention_config) if each]
    if implementation == "flex_attention" and any(
        layer.attention_sink or (layer.attention_normalization or layer.activation.normalization) != "sum"
        for layer in layers
    ):
        return False  # on the CPU
    backend = ATTENTION_BACKENDS.get(implementation)
    is_linear = (layer.attention_activation == "linear_attention" for layer in layers)
    return backend is None or all(
        linear or backend.supports_layer(request_of(layer)) for layer, linear in zip(layers, is_linear)
    )


def has_case(kind: str, implementation: str, **_) -> bool:
    """Tells whether the backend computes such layers; linear ones do not call it."""
    is_linear = KINDS[kind]["attention_activation"] == "linear_attention"
    if is_linear or implementation == "nlq_cpp":
        return (
            implementation in ("eager", "nlq") if is_linear else kind in ("softmax", *NON_NEGATIVE, "tanh", "identity")
        )
    return computes(implementation, kind_for(kind, implementation))


@st.composite
def some_switches(draw, fields, accepts, most=8):
    switches = {}
    for name in draw(
        st.lists(st.sampled_from([field for field in fields if values_of(field)]), min_size=1, max_size=most)
    ):
        part = PART_OF.get(name)
        more = {part: draw(st.sampled_from(values_of(part)))} if part in fields and not switches.get(part) else {}
        changed = {**switches, **more, name: draw(st.sampled_from(values_of(name)))}
        switches = changed if accepts(changed) else switches
    return switches


@st.composite
def model_switches(draw, kind, implementation, roles=("decoder",), kinds=tuple(KINDS), **fixed):
    """The switches of a model whose first layer, or all, are of a kind that the backend computes.

    `roles` are keys of `ROLES`, `kinds` those of another layer, and `fixed` switches of all layers that are not drawn.
    """
    switches = {**kind_for(kind, implementation), **ROLES[draw(st.sampled_from(roles))], **fixed}
    if not computes(implementation, switches):  # an encoder has no decay, for example
        switches = {**kind_for(kind, implementation), **ROLES[roles[0]], **fixed}

    def accepts(more):
        return computes(implementation, {**switches, **more})

    if "position_embedding" not in fixed and draw(st.booleans()):
        rope = {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": draw(st.sampled_from([1.0, 0.5])),
        }
        positions = draw(st.sampled_from([{"position_embedding": "none"}, {"rope_parameters": rope}]))
        positions = {"position_embedding": "rope", **positions}
        switches |= positions if accepts(positions) else {}
    switches |= draw(some_switches([name for name in OF_MODEL if name not in fixed], accepts, most=5))
    of_layer = [name for name in PER_LAYER_SWITCHES if name not in fixed]
    switches |= draw(some_switches(of_layer, accepts))
    if switches.get("add_cross_attention") and draw(st.booleans()):
        own = {"cross_attention_hidden_size": draw(st.sampled_from([16, 20]))}
        own["cross_attention"] = draw(
            some_switches(CROSS_ATTENTION_SWITCHES, lambda more: accepts({**own, "cross_attention": more}))
        )
        switches |= own if accepts(own) else {}
    if draw(st.booleans()):
        # What is absent would be inherited from the model
        absent = {name: getattr(NLQConfig, name) for name in of_layer if name != "position_embedding"}
        absent["cross_attention"] = switches.get("cross_attention")
        index, other = draw(st.sampled_from([0, 1])), draw(st.sampled_from(kinds))
        other = {**absent, **kind_for(other, implementation)}
        if accepts({"per_layer_config": {index: other}}):
            other |= draw(
                some_switches(of_layer, lambda more: accepts({"per_layer_config": {index: {**other, **more}}}))
            )
            switches["per_layer_config"] = {index: other}
    return switches


@st.composite
def batches(draw, config, longest=5):
    """Draws inputs for a model, padded, packed or plain, and a mask of the tokens that are not padding."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, longest))
    generator = torch.Generator().manual_seed(length)
    inputs = {"input_ids": torch.randint(VOCABULARY, (rows, length), generator=generator)}
    is_token = torch.ones(rows, length).bool()
    if config.add_cross_attention:
        width = config.cross_attention_hidden_size or config.hidden_size
        source = torch.randn(rows, 5, width, generator=generator, dtype=torch.float64)
        mask = draw(masks(rows, 5))
        inputs |= {"encoder_hidden_states": source, "encoder_attention_mask": mask}
    kind = draw(st.sampled_from(["padded", "padded", "plain", *([] if config.add_cross_attention else ["packed"])]))
    if kind == "padded":
        inputs["attention_mask"] = draw(masks(rows, length))
        is_token = inputs["attention_mask"].bool()
    elif kind == "packed":
        begins = draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
        begins = torch.tensor(begins).view(rows, length)
        begins[:, 0] = True
        index = torch.arange(length)
        inputs["position_ids"] = index - torch.where(begins, index, 0).cummax(dim=1).values
    return inputs, is_token


@st.composite
def masks(draw, rows, length):
    row = st.lists(st.sampled_from([0, 1, 1]), min_size=length, max_size=length).filter(any)
    return torch.tensor([draw(row) for _ in range(rows)])
