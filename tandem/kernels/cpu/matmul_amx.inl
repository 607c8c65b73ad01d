// The product with AMX tiles: a tile of 16 rows x 32 inputs of the weight, turned into bf16 once, times all rows there are.
//
//     A  weight tile   [16 outputs, 32 inputs]        B  16 rows of x, inputs in pairs   [16 pairs, 16 rows x 2]
//     C  += A B        [16 outputs, 16 rows] f32      tiles 0-3: outputs a, b x rows 0-15, 16-31; 4, 5: A; 6, 7: B
//
// Rows are padded to 16 or 32, so one row and sixteen run the same instructions, and a column of C depends on its own
// column of B alone. More rows come in groups of 32; a strip
// is then unpacked once for all.
//
// Q4_K and Q5_K scale their integers twice: w = D s q - M t. Here bf16(s q) is looked up, a table for each of the 64
// values of s, so that unpacking takes half the time; D is applied to the sums over a superblock. M t multiplies the sum of x
// over each group of 32, which is the same for all outputs: a tile product of its own, of 8 groups at once, with the sums split
// into three bf16 so that nothing is lost. Only s q is rounded: it is exact up to 256, and at most 945, or 1953 with
// 5 bits.

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static void configure_tiles() {
    const TileConfig config;
    // gcc 12 does not see that the instruction reads the configuration, and may drop the stores to it.
    asm volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
}

// Transpose 16 vectors of 16 dwords in place.
TANDEM_INLINE void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Where the tiles of x's sums lie, behind those of x: one B tile for each superblock and 16 rows. Pairs 2 g and 2 g + 1 hold
// the sum of group g as three bf16 and a zero.
static uint16_t *sums_of(const Product &p, int64_t k) {
    return p.packed + round_up(p.rows, 32) * round_up(k, kTile);
}

// The pairs of one group, from 16 rows' inputs in pairs.
TANDEM_INLINE void sum_pairs(const __m512i (&pairs)[16], uint16_t *out) {
    __m512 sum = _mm512_setzero_ps();
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (const __m512i &pair : pairs) {
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(pair, upper)));
    }
    __m512i parts[3];
    for (__m512i &part : parts) {
        part = _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(sum)));
        sum = _mm512_sub_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(part, 16)));
    }
    _mm512_store_si512(out, _mm512_or_si512(parts[0], _mm512_slli_epi32(parts[1], 16)));
    _mm512_store_si512(out + 32, parts[2]);
}

// x as B tiles: for each 32 rows, for each 32 inputs, one or two tiles. Members share the work and meet after it.
static void pack_rows(Member &member, const Product &p, int64_t k) {
    const int64_t tiles = round_up(k, kTile) / kTile, blocks = (p.rows + 15) / 16;
    for (int64_t item = member.index; item < tiles * blocks; item += member.count) {
        const int64_t block = item / tiles, tile = item % tiles;
        const int64_t rows = p.rows - block * 16 < 16 ? p.rows - block * 16 : 16;
        const int64_t there = k - tile * kTile < kTile ? k - tile * kTile : kTile;
        const __mmask32 mask = there == 32 ? ~0u : (1u << there) - 1;
        const uint16_t *x = p.x + block * 16 * p.x_stride + tile * kTile;
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
            r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * p.x_stride) : _mm512_setzero_si512();
        }
        transpose(r);
        // Two blocks of 16 rows stand side by side if both are there.
        const int64_t pair = block / 2, width = blocks - pair * 2 < 2 ? 1 : 2;
        uint16_t *out = p.packed + pair * tiles * 1024 + (tile * width + block % 2) * 512;
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, r[i]);
        const int64_t supers = round_up(tiles, kSuper) / kSuper, super = tile / kSuper;
        sum_pairs(r, sums_of(p, k) + (pair * 2 * supers + super * width + block % 2) * 512 + tile % kSuper * 64);
    }
    member.meet();
}

using Pair = uint16_t[2][512];  // A tiles of a strip's two halves

