"""The decoder against transformers, and the same bits for a token in every batch, chunk and page order."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from torch.nn.functional import pad, rms_norm

from tandem.cache.pool import Pool
from tandem.engine.batch import Batch
from tandem.errors import LoadError
from tandem.kernels.attention import AttentionPlan
from tandem.models.decoder import Decoder
from tandem.models.load import load_model, model_of, open_checkpoint

CPU = torch.device("cpu")
LENGTH = 150

SHAPE = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama": ("Llama", {}),
    "llama MHA": ("Llama", dict(num_key_value_heads=4)),
    "llama MQA": ("Llama", dict(num_key_value_heads=1)),
    "llama three heads a group": ("Llama", dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=144)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama biased": ("Llama", dict(attention_bias=True)),
    "llama head size": ("Llama", dict(head_dim=48)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32))),
    "linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "yarn": ("Llama", dict(rope_parameters=YARN)),
    "mistral": ("Mistral", dict(sliding_window=16)),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied, far theta": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_theta=1e6))),
    "qwen2 windowed": ("Qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
}


@cache
def reference(name: str) -> transformers.PreTrainedModel:
    """A random model in float64, with biases and norms that are not 0 and 1."""
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2)
        else:
            parameter.data.normal_(0.0 if key.endswith("bias") else 1.0, 0.3)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # As it comes, this norm is computed in float32 even here.
            module.forward = lambda x, m=module: rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    return model


@cache
def decoder(name: str, dtype: torch.dtype, shard: str = "1GB") -> Decoder:
    """The same model through files in float32, and the float64 one with its weights rounded alike."""
    model = reference(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.float().double()
    with TemporaryDirectory() as folder:
        state = {key: tensor.float() for key, tensor in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state, max_shard_size=shard)
        return load_model(Path(folder), dtype, CPU)


@cache
def expected(name: str) -> torch.Tensor:
    """[LENGTH, V] float64 logits of `tokens(0)`."""
    decoder(name, torch.float64)
    with torch.inference_mode():
        return reference(name)(tokens(0)[None]).logits[0]


def tokens(row: int) -> torch.Tensor:
    return torch.randint(0, 300, (LENGTH,), generator=torch.Generator().manual_seed(row))


class Session:
    """Rows of random text on shuffled pages; each call of `run` computes the next tokens of some rows."""

    def __init__(self, model: Decoder, rows: int = 1, page_size: int = 16) -> None:
        self.model, self.page_size = model, page_size
        width = -(-LENGTH // page_size)
        order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(rows)) + 1
        self.table = order.view(rows, width)
        self.pool = Pool.allocate(model.config, 1 + rows * width, page_size, model.dtype, CPU)
        self.done = [0] * rows

    def run(self, counts: dict[int, int]) -> list[torch.Tensor]:
        """Compute `counts[row]` more tokens of each row; returns logits [count, V] in the same order."""
        spans = [(row, self.done[row], self.done[row] + count) for row, count in counts.items()]
        filler = -sum(counts.values()) % 16
        positions = torch.cat([torch.arange(first, end) for _, first, end in spans])
        pages = torch.cat([self.table[row, torch.arange(first, end) // self.page_size] for row, first, end in spans])
        ids = torch.cat([tokens(row)[first:end] for row, first, end in spans])
        slots = pages * self.page_size + positions % self.page_size
        ends = tuple(end for _, _, end in spans)
        plan = AttentionPlan(self.table[list(counts)], tuple(counts.values()), ends, pad(positions, (0, filler)))
        batch = Batch(*(pad(t, (0, filler)) for t in (ids, positions, slots)), plan)
        hidden = self.model.forward(batch, self.pool)
        for row, _, end in spans:
            self.done[row] = end
        assert hidden.shape == (len(ids) + filler, self.model.config.hidden)
        return list(self.model.logits(hidden[: len(ids)]).split(list(counts.values())))


@cache
def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
    return Session(decoder(name, dtype)).run({0: LENGTH})[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    scale = expected(name).abs().max()
    exact = (whole(name, torch.float64) - expected(name)).abs().max() / scale
    assert exact < 1e-12
    single = (whole(name, torch.float32).double() - expected(name)).abs().max() / scale
    assert single < 5e-6
    half = (whole(name, torch.bfloat16).double() - expected(name)).abs().mean() / expected(name).abs().mean()
    assert half < 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_do_not_depend_on_the_chunk(name, dtype):
    for sizes in ([1] * 20, [7] * 21 + [3], [16, 1, 130, 2, 1], [33, 100, 17]):
        session, got = Session(decoder(name, dtype), page_size=4), []
        for size in sizes:
            got += session.run({0: size})
        assert torch.equal(torch.cat(got), whole(name, dtype)[: sum(sizes)]), sizes


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "llama three heads a group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(name, dtype):
    """Row 0 decodes among 64 rows that prefill and decode."""
    session = Session(decoder(name, dtype), rows=64)
    (got,) = session.run({0: 120})
    assert torch.equal(got, whole(name, dtype)[:120])
    for step in range(3):
        counts = {row: 1 + (row * 5 + step) % 9 for row in range(63, 0, -1)}
        *_, got = session.run(counts | {0: 1 + step})
        end = session.done[0]
        assert torch.equal(got, whole(name, dtype)[end - 1 - step : end]), step


def test_bits_do_not_depend_on_the_number_of_logits():
    model = decoder("llama", torch.bfloat16)
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    for first, end in ((0, 1), (3, 5), (10, 27), (0, 32), (1, 50)):
        assert torch.equal(model.logits(hidden[first:end]), logits[first:end])


def test_shards_hold_the_same_model():
    got = Session(decoder("qwen2", torch.float32, shard="50KB")).run({0: LENGTH})[0]
    assert torch.equal(got, whole("qwen2", torch.float32))


def test_models_with_different_rotations_do_not_disturb_each_other():
    for names in (("llama3", "llama"), ("llama", "llama3")):
        sessions = [Session(decoder(name, torch.float32)) for name in names]
        for _ in range(2):
            got = [session.run({0: 60})[0] for session in sessions]
        for name, logits in zip(names, got, strict=True):
            assert torch.equal(logits, whole(name, torch.float32)[60:120])


class Held:
    """A checkpoint in memory."""

    def __init__(self, name: str) -> None:
        with TemporaryDirectory() as folder:
            reference(name).save_pretrained(folder)
            self.config = open_checkpoint(Path(folder)).config
        self.tensors = {key: tensor.detach() for key, tensor in reference(name).state_dict().items()}
        if self.config.tied:
            del self.tensors["lm_head.weight"]

    def names(self):
        return set(self.tensors)

    def tensor(self, name):
        return self.tensors[name]

    def quantised(self, name):
        return None

    def close(self):
        pass

    def load(self, **changes):
        self.config = replace(self.config, **changes)
        return model_of(self, torch.float64, CPU)


def logits_of(model):
    return Session(model).run({0: 40})[0]


def test_a_missing_tensor_is_named():
    held = Held("qwen3")
    del held.tensors["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(LoadError, match=r"model\.layers\.1\.self_attn\.k_norm\.weight \(32,\) is missing"):
        held.load()


def test_a_wrong_shape_is_named_with_the_right_one():
    held = Held("llama")
    held.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(111, 64)
    with pytest.raises(LoadError, match=r"up_proj\.weight is \(111, 64\); the configuration says \(112, 64\)"):
        held.load()


def test_unused_tensors_are_named_but_derived_ones_are_not(caplog):
    held = Held("llama")
    held.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    with caplog.at_level(logging.WARNING):
        held.load()
    assert not caplog.records
    held.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    with caplog.at_level(logging.WARNING):
        held.load()
    assert "model.layers.0.self_attn.q_proj.bias" in caplog.text


def test_a_head_in_the_file_counts_and_an_untied_model_needs_one():
    held = Held("llama tied")
    tied = held.load()
    held.tensors["lm_head.weight"] = held.tensors["model.embed_tokens.weight"].clone()
    same = held.load()
    assert torch.equal(logits_of(same), logits_of(tied))
    held.tensors["lm_head.weight"] *= 2.0
    torch.testing.assert_close(logits_of(held.load()), logits_of(tied) * 2, rtol=1e-12, atol=1e-12)
    del held.tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        held.load(tied=False)


def test_a_tied_head_and_an_equal_one_are_not_copied():
    held = Held("llama tied")
    held.tensors["lm_head.weight"] = held.tensors["model.embed_tokens.weight"].clone()
    model = held.load()
    before = model.logits(torch.ones(1, 64, dtype=torch.float64))
    model._embedding.mul_(2.0)
    assert torch.equal(model.logits(torch.ones(1, 64, dtype=torch.float64)), before * 2)


def test_weight_bytes_counts_what_a_step_reads():
    config, model = Held("llama").config, decoder("llama", torch.float32)
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 112
    assert model.weight_bytes == 4 * (config.layers * per_layer + 300 * 64)


def test_moved_entries_are_read_at_their_new_place():
    """Sources and targets overlap, as they do when an accepted path is brought together."""
    model = decoder("llama", torch.float64)
    session = Session(model)
    session.run({0: 60})
    slot = session.table[0, torch.arange(60) // 16] * 16 + torch.arange(60) % 16
    keys, values = session.pool.keys.clone(), session.pool.values.clone()
    flat = [t.flatten(2, 3) for t in (session.pool.keys, session.pool.values)]
    session.pool.move(slot[[50, 49, 53]], slot[[49, 50, 51]])
    for now, before in zip(flat, (keys, values), strict=True):
        before = before.flatten(2, 3)
        assert torch.equal(now[:, :, slot[[49, 50, 51]]], before[:, :, slot[[50, 49, 53]]])
        rest = [i for i in range(now.shape[2]) if i not in slot[[49, 50, 51]].tolist()]
        assert torch.equal(now[:, :, rest], before[:, :, rest])
    assert session.pool.keys.nbytes + session.pool.values.nbytes == session.pool.num_pages * Pool.bytes_per_page(
        model.config, 16, torch.float64
    )
