"""A training step reads no tensor of the device, because the processor would wait until all kernels have finished."""

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    combinations,
    inputs_of,
    layer_for,
    run,
    set_tiles,
)
from support.model_cases import ELEMENTWISE_KINDS, KINDS, LIBRARY, PART_SWITCHES, make_model, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_nlq import masking_nlq, modeling_nlq, tiled_nlq


# `torch.func` differentiates PyTorch's activations, and no dispatch mode works inside it
KINDS_OF_OURS = {name: switches for name, switches in KINDS.items() if name not in LIBRARY}
CASES = KINDS_OF_OURS | PART_SWITCHES | {"encoder": {"is_causal": False, "sliding_window": 3}}
CASES |= {
    f"{name}-tiled": {**switches, "implementation": "nlq_tiled"}
    for name, switches in KINDS_OF_OURS.items()
    if name in ELEMENTWISE_KINDS
}


class Reads(TorchDispatchMode):
    """Counts the reads of tensors, also in the functions behind operators."""

    BY_SIZE = ("equal", "masked_select", "nonzero", "unique", "_unique2")

    def __init__(self, patch):
        super().__init__()
        self.count = 0
        for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist"):
            patch.setattr(torch.Tensor, name, self.counting(getattr(torch.Tensor, name)))

    def counting(self, method):
        def read(tensor, *arguments):
            self.count += 1
            return method(tensor, *arguments)

        return read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        self.count += packet.__name__ in self.BY_SIZE
        if packet in (torch.ops.aten.index, torch.ops.aten.index_put):
            self.count += any(index is not None and index.dtype == torch.bool for index in args[1])
        return function(*args, **kwargs or {})


@pytest.fixture
def reads(monkeypatch):
    """Counts reads where the CPU passes for an accelerator."""
    for module in (masking_nlq, modeling_nlq, tiled_nlq):
        monkeypatch.setattr(module, "can_be_read", lambda tensor: False)
    set_tiles(monkeypatch, 4, 4, 0)
    return Reads(monkeypatch)


def train(model, device="cpu", **inputs):
    tokens = random_tokens(2, 9).to(device)
    model(tokens, labels=tokens, use_cache=False, **inputs).loss.backward()


@pytest.mark.parametrize("switches", CASES.values(), ids=CASES)
def test_a_step_reads_nothing(reads, switches):
    model = make_model(**{"implementation": "nlq"} | switches)
    with reads:
        train(model)
    assert reads.count == 0


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "inputs",
    [{"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}, {"attention_mask": torch.ones(2, 9).tril(7)}],
    ids=["packed", "padded"],
)
def test_packing_and_padding_are_read_once(reads, kind, inputs):
    """A mask that hides nothing would cost SDPA its flash kernel. Transformers' masks may read positions once more."""
    model = make_model(implementation="nlq", attention_activation=kind, sliding_window=5)
    with reads:
        train(model, **inputs)
    assert 1 <= reads.count <= 1 + (kind == "softmax" and "position_ids" in inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("implementation", ["nlq", "nlq_tiled", "nlq_triton"])
def test_a_step_synchronizes_nowhere(implementation):
    model = make_model(implementation=implementation, attention_activation="sigmoid").to("cuda")
    train(model, "cuda")  # libraries load, and kernels are tuned
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@combinations([("sigmoid", "sum"), ("softplus", "none")])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tiles_that_are_not_read_change_no_bit(monkeypatch, layout, activation, normalization):
    set_tiles(monkeypatch, 4, 4, 0)
    module = layer_for(layout, activation, normalization)
    states = layout.states()
    expected = run("nlq_tiled", layout, module, states)
    monkeypatch.setattr(tiled_nlq, "can_be_read", lambda tensor: False)
    actual = run("nlq_tiled", layout, module, inputs_of(module, states))
    assert all(map(torch.equal, actual, expected))
