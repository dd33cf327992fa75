"""The peer's side of `generate.py`: transformers' `generate`. Arguments: shape (JSON), folder, attention, cache."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers
from worker import serve


def main() -> None:
    shape, folder, attention, cache = json.loads(sys.argv[1]), *sys.argv[2:5]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.GPTJForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    ).eval()  # fmt: skip
    model.generation_config.eos_token_id = None

    def generate(batch: int, count: int) -> dict[str, Any]:
        drawn = np.random.default_rng(batch).integers(0, shape["n_vocab"], (batch, shape["prompt"]))
        ids = torch.from_numpy(drawn)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0, cache_implementation=None if cache == "dynamic" else cache, disable_compile=True,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": out[:, shape["prompt"] :].tolist()}

    requests = {
        f"{name} {batch}": lambda batch=batch, count=count: generate(batch, count)
        for name, count in (("generate", shape["count"]), ("first", 1))
        for batch in (1, 8)
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve(lambda: None, {**requests, "versions": lambda: versions})


if __name__ == "__main__":
    main()
