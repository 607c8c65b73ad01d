"""Small tokenizers, built in memory: ids that are bytes, trained merges, and the manner of SentencePiece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tandem.text.tokenizer import Tokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LESSON = "The quick brown fox, naïve café. 日本語 👩‍👩‍👧‍👦 don't  stop\n\tdef f(x): return x ** 2\n"


def byte_character(byte: int) -> str:
    """The printable character of a byte: itself in Latin-1, or the next free one from U+0100 on."""
    hidden = [b for b in range(256) if b < 0x21 or 0x7F <= b <= 0xA0 or b == 0xAD]
    return chr(0x100 + hidden.index(byte)) if byte in hidden else chr(byte)


def finish(backend: Backend, specials: tuple[str, ...], template: str | None, affixes: str) -> PreTrainedTokenizerFast:
    """`affixes` says what surrounds every text: "$A" for nothing, "<s> $A" for a BOS."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    used = [(token, backend.token_to_id(token)) for token in affixes.split() if token != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=affixes, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.fixture(scope="session")
def byte_hf() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds a byte-level tokenizer whose ids 0 to 255 are the bytes and 256 to 260 the special tokens."""

    def build(
        vocabulary: dict[str, int] | None = None,
        specials: tuple[str, ...] = SPECIALS,
        template: str | None = None,
        affixes: str = "$A",
    ) -> PreTrainedTokenizerFast:
        bytes_alone = {byte_character(byte): byte for byte in range(256)}
        backend = Backend(models.BPE(vocab=vocabulary or bytes_alone, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return finish(backend, specials, template, affixes)

    return build


@pytest.fixture(scope="session")
def merged_hf() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds a byte-level tokenizer with trained merges; its ids 0 to 4 are the special tokens."""

    def build(template: str | None = None, affixes: str = "$A") -> PreTrainedTokenizerFast:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator([LESSON] * 5, trainer)
        return finish(backend, SPECIALS, template, affixes)

    return build


@pytest.fixture(scope="session")
def piece_hf() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds one as the first Llama models have it: byte fallback, leading space, BOS; special ids 0 to 4."""

    def build(template: str | None = None) -> PreTrainedTokenizerFast:
        pieces = [
            *SPECIALS,
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            *"helowrd,é",
            "he",
            "▁he",
            "▁w",
        ]
        vocabulary = {piece: token for token, piece in enumerate(pieces)}
        merges = [("h", "e"), ("▁", "he"), ("▁", "w")]
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<|pad|>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return finish(backend, SPECIALS, template, "<s> $A")

    return build


@pytest.fixture(scope="session")
def bytes_only(byte_hf: Callable[..., PreTrainedTokenizerFast]) -> Tokenizer:
    """Byte ids, no BOS, and a chat template in ChatML."""
    return Tokenizer(byte_hf(template=CHATML))


@pytest.fixture(scope="session")
def pieces(piece_hf: Callable[..., PreTrainedTokenizerFast]) -> Tokenizer:
    return Tokenizer(piece_hf())
