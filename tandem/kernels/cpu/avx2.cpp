#include "isa.inl"

namespace tandem {

const Kernels *kernels_avx2() {
    static const Kernels kernels{"avx2", matmul, attend, forward, draw, rank};
    static const bool works = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return works ? &kernels : nullptr;
}

}  // namespace tandem
