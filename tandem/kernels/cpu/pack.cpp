#include "pack.h"

#include <cstring>

namespace tandem {

namespace {

// 32 weights of one row as the file has them, scales beside them.
struct Group {
    uint8_t q[32];
    uint16_t d, m;    // f16: of the group, or of the superblock
    uint8_t s[2], t;  // integer scales: of the group (Q6_K: of its halves), and of its minimum
};

uint16_t half_at(const uint8_t *p) { return uint16_t(p[0] | p[1] << 8); }

void read_nibbles(const uint8_t *p, uint8_t *q) {
    for (int i = 0; i < 16; i++) {
        q[i] = p[i] & 15;
        q[i + 16] = p[i] >> 4;
    }
}

void read_fifth_bits(const uint8_t *p, uint8_t *q) {
    for (int i = 0; i < 32; i++) q[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

// Scale and minimum of group g of a Q4_K or Q5_K block, from its twelve bytes of 6-bit integers.
void read_scales(const uint8_t *p, int g, Group &out) {
    if (g < 4) {
        out.s[0] = p[g] & 63;
        out.t = p[g + 4] & 63;
    } else {
        out.s[0] = uint8_t((p[g + 4] & 15) | p[g - 4] >> 6 << 4);
        out.t = uint8_t(p[g + 4] >> 4 | p[g] >> 6 << 4);
    }
}

// Group g of a block of the file; the layouts are those of ggml's block_q* structures.
void read_group(int32_t kind, const uint8_t *block, int g, Group &out) {
    out.d = half_at(block);
    switch (kind) {
        case Q4_0:
            read_nibbles(block + 2, out.q);
            break;
        case Q4_1:
            out.m = half_at(block + 2);
            read_nibbles(block + 4, out.q);
            break;
        case Q5_0:
            read_nibbles(block + 6, out.q);
            read_fifth_bits(block + 2, out.q);
            break;
        case Q5_1:
            out.m = half_at(block + 2);
            read_nibbles(block + 8, out.q);
            read_fifth_bits(block + 4, out.q);
            break;
        case Q8_0:
            std::memcpy(out.q, block + 2, 32);
            break;
        case Q4_K:
        case Q5_K: {
            out.m = half_at(block + 2);
            read_scales(block + 4, g, out);
            const uint8_t *nibbles = block + (kind == Q4_K ? 16 : 48) + g / 2 * 32;
            for (int i = 0; i < 32; i++) {
                out.q[i] = nibbles[i] >> g % 2 * 4 & 15;
                if (kind == Q5_K) out.q[i] |= (block[16 + i] >> g & 1) << 4;
            }
            break;
        }
        case Q6_K: {
            out.d = half_at(block + 208);
            const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
            for (int i = 0; i < 32; i++) {
                out.q[i] = uint8_t((low[i] >> g % 4 / 2 * 4 & 15) | (high[i] >> g % 4 * 2 & 3) << 4);
            }
            out.s[0] = block[192 + 2 * g];
            out.s[1] = block[193 + 2 * g];
            break;
        }
    }
}

void put_integers(int bits, int row, const uint8_t *q, uint8_t *tile) {
    for (int i = 0; i < 32; i++) {
        if (bits <= 5) {
            const int word = i % 8, nibble = i / 8;
            tile[16 * row + 2 * word + nibble / 2] |= (q[i] & 15) << nibble % 2 * 4;
            if (bits == 5) tile[256 + 4 * row + i / 8] |= (q[i] >> 4) << i % 8;
        } else if (bits == 6) {
            const int place = row % 2 * 32 + i, qword = place / 8, nibble = qword / 4 * 8 + place % 8;
            const int pair = qword / 2 * 8 + place % 8;
            tile[row / 2 * 32 + qword % 4 * 8 + nibble / 2] |= (q[i] & 15) << nibble % 2 * 4;
            tile[256 + row / 2 * 16 + qword % 2 * 8 + pair / 4] |= (q[i] >> 4) << pair % 4 * 2;
        } else {
            tile[32 * row + i] = q[i];
        }
    }
}

uint8_t get_integer(int bits, int row, int i, const uint8_t *tile) {
    if (bits <= 5) {
        const int word = i % 8, nibble = i / 8;
        const int low = tile[16 * row + 2 * word + nibble / 2] >> nibble % 2 * 4 & 15;
        return uint8_t(bits == 4 ? low : low | (tile[256 + 4 * row + i / 8] >> i % 8 & 1) << 4);
    }
    if (bits == 6) {
        const int place = row % 2 * 32 + i, qword = place / 8, nibble = qword / 4 * 8 + place % 8;
        const int pair = qword / 2 * 8 + place % 8;
        const int low = tile[row / 2 * 32 + qword % 4 * 8 + nibble / 2] >> nibble % 2 * 4 & 15;
        return uint8_t(low | (tile[256 + row / 2 * 16 + qword % 2 * 8 + pair / 4] >> pair % 4 * 2 & 3) << 4);
    }
    return tile[32 * row + i];
}

bool has_minima(int32_t kind) { return kind == Q4_1 || kind == Q5_1; }

void put_scales(int32_t kind, const Format &f, int row, int tile, const Group &group, uint8_t *header) {
    auto half = [&](int64_t at, uint16_t value) { std::memcpy(header + at + 2 * row, &value, 2); };
    const int64_t own = f.super_header + tile * f.tile_header;
    if (f.super_header == 0) {
        half(own, group.d);
        if (has_minima(kind)) half(own + 64, group.m);
        return;
    }
    half(0, group.d);
    header[own + row] = group.s[0];
    if (kind == Q6_K) {
        header[own + 32 + row] = group.s[1];
    } else {
        half(64, group.m);
        header[128 + 8 * row + tile] = group.t;
    }
}

void pack_row(int32_t kind, const Format &f, int64_t k, int row, const uint8_t *source, uint8_t *strip) {
    const int64_t tiles = round_up(k, kTile) / kTile;
    for (int64_t tile = 0; tile < tiles; tile++) {
        uint8_t *super = strip + tile / kSuper * super_bytes(f, kSuper);
        const int64_t in_super = tiles - tile / kSuper * kSuper < kSuper ? tiles % kSuper : kSuper;
        const int64_t header = f.super_header + in_super * f.tile_header;
        uint8_t *own = super + header + (tile % kSuper * 2 + row / 16) * tile_bytes(f);
        if (kind == BF16) {
            const int64_t there = k - tile * kTile < kTile ? k - tile * kTile : kTile;
            std::memcpy(own + row % 16 * 64, source + tile * kTile * 2, there * 2);
            continue;
        }
        Group group{};
        const int64_t weight = tile * kTile;
        read_group(kind, source + weight / f.block * f.block_bytes, int(weight % f.block / 32), group);
        put_scales(kind, f, row, int(tile % kSuper), group, super);
        put_integers(f.bits, row % 16, group.q, own);
    }
}

}  // namespace

void pack(int32_t kind, int64_t k, const uint8_t *const *rows, int64_t first, int64_t last, uint8_t *out) {
    const Format &f = format_of(kind);
    const int64_t bytes = strip_bytes(f, k);
    for (int64_t strip = first; strip < last; strip++) {
        std::memset(out + strip * bytes, 0, bytes);
        for (int row = 0; row < kStrip; row++) {
            const uint8_t *source = rows[strip * kStrip + row];
            if (source != nullptr) pack_row(kind, f, k, row, source, out + strip * bytes);
        }
    }
}

void unpack_plain(int32_t kind, int64_t k, const uint8_t *strip, int64_t tile, int first, int last, float *out) {
    const Format &f = format_of(kind);
    const int64_t tiles = round_up(k, kTile) / kTile;
    const uint8_t *super = strip + tile / kSuper * super_bytes(f, kSuper);
    const int64_t in_super = tiles - tile / kSuper * kSuper < kSuper ? tiles % kSuper : kSuper;
    const uint8_t *own = super + f.super_header + tile % kSuper * f.tile_header;
    const uint8_t *pair = super + f.super_header + in_super * f.tile_header + tile % kSuper * 2 * tile_bytes(f);
    for (int row = first; row < last; row++) {
        const uint8_t *integers = pair + row / 16 * tile_bytes(f);
        if (kind == BF16) {
            for (int i = 0; i < kTile; i++) {
                out[i * kStrip + row] = from_bf16(half_at(integers + row % 16 * 64 + 2 * i));
            }
            continue;
        }
        float scale[2], minimum = 0.0f;
        if (f.super_header == 0) {
            scale[0] = scale[1] = from_half(half_at(own + 2 * row));
            minimum = has_minima(kind) ? from_half(half_at(own + 64 + 2 * row)) : 0.0f;
        } else {
            const float d = from_half(half_at(super + 2 * row));
            if (kind == Q6_K) {
                scale[0] = d * float(int8_t(own[row]));
                scale[1] = d * float(int8_t(own[32 + row]));
            } else {
                scale[0] = scale[1] = d * float(own[row]);
                minimum = -from_half(half_at(super + 64 + 2 * row)) * float(super[128 + 8 * row + tile % kSuper]);
            }
        }
        for (int i = 0; i < kTile; i++) {
            const uint8_t q = get_integer(f.bits, row % 16, i, integers);
            const int value = f.bits == 8 ? int(int8_t(q)) : int(q) - f.offset;
            // The product is exact in f32, so it does not matter whether it is rounded before the sum.
            out[i * kStrip + row] = scale[i / 16] * float(value) + minimum;
        }
    }
}

}  // namespace tandem
