// Drawing a token: the first greatest of logits + Gumbel noise, in one pass and without the noise ever in memory.
// tandem/kernels/noise.py defines the noise and has the twin: the words and the numbers between 0 and 1 are the same, bit for
// bit, and the logarithms agree to a few units in the last place.
//
// A token's lane is its id modulo 32, and a short end is filled up: what is computed for it depends on nothing else.

constexpr int kAtOnce = 32;

// A normal number as 2^e (1 + f) with 1 + f from sqrt(1/2) to sqrt(2).
struct Parts {
    int32_t e;
    float f;
};

static inline Parts parts_of(float x) {
    constexpr int32_t kRoot = 0x3f3504f3;  // sqrt(1/2)
    const int32_t above = std::bit_cast<int32_t>(x) - kRoot;
    return {above >> 23, std::bit_cast<float>((above & 0x7fffff) + kRoot) - 1.0f};
}

// The natural logarithm: log(1 + f) = f + f^2 q(f), q fitted for the least relative error, 4e-9, below float32's own.
static inline float log_of(Parts p) {
    float q = -0.076223895f;
    q = q * p.f + 0.129049137f;
    q = q * p.f - 0.132429689f;
    q = q * p.f + 0.141817391f;
    q = q * p.f - 0.166090727f;
    q = q * p.f + 0.200019792f;
    q = q * p.f - 0.250015825f;
    q = q * p.f + 0.333333254f;
    q = q * p.f - 0.499999881f;
    return p.f * p.f * q + p.f + float(p.e) * 0.693147181f;
}

// SplitMix64's finaliser short of its last shift, and the upper 52 bits as a number strictly between 0 and 1.
static inline float open_unit(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    // Below the leading bit of 2^52 they are a float64 without a conversion, which AVX2 does not have.
    const double whole = std::bit_cast<double>(word >> 12 | 0x4330000000000000) - 0x1p52;
    return (float(whole) + 0.5f) * 0x1.fffffep-53f;
}

// -log(-log(1 - v)). What 1 - v loses to rounding goes back into f, which is then -v itself for small v.
static inline float gumbel(uint64_t word) {
    const float v = open_unit(word);
    const float left = 1.0f - v;
    Parts p = parts_of(left);
    p.f += 1.0f - left - v;
    return -log_of(parts_of(-log_of(p)));
}

// The first greatest of `count` logits, plus noise where `key` is given. What is not a number is never it; where nothing
// else is above -inf, it is the first.
template <bool NOISY>
static Best best_of(const float *logits, int64_t count, int64_t first, uint64_t key) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
    float best[kAtOnce];
    int32_t at[kAtOnce] = {};
    uint64_t words[kAtOnce];
    for (int j = 0; j < kAtOnce; j++) {
        best[j] = -INFINITY;
        words[j] = key + uint64_t(first + j + 1) * kGolden;
    }
    // Straight loops without branches: the compiler vectorises them for every instruction set.
    auto take = [&](const float *x, int32_t i) {
        float sums[kAtOnce];
        for (int j = 0; j < kAtOnce; j++) {
            sums[j] = NOISY ? x[j] + gumbel(words[j]) : x[j];
            words[j] += kAtOnce * kGolden;
        }
        for (int j = 0; j < kAtOnce; j++) {
            const int32_t kept = sums[j] > best[j] ? 0 : -1;
            at[j] = (at[j] & kept) | (i & ~kept);
            best[j] = sums[j] > best[j] ? sums[j] : best[j];
        }
    };
    int64_t i = 0;
    for (; i + kAtOnce <= count; i += kAtOnce) take(logits + i, int32_t(i));
    if (i < count) {
        float rest[kAtOnce];
        for (int j = 0; j < kAtOnce; j++) rest[j] = i + j < count ? logits[i + j] : -INFINITY;
        take(rest, int32_t(i));
    }
    Best found{-INFINITY, int32_t(first)};
    for (int j = 0; j < kAtOnce; j++) {
        const int32_t token = int32_t(first) + at[j] + j;
        if (best[j] > found.sum || (best[j] == found.sum && token < found.token)) found = {best[j], token};
    }
    return found;
}

static Best draw(const Draw &d, int64_t row, int64_t block) {
    const int64_t first = block * kDrawn, count = std::min(kDrawn, d.vocab - first);
    const float *logits = d.logits + row * d.stride + first;
    if (d.keys == nullptr || d.greedy[row]) return best_of<false>(logits, count, first, 0);
    return best_of<true>(logits, count, first, d.keys[row]);
}
