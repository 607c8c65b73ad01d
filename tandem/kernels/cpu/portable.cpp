#include "isa.inl"

namespace tandem {

const Kernels *kernels_portable() {
    static const Kernels kernels{"portable", matmul, attend, forward, draw, rank};
    return &kernels;
}

#if !defined(TANDEM_X86)
const Kernels *kernels_amx() { return nullptr; }
const Kernels *kernels_avx512() { return nullptr; }
const Kernels *kernels_avx2() { return nullptr; }
#endif

}  // namespace tandem
