"""`optimizer: muon`: which weights it takes, that its parts step as PyTorch's do, resuming, and refusals."""

import pytest
import torch
from support.runs import interrupt, logged_losses
from transformers import TrainingArguments, get_scheduler

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.training import train
from modeling_nlq.training.run.muon import make_muon, muon_parameters
from modeling_nlq.training.run.trainer import RecordingTrainer, RunRecord


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs PyTorch 2.9")
SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def make_model(**switches):
    torch.manual_seed(0)
    return NLQForCausalLM(NLQConfig(**SIZES, **switches))


def test_matrices_inside_blocks():
    """Neither embeddings, LM head and norms, nor a projection of three dimensions or a convolution."""
    model = make_model(head_projection=True, canon="AC", use_bias=True, query_projection="linear")
    names = [f"model.layers.0.{name}_proj.weight" for name in map("self_attn.{}".format, "qkvo")]
    names += [f"model.layers.0.mlp.fc{index}.weight" for index in (1, 2)]
    assert sorted(muon_parameters(model)) == sorted(names)
    model.model.layers[0].mlp.fc1.weight.requires_grad_(False)
    model.shared = torch.nn.Linear(16, 16, bias=False)
    model.shared.weight = model.model.layers[0].self_attn.q_proj.weight
    assert len(muon_parameters(model)) == 4
    assert muon_parameters(torch.nn.Linear(2, 2)) == []


def test_steps_are_those_of_the_two_optimizers(tmp_path):
    """Rate and weight decay are the same for both; the state is saved and loaded after each step."""
    rates, tokens = [1e-2, 5e-3, 2e-3], torch.arange(24).view(2, 12) % 17
    arguments = TrainingArguments(tmp_path, learning_rate=1.0, weight_decay=0.1, adam_beta2=0.95, use_cpu=True)
    model, expected = make_model(), make_model()
    trainer = RecordingTrainer(model=model, args=arguments, record=RunRecord(), optimizer="muon")
    optimizer = trainer.create_optimizer()
    names = set(muon_parameters(expected))
    decayed = set(trainer.get_decay_parameter_names(expected))
    parameters = dict(expected.named_parameters())
    groups = [
        {"params": [parameters[name] for name in parameters if name not in names and (name in decayed) is decays]}
        | {"weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    matrices = [parameters[name] for name in parameters if name in names]
    theirs = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
    ]
    for rate in rates:
        for each in (optimizer, *theirs):
            for group in each.param_groups:
                group["lr"] = rate
            each.zero_grad()
        for each in (model, expected):
            each(tokens, labels=tokens).loss.backward()
        for each in (optimizer, *theirs):
            each.step()
        state = optimizer.state_dict()
        optimizer = make_muon(model, arguments, decayed)
        optimizer.load_state_dict(state)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("trained", ["v_proj.weight", "norm.weight"])
def test_matrices_alone_and_none(tmp_path, trained):
    """LoRA trains matrices alone, and `trainable: new` may train none."""
    model, arguments = make_model(), TrainingArguments(tmp_path, learning_rate=1e-2, use_cpu=True)
    model.requires_grad_(False)
    weights = [weight.requires_grad_() for name, weight in model.named_parameters() if name.endswith(trained)]
    optimizer, before = make_muon(model, arguments, []), [weight.detach().clone() for weight in weights]
    model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weights and not any(map(torch.equal, weights, before))
    assert {"ns_steps" in group for group in optimizer.param_groups} == {trained == "v_proj.weight"}
    get_scheduler("polynomial", optimizer, 1, 9)  # which reads the optimizer's own rate


@pytest.mark.slow
def test_interrupted_run_ends_with_the_same_bits(recipe_file, tmp_path):
    options = {"optimizer": "muon", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "bf16": True}
    options |= {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 0.5}}
    whole = train(recipe_file, output_dir=tmp_path / "whole", **options)
    interrupt(recipe_file, output_dir=tmp_path / "cut", **options)
    assert train(recipe_file, output_dir=tmp_path / "cut", **options).losses.test == whole.losses.test
    assert logged_losses(tmp_path / "cut") == logged_losses(tmp_path / "whole")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_decay_is_a_share_of_the_steps(tmp_path):
    arguments = TrainingArguments(
        tmp_path,
        learning_rate=1.0,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 0.25, "decay_type": "linear"},
        use_cpu=True,
    )
    trainer = RecordingTrainer(model=make_model(), args=arguments, record=RunRecord())
    trainer.create_optimizer_and_scheduler(40)
    rates = []
    for _ in range(40):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[:31] == [1.0] * 31 and rates[31:] == pytest.approx([1 - step / 10 for step in range(1, 10)])
    assert arguments.lr_scheduler_kwargs["num_decay_steps"] == 0.25


@pytest.mark.parametrize(
    ("options", "variable", "message"),
    [
        (
            {"parametrization": "completep", "base_sizes": {"hidden_size": 16}},
            None,
            "both scale the steps of matrices",
        ),
        ({"optim": "adafactor"}, None, "optimizer='muon' and optim='adafactor' both name the optimizer"),
        ({}, "ACCELERATE_USE_FSDP", "needs whole matrices, which FSDP and DeepSpeed split"),
    ],
)
def test_refusals(recipe_file, tmp_path, monkeypatch, options, variable, message):
    if variable is not None:
        monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=message):
        train(recipe_file, output_dir=tmp_path / "run", optimizer="muon", **options)
    assert not (tmp_path / "run").exists()


def test_pytorch_without_muon(recipe_file, tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"optimizer='muon' needs PyTorch 2\.9, and this is "):
        train(recipe_file, output_dir=tmp_path / "run", optimizer="muon")
