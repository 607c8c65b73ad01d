#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kSpins = 1 << 14;  // on x86 some tenths of a millisecond: about the host's work in a step

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until done() holds: spin, then let others run. Where cores are fewer than threads, spinning alone would starve.
template <class Done>
void spin(const Done &done) {
    for (int i = 0; !done(); i++) {
        if (i < kSpins) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

}  // namespace

void Member::meet() {
    const uint64_t goal = uint64_t(++meetings_) * count;
    team.arrived_.fetch_add(1, std::memory_order_acq_rel);
    spin([&] { return team.arrived_.load(std::memory_order_acquire) >= goal; });
    // Everybody has left the numbers of the last section, and takes them up again only after member 0 is back here.
    if (index == 0) team.next_[(meetings_ - 1) & 1].store(0, std::memory_order_relaxed);
}

int64_t Member::take() { return team.next_[meetings_ & 1].fetch_add(1, std::memory_order_relaxed); }

void *Member::scratch(int purpose, size_t bytes) noexcept {
    if (size_t(purpose) >= memory_.size()) {
        memory_.resize(purpose + 1);
        sizes_.resize(purpose + 1);
    }
    if (sizes_[purpose] < bytes) {
        memory_[purpose].reset(new uint8_t[bytes + 64]);
        sizes_[purpose] = bytes;
    }
    return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory_[purpose].get()) + 63) & ~uintptr_t(63));
}

Team::Team(int count) {
    for (int i = 0; i < count; i++) members_.emplace_back(new Member(*this, i, count));
    for (int i = 1; i < count; i++) std::thread([this, i] { serve(i); }).detach();
}

void Team::serve(int index) {
    for (uint64_t job = 1;; job++) {
        for (int i = 0; posted_.load(std::memory_order_acquire) < job; i++) {
            if (i < kSpins) {
                relax();
            } else {
                posted_.wait(job - 1);
            }
        }
        (*job_)(*members_[index]);
        finished_.fetch_add(1, std::memory_order_acq_rel);
    }
}

void Team::run(const std::function<void(Member &)> &job) {
    std::lock_guard<std::mutex> turn(turn_);
    job_ = &job;
    next_[0].store(0);
    next_[1].store(0);
    const uint64_t posted = posted_.fetch_add(1, std::memory_order_acq_rel) + 1;
    posted_.notify_all();
    job(*members_[0]);
    const uint64_t goal = posted * (members_.size() - 1);
    spin([&] { return finished_.load(std::memory_order_acquire) >= goal; });
}

}  // namespace tandem
