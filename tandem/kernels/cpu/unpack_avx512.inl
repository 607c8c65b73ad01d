// Packed tiles -> bf16, 16 rows of 32 inputs, with AVX-512 (BW, VBMI, BF16).
//
// 4 and 5 bits are looked up: a row has one scale for its 32 inputs, so all its possible values fit one or two
// vectors, computed once, and a 16-bit permutation turns 32 integers into 32 weights.
//
// The scales are read back from memory as broadcasts. The barrier between storing and loading them is there because the
// compiler would otherwise make each broadcast out of the register it still has, by a permutation that costs four times.

#define TANDEM_INLINE static inline __attribute__((always_inline))

constexpr int kAhead = 2048;  // bytes that weights are fetched ahead of their use

alignas(64) static const uint16_t kShifts[32] = {1,    1,    1,    1,    1,    1,    1,    1,    4096, 4096, 4096,
                                                 4096, 4096, 4096, 4096, 4096, 256,  256,  256,  256,  256,  256,
                                                 256,  256,  16,   16,   16,   16,   16,   16,   16,   16};
alignas(64) static const float kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Where the bits of output byte 8 s + i begin in qword s % 4 or s % 2; see pack.h.
struct Offsets {
    alignas(64) uint8_t low[64], high[64];
    constexpr Offsets() : low(), high() {
        for (int s = 0; s < 8; s++) {
            for (int i = 0; i < 8; i++) {
                low[8 * s + i] = uint8_t(4 * (8 * (s / 4) + i));
                high[8 * s + i] = uint8_t((2 * (8 * (s / 2) + i) + 60) % 64);  // so that the pair lands at bits 4 and 5
            }
        }
    }
};
static constexpr Offsets kOffsets;

// Lines of 64 bytes that a tile and its share of the scales take.
template <int32_t KIND>
constexpr int kLines = int((super_bytes(format_of(KIND), kSuper) / (2 * kSuper) + 63) / 64);

// Of `lines` lines from p on, fetch the share of step `step` of `steps`. They are spread over a
// tile's work: fetched together they would fill the processor's few buffers for misses and then wait for them.
TANDEM_INLINE void fetch(const uint8_t *p, int lines, int step, int steps) {
    for (int i = step * lines / steps; i < (step + 1) * lines / steps; i++) {
        _mm_prefetch(reinterpret_cast<const char *>(p + 64 * i), _MM_HINT_T0);
    }
}

TANDEM_INLINE __m128i bytes_16(const uint8_t *p) { return _mm_load_si128(reinterpret_cast<const __m128i *>(p)); }

// 16 bf16 of each, `first` in the lower half.
TANDEM_INLINE __m512i rounded(__m512 first, __m512 second) { return __m512i(_mm512_cvtne2ps_pbh(second, first)); }

// 32 words whose low four bits are the nibbles of 16 bytes: shifted to the right by multiplying, which is cheaper.
TANDEM_INLINE __m512i nibbles(const uint8_t *q) {
    const __m512i words = _mm512_broadcast_i32x4(bytes_16(q));
    return _mm512_mask_mulhi_epu16(words, 0xFFFFFF00, words, _mm512_load_si512(kShifts));
}

// Two rows share a table of 32 entries.
template <int LINES>
TANDEM_INLINE void unpack_4(const uint8_t *q, const float *scale, const float *minimum, uint16_t *out,
                            const uint8_t *ahead) {
    const __m512 iota = _mm512_load_ps(kIota);
    const __m512i low = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
#pragma GCC unroll 8
    for (int row = 0; row < 16; row += 2) {
        fetch(ahead, LINES, row / 2, 8);
        const __m512i first = _mm512_and_si512(nibbles(q + 16 * row), low);
        const __m512i second = _mm512_or_si512(_mm512_and_si512(nibbles(q + 16 * row + 16), low), upper);
        const __m512i table =
            rounded(_mm512_fmadd_ps(iota, _mm512_set1_ps(scale[row]), _mm512_set1_ps(minimum[row])),
                    _mm512_fmadd_ps(iota, _mm512_set1_ps(scale[row + 1]), _mm512_set1_ps(minimum[row + 1])));
        _mm512_store_si512(out + 32 * row, _mm512_permutexvar_epi16(first, table));
        _mm512_store_si512(out + 32 * row + 32, _mm512_permutexvar_epi16(second, table));
    }
}

