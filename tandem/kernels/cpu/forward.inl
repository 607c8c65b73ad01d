// The pass of a pre-norm decoder (tandem/models/decoder.py has the twin), one call for all layers: between operators there is
// a barrier, and no Python.

// Sums go over 16 lanes and then over the lanes in order: the compiler vectorises it, and the order is the same for every row.
static float sum_of_squares(const float *x, int64_t n) {
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int lane = 0; lane < 16; lane++) lanes[lane] += x[i + lane] * x[i + lane];
    }
    float sum = 0.0f;
    for (; i < n; i++) sum += x[i] * x[i];
    for (float lane : lanes) sum += lane;
    return sum;
}

static float norm_scale(const float *x, int64_t n, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
}

static void norm_rows(Member &member, const float *x, const float *weight, uint16_t *out, int64_t count, const Model &m) {
    for (int64_t t = member.index; t < count; t += member.count) {
        const float *row = x + t * m.hidden;
        uint16_t *to = out + t * m.hidden;
        const float scale = norm_scale(row, m.hidden, m.eps);
        for (int64_t i = 0; i < m.hidden; i++) to[i] = to_bf16(row[i] * scale * weight[i]);
    }
    member.meet();
}

// The residual stream as it is, in bf16, `stride` apart.
static void round_rows(Member &member, const float *x, uint16_t *out, int64_t stride, int64_t count, const Model &m) {
    for (int64_t t = member.index; t < count; t += member.count) {
        for (int64_t i = 0; i < m.hidden; i++) out[t * stride + i] = to_bf16(x[t * m.hidden + i]);
    }
    member.meet();
}

static void embed(Member &member, const Matrix &w, const Pass &pass, float *x) {
    const Format &f = format_of(w.kind);
    float tile[kTile * kStrip];
    for (int64_t t = member.index; t < pass.count; t += member.count) {
        const int64_t id = pass.tokens[t];
        const uint8_t *strip = w.data + id / kStrip * strip_bytes(f, w.k);
        for (int64_t i = 0; i * kTile < w.k; i++) {
            const int row = int(id % kStrip);
            unpack_plain(w.kind, w.k, strip, i, row, row + 1, tile);
            for (int64_t j = 0; j < kTile && i * kTile + j < w.k; j++) {
                x[t * w.k + i * kTile + j] = from_bf16(to_bf16(tile[j * kStrip + row]));
            }
        }
    }
    member.meet();
}

// What is not finite is stored as 0: slots are read with weight 0 by whoever has the page next, and 0 times NaN is NaN.
static uint16_t stored(float value) { return std::isfinite(value) ? to_bf16(value) : uint16_t(0); }

// Norm and turn the heads of q and k, scale q, and write keys and values to their slots.
static void turn_rows(Member &member, const Model &m, const Layer &layer, const Pass &pass, uint16_t *keys, float *qkv) {
    const int64_t d = m.head_dim, half = d / 2, heads = m.heads + m.kv_heads, slots = pass.num_pages * pass.page_size;
    const float scale = 1.0f / std::sqrt(float(d));
    for (int64_t t = member.index; t < pass.count; t += member.count) {
        float *row = qkv + t * (heads + m.kv_heads) * d;
        const float *cosine = pass.cosines + t * d, *sine = pass.sines + t * d;
        for (int64_t h = 0; h < heads; h++) {
            float *x = row + h * d;
            if (layer.head_norm != nullptr) {
                const float factor = norm_scale(x, d, m.eps);
                for (int64_t i = 0; i < d; i++) x[i] *= factor * layer.head_norm[h * d + i];
            }
            const float size = h < m.heads ? scale : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = (a * cosine[i] + b * sine[i]) * size;
                x[i + half] = (b * cosine[i + half] + a * sine[i + half]) * size;
            }
        }
        for (int64_t h = 0; h < 2 * m.kv_heads; h++) {
            uint16_t *to = keys + (h * slots + pass.slots[t]) * d;
            const float *from = row + (m.heads + h) * d;
            for (int64_t i = 0; i < d; i++) to[i] = stored(from[i]);
        }
    }
    member.meet();
}

static void forward(Member &member, const Model &m, const Pass &pass, Workspace &space) {
    const int64_t d = m.head_dim, q = m.heads * d, width = q + 2 * m.kv_heads * d, count = pass.count;
    const int64_t pool = pass.num_pages * pass.page_size * m.kv_heads * d;
    auto product = [&](const uint16_t *x, int64_t k, const Matrix *w, int64_t matrices, const float *bias, void *y,
                       int64_t y_stride, Then then) {
        matmul(member, Product{x, k, count, w, matrices, bias, y, y_stride, then, space.packed});
        member.meet();
    };
    auto tap = [&](int64_t layers) {
        for (int64_t j = 0; j < pass.tap_count; j++) {
            if (pass.taps[j] != layers) continue;
            round_rows(member, space.x, pass.tapped + j * m.hidden, pass.tap_count * m.hidden, count, m);
        }
    };
    if (pass.tokens != nullptr) {
        embed(member, m.embedding, pass, space.x);
    } else {
        for (int64_t t = member.index; t < count; t += member.count) {
            std::memcpy(space.x + t * m.hidden, pass.given + t * m.hidden, 4 * m.hidden);
        }
        member.meet();
    }
    tap(0);
    for (int64_t i = 0; i < m.layer_count; i++) {
        const Layer &layer = m.layers[i];
        uint16_t *keys = pass.kv + 2 * i * pool;
        const uint16_t *entry = i == 0 ? pass.entry : nullptr;
        if (entry == nullptr) {
            norm_rows(member, space.x, layer.attention_norm, space.normed, count, m);
            entry = space.normed;
        }
        product(entry, layer.qkv[0].k, layer.qkv, layer.qkv_count, layer.qkv_bias, space.qkv, width, STORE);
        turn_rows(member, m, layer, pass, keys, space.qkv);
        attend(member,
               Attention{space.qkv, width, keys, keys + pool, pass.num_pages, space.attended, int32_t(m.heads),
                         int32_t(m.kv_heads), int32_t(d), int32_t(pass.page_size), int32_t(layer.window), 0},
               pass.sight);
        member.meet();
        product(space.attended, q, &layer.out, 1, layer.out_bias, space.x, m.hidden, ADD);
        norm_rows(member, space.x, layer.mlp_norm, space.normed, count, m);
        product(space.normed, m.hidden, &layer.gate_up, 1, nullptr, space.inner, m.intermediate, SWIGLU);
        product(space.inner, m.intermediate, &layer.down, 1, nullptr, space.x, m.hidden, ADD);
        tap(i + 1);
    }
    if (m.norm == nullptr) {
        round_rows(member, space.x, pass.hidden, m.hidden, count, m);
    } else {
        norm_rows(member, space.x, m.norm, pass.hidden, count, m);
    }
}