// Set the C tiles of 16 * BLOCKS rows, BLOCKS 1 or 2, to zero.
template <int BLOCKS>
TANDEM_INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Add the products of two A tiles, and of one B tile or two side by side.
template <int BLOCKS>
TANDEM_INLINE void add_products(const void *first, const void *second, const uint16_t *b) {
    _tile_loadd(4, first, 64);
    _tile_loadd(5, second, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (BLOCKS == 2) {
        _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <int BLOCKS>
TANDEM_INLINE void store_tiles(float (*c)[256]) {
    _tile_stored(0, c[0], 64);
    _tile_stored(1, c[1], 64);
    if constexpr (BLOCKS == 2) {
        _tile_stored(2, c[2], 64);
        _tile_stored(3, c[3], 64);
    }
}

// C tiles of one strip for 16 * BLOCKS rows, BLOCKS 1 or 2.
template <int32_t KIND, int BLOCKS>
static void multiply(const uint8_t *strip, int64_t k, const uint16_t *b, float (*c)[256]) {
    alignas(64) float scales[kSuper][64];
    alignas(64) Pair weights[2];
    const Format &f = format_of(KIND);
    const int64_t tiles = round_up(k, kTile) / kTile, bytes = tile_bytes(f);
    auto use = [&](const void *first, const void *second, int64_t tile) {
        add_products<BLOCKS>(first, second, b + tile * 512 * BLOCKS);
    };
    clear_tiles<BLOCKS>();
    for (int64_t first = 0; first < tiles; first += kSuper) {
        const int64_t here = tiles - first < kSuper ? tiles - first : kSuper;
        const uint8_t *q = strip + f.super_header + here * f.tile_header;
        const int64_t lines = super_bytes(f, here) / 64;
        if constexpr (KIND != BF16) read_scales<KIND>(strip, here, scales);
        for (int64_t i = 0; i < here; i++) {
            const uint8_t *ahead = strip + kAhead + lines * i / here * 64;
            const uint8_t *further = strip + kAhead + lines * (2 * i + 1) / (2 * here) * 64;
            if constexpr (KIND == BF16) {
                fetch(ahead, 32, 0, 1);
                use(q, q + bytes, first + i);
            } else {
                // One tile's products overlap with the unpacking of the next.
                if (first + i > 0) use(weights[(first + i + 1) & 1][0], weights[(first + i + 1) & 1][1], first + i - 1);
                Pair &w = weights[(first + i) & 1];
                const float *s = scales[i];
                unpack_tile<KIND>(q, s, s + 32, w[0], ahead);
                unpack_tile<KIND>(q + bytes, s + 16, s + 48, w[1], further);
            }
            q += 2 * bytes;
        }
        strip += super_bytes(f, here);
    }
    if constexpr (KIND != BF16) use(weights[(tiles + 1) & 1][0], weights[(tiles + 1) & 1][1], tiles - 1);
    store_tiles<BLOCKS>(c);
}

// bf16(s q) for every 6-bit s and every q.
template <int BITS>
struct Products {
    alignas(64) uint16_t of[64][1 << BITS];
    constexpr Products() : of() {
        for (int s = 0; s < 64; s++) {
            for (int q = 0; q < 1 << BITS; q++) of[s][q] = to_bf16(float(s * q));
        }
    }
};
static constexpr Products<4> kProducts4;
static constexpr Products<5> kProducts5;

// One tile of 16 rows of a K format without D and M: out[16][32] bf16. `s` are the rows' integer scales.
template <int32_t KIND>
TANDEM_INLINE void unpack_scaled(const uint8_t *q, const uint8_t *s, uint16_t *out, const uint8_t *ahead) {
    const __m512i low = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    const uint32_t *fifth = reinterpret_cast<const uint32_t *>(q + 256);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        fetch(ahead, kLines<KIND>, row, 16);
        __m512i index = nibbles(q + 16 * row), table;
        if constexpr (KIND == Q4_K) {
            // Both halves of the table are the same, so the fifth bit of an index, the next nibble's first, does not matter.
            table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(kProducts4.of[s[row]])));
        } else {
            index = _mm512_and_si512(index, low);
            index = _mm512_mask_add_epi16(index, fifth[row], index, upper);
            table = _mm512_load_si512(kProducts5.of[s[row]]);
        }
        _mm512_store_si512(out + 32 * row, _mm512_permutexvar_epi16(index, table));
    }
}

// The integers t of 16 rows as an A tile: out[16][32], four times each, as 128 + t, which bf16 holds exactly.
TANDEM_INLINE void unpack_minima(const uint8_t *t, uint16_t *out) {
    alignas(64) static constexpr uint8_t kPlaces[64] = {
        0, 128, 0, 128, 0, 128, 0, 128, 1, 128, 1, 128, 1, 128, 1, 128, 2, 128, 2, 128, 2, 128,
        2, 128, 3, 128, 3, 128, 3, 128, 3, 128, 4, 128, 4, 128, 4, 128, 4, 128, 5, 128, 5, 128,
        5, 128, 5, 128, 6, 128, 6, 128, 6, 128, 6, 128, 7, 128, 7, 128, 7, 128, 7, 128};
    for (int row = 0; row < 16; row++) {
        int64_t groups;
        std::memcpy(&groups, t + 8 * row, 8);
        const __m512i words = _mm512_shuffle_epi8(_mm512_set1_epi64(groups), _mm512_load_si512(kPlaces));
        _mm512_store_si512(out + 32 * row, _mm512_or_si512(words, _mm512_set1_epi16(0x4300)));
    }
}

