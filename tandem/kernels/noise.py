"""Counter-based noise: pure functions of (seed, stream, round, position, token), nothing else.

Neither call order, nor the row a request sits in, nor what shares the batch can change a value, so a token is
decided by the same noise however many tokens a step verifies. The generator is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): `key` folds the four
coordinates into a 64-bit start, and token t of a key is a Weyl step away from it, mixed.

Streams keep draws apart that must be independent. Reusing a stream for another purpose correlates the two and
bends the law of the output; `round` is the position of the first token that the step decides.

    stream    round   used for
    TARGET    0       the target's own token at a position (rules `match`, `threshold`) and the drafts coupled
                      to it: these guess better for it, and never change what the target says.
    DRAFT     salted  drafted tokens of `ratio` and `block`. With the noise of RESIDUAL a rejected token and
                      its replacement would be drawn alike, and the replacement not from the residual law.
    ACCEPT    salted  the coins of `ratio` and `block`: with the draft's noise they would depend on the very
                      token they judge.
    RESIDUAL  salted  the token that closes a step of `ratio` and `block`.

Why salt by round: a rejected position is drafted again in the next round, and under `block` the number of
accepted tokens depends on the drafts *after* the cut. Noise of those positions is then conditioned on the cut
having happened there, and is fresh no more.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tandem.kernels import native

__all__ = ["ACCEPT", "DRAFT", "RESIDUAL", "TARGET", "draw", "gumbel", "key", "rank", "uniform"]

TARGET: Final = 1
DRAFT: Final = 2
ACCEPT: Final = 3
RESIDUAL: Final = 4


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits: integer tensors wrap around, Python's do not."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)

_CHUNK = {"cpu": 1 << 17}  # elements mixed at once: a chunk and its scratch stay in the cores' caches
_LARGE_CHUNK = 1 << 24  # elsewhere only the size of the temporary matters


def key(seed: Tensor, stream: int, round: Tensor, position: Tensor) -> Tensor:
    """The start of one noise sequence per entry. All tensors are int64 of one shape, and so is the result."""
    if seed.device.type == "cpu" and native.missing() is None:
        return native.key(seed, stream, round, position)
    state = seed.clone()
    scratch = torch.empty_like(state)
    for coordinate in (stream, round, position):
        _mix_(state.add_(_GOLDEN), scratch)
        state.add_(coordinate)
    return _mix_(state.add_(_GOLDEN), scratch)


def uniform(keys: Tensor) -> Tensor:
    """One number per key, strictly between 0 and 1: float64 of the keys' shape."""
    state = _mix_(keys.clone(), torch.empty_like(keys))
    return _open_unit_(state, torch.empty(keys.shape, dtype=torch.float64, device=keys.device))


def gumbel(keys: Tensor, tokens: int | Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of tokens, the first so many or those given [V] int64: keys [K] int64 -> [K, V] of `dtype`,
    float32 or float64, finite.

    `argmax(log p + g)` then has the law p. g = -log(-log(1 - v)), v small where g is large: the resolution
    lies in the tail that decides, and stays 2^-52 there even in float32.
    """
    ids = torch.arange(tokens, device=keys.device) if isinstance(tokens, int) else tokens
    weyl, vocab = (ids + 1).mul_(_GOLDEN), len(ids)
    out = torch.empty(len(keys), vocab, dtype=dtype, device=keys.device)
    chunk = _CHUNK.get(keys.device.type, _LARGE_CHUNK)
    columns = max(1, min(vocab, chunk))
    rows = max(1, chunk // columns)
    words = torch.empty(2, min(rows, len(keys)) * columns, dtype=torch.int64, device=keys.device)
    for top in range(0, len(keys), rows):
        for left in range(0, vocab, columns):
            block = out[top : top + rows, left : left + columns]
            state, scratch = words[:, : block.numel()].view(2, *block.shape)
            torch.add(keys[top : top + rows, None], weyl[left : left + columns], out=state)
            _open_unit_(_mix_(state, scratch), block)
            block.neg_().log1p_().neg_().log_().neg_()
    return out


def draw(logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None = None) -> Tensor:
    """One token per row: argmax(logits + g), which has the law softmax(logits) (Gumbel 1954); the first of equal ones.

    Args:
        logits: [K, V].
        keys: [K] int64, one noise sequence per row; None: every row is greedy.
        greedy: [K] bool, rows that take g = 0; not read where there are no keys.
        ids: [V] int64 the token of each column; None: its number.

    Returns:
        [K] int64. Where a row's logits are no numbers, some token.
    """
    if _on_kernels(logits):
        return native.draw(logits, keys, greedy, ids)
    columns = _perturbed(logits, keys, greedy, ids).max(-1).indices  # faster than argmax
    return columns if ids is None else ids[columns]


def rank(
    logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` tokens of each row with the greatest logits + g, the greatest first, equal ones in any order;
    arguments as for `draw`.

    Returns:
        Tokens [K, count] int64, their sums logits + g likewise, and [K] the logarithm of the sum of e^(logits + g) over
        all columns, 0 if all are -inf.
    """
    if _on_kernels(logits):
        return native.rank(logits, keys, greedy, ids, count)
    noisy = _perturbed(logits, keys, greedy, ids)
    sums, columns = noisy.topk(count)
    mass = noisy.logsumexp(-1)
    return columns if ids is None else ids[columns], sums, mass.masked_fill_(mass == float("-inf"), 0)


def _on_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and native.missing() is None


def _perturbed(logits: Tensor, keys: Tensor | None, greedy: Tensor, ids: Tensor | None) -> Tensor:
    """logits [K, V] + g."""
    if keys is None:
        return logits
    noise = gumbel(keys, logits.shape[-1] if ids is None else ids, logits.dtype)
    noise *= ~greedy[:, None]
    return noise.add_(logits)


def _mix_(state: Tensor, scratch: Tensor) -> Tensor:
    """SplitMix64's finaliser in place, short of its last shift: that one only reaches the lower half."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(state, shift, out=scratch)
        scratch.bitwise_and_((1 << (64 - shift)) - 1)  # int64 shifts drag the sign along
        state.bitwise_xor_(scratch).mul_(factor)
    return state


def _open_unit_(state: Tensor, out: Tensor) -> Tensor:
    """The upper 52 bits as a number strictly between 0 and 1, written to `out`; `state` is used up."""
    state.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    out.copy_(state)
    # Converting may round up to 2^52: the scale falls short of 2^-52 by just that much.
    largest = 1.0 - torch.finfo(out.dtype).eps / 2
    return out.add_(0.5).mul_(largest * 2.0**-52)
