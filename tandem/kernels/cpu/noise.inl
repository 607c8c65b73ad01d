// Drawing tokens: the greatest of logits + Gumbel noise, in one pass and without the noise ever in memory.
// tandem/kernels/noise.py defines the noise and has the twin: the words and the numbers between 0 and 1 are the same, bit for
// bit, and the logarithms agree to a few units in the last place.
//
// A column's lane is its number modulo 32, and a short end is filled up: what is computed for it depends on nothing else.

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

static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

// Where a column's word begins: at its token's place in the row's sequence.
template <bool MAPPED>
static inline uint64_t word_of(const Draw &d, uint64_t key, int64_t column) {
    return key + uint64_t((MAPPED ? d.ids[column] : column) + 1) * kGolden;
}

// Hand kAtOnce columns after another to take(first column, their sums). Straight loops without branches: the compiler
// vectorises them for every instruction set. The short end is filled up with -inf.
template <bool NOISY, bool MAPPED, class Take>
static inline void each_sums(const Draw &d, int64_t row, int64_t block, const Take &take) {
    const int64_t begin = block * kDrawn, end = std::min(begin + kDrawn, d.vocab);
    const float *logits = d.logits + row * d.stride;
    const uint64_t key = NOISY ? d.keys[row] : 0;
    float sums[kAtOnce];
    int64_t i = begin;
    for (; i + kAtOnce <= end; i += kAtOnce) {
        for (int j = 0; j < kAtOnce; j++) {
            sums[j] = NOISY ? logits[i + j] + gumbel(word_of<MAPPED>(d, key, i + j)) : logits[i + j];
        }
        take(i, sums);
    }
    if (i == end) return;
    for (int j = 0; j < kAtOnce; j++) {
        sums[j] = -INFINITY;
        if (i + j < end) sums[j] = NOISY ? logits[i + j] + gumbel(word_of<MAPPED>(d, key, i + j)) : logits[i + j];
    }
    take(i, sums);
}

template <class Take>
static inline void each_sums(const Draw &d, int64_t row, int64_t block, const Take &take) {
    if (d.keys == nullptr || d.greedy[row]) {
        each_sums<false, false>(d, row, block, take);
    } else if (d.ids == nullptr) {
        each_sums<true, false>(d, row, block, take);
    } else {
        each_sums<true, true>(d, row, block, take);
    }
}

// What is not a number is never the best; where nothing else is above -inf, the block's first column is.
static Best draw(const Draw &d, int64_t row, int64_t block) {
    float best[kAtOnce];
    int32_t at[kAtOnce] = {};
    const int32_t begin = int32_t(block * kDrawn);
    for (float &sum : best) sum = -INFINITY;
    each_sums(d, row, block, [&](int64_t first, const float *sums) {
        const int32_t i = int32_t(first) - begin;
        for (int j = 0; j < kAtOnce; j++) {
            const int32_t kept = sums[j] > best[j] ? 0 : -1;
            at[j] = (at[j] & kept) | (i & ~kept);
            best[j] = sums[j] > best[j] ? sums[j] : best[j];
        }
    });
    Best found{-INFINITY, begin};
    for (int j = 0; j < kAtOnce; j++) {
        const int32_t column = begin + at[j] + j;
        if (best[j] > found.sum || (best[j] == found.sum && column < found.column)) found = {best[j], column};
    }
    return found;
}

static float rank(const Draw &d, int64_t row, int64_t block, int64_t count, Best *best) {
    alignas(64) float all[kDrawn];
    const int64_t begin = block * kDrawn;
    int64_t end = begin;
    std::fill(best, best + count, Best{-INFINITY, int32_t(begin)});
    each_sums(d, row, block, [&](int64_t first, const float *sums) {
        const float least = best[count - 1].sum;
        std::memcpy(all + first - begin, sums, sizeof(float) * kAtOnce);
        end = first + kAtOnce;
        int better = 0;
        for (int j = 0; j < kAtOnce; j++) better |= sums[j] > least;
        if (!better) return;
        for (int j = 0; j < kAtOnce; j++) {
            if (!(sums[j] > best[count - 1].sum)) continue;
            int64_t place = count - 1;
            for (; place > 0 && best[place - 1].sum < sums[j]; place--) best[place] = best[place - 1];
            best[place] = {sums[j], int32_t(first + j)};
        }
    });
    float lanes[kAtOnce] = {}, mass = 0.0f;
    for (int64_t i = 0; i < end - begin; i += kAtOnce) {
        for (int j = 0; j < kAtOnce; j++) {
            const float e = exponential(all[i + j] - best[0].sum);
            lanes[j] += all[i + j] > -INFINITY ? e : 0.0f;
        }
    }
    for (float lane : lanes) mass += lane;
    return mass;
}
