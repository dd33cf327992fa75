"""The peer's side of `training.py`: Hugging Face GPT-J on torch. Arguments: shape (JSON), attention, Adam kind."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import transformers
from worker import serve


def main() -> None:
    shape, attention, adam = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        vocab_size=shape["n_vocab"], n_positions=shape["seq"], n_embd=shape["d_model"], n_layer=shape["layers"],
        n_head=shape["n_heads"], rotary_dim=shape["rotary"], attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPTJForCausalLM._from_config(config, attn_implementation=attention)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=adam == "fused", foreach=adam == "foreach")
    tokens = np.random.default_rng(0).integers(0, shape["n_vocab"], (shape["batch"], shape["seq"] + 1))
    obs, target = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=obs).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    def versions() -> dict[str, Any]:
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    serve(step, {"versions": versions})


if __name__ == "__main__":
    main()
