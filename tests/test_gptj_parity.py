"""Hugging Face's GPT-J, an independent implementation, with the same weights gives the same logits."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import network_of, tokens_of

from mesh_transformer import parameters, steps

pytest.importorskip("torch", reason="torch is not installed (the extra 'peers')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'peers')")


@pytest.mark.parametrize(("dp", "mp"), [(1, 1), (2, 4)])
def test_logits_of_a_random_gptj(dp: int, mp: int) -> None:
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    torch.manual_seed(0)
    net = network_of(dp, mp, layers=3)
    model = net.model
    peer = GPTJForCausalLM(
        GPTJConfig(
            vocab_size=model.n_vocab, n_positions=model.seq, n_embd=model.d_model, n_layer=model.layers,
            n_head=model.n_heads, rotary_dim=model.pe_rotary_dims, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    for weight in peer.parameters():  # biases and norms too: a wrong place for one would show
        torch.nn.init.normal_(weight, std=0.3)
    values = {name: weight.detach().numpy() for name, weight in peer.state_dict().items()}

    def whole(kind: parameters.Kind) -> np.ndarray:
        if kind.hf_name is None:  # the embedding bias, which GPT-J's Hugging Face form does not have
            return np.zeros(kind.shape, np.float32)
        names = [kind.hf_name.replace("{i}", str(i)) for i in range(model.layers)] if kind.stacked else [kind.hf_name]
        parts = [values[n].T if kind.hf_transposed else values[n] for n in names]
        return np.stack(parts) if kind.stacked else parts[0]

    tree = parameters.tree((kind, whole(kind)) for kind in parameters.kinds(model, mp))
    net.state = net.state._replace(params=steps.place(net.mesh, parameters.specs(model, mp), tree))
    obs = tokens_of(4, model.seq, vocab=model.n_vocab)
    with torch.no_grad():
        expected = peer(input_ids=torch.from_numpy(obs.astype(np.int64))).logits.numpy()
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(np.asarray(net.logits(obs)), expected, atol=1e-4, rtol=0)
