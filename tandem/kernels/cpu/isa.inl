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

}  // namespace
}  // namespace tandem
