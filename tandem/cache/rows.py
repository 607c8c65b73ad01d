"""The device's truth about running requests, one row each: tokens, lengths, pages, seeds, sampler options.

The host refers to a row by its number and keeps bounds; values are read from here on the device. A row is filled by
`admit` and simply overwritten by the next request. Wide tables (logit bias, token counts) are made when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.request import Request
from tandem.sampling import SamplingParams

__all__ = ["Rows"]


@dataclass(slots=True)
class Rows:
    """Tables by row. `C` rows, `S` token slots, `P` pages, `V` vocabulary. The last row is scratch: always zeros, it
    stands in for the padding tokens of a batch.

    Attributes:
        tokens: [C, S] int64 committed tokens, prompt first.
        known: [C] int64 number of committed tokens.
        length: [C] int64 tokens in the target's KV at the step border; `known - length` are still to be computed.
        observed: [C] int64 tokens the speculator has been shown.
        pages: [C, P] int64 page ids; entries past the row's pages are 0, the scratch page.
        seed: [C] int64.
        temperature, top_p, min_p, repetition, presence, frequency: [C] floats of the sampler's precision.
        top_k: [C] int64, V where the filter is off.
        minimum: [C] int64 length before which no stop token may appear.
        stops: [C, W] int64 stop token ids, padded with -1; W grows with need.
        bias: [C, V] added to logits (-inf bans a token), or None while no row needs it.
        counts: [C, V] int32 occurrences in the output, or None while no row needs it.
        in_prompt: [C, V] bool occurrence in the prompt, or None likewise.
    """

    tokens: Tensor
    known: Tensor
    length: Tensor
    observed: Tensor
    pages: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    minimum: Tensor
    stops: Tensor
    vocab: int
    bias: Tensor | None = None
    counts: Tensor | None = None
    in_prompt: Tensor | None = None

    @classmethod
    def allocate(
        cls, capacity: int, slots: int, pages: int, vocab: int, device: torch.device, dtype: torch.dtype
    ) -> Rows:
        """Empty tables for `capacity` requests. `dtype` is the sampler's precision, float32 or float64."""
        capacity += 1  # the scratch row

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def real() -> Tensor:
            return torch.zeros(capacity, dtype=dtype, device=device)

        return cls(
            tokens=whole(capacity, slots),
            known=whole(capacity),
            length=whole(capacity),
            observed=whole(capacity),
            pages=whole(capacity, pages),
            seed=whole(capacity),
            temperature=real(),
            top_k=whole(capacity),
            top_p=real(),
            min_p=real(),
            repetition=real(),
            presence=real(),
            frequency=real(),
            minimum=whole(capacity),
            stops=whole(capacity, 1) - 1,
            vocab=vocab,
        )

    def admit(self, request: Request) -> None:
        """Fill the request's row from what the host knows: it starts, or starts again after preemption."""
        row, params, prompt = request.row, request.params, request.prompt_length
        known = torch.tensor(request.tokens, dtype=torch.int64, device=self.tokens.device)
        self.tokens[row, : request.known] = known
        self.known[row] = request.known
        self.length[row], self.observed[row] = request.computed, request.observed
        self.pages[row] = 0
        self.seed[row] = request.seed
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = min(params.top_k, self.vocab) or self.vocab
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.minimum[row] = prompt + params.min_tokens
        self._fill_stops(row, sorted(request.stops))
        self._fill_bias(row, params)
        self._fill_counts(row, known, prompt, params)

    def _fill_stops(self, row: int, stops: Sequence[int]) -> None:
        grow = len(stops) - self.stops.shape[1]
        if grow > 0:
            self.stops = torch.nn.functional.pad(self.stops, (0, grow), value=-1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = torch.tensor(stops, dtype=torch.int64, device=self.stops.device)

    def _fill_bias(self, row: int, params: SamplingParams) -> None:
        if not params.biased:
            if self.bias is not None:
                self.bias[row] = 0.0
            return
        if self.bias is None:
            shape = (self.tokens.shape[0], self.vocab)
            self.bias = torch.zeros(shape, dtype=self.temperature.dtype, device=self.tokens.device)
        line = self.bias[row]
        line.zero_()
        for token, value in params.logit_bias.items():
            line[token] = value
        if params.allowed_token_ids is not None:
            kept = torch.full_like(line, float("-inf"))
            allowed = torch.tensor(params.allowed_token_ids, device=line.device)
            kept[allowed] = line[allowed]
            line.copy_(kept)
        if params.banned_token_ids:
            line[torch.tensor(params.banned_token_ids, device=line.device)] = float("-inf")

    def _fill_counts(self, row: int, known: Tensor, prompt: int, params: SamplingParams) -> None:
        if not params.penalised:
            return
        if self.counts is None or self.in_prompt is None:
            shape = (self.tokens.shape[0], self.vocab)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.tokens.device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.tokens.device)
        self.counts[row] = torch.bincount(known[prompt:], minlength=self.vocab).to(torch.int32)
        self.in_prompt[row] = False
        self.in_prompt[row, known[:prompt]] = True
