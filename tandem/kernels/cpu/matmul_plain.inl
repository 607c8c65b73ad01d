// The product in plain C++ that a compiler vectorises over the 32 outputs of a strip. One sum over k in order for each
// output, so its bits depend on nothing else.

static void matmul(Member &member, const Product &p) {
    const Strips strips(p, member.count);
    strips.share(member, [&](int64_t strip) {
        int64_t column;
        const Matrix &m = strips.find(strip, column);
        const Format &f = format_of(m.kind);
        const uint8_t *data = m.data + strip * strip_bytes(f, m.k);
        const int64_t tiles = round_up(m.k, kTile) / kTile;
        float *acc = static_cast<float *>(member.scratch(0, (p.rows + 1) * 32 * sizeof(float)));
        float w[kTile * kStrip];
        for (int64_t i = 0; i < p.rows * 32; i++) acc[i] = 0.0f;
        for (int64_t tile = 0; tile < tiles; tile++) {
            unpack_plain(m.kind, m.k, data, tile, 0, kStrip, w);
            for (float &value : w) value = from_bf16(to_bf16(value));
            const int64_t there = m.k - tile * kTile < kTile ? m.k - tile * kTile : kTile;
            for (int64_t row = 0; row < p.rows; row++) {
                const uint16_t *x = p.x + row * p.x_stride + tile * kTile;
                float *a = acc + row * 32;
                for (int64_t i = 0; i < there; i++) {
                    const float factor = from_bf16(x[i]);
                    for (int n = 0; n < 32; n++) a[n] += factor * w[i * kStrip + n];
                }
            }
        }
        for (int64_t row = 0; row < p.rows; row++) {
            finish(p, acc + row * 32, row, column + strip * 32, outputs_of(m, strip));
        }
    });
}
