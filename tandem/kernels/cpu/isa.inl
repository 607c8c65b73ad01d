// One instruction set's kernels. Included once by each of the translation units amx.cpp, avx512.cpp, avx2.cpp and
// portable.cpp, which are compiled for their processors and define what is available.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "matmul.h"
#include "pack.h"
#include "workspace.h"

#if defined(TANDEM_AMX) || defined(TANDEM_AVX512)
#include <immintrin.h>
#endif

namespace tandem {
namespace {

#include "strips.inl"
#if defined(TANDEM_AMX) || defined(TANDEM_AVX512)
#include "unpack_avx512.inl"
#endif
#if defined(TANDEM_AMX)
#include "matmul_amx.inl"
#include "attention_amx.inl"
#elif defined(TANDEM_AVX512)
#include "matmul_avx512.inl"
#include "attention_plain.inl"
#else
#include "matmul_plain.inl"
#include "attention_plain.inl"
#endif
#include "forward.inl"
#include "noise.inl"

static void unpack(int32_t kind, int64_t k, const uint8_t *strip, uint16_t *out) {
#if defined(TANDEM_AMX) || defined(TANDEM_AVX512)
    for_kind(kind, [&]<int32_t KIND>() { unpack_strip<KIND>(strip, k, out); });
#else
    float tile[kTile * kStrip];
    for (int64_t i = 0; i * kTile < k; i++) {
        unpack_plain(kind, k, strip, i, 0, kStrip, tile);
        for (int row = 0; row < kStrip; row++) {
            for (int j = 0; j < kTile; j++) out[(i * kStrip + row) * kTile + j] = to_bf16(tile[j * kStrip + row]);
        }
    }
#endif
}

}  // namespace

#if defined(TANDEM_AVX512)
Best draw_avx512(const Draw &d, int64_t row, int64_t block) { return draw(d, row, block); }
#elif defined(__AVX2__) && !defined(TANDEM_AMX)
Best draw_avx2(const Draw &d, int64_t row, int64_t block) { return draw(d, row, block); }
#elif !defined(TANDEM_AMX)
Best draw_portable(const Draw &d, int64_t row, int64_t block) { return draw(d, row, block); }
#endif

}  // namespace tandem
