"""Text in and out: `tokenizer` turns prompts into ids, `stream` turns ids into streamed text with stops."""

from tandem.text.stream import Detokenizer, StopStrings, TextStream
from tandem.text.tokenizer import Tokenizer, check_pair, load_tokenizer

__all__ = ["Detokenizer", "StopStrings", "TextStream", "Tokenizer", "check_pair", "load_tokenizer"]