// What `multiply_super` unpacks: of each superblock eight pairs of tiles, then that of the minima.
template <int32_t KIND>
static void unpack_supers(const uint8_t *strip, int64_t k, Pair *out) {
    const Format &f = format_of(KIND);
    const int64_t bytes = tile_bytes(f);
    for (int64_t super = 0; super < k / (kSuper * kTile); super++, strip += super_bytes(f, kSuper)) {
        const uint8_t *header = strip + f.super_header, *q = header + kSuper * f.tile_header;
        for (int i = 0; i < kSuper; i++, q += 2 * bytes, header += f.tile_header, out++) {
            unpack_scaled<KIND>(q, header, (*out)[0], q + kAhead);
            unpack_scaled<KIND>(q + bytes, header + 16, (*out)[1], q + bytes + kAhead);
        }
        unpack_minima(strip + 128, (*out)[0]);
        unpack_minima(strip + 256, (*out)[1]);
        out++;
    }
}

// `multiply` for Q4_K and Q5_K, superblock by superblock: c += D * products - M * (minima - 128 * sums). `sums` are x's tiles;
// `ready` is what `unpack_supers` made, or null if each tile is unpacked on the way, which is faster when it is used once.
template <int32_t KIND, int BLOCKS>
static void multiply_super(const uint8_t *strip, const Pair *ready, int64_t k, const uint16_t *b, const uint16_t *sums,
                           float (*c)[256]) {
    alignas(64) Pair weights[2];
    alignas(64) float products[2 * BLOCKS][256], minima[2 * BLOCKS][256], d[32], m[32];
    const Format &f = format_of(KIND);
    const int64_t supers = k / (kSuper * kTile), bytes = tile_bytes(f), lines = super_bytes(f, kSuper) / 64;
    for (int i = 0; i < 2 * BLOCKS; i++) std::memset(c[i], 0, sizeof c[i]);
    auto use = [](const Pair &w, const uint16_t *rows) { add_products<BLOCKS>(w[0], w[1], rows); };
    // What a superblock's products become; done while the next one is being unpacked.
    auto settle = [&](int64_t super) {
        for (int block = 0; block < BLOCKS; block++) {
            const uint16_t *x = sums + (super * BLOCKS + block) * 512;
            __m512 sum = _mm512_setzero_ps();
            for (int pair = 0; pair < 16; pair++) {
                const __m512i two = _mm512_load_si512(x + 32 * pair);
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(two, 16)));
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(two, _mm512_set1_epi32(0xffff0000))));
            }
            const __m512 offset = _mm512_mul_ps(sum, _mm512_set1_ps(128.0f));
            for (int half = 0; half < 2; half++) {
                const int i = 2 * block + half;
                for (int n = 0; n < 16; n++) {
                    const __m512 least = _mm512_sub_ps(_mm512_load_ps(minima[i] + 16 * n), offset);
                    __m512 v = _mm512_load_ps(c[i] + 16 * n);
                    v = _mm512_fmadd_ps(_mm512_load_ps(products[i] + 16 * n), _mm512_set1_ps(d[16 * half + n]), v);
                    v = _mm512_fnmadd_ps(least, _mm512_set1_ps(m[16 * half + n]), v);
                    _mm512_store_ps(c[i] + 16 * n, v);
                }
            }
        }
    };
    for (int64_t super = 0; super < supers; super++, strip += super_bytes(f, kSuper)) {
        const uint8_t *header = strip + f.super_header, *q = header + kSuper * f.tile_header;
        const uint16_t *rows = b + super * kSuper * 512 * BLOCKS;
        for (int i = 0; i < kSuper; i++, q += 2 * bytes, header += f.tile_header) {
            if (ready == nullptr) {
                const uint8_t *ahead = strip + kAhead + lines * i / kSuper * 64;
                unpack_scaled<KIND>(q, header, weights[i & 1][0], ahead);
                unpack_scaled<KIND>(q + bytes, header + 16, weights[i & 1][1], ahead + lines / (2 * kSuper) * 64);
            }
            if (i == 0) {
                if (super > 0) settle(super - 1);
                for (int half = 0; half < 2; half++) {
                    _mm512_store_ps(d + 16 * half, halves(strip + 32 * half));
                    _mm512_store_ps(m + 16 * half, halves(strip + 64 + 32 * half));
                }
                asm volatile("" ::: "memory");
                clear_tiles<BLOCKS>();
            } else {
                use(ready == nullptr ? weights[(i - 1) & 1] : ready[i - 1], rows + (i - 1) * 512 * BLOCKS);
            }
        }
        if (ready == nullptr) {
            // The eighth pair of tiles is in the second buffer, so the first is free.
            unpack_minima(strip + 128, weights[0][0]);
            unpack_minima(strip + 256, weights[0][1]);
        }
        use(ready == nullptr ? weights[1] : ready[kSuper - 1], rows + (kSuper - 1) * 512 * BLOCKS);
        store_tiles<BLOCKS>(products);
        clear_tiles<BLOCKS>();
        use(ready == nullptr ? weights[0] : ready[kSuper], sums + super * 512 * BLOCKS);
        if (ready != nullptr) ready += kSuper + 1;
        store_tiles<BLOCKS>(minima);
    }
    settle(supers - 1);
}

