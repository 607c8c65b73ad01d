"""The tokenizer inside a GGUF file as a Hugging Face one, and the tokens that end a generation.

Two kinds exist. `gpt2`: byte-level BPE with merges, whose rule for cutting text into words is named by
`tokenizer.ggml.pre`; an unknown name is refused, since a wrong cut gives plausible but wrong ids. `llama`:
SentencePiece BPE with scores and byte fallback. (transformers' own conversion does not read `pre`.)

BOS is put before a text when `tokenizer.ggml.add_bos_token` says so; without that key, as in llama.cpp, for
`llama` tokenizers and for Llama 3's, not for others. EOS is never appended, whatever the file says: a prompt
is there to be continued.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeVar

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tandem.errors import LoadError
from tandem.models.gguf import GGUFCheckpoint
from tandem.models.gguf_file import read

__all__ = ["end_tokens_from_gguf", "tokenizer_from_gguf"]

_log = logging.getLogger(__name__)

Source = GGUFCheckpoint | str | PathLike[str]
T = TypeVar("T", str, int, float)

# Words of the GPT-4 family, by the number of digits that make one word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How one `tokenizer.ggml.pre` treats text before the merges."""

    words: str | None = None  # regular expression of a word; None: GPT-2's
    single_digits: bool = False  # every digit is cut off first
    composed: bool = False  # Unicode NFC
    whole_words: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # where the file does not say


_GPT2 = _Pre()
_LLAMA3 = _Pre(words=_WORDS % "{1,3}", whole_words=True, add_bos=True)
_PRE = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Pre(single_digits=True),
    "qwen2": _Pre(words=_WORDS % "", composed=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
_NO_TOKEN = 0xFFFFFFFF  # written for an id of -1
_SPACE = "\u2581"  # SentencePiece's


def tokenizer_from_gguf(source: Source) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF model, with special tokens, BOS rule and chat template.

    source: an open checkpoint or any path that opens one. LoadError for a kind that is not supported and for
    lists that do not fit together.
    """
    vocabulary = _Vocabulary(source)
    tokenizer, add_bos = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
    tokenizer.add_tokens(list(vocabulary.added()))
    bos = vocabulary.text("bos")
    if vocabulary.flag("add_bos_token", add_bos):
        if bos is None:
            raise LoadError(f"{vocabulary.path}: a BOS is to be added, but tokenizer.ggml.bos_token_id is missing")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=vocabulary.text("eos"),
        unk_token=vocabulary.text("unknown"),
        pad_token=vocabulary.text("padding"),
        add_bos_token=tokenizer.post_processor is not None,
        add_eos_token=False,
        chat_template=vocabulary.chat_template(),
        clean_up_tokenization_spaces=False,
    )


def end_tokens_from_gguf(source: Source) -> tuple[int, ...]:
    """Ids that end a generation: EOS first, then ends of turn or message, by their keys or usual texts."""
    vocabulary = _Vocabulary(source)
    ids = [vocabulary.id(name) for name in ("eos", "eot", "eom")]
    ends = {vocabulary.tokens[i]: i for i in vocabulary.of_type(TokenType.CONTROL)}
    ids += [ends.get(text) for text in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


class _Vocabulary:
    """The `tokenizer.*` metadata, checked."""

    def __init__(self, source: Source) -> None:
        if isinstance(source, GGUFCheckpoint):
            self.path, self._metadata = source.path, source.metadata
        else:
            self.path = Path(source)
            self._metadata = read(self.path)[0]
        self.model = self._metadata.get("tokenizer.ggml.model")
        if self.model not in ("gpt2", "llama"):
            raise LoadError(f"{self.path}: tokenizer.ggml.model = {self.model!r}; supported are gpt2 and llama")
        self.tokens = self.listed("tokens", str)
        self._padded = len(self.tokens)
        # Converters fill the list up to the rows of the embedding; no text has these tokens.
        while self.tokens and self.tokens[-1] == f"[PAD{len(self.tokens) - 1}]":
            self.tokens.pop()
        self._types = [int(TokenType.NORMAL)] * len(self.tokens)
        if self.get("token_type") is not None:
            self._types = self.per_token("token_type", int)

    def get(self, name: str) -> object:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def listed(self, name: str, kind: type[T]) -> list[T]:
        values = self.get(name)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise LoadError(f"{self.path}: tokenizer.ggml.{name} is missing or no list of {kind.__name__}")
        return list(values)

    def per_token(self, name: str, kind: type[T]) -> list[T]:
        """A list with one entry for every token, those of fillers left out."""
        values = self.listed(name, kind)
        if len(values) != self._padded:
            what = f"{len(values)} entries for {self._padded} tokens"
            raise LoadError(f"{self.path}: tokenizer.ggml.{name} has {what}")
        return values[: len(self.tokens)]

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise LoadError(f"{self.path}: tokenizer.ggml.{name} = {value!r}: true or false is needed")
        return default if value is None else value

    def id(self, name: str) -> int | None:
        """The id of a special token; `llama` files may leave the first three to SentencePiece's defaults."""
        default = {"unknown": 0, "bos": 1, "eos": 2}.get(name) if self.model == "llama" else None
        value = self.get(f"{name}_token_id")
        value = default if value is None else value
        if value is None or value == _NO_TOKEN:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            allowed = f"an id below {len(self.tokens)} is needed"
            raise LoadError(f"{self.path}: tokenizer.ggml.{name}_token_id = {value!r}: {allowed}")
        return value

    def text(self, name: str) -> str | None:
        i = self.id(name)
        return None if i is None else self.tokens[i]

    def of_type(self, *types: TokenType) -> Iterator[int]:
        return (i for i, kind in enumerate(self._types) if kind in types)

    def added(self) -> Iterator[AddedToken]:
        """Tokens found in a text as they are spelled, ahead of all rules; the special ones are not shown."""
        special = set(self.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
        for i in self.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            yield AddedToken(self.tokens[i], special=i in special, normalized=False)

    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise LoadError(f"{self.path}: tokenizer.chat_template is not a string")
        return template


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE over bytes; and whether it adds a BOS by default."""
    name = vocabulary.get("pre")
    if name is not None and name not in _PRE:
        raise LoadError(f"{vocabulary.path}: tokenizer.ggml.pre = {name!r}; supported are {', '.join(_PRE)}")
    if name is None:
        _log.warning("%s: tokenizer.ggml.pre is missing; words are cut as by GPT-2", vocabulary.path)
    pre = _GPT2 if name is None else _PRE[str(name)]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.listed("merges", str))]
    for left, right in merges:
        if not {left, right, left + right} <= ids.keys():
            raise LoadError(f"{vocabulary.path}: tokenizer.ggml.merges joins {left!r} and {right!r}, no tokens")
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=pre.whole_words))
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.words is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE over characters, unknown ones as bytes; a space before each stretch of text; a BOS by default."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.text("unknown")
    merges = _merges(vocabulary)
    tokenizer = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.flag("add_space_prefix", True)
    space = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first: SentencePiece joins whatever scores highest.

    Pieces of the same score and pairs of the same piece come in the order of ids, as Hugging Face converts them.
    """
    scores = vocabulary.per_token("scores", float)
    ids = {vocabulary.tokens[i]: i for i in vocabulary.of_type(TokenType.NORMAL)}
    found = [
        (-scores[i], i, ids[piece[:cut]], ids[piece[cut:]])
        for piece, i in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in sorted(found)]
