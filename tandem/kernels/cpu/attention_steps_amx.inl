// The parts of a share's work (attention_amx.inl has the whole): scores of two tiles of queries, their weights by the
// online softmax, weights times V.

constexpr int kBlock = 256, kStep = 32, kSteps = kBlock / kStep;
constexpr int kRows = 192;               // query rows of a share: their sums stay in the second-level cache
constexpr int kScores = kBlock * 16;     // of a tile of queries and a block
constexpr int kWeights = kSteps * 512;   // likewise; [kSteps, 16 queries, 32 keys]

// The compiler must not keep vector stores back until after a tile is loaded.
TANDEM_INLINE void settle() { asm volatile("" ::: "memory"); }

// 2 ** x; exactly 1 for 0 and 0 for -infinity. The coefficients minimise the largest relative error over [0, 1), 3e-6:
// weights are rounded to 8 bits next.
TANDEM_INLINE __m512 power_of_2(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0134266886f), _mm512_set1_ps(0.0522424672f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.241280208f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.693044844f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

// out[i][j] = in[j][i] for 16 x 16 dwords; rows of `in` are `stride` dwords apart. Loads that insert a quarter vector
// spare half of the shuffles.
TANDEM_INLINE void turn(const uint32_t *in, int64_t stride, uint32_t *out) {
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i r[4], t[4];
        for (int i = 0; i < 4; i++) {
            auto at = [&](int j) {
                return _mm_load_si128(reinterpret_cast<const __m128i *>(in + (4 * j + i) * stride + 4 * quarter));
            };
            r[i] = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1);
            r[i] = _mm512_inserti32x4(_mm512_inserti32x4(r[i], at(2), 2), at(3), 3);
        }
        t[0] = _mm512_unpacklo_epi32(r[0], r[1]), t[1] = _mm512_unpackhi_epi32(r[0], r[1]);
        t[2] = _mm512_unpacklo_epi32(r[2], r[3]), t[3] = _mm512_unpackhi_epi32(r[2], r[3]);
        uint32_t *to = out + quarter * 64;
        _mm512_store_si512(to, _mm512_unpacklo_epi64(t[0], t[2]));
        _mm512_store_si512(to + 16, _mm512_unpackhi_epi64(t[0], t[2]));
        _mm512_store_si512(to + 32, _mm512_unpacklo_epi64(t[1], t[3]));
        _mm512_store_si512(to + 48, _mm512_unpackhi_epi64(t[1], t[3]));
    }
}

// Two rows of V as pairs: [dim / 16] vectors, a tile apart. Of each 32 columns the first vector has 0-3, 8-11, 16-19
// and 24-27, the second the others; `Tiles::finish` puts them back.
TANDEM_INLINE void interleave(const uint16_t *even, const uint16_t *odd, int64_t dim, uint32_t *out) {
    for (int64_t d = 0; d < dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        _mm512_store_si512(out + d * 16, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out + d * 16 + 256, _mm512_unpackhi_epi16(a, b));
    }
}

// Scores of Q tiles of queries against `count` tiles of 16 keys: out [count, 16, 16], the next tile of queries `next`
// floats further on. `count` is a multiple of 4 / Q.
template <int Q>
static void score(const uint16_t *const *keys, int count, const uint32_t *queries, int64_t dim, float *out,
                  int64_t next) {
    for (int i = 0; i < count; i += 4 / Q) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(6, queries + d * 8, 64);
            _tile_loadd(4, keys[i] + d, dim * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, keys[i + 1] + d, dim * 2);
            _tile_dpbf16ps(1, 5, 6);
            if constexpr (Q == 2) {
                _tile_loadd(7, queries + dim * 8 + d * 8, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            } else {
                _tile_loadd(4, keys[i + 2] + d, dim * 2);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(5, keys[i + 3] + d, dim * 2);
                _tile_dpbf16ps(3, 5, 6);
            }
        }
        float *to = out + i * 256, *then = Q == 2 ? to + next : to + 512;
        _tile_stored(0, to, 64);
        _tile_stored(1, to + 256, 64);
        _tile_stored(2, then, 64);
        _tile_stored(3, then + 256, 64);
    }
}

