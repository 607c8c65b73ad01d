// The C functions that Python calls (tandem/kernels/native.py). Those that return int return 0, or 1 if memory ran out.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>

#include "kernels.h"
#include "matmul.h"
#include "pack.h"
#include "workspace.h"

namespace tandem {

void Workspace::fit(const Model &m, int64_t count) {
    const int64_t q = m.heads * m.head_dim, first = m.layer_count ? m.layers[0].qkv[0].k : 0;
    const int64_t widest = std::max({m.hidden, q, m.intermediate, first});
    const int64_t sizes[] = {4 * count * m.hidden,
                             4 * count * (q + 2 * m.kv_heads * m.head_dim),
                             2 * count * m.hidden,
                             2 * count * q,
                             2 * count * m.intermediate,
                             2 * packed_size(count, widest)};
    int64_t total = 64;
    for (int64_t size : sizes) total += round_up(size, 64);
    if (total > size_) {
        memory_.reset(new uint8_t[total]);
        size_ = total;
    }
    uintptr_t at = (reinterpret_cast<uintptr_t>(memory_.get()) + 63) & ~uintptr_t(63);
    auto next = [&](int i) {
        void *p = reinterpret_cast<void *>(at);
        at += round_up(sizes[i], 64);
        return p;
    };
    x = static_cast<float *>(next(0));
    qkv = static_cast<float *>(next(1));
    normed = static_cast<uint16_t *>(next(2));
    attended = static_cast<uint16_t *>(next(3));
    inner = static_cast<uint16_t *>(next(4));
    packed = static_cast<uint16_t *>(next(5));
}

namespace {

// From the fastest on.
const Kernels *(*const kPaths[])() = {kernels_amx, kernels_avx512, kernels_avx2, kernels_portable};

const Kernels *find(int path) { return kPaths[path](); }

// A team, and memory for its passes, which come one at a time. Of each team's own: a forked process has the parent's
// locks as they were, but makes a team anew.
struct Crew : Team {
    using Team::Team;
    Workspace space;
    std::mutex passing;
};

template <class Body>
int guarded(const Body &body) {
    try {
        body();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

bool less(Best a, Best b) { return a.sum < b.sum; }

int64_t token_of(const Draw &d, Best best) { return d.ids == nullptr ? best.column : d.ids[best.column]; }

}  // namespace

}  // namespace tandem

using namespace tandem;

extern "C" {

// The name of path 0, 1, ... from the fastest on; null where this processor lacks it, "" past the last.
const char *tandem_path(int path) {
    if (path >= int(std::size(kPaths))) return "";
    const Kernels *kernels = find(path);
    return kernels == nullptr ? nullptr : kernels->name;
}

void *tandem_team(int threads) { return static_cast<Team *>(new Crew(threads)); }

int64_t tandem_packed_bytes(int32_t kind, int64_t n, int64_t k) {
    return round_up(n, kStrip) / kStrip * strip_bytes(format_of(kind), k);
}

void tandem_pack(void *team, int32_t kind, int64_t n, int64_t k, const uint8_t *const *rows, uint8_t *out) {
    const int64_t strips = round_up(n, kStrip) / kStrip;
    static_cast<Team *>(team)->run([&](Member &member) {
        for (int64_t strip; (strip = member.take()) < strips;) pack(kind, k, rows, strip, strip + 1, out);
    });
}

// Read memory once, by all members in streams of their own, to find out how fast it is. Returns a sum of what was read.
uint64_t tandem_read(void *team, const uint64_t *data, int64_t bytes) {
    constexpr int64_t kStreams = 4, kAhead = 4096;
    std::atomic<uint64_t> total{0};
    static_cast<Team *>(team)->run([&](Member &member) {
        const int64_t each = bytes / 8 / (member.count * kStreams) / 8 * 8;
        uint64_t sum = 0;
        for (int64_t i = 0; i < each; i += 8) {
            for (int64_t stream = 0; stream < kStreams; stream++) {
                const uint64_t *p = data + (member.index * kStreams + stream) * each + i;
                __builtin_prefetch(reinterpret_cast<const char *>(p) + kAhead);
                for (int j = 0; j < 8; j++) sum += p[j];
            }
        }
        total += sum;
    });
    return total;
}

int tandem_matmul(void *team, int path, const Product *product) {
    return guarded([&] {
        Product p = *product;
        const size_t size = packed_size(p.rows, p.matrices[0].k);
        std::unique_ptr<uint16_t[]> packed(new uint16_t[size + 32]);
        p.packed = reinterpret_cast<uint16_t *>((reinterpret_cast<uintptr_t>(packed.get()) + 63) & ~uintptr_t(63));
        static_cast<Team *>(team)->run([&](Member &member) { find(path)->matmul(member, p); });
    });
}

void tandem_attend(void *team, int path, const Attention *attention, const Sight *sight) {
    static_cast<Team *>(team)->run([&](Member &member) { find(path)->attend(member, *attention, *sight); });
}

int tandem_forward(void *team, int path, const Model *model, const Pass *pass) {
    Crew *crew = static_cast<Crew *>(static_cast<Team *>(team));
    std::lock_guard<std::mutex> turn(crew->passing);
    return guarded([&] {
        crew->space.fit(*model, pass->count);
        crew->run([&](Member &member) { find(path)->forward(member, *model, *pass, crew->space); });
    });
}

int tandem_draw(void *team, int path, const Draw *d, int64_t *tokens) {
    return guarded([&] {
        const int64_t blocks = round_up(d->vocab, kDrawn) / kDrawn;
        std::unique_ptr<Best[]> best(new Best[d->rows * blocks]);
        static_cast<Team *>(team)->run([&](Member &member) {
            for (int64_t i; (i = member.take()) < d->rows * blocks;) best[i] = find(path)->draw(*d, i / blocks, i % blocks);
        });
        for (int64_t row = 0; row < d->rows; row++) {
            const Best *first = best.get() + row * blocks;
            tokens[row] = token_of(*d, *std::max_element(first, first + blocks, less));
        }
    });
}

// The `count` best tokens of each row in order, their sums, and the logarithm of the sum of e^sum over the row, 0
// if all are -inf: tokens and sums [rows, count], mass [rows].
int tandem_rank(void *team, int path, const Draw *d, int64_t count, int64_t *tokens, float *sums, float *mass) {
    return guarded([&] {
        const int64_t blocks = round_up(d->vocab, kDrawn) / kDrawn;
        std::unique_ptr<Best[]> best(new Best[d->rows * blocks * count]);
        std::unique_ptr<float[]> masses(new float[d->rows * blocks]);
        static_cast<Team *>(team)->run([&](Member &member) {
            for (int64_t i; (i = member.take()) < d->rows * blocks;) {
                masses[i] = find(path)->rank(*d, i / blocks, i % blocks, count, best.get() + i * count);
            }
        });
        for (int64_t row = 0; row < d->rows; row++) {
            Best *all = best.get() + row * blocks * count;
            double sum = 0.0;
            float top = -INFINITY;
            for (int64_t i = 0; i < blocks; i++) top = std::max(top, all[i * count].sum);
            for (int64_t i = 0; i < blocks; i++) {
                if (masses[row * blocks + i] > 0) sum += masses[row * blocks + i] * std::exp(double(all[i * count].sum) - top);
            }
            mass[row] = sum > 0 ? float(top + std::log(sum)) : 0.0f;
            // Blocks are in order of columns, so equal sums stay in order too.
            std::stable_sort(all, all + blocks * count, [](Best a, Best b) { return less(b, a); });
            for (int64_t i = 0; i < count; i++) {
                tokens[row * count + i] = token_of(*d, all[i]);
                sums[row * count + i] = all[i].sum;
            }
        }
    });
}

// The starts of noise sequences: tandem/kernels/noise.py has the twin and says what they are.
void tandem_key(int64_t count, const uint64_t *seed, uint64_t stream, const uint64_t *round, const uint64_t *position,
                uint64_t *keys) {
    auto mixed = [](uint64_t word) {
        word += 0x9e3779b97f4a7c15;
        word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
        return (word ^ word >> 27) * 0x94d049bb133111eb;
    };
    for (int64_t i = 0; i < count; i++) {
        keys[i] = mixed(mixed(mixed(mixed(seed[i]) + stream) + round[i]) + position[i]);
    }
}
}
