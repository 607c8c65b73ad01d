#define TANDEM_AVX512
#include "isa.inl"

namespace tandem {

const Kernels *kernels_avx512() {
    static const Kernels kernels{"avx512", matmul, attend, forward, draw, rank};
    static const bool works = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                              __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
    return works ? &kernels : nullptr;
}

}  // namespace tandem