// Where weights are: how far apart those of two queries and of two steps.
struct Layout {
    int64_t row, step;
};
constexpr Layout kShared{32, 512}, kOwn{kSteps * 32, 32};

// Add the steps from .. to - 1 of weights times V to the sums of 16 queries, in 16 * C columns.
template <int C, Layout LAYOUT>
static void add_columns(const uint16_t *weights, const uint32_t *values, int from, int to, int64_t dim, float *sums) {
    _tile_loadd(0, sums, dim * 4);
    _tile_loadd(1, sums + 16, dim * 4);
    if constexpr (C == 4) {
        _tile_loadd(2, sums + 32, dim * 4);
        _tile_loadd(3, sums + 48, dim * 4);
    }
    for (int step = from; step < to; step++) {
        const uint32_t *v = values + step * dim * 16;
        _tile_loadd(4, weights + step * LAYOUT.step, LAYOUT.row * 2);
        _tile_loadd(6, v, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, v + 256, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (C == 4) {
            _tile_loadd(6, v + 512, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, v + 768, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, dim * 4);
    _tile_stored(1, sums + 16, dim * 4);
    if constexpr (C == 4) {
        _tile_stored(2, sums + 32, dim * 4);
        _tile_stored(3, sums + 48, dim * 4);
    }
}

template <Layout LAYOUT>
static void add_one(const uint16_t *weights, const uint32_t *values, int from, int to, int64_t dim, float *sums) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_columns<4, LAYOUT>(weights, values + d * 16, from, to, dim, sums + d);
    if (d < dim) add_columns<2, LAYOUT>(weights, values + d * 16, from, to, dim, sums + d);
}

// The same for two tiles of queries.
static void add_two(const uint16_t *weights, const uint32_t *values, int from, int to, int64_t dim, float *sums) {
    float *others = sums + 16 * dim;
    for (int64_t d = 0; d < dim; d += 32) {
        _tile_loadd(0, sums + d, dim * 4);
        _tile_loadd(1, sums + d + 16, dim * 4);
        _tile_loadd(2, others + d, dim * 4);
        _tile_loadd(3, others + d + 16, dim * 4);
        for (int step = from; step < to; step++) {
            const uint32_t *v = values + step * dim * 16 + d * 16;
            _tile_loadd(4, weights + step * 512, 64);
            _tile_loadd(6, v, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, v + 256, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, weights + kWeights + step * 512, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums + d, dim * 4);
        _tile_stored(1, sums + d + 16, dim * 4);
        _tile_stored(2, others + d, dim * 4);
        _tile_stored(3, others + d + 16, dim * 4);
    }
}

// 16 query rows.
struct alignas(64) Tile {
    int32_t low[16], length[16];  // the virtual positions that each sees
    float top[16], total[16];     // the largest score so far as an exponent of 2, and the sum of the weights
    int64_t low_of_any, low_of_all, length_of_all, length_of_any;
    int64_t shared;    // from this virtual position on, no row uses the V of the block
    int64_t branches;  // from this virtual position on, the scores of some row are picked, and its V gathered
    int64_t roots;     // past the last root of such rows
};

// The scores of virtual positions from .. to - 1 of a block that a row does not see become -infinity.
static void hide_range(const Tile &tile, int64_t start, int64_t from, int64_t to, float *scores) {
    const __m512i low = _mm512_load_si512(tile.low), length = _mm512_load_si512(tile.length);
    for (int64_t position = from; position < to; position++) {
        const __m512i at = _mm512_set1_epi32(int32_t(position));
        const __mmask16 hidden = _mm512_cmplt_epi32_mask(at, low) | _mm512_cmpge_epi32_mask(at, length);
        _mm512_mask_storeu_ps(scores + (position - start) * 16, hidden, _mm512_set1_ps(-INFINITY));
    }
}

static void hide(const Tile &tile, int64_t start, int from, int to, float *scores) {
    const int64_t first = start + from * kStep, end = start + to * kStep;
    hide_range(tile, start, first, std::min(end, tile.low_of_all), scores);
    hide_range(tile, start, std::max(first, tile.length_of_all), end, scores);
}

// Turn a block's scores into weights [kSteps, 16, 32] and take them into the totals. Returns whether sums need `decay`.
static bool weigh(Tile &tile, const float *scores, int from, int to, uint16_t *weights, float *decay) {
    const __m512 log2e = _mm512_set1_ps(plain::kLog2e), before = _mm512_load_ps(tile.top);
    __m512 most[4], sum[4];
    for (int n = 0; n < 4; n++) most[n] = _mm512_set1_ps(-INFINITY), sum[n] = _mm512_setzero_ps();
    for (int j = from * kStep; j < to * kStep; j += 4) {
        for (int n = 0; n < 4; n++) most[n] = _mm512_max_ps(most[n], _mm512_load_ps(scores + (j + n) * 16));
    }
    const __m512 largest = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const __m512 top = _mm512_max_ps(before, _mm512_mul_ps(largest, log2e));
    // A row that has seen nothing yet: any finite number in place of its top gives weights of 0.
    const __mmask16 nothing = _mm512_cmpeq_ps_mask(top, _mm512_set1_ps(-INFINITY));
    const __m512 base = _mm512_mask_mov_ps(top, nothing, _mm512_setzero_ps());
    const __m512 less = power_of_2(_mm512_sub_ps(before, base));
    // Words of a key and the next, 16 queries each, to pairs.
    alignas(64) static const uint8_t kPairs[64] = {0,  1,  32, 33, 2,  3,  34, 35, 4,  5,  36, 37, 6,  7,  38, 39,
                                                   8,  9,  40, 41, 10, 11, 42, 43, 12, 13, 44, 45, 14, 15, 46, 47,
                                                   16, 17, 48, 49, 18, 19, 50, 51, 20, 21, 52, 53, 22, 23, 54, 55,
                                                   24, 25, 56, 57, 26, 27, 58, 59, 28, 29, 60, 61, 30, 31, 62, 63};
    const __m512i pairs = _mm512_load_si512(kPairs);
    for (int step = from; step < to; step++) {
        alignas(64) uint32_t turned[256];
        for (int pair = 0; pair < 16; pair += 2) {
            const float *s = scores + (step * kStep + pair * 2) * 16;
            __m512 w[4];
            for (int n = 0; n < 4; n++) {
                w[n] = power_of_2(_mm512_fmsub_ps(_mm512_load_ps(s + n * 16), log2e, base));
                sum[n] = _mm512_add_ps(sum[n], w[n]);
            }
            const __m512i first = (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]);
            const __m512i second = (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2]);
            _mm512_store_si512(turned + pair * 16, _mm512_permutexvar_epi8(pairs, first));
            _mm512_store_si512(turned + pair * 16 + 16, _mm512_permutexvar_epi8(pairs, second));
        }
        settle();
        turn(turned, 16, reinterpret_cast<uint32_t *>(weights + step * 512));
    }
    const __m512 all = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    _mm512_store_ps(tile.total, _mm512_fmadd_ps(_mm512_load_ps(tile.total), less, all));
    _mm512_store_ps(tile.top, top);
    _mm512_store_ps(decay, less);
    return _mm512_cmpneq_ps_mask(less, _mm512_set1_ps(1.0f)) != 0;
}

static void fade(const float *decay, int64_t rows, int64_t dim, float *sums) {
    settle();
    for (int64_t row = 0; row < rows; row++) {
        const __m512 factor = _mm512_set1_ps(decay[row]);
        for (int64_t d = 0; d < dim; d += 16) {
            float *at = sums + row * dim + d;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
        }
    }
}
