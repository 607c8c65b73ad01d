// Memory for what flows between the operators of a pass; grows with the batch and is kept.
#pragma once

#include <memory>

#include "kernels.h"

namespace tandem {

struct Workspace {
    float *x = nullptr;           // [count, hidden] the residual stream
    float *qkv = nullptr;         // [count, (heads + 2 kv_heads) * head_dim]
    uint16_t *normed = nullptr;   // [count, hidden]
    uint16_t *attended = nullptr; // [count, heads * head_dim]
    uint16_t *inner = nullptr;    // [count, intermediate]
    uint16_t *packed = nullptr;   // a product's x as its kernel wants it

    void fit(const Model &m, int64_t count);

  private:
    std::unique_ptr<uint8_t[]> memory_;
    int64_t size_ = 0;
};

}  // namespace tandem