template <int LINES>
TANDEM_INLINE void unpack_5(const uint8_t *q, const float *scale, const float *minimum, uint16_t *out,
                            const uint8_t *ahead) {
    const __m512 iota = _mm512_load_ps(kIota), later = _mm512_add_ps(iota, _mm512_set1_ps(16.0f));
    const __m512i low = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    const uint32_t *fifth = reinterpret_cast<const uint32_t *>(q + 256);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        fetch(ahead, LINES, row, 16);
        const __m512i four = _mm512_and_si512(nibbles(q + 16 * row), low);
        const __m512i five = _mm512_mask_add_epi16(four, fifth[row], four, upper);
        const __m512 s = _mm512_set1_ps(scale[row]), m = _mm512_set1_ps(minimum[row]);
        const __m512i table = rounded(_mm512_fmadd_ps(iota, s, m), _mm512_fmadd_ps(later, s, m));
        _mm512_store_si512(out + 32 * row, _mm512_permutexvar_epi16(five, table));
    }
}

// 16 signed bytes as floats.
TANDEM_INLINE __m512 signed_bytes(const uint8_t *q) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_16(q))); }

template <int LINES>
TANDEM_INLINE void unpack_8(const uint8_t *q, const float *scale, uint16_t *out, const uint8_t *ahead) {
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        fetch(ahead, LINES, row, 16);
        const __m512 s = _mm512_set1_ps(scale[row]);
        _mm512_store_si512(out + 32 * row, rounded(_mm512_mul_ps(signed_bytes(q + 32 * row), s),
                                                   _mm512_mul_ps(signed_bytes(q + 32 * row + 16), s)));
    }
}

template <int LINES>
TANDEM_INLINE void unpack_6(const uint8_t *q, const float *first, const float *second, uint16_t *out,
                            const uint8_t *ahead) {
    alignas(64) uint8_t bytes[16][32];
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; pair++) {
        const __m512i low = _mm512_multishift_epi64_epi8(
            _mm512_load_si512(kOffsets.low),
            _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(q + 32 * pair))));
        const __m512i high = _mm512_multishift_epi64_epi8(_mm512_load_si512(kOffsets.high),
                                                          _mm512_broadcast_i32x4(bytes_16(q + 256 + 16 * pair)));
        const __m512i six = _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)),
                                            _mm512_and_si512(high, _mm512_set1_epi8(48)));
        _mm512_store_si512(bytes[2 * pair], _mm512_sub_epi8(six, _mm512_set1_epi8(32)));
    }
    asm volatile("" ::: "memory");
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        fetch(ahead, LINES, row, 16);
        const __m512 a = _mm512_mul_ps(signed_bytes(bytes[row]), _mm512_set1_ps(first[row]));
        const __m512 b = _mm512_mul_ps(signed_bytes(bytes[row] + 16), _mm512_set1_ps(second[row]));
        _mm512_store_si512(out + 32 * row, rounded(a, b));
    }
}

TANDEM_INLINE __m512 halves(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(p)));
}

