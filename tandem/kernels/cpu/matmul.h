// y = x @ w.T and what follows it, while y is at hand.
#pragma once

#include "kernels.h"

namespace tandem {

// What becomes of the products v[row, n].
enum Then : int32_t {
    STORE = 0,   // y = v + bias
    ADD = 1,     // y += v + bias
    SWIGLU = 2,  // the matrix interleaves gate and up by 16 rows: out = bf16(silu(gate) * up)
};

struct Product {
    const uint16_t *x;  // [rows, x_stride] bf16, k of them used
    int64_t x_stride, rows;
    const Matrix *matrices;  // `count` matrices of equal k; their outputs stand side by side in y
    int64_t count;
    const float *bias;  // [sum of n] or null; not with SWIGLU
    void *y;            // [rows, y_stride] f32; bf16 for SWIGLU
    int64_t y_stride;
    int32_t then;
    uint16_t *packed;  // room of `packed_size` elements, for x as a kernel wants it
};

// All of x in bf16, padded, and of each 256 inputs of 16 rows 512 elements more.
static constexpr int64_t packed_size(int64_t rows, int64_t k) {
    return (rows + 31) / 32 * 32 * ((k + 31) / 32 * 32 + (k + 255) / 256 * 32);
}

}  // namespace tandem
