#define TANDEM_AMX
#include "isa.inl"

#include <sys/syscall.h>
#include <unistd.h>

namespace tandem {

// The kernel lends the tile registers on request only, to all threads of the process.
static bool permitted() {
    constexpr long kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

const Kernels *kernels_amx() {
    static const Kernels kernels{"amx", matmul, attend, forward, draw, rank};
    static const bool works = kernels_avx512() != nullptr && __builtin_cpu_supports("amx-bf16") && permitted();
    return works ? &kernels : nullptr;
}

}  // namespace tandem
