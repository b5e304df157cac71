"""`nlq generate`: continues a text."""

import math

import torch
from transformers import set_seed

from ..loading import load_model
from ..size import ModelKind, positions_of
from ..text import check_number


_GENERATING = (ModelKind.DECODER, ModelKind.ENCODER_DECODER)


def generate_text(
    model: str,
    prompt: str,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> str:
    """Continues a text with a saved model; an encoder and decoder writes the target for the prompt.

    A special token in the prompt is read as one. By default it generates 100 tokens, or as many as the model has
    positions for. A temperature of 0 takes the likeliest token each time, a `top_k` of 0 samples among all. Raises
    `ValueError` for an empty prompt, or one that leaves no position.
    """
    check_number("max_new_tokens", max_new_tokens, 1)
    loaded, tokenizer = load_model(model, trust_remote_code, _GENERATING, "generation")
    loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    set_seed(seed)
    is_pair = loaded.config.is_encoder_decoder
    # As in training: some tokenizers append end-of-text, which belongs to sources alone
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("the prompt is empty")
    if is_pair:
        ids.append(tokenizer.eos_token_id)
        if (positions := positions_of(loaded.config, "encoder")) is not None and len(ids) > positions:
            raise ValueError(f"a source of {len(ids)} tokens does not fit {positions} positions")
    length = 1 if is_pair else len(ids)
    positions = positions_of(loaded.config)
    room = math.inf if positions is None else positions + 1 - length  # the last new token is not read
    max_new_tokens = min(100, room) if max_new_tokens is None else max_new_tokens
    if not 0 < max_new_tokens <= room:
        raise ValueError(
            f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} do not fit {positions} positions"
        )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    inputs = torch.tensor([ids], device=loaded.device)
    mask = torch.ones_like(inputs)
    output = loaded.generate(input_ids=inputs, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling)
    return tokenizer.decode(output[0], skip_special_tokens=True)
