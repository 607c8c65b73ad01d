// What the native kernels share: the plain structs that Python fills (tandem/kernels/native.py mirrors them with ctypes),
// and the table of functions that each instruction set provides.
//
// Every function in `Kernels` but `draw` and `rank` is called by all threads of a team at once (SPMD): thread t of n takes its share, and may return
// before others have done theirs; `meet` before reading them. No result depends on n, or on which rows stand beside a row: sums
// run over K (or over key positions) in an order that depends on nothing else.
//
// bf16 is stored as uint16_t. Weights and activations are rounded to it, to nearest even, before they are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "team.h"

namespace tandem {

// How a packed matrix holds its weights; the numbers are those of tandem/kernels/native.py.
enum Kind : int32_t { BF16 = 0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// A weight [n, k] in strips of 32 output rows (pack.h describes the layout). `data` is 64-byte aligned.
struct Matrix {
    const uint8_t *data;
    int64_t n, k;  // as the model has them; packed they are rounded up to 32
    int32_t kind;
};

// What each query of one batch sees. Query tokens are packed row after row; row r's are first[r] .. first[r + 1] - 1,
// in consecutive slots of the row. A query sees every slot of its row up to seen_to[token], and, in a tree, the slots
// seen_to[token] + j for each bit j > 0 of ancestors[token] (bit j is node j; the root is node 0 at slot seen_to).
// Ancestors stand in order of depth: a node's virtual position is seen_to + (ancestor bits below it that are set).
struct Sight {
    const int64_t *pages;  // [rows, page_stride] page ids in row order
    int64_t page_stride;
    const int64_t *seen_to;    // [tokens]
    const int64_t *ancestors;  // [tokens] or null; 0 for tokens outside a tree
    const int32_t *first;      // [rows + 1]
    int64_t begin;             // a query sees no slot below the smaller of this and its seen_to
    int32_t rows;
};

// One layer's attention. KV is [kv_heads, num_pages, page_size, head_dim], keys and values apart, bf16 or f32.
struct Attention {
    const float *q;  // [tokens, q_stride]: heads * head_dim floats each, already turned and scaled by head_dim ** -0.5
    int64_t q_stride;
    const void *keys, *values;
    int64_t num_pages;
    void *out;  // [tokens, heads * head_dim], bf16 if KV is bf16, else f32
    int32_t heads, kv_heads, head_dim, page_size;
    int32_t window;   // keys a query sees, itself included; 0: all
    int32_t kv_wide;  // 1: KV and out are f32
};

// The weights of one pre-norm layer. Norm weights are f32.
struct Layer {
    const float *attention_norm;  // [hidden]
    Matrix qkv[3];                // up to three matrices whose outputs stand side by side: q, k, v
    int64_t qkv_count;
    const float *qkv_bias;   // [(heads + 2 kv_heads) * head_dim] or null
    const float *head_norm;  // [heads + kv_heads, head_dim] or null: a norm over each head of q and k
    Matrix out;
    const float *out_bias;  // [hidden] or null
    const float *mlp_norm;  // [hidden]
    Matrix gate_up;         // gate and up, interleaved by 16 rows
    Matrix down;
    int64_t window;  // keys a query sees; 0: all
};

struct Model {
    const Layer *layers;
    const float *norm;  // [hidden], after the last layer; null: there is none
    Matrix embedding;   // [vocab, hidden]; not there in a draft head, which is given its states
    int64_t layer_count, hidden, heads, kv_heads, head_dim, intermediate;
    float eps;
};

// One forward pass. KV is [layers, 2, kv_heads, num_pages, page_size, head_dim] bf16.
struct Pass {
    const int64_t *tokens;  // [count] ids, or null: the pass starts from `given`
    const float *given;     // [count, hidden] residual stream
    const uint16_t *entry;  // [count, k] bf16, what the first layer's qkv multiply; null: the normed residual stream
    const int64_t *taps;    // [tap_count] numbers of layers after which the residual stream is wanted
    uint16_t *tapped;       // [count, tap_count, hidden] bf16, out
    int64_t tap_count;
    const int64_t *slots;   // [count] where keys and values go: page * page_size + offset
    const float *cosines, *sines;  // [count, head_dim], as `Rope.tables` makes them
    uint16_t *kv;
    uint16_t *hidden;  // [count, hidden] bf16, out
    int64_t count, num_pages, page_size;
    Sight sight;
};

// Tokens to choose from, for each row: logits plus the noise of the row's key.
struct Draw {
    const float *logits;  // [rows, stride], vocab of them used
    int64_t stride, rows, vocab;
    const int64_t *ids;     // [vocab] the token of each column, or null: its number
    const uint64_t *keys;   // [rows], or null: no row has noise
    const uint8_t *greedy;  // [rows], 1: without noise
};

// Columns are looked at in blocks of so many. Of equal sums that of the lowest column is the best.
constexpr int64_t kDrawn = 4096;
struct Best {
    float sum;
    int32_t column;
};

// The functions of one instruction set.
struct Kernels {
    const char *name;
    // See matmul.h; what it writes may be read after a `meet`.
    void (*matmul)(Member &, const struct Product &);
    // Likewise.
    void (*attend)(Member &, const Attention &, const Sight &);
    void (*forward)(Member &, const Model &, const Pass &, struct Workspace &);
    // The best of one block of a row; called by one thread.
    Best (*draw)(const Draw &, int64_t row, int64_t block);
    // The `count` best of one block in order, filled up with sums of -inf. Returns the sum of e^(sum - the best sum).
    float (*rank)(const Draw &, int64_t row, int64_t block, int64_t count, Best *best);
};

// The kernels of an instruction set, or null if this build or this processor does not have it.
const Kernels *kernels_amx();
const Kernels *kernels_avx512();
const Kernels *kernels_avx2();
const Kernels *kernels_portable();

}  // namespace tandem
