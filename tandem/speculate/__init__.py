"""Guesses and judges: the nouns in `draft`, the law and its verification, and one file per way to draft."""
