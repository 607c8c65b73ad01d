// The product with AVX512_BF16: a strip is unpacked to bf16, then for each row and 16 outputs there are 16 sums of pairs of
// inputs, each a vector over inputs, added up at the end in one fixed order.

static void matmul(Member &member, const Product &p) {
    const Strips strips(p, member.count);
    strips.share(member, [&](int64_t strip) {
        int64_t column;
        const Matrix &m = strips.find(strip, column);
        const uint8_t *data = m.data + strip * strip_bytes(format_of(m.kind), m.k);
        const int64_t tiles = round_up(m.k, kTile) / kTile;
        uint16_t *w = static_cast<uint16_t *>(member.scratch(0, tiles * 2 * 512 * sizeof(uint16_t)));
        for_kind(m.kind, [&]<int32_t KIND>() { unpack_strip<KIND>(data, m.k, w); });
        for (int64_t row = 0; row < p.rows; row++) {
            alignas(64) float acc[32];
            for (int half = 0; half < 2; half++) {
                __m512 sums[16];
                for (auto &sum : sums) sum = _mm512_setzero_ps();
                for (int64_t tile = 0; tile < tiles; tile++) {
                    const int64_t there = m.k - tile * kTile < kTile ? m.k - tile * kTile : kTile;
                    const __mmask32 mask = there == 32 ? ~0u : (1u << there) - 1;
                    const __m512i x = _mm512_maskz_loadu_epi16(mask, p.x + row * p.x_stride + tile * kTile);
                    const uint16_t *weights = w + (2 * tile + half) * 512;
                    for (int i = 0; i < 16; i++) {
                        sums[i] = _mm512_dpbf16_ps(sums[i], __m512bh(_mm512_load_si512(weights + 32 * i)), __m512bh(x));
                    }
                }
                for (int i = 0; i < 16; i++) acc[16 * half + i] = _mm512_reduce_add_ps(sums[i]);
            }
            finish(p, acc, row, column + strip * 32, outputs_of(m, strip));
        }
    });
}