// Turn C, [outputs, rows], into products by row, [rows][32], and hand them over.
static void finish_tiles(const Product &p, float (*c)[256], int64_t rows, int64_t row, int64_t column, int64_t outputs) {
    alignas(64) float acc[32][32];
    for (int64_t block = 0; block * 16 < rows; block++) {
        for (int half = 0; half < 2; half++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(c[2 * block + half] + 16 * i);
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(acc[16 * block + i] + 16 * half, r[i]);
        }
    }
    for (int64_t i = 0; i < rows; i++) finish(p, acc[i], row + i, column, outputs);
}

// The products of one strip. More than 32 rows take it in turns, unpacked once for all.
template <int32_t KIND>
static void multiply_strip(Member &member, const Product &p, const Matrix &m, const uint8_t *data, int64_t column,
                           int64_t outputs) {
    constexpr bool kSupers = KIND == Q4_K || KIND == Q5_K;
    const int64_t tiles = round_up(m.k, kTile) / kTile, supers = round_up(tiles, kSuper) / kSuper;
    alignas(64) float c[4][256];
    Pair *ready = nullptr;
    if (p.rows > 32 && KIND != BF16) {
        ready = static_cast<Pair *>(member.scratch(0, (tiles + supers) * sizeof(Pair)));
        if constexpr (kSupers) {
            unpack_supers<KIND>(data, m.k, ready);
        } else {
            unpack_strip<KIND>(data, m.k, ready[0][0]);
        }
    }
    for (int64_t row = 0; row < p.rows; row += 32) {
        const int64_t rows = p.rows - row < 32 ? p.rows - row : 32;
        const uint16_t *b = p.packed + row / 32 * tiles * 1024;
        if constexpr (kSupers) {
            const uint16_t *sums = sums_of(p, m.k) + row / 32 * supers * 1024;
            rows <= 16 ? multiply_super<KIND, 1>(data, ready, m.k, b, sums, c)
                       : multiply_super<KIND, 2>(data, ready, m.k, b, sums, c);
        } else if (ready != nullptr) {
            // What was unpacked is a strip of BF16.
            const uint8_t *strip = reinterpret_cast<const uint8_t *>(ready);
            rows <= 16 ? multiply<BF16, 1>(strip, m.k, b, c) : multiply<BF16, 2>(strip, m.k, b, c);
        } else {
            rows <= 16 ? multiply<KIND, 1>(data, m.k, b, c) : multiply<KIND, 2>(data, m.k, b, c);
        }
        finish_tiles(p, c, rows, row, column, outputs);
    }
}

static void matmul(Member &member, const Product &p) {
    configure_tiles();
    pack_rows(member, p, p.matrices[0].k);
    const Strips strips(p, member.count);
    strips.share(member, [&](int64_t strip) {
        int64_t column;
        const Matrix &m = strips.find(strip, column);
        const uint8_t *data = m.data + strip * strip_bytes(format_of(m.kind), m.k);
        for_kind(m.kind, [&]<int32_t KIND>() {
            multiply_strip<KIND>(member, p, m, data, column + strip * 32, outputs_of(m, strip));
        });
    });
}