// The scales of a superblock's tiles as f32: for each tile 32 scales, and 32 minima (6 bits: the second scales).
template <int32_t KIND>
TANDEM_INLINE void read_scales(const uint8_t *super, int64_t tiles, float (*out)[64]) {
    const Format &f = format_of(KIND);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const uint8_t *own = super + f.super_header + tile * f.tile_header;
        for (int half = 0; half < 2; half++) {
            float *scale = out[tile] + 16 * half, *minimum = out[tile] + 32 + 16 * half;
            if constexpr (KIND == Q4_K || KIND == Q5_K || KIND == Q6_K) {
                const __m512 d = halves(super + 32 * half);
                if constexpr (KIND == Q6_K) {
                    _mm512_store_ps(scale, _mm512_mul_ps(d, signed_bytes(own + 16 * half)));
                    _mm512_store_ps(minimum, _mm512_mul_ps(d, signed_bytes(own + 32 + 16 * half)));
                } else {
                    const __m128i s = bytes_16(own + 16 * half);
                    _mm512_store_ps(scale, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(s))));
                    const uint8_t *m = super + 64 + 32 * half, *t = super + 128 + 128 * half + tile;
                    for (int i = 0; i < 16; i++) minimum[i] = -from_half(uint16_t(m[2 * i] | m[2 * i + 1] << 8)) * t[8 * i];
                }
            } else {
                const __m512 d = halves(own + 32 * half);
                _mm512_store_ps(scale, d);
                if constexpr (KIND == Q4_1 || KIND == Q5_1) _mm512_store_ps(minimum, halves(own + 64 + 32 * half));
                if constexpr (KIND == Q4_0) _mm512_store_ps(minimum, _mm512_mul_ps(d, _mm512_set1_ps(-8.0f)));
                if constexpr (KIND == Q5_0) _mm512_store_ps(minimum, _mm512_mul_ps(d, _mm512_set1_ps(-16.0f)));
            }
        }
    }
    asm volatile("" ::: "memory");
}

// One tile of 16 rows: out[16][32] bf16. `scale` and `minimum` are this half's 16; what lies at `ahead` is fetched.
template <int32_t KIND>
TANDEM_INLINE void unpack_tile(const uint8_t *q, const float *scale, const float *minimum, uint16_t *out,
                               const uint8_t *ahead) {
    constexpr int lines = kLines<KIND>;
    if constexpr (KIND == Q4_0 || KIND == Q4_1 || KIND == Q4_K) unpack_4<lines>(q, scale, minimum, out, ahead);
    if constexpr (KIND == Q5_0 || KIND == Q5_1 || KIND == Q5_K) unpack_5<lines>(q, scale, minimum, out, ahead);
    if constexpr (KIND == Q8_0) unpack_8<lines>(q, scale, out, ahead);
    if constexpr (KIND == Q6_K) unpack_6<lines>(q, scale, minimum, out, ahead);
}

// Call `body.template operator()<KIND>()` for the kind of a matrix.
template <class Body>
static void for_kind(int32_t kind, const Body &body) {
    switch (kind) {
        case BF16: return body.template operator()<BF16>();
        case Q4_0: return body.template operator()<Q4_0>();
        case Q4_1: return body.template operator()<Q4_1>();
        case Q5_0: return body.template operator()<Q5_0>();
        case Q5_1: return body.template operator()<Q5_1>();
        case Q8_0: return body.template operator()<Q8_0>();
        case Q4_K: return body.template operator()<Q4_K>();
        case Q5_K: return body.template operator()<Q5_K>();
        case Q6_K: return body.template operator()<Q6_K>();
    }
}

// All tiles of a strip: out[tile][a, b][16][32].
template <int32_t KIND>
static void unpack_strip(const uint8_t *strip, int64_t k, uint16_t *out) {
    const Format &f = format_of(KIND);
    const int64_t tiles = round_up(k, kTile) / kTile, bytes = tile_bytes(f);
    alignas(64) float scales[kSuper][64];
    for (int64_t first = 0; first < tiles; first += kSuper) {
        const int64_t here = tiles - first < kSuper ? tiles - first : kSuper;
        const uint8_t *q = strip + f.super_header + here * f.tile_header;
        if constexpr (KIND != BF16) read_scales<KIND>(strip, here, scales);
        for (int64_t i = 0; i < here; i++, out += 1024, q += 2 * bytes) {
            if constexpr (KIND == BF16) {
                std::memcpy(out, q, 2048);
            } else {
                unpack_tile<KIND>(q, scales[i], scales[i] + 32, out, q + kAhead);
                unpack_tile<KIND>(q + bytes, scales[i] + 16, scales[i] + 48, out + 512, q + bytes + kAhead);
            }
        }
        strip += super_bytes(f, here);
    }
}
