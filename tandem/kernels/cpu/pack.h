// The layout of packed weights, and writing and reading it without any instruction set in mind.
//
// A matrix [n, k] is a run of strips of 32 output rows: rows 0-15 ("a") and 16-31 ("b"). A strip is a run of superblocks
// of up to 256 inputs, each a header of scales and then up to 8 pairs of tiles, a's and b's, of 16 rows x 32 inputs. One
// strip is read from front to back, once. Scales are the file's own; a value is
//
//     Q4_0 Q5_0 Q8_0   d * (q - offset)       header: for each tile d[32] as f16
//     Q4_1 Q5_1        d * q + m              header: for each tile d[32], m[32] as f16
//     Q4_K Q5_K        D s * q - M t          header: D[32], M[32] as f16, t[32][8] as u8, then for each tile s[32] as u8
//     Q6_K             D s * (q - 32)         header: D[32] as f16, then for each tile s[2][32] as i8, one for 16 inputs
//     BF16             as stored              no header
//
// Integers of a tile, row after row, in the order in which vector instructions take them apart:
//
//     4 bits   16 bytes a row: input 8 j + w is nibble j of 16-bit word w
//     5 bits   the same, and after the 16 rows 4 bytes a row: bit i is the fifth bit of input i
//     6 bits   of every two rows, whose 64 inputs are numbered 8 s + i, 32 bytes: nibble 8 (s / 4) + i of qword s % 4 is the
//              low half; and then, after all rows, 16 bytes: bit pair 8 (s / 2) + i of qword s % 2 is the high one
//     8 bits   32 bytes a row
//     BF16     64 bytes a row
//
// Functions here are static: each instruction set compiles its own copy, and the linker must not choose one for all.
#pragma once

#include <bit>

#include "kernels.h"

namespace tandem {

constexpr int kStrip = 32;  // output rows of a strip
constexpr int kTile = 32;   // inputs of a tile
constexpr int kSuper = 8;   // tiles of a superblock

struct Format {
    int bits;          // of an integer; 16 for BF16
    int offset;        // subtracted from it
    int super_header;  // bytes once for each superblock
    int tile_header;   // bytes for each pair of tiles
    int block;         // weights of a block in the file
    int block_bytes;
};

static constexpr Format kFormats[] = {
    {16, 0, 0, 0, 1, 2},        // BF16
    {4, 8, 0, 64, 32, 18},      // Q4_0
    {4, 0, 0, 128, 32, 20},     // Q4_1
    {5, 16, 0, 64, 32, 22},     // Q5_0
    {5, 0, 0, 128, 32, 24},     // Q5_1
    {8, 0, 0, 64, 32, 34},      // Q8_0
    {4, 0, 384, 32, 256, 144},  // Q4_K
    {5, 0, 384, 32, 256, 176},  // Q5_K
    {6, 32, 64, 64, 256, 210},  // Q6_K
};

static constexpr const Format &format_of(int32_t kind) { return kFormats[kind]; }

static constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Bytes of one tile of 16 rows.
static constexpr int64_t tile_bytes(const Format &f) { return 16 * kTile * f.bits / 8; }

// Bytes of the first `tiles` pairs of tiles of a superblock and its header.
static constexpr int64_t super_bytes(const Format &f, int64_t tiles) {
    return f.super_header + tiles * (f.tile_header + 2 * tile_bytes(f));
}

// Bytes of one strip of a matrix with k inputs.
static constexpr int64_t strip_bytes(const Format &f, int64_t k) {
    const int64_t tiles = round_up(k, kTile) / kTile;
    return tiles / kSuper * super_bytes(f, kSuper) + (tiles % kSuper ? super_bytes(f, tiles % kSuper) : 0);
}

// Pack strips first .. last - 1. `rows[r]` is where row r lies in the file's own format (bf16 for BF16), or null for a row
// of zeros; there are as many entries as the strips have rows.
void pack(int32_t kind, int64_t k, const uint8_t *const *rows, int64_t first, int64_t last, uint8_t *out);

// The values of rows first .. last - 1 of tile pair `tile` of a strip, as f32 before they are rounded to bf16:
// out[32 inputs][32 rows].
void unpack_plain(int32_t kind, int64_t k, const uint8_t *strip, int64_t tile, int first, int last, float *out);

static constexpr float from_bf16(uint16_t value) { return std::bit_cast<float>(uint32_t(value) << 16); }

// f32 -> bf16, to nearest even; NaN stays NaN.
static constexpr uint16_t to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// IEEE half -> f32, exact.
static constexpr float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return std::bit_cast<float>(std::bit_cast<uint32_t>(float(fraction) * 0x1p-24f) | sign);
    return std::bit_cast<float>(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13);
}

}  // namespace tandem
