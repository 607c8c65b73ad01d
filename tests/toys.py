"""Toys shared by tests: a byte tokenizer, and a model whose next token is a function of the last one alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.config import EngineConfig
from tandem.engine.build import Drafting, assemble
from tandem.llm import LLM
from tandem.text import Tokenizer as TandemTokenizer
from tests.exact.oracle import Weights, random_weights, tiny_config

EOS = 256
VOCAB = 260
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def byte_hf() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes, 256 is the end-of-text token."""
    hidden = [b for b in range(256) if b < 0x21 or 0x7F <= b <= 0xA0 or b == 0xAD]
    names = {chr(0x100 + hidden.index(b)) if b in hidden else chr(b): b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE)


def bigram(table: torch.Tensor) -> Weights:
    """A model of the given law: `table[t]` are the log-probabilities after token t. It attends to nothing."""
    vocab = len(table)
    weights = random_weights(0, tiny_config(vocab=vocab, hidden=vocab, layers=1, sliding_window=(None,)))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights.tensors[f"model.layers.0.{name}.weight"].zero_()
    weights.tensors["model.embed_tokens.weight"] = torch.eye(vocab, dtype=torch.float64)
    # The final norm scales a one-hot state by the square root of its width.
    weights.tensors["lm_head.weight"] = table.T.double().contiguous() / math.sqrt(vocab)
    return weights


def writes(text: bytes | list[int], then: Mapping[int, int] | None = None) -> Weights:
    """A model that goes through these tokens in a circle; every token may occur only once in them."""
    order = list(text)
    assert len(set(order)) == len(order), "the next token must follow from the last"
    table = torch.full((VOCAB, VOCAB), -8.0)
    for last, following in zip(order, order[1:] + order[:1], strict=True):
        table[last, following] = 8.0
    for last, following in (then or {}).items():
        table[last] = -8.0
        table[last, following] = 8.0
    return bigram(table)


def llm_of(target: Weights, draft: Weights | str = "none", **settings) -> LLM:
    """An LLM over a toy target; `draft` is a toy, "lookup" or "none"."""
    config = EngineConfig(
        **{"dtype": "float64", "max_length": 256, "page_size": 4, "lookup_match": 1, "kv_pages": 2100, **settings}
    )
    if isinstance(draft, Weights):
        drafting = Drafting.draft_model(draft.decoder())
    else:
        drafting = Drafting.none() if draft == "none" else Drafting.lookup()
    return LLM.from_parts(assemble(target.decoder(), drafting, config, VOCAB - 3), TandemTokenizer(byte_hf()))
