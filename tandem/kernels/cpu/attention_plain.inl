// Attention over pages in plain C++ and the compilers' vector types, and what every attention kernel shares: which
// keys a query sees, in which order, and how a batch is shared among the team.
//
// The order is that of virtual positions (kernels.h), so a tree's node has the bits of the same tokens in a line.
// Scores, weights and sums are f32. Keys are taken in blocks of 32 virtual positions from 0 on, with the online softmax
// of Milakov and Gimelshein (https://arxiv.org/abs/1805.02867): a block's maximum is over the query's own keys, and
// what it does not see is left out, so a query's bits depend on nothing but its keys. Weights are powers of 2.

constexpr float kLog2e = 1.44269504088896341f;

// The virtual positions of one query, which sees low .. length - 1. Those below `straight` are slots; then the
// ancestors follow, bit j of `later` being slot root + 1 + j.
struct Reach {
    int64_t low, straight, length, root;
    uint64_t later;

    bool branches() const { return straight < length; }
    // The first slot that the query surely does not see, nor any later one.
    int64_t slots() const { return root + 1 + (later == 0 ? 0 : 64 - __builtin_clzll(later)); }
};

static Reach reach_of(const Sight &sight, int64_t token, int window) {
    const int64_t root = sight.seen_to[token];
    const uint64_t later = sight.ancestors == nullptr ? 0 : uint64_t(sight.ancestors[token]) >> 1;
    const int64_t length = root + 1 + __builtin_popcountll(later);
    // `later` has 63 bits at most, so its complement is not 0.
    const int64_t straight = root + 1 + __builtin_ctzll(~later);
    const int64_t low = window > 0 && window < length ? length - window : 0;
    return {std::max(low, std::min(sight.begin, root)), straight, length, root, later};
}

// The slots of `count` virtual positions from `start` on; -1 for those that the query does not see.
static void slots_of(const Reach &reach, int64_t start, int count, int64_t *slots) {
    uint64_t later = reach.later;
    for (int64_t position = reach.root + 1; position < start && later != 0; position++) later &= later - 1;
    for (int i = 0; i < count; i++) {
        const int64_t position = start + i;
        slots[i] = -1;
        if (position >= reach.length) continue;
        if (position <= reach.root) {
            slots[i] = position;
        } else {
            slots[i] = reach.root + 1 + __builtin_ctzll(later);
            later &= later - 1;
        }
        if (position < reach.low) slots[i] = -1;
    }
}

// Where a row's slots are in the pool of one head, counted in floats or halves of it.
struct Places {
    const int64_t *pages;
    int64_t first, page_size, head_dim;  // first: where the head begins

    Places(const Attention &a, const Sight &sight, int row, int head)
        : pages(sight.pages + row * sight.page_stride), first(head * a.num_pages * a.page_size * a.head_dim),
          page_size(a.page_size), head_dim(a.head_dim) {}

    int64_t operator[](int64_t slot) const {
        return first + (pages[slot / page_size] * page_size + slot % page_size) * head_dim;
    }
    // Places of `count` slots from `start` on; -1 from slot `end` on.
    void list(int64_t start, int count, int64_t end, int64_t *places) const {
        int64_t page = start / page_size, at = start % page_size;
        for (int i = 0; i < count; i++) {
            places[i] = start + i < end ? first + (pages[page] * page_size + at) * head_dim : -1;
            if (++at == page_size) page++, at = 0;
        }
    }
};

// One piece of work: tokens of one row under one key head.
struct Share {
    int row, head;
    int64_t token, tokens;
};

// How many tokens a share has: `rows` query rows or fewer, and fewer still where there would be idle members.
static int64_t tokens_of_a_share(const Member &member, const Attention &a, const Sight &sight, int rows) {
    const int64_t group = a.heads / a.kv_heads, shares = int64_t(sight.rows) * a.kv_heads;
    int64_t longest = 1;
    for (int row = 0; row < sight.rows; row++) {
        longest = std::max<int64_t>(longest, sight.first[row + 1] - sight.first[row]);
    }
    const int64_t pieces = (member.count + shares - 1) / shares;
    const int64_t fair = std::max((longest + pieces - 1) / pieces, (16 + group - 1) / group);
    return std::max<int64_t>(1, std::min(fair, rows / group));
}

// The share with this number, if there are as many. A row's last tokens, which see most, come first.
static bool find_share(const Attention &a, const Sight &sight, int64_t size, int64_t number, Share &share) {
    for (int row = 0; row < sight.rows; row++) {
        const int64_t first = sight.first[row], count = sight.first[row + 1] - first;
        const int64_t pieces = (count + size - 1) / size;
        if (number < pieces * a.kv_heads) {
            const int64_t start = (pieces - 1 - number / a.kv_heads) * size;
            share = {row, int(number % a.kv_heads), first + start, std::min(size, count - start)};
            return true;
        }
        number -= pieces * a.kv_heads;
    }
    return false;
}

// As many floats as the processor adds at once.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kKeys = 32;  // of a block
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(float))));

static inline Lanes load(const float *from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float *to, const Lanes &x) { std::memcpy(to, &x, sizeof x); }

static inline float total(const Lanes &x) {
    float sums[kLanes];
    std::memcpy(sums, &x, sizeof sums);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    }
    return sums[0];
}

// 2 ** x for x <= 0, to 1e-7; exactly 1 for 0, and exactly 0 for what is below 2 ** -126. The coefficients minimise the
// largest relative error over [-0.5, 0.5].
static inline Lanes power_of_2(const Lanes &x) {
    const Lanes kRound = Lanes{} + 12582912.0f;  // 1.5 * 2 ** 23: adding it leaves an integer in the low bits
    const Lanes shifted = x + kRound, r = x - (shifted - kRound);
    Lanes y = r * 0.00132647272f + 0.00967151281f;
    y = y * r + 0.0555073374f;
    y = y * r + 0.240222421f;
    y = y * r + 0.693146978f;
    y = y * r + 1.0f;
    const Bits bits = ((Bits)shifted - (Bits)kRound + 127) << 23;
    return (Lanes)((Bits)(y * (Lanes)bits) & (Bits)(x >= -126.0f));
}

static inline float widened(uint16_t x) { return from_bf16(x); }

static inline float widened(float x) { return x; }

static inline void narrow(float x, uint16_t *to) { *to = to_bf16(x); }

static inline void narrow(float x, float *to) { *to = x; }

// The keys and values of a block that one query sees, in f32, `padded` floats a row.
struct Block {
    int64_t padded;
    const float *keys[kKeys], *values[kKeys];  // by virtual position
};

// One query row: what it has summed so far.
struct Query {
    const float *q;
    float *sum;        // [padded]
    float weights[kLanes];
    float top;
};

static void weigh(const Block &block, int from, int to, Query &query, float *weights, float &decay) {
    for (int j = 0; j < kKeys; j++) weights[j] = -INFINITY;
    float top = query.top;
    for (int j = from; j < to; j++) {
        Lanes sum = {};
        for (int64_t d = 0; d < block.padded; d += kLanes) sum += load(query.q + d) * load(block.keys[j] + d);
        weights[j] = total(sum) * kLog2e;
        top = weights[j] > top ? weights[j] : top;
    }
    float first[kLanes];
    store(first, power_of_2(Lanes{} + (query.top - top)));
    decay = first[0];
    Lanes sum = load(query.weights) * decay;
    for (int j = 0; j < kKeys; j += kLanes) {
        const Lanes x = power_of_2(load(weights + j) - top);
        store(weights + j, x);
        sum += x;
    }
    store(query.weights, sum);
    query.top = top;
}

template <int N>
static inline void accumulate(const Block &block, int from, int to, const float *weights, int64_t d, float *sum) {
    Lanes acc[N];
    for (int n = 0; n < N; n++) acc[n] = load(sum + d + n * kLanes);
    for (int j = from; j < to; j++) {
        for (int n = 0; n < N; n++) acc[n] += weights[j] * load(block.values[j] + d + n * kLanes);
    }
    for (int n = 0; n < N; n++) store(sum + d + n * kLanes, acc[n]);
}

static void take_block(const Block &block, int from, int to, Query &query) {
    float weights[kKeys], decay;
    weigh(block, from, to, query, weights, decay);
    if (decay != 1.0f) {
        for (int64_t d = 0; d < block.padded; d += kLanes) store(query.sum + d, load(query.sum + d) * decay);
    }
    int64_t d = 0;
    for (; d + 4 * kLanes <= block.padded; d += 4 * kLanes) accumulate<4>(block, from, to, weights, d, query.sum);
    for (; d < block.padded; d += kLanes) accumulate<1>(block, from, to, weights, d, query.sum);
}

template <class T>
struct PlainShare {
    const Attention &a;
    const Share &share;
    const Places places;
    const int64_t group, rows, dim, padded;
    Reach *reach;         // [tokens]
    float *queries;       // [rows, padded]
    float *sums;          // [rows, padded]
    Query *states;        // [rows]
    float *rows_of_block; // [2, kKeys, padded] keys, then values
    float *branches;      // [2, tree slots, padded]
    int64_t tree, tree_end;  // slots that stand in another order for some query

    PlainShare(Member &member, const Attention &a, const Sight &sight, const Share &share)
        : a(a), share(share), places(a, sight, share.row, share.head), group(a.heads / a.kv_heads),
          rows(share.tokens * group), dim(a.head_dim), padded((a.head_dim + kLanes - 1) / kLanes * kLanes) {
        auto floats = [&](int purpose, int64_t count) {
            return static_cast<float *>(member.scratch(purpose, count * sizeof(float)));
        };
        reach = static_cast<Reach *>(member.scratch(0, share.tokens * sizeof(Reach)));
        queries = floats(1, rows * padded);
        sums = floats(2, rows * padded);
        states = static_cast<Query *>(member.scratch(3, rows * sizeof(Query)));
        rows_of_block = floats(4, 2 * kKeys * padded);
        tree = INT64_MAX, tree_end = 0;
        for (int64_t t = 0; t < share.tokens; t++) {
            reach[t] = reach_of(sight, share.token + t, a.window);
            if (!reach[t].branches()) continue;
            tree = std::min(tree, reach[t].straight);
            tree_end = std::max(tree_end, reach[t].slots());
        }
        branches = floats(5, std::max<int64_t>(0, tree_end - tree) * 2 * padded);
    }

    void widen(int64_t place, float *keys, float *values) const {
        const T *k = static_cast<const T *>(a.keys) + place, *v = static_cast<const T *>(a.values) + place;
        for (int64_t d = 0; d < dim; d++) keys[d] = widened(k[d]);
        for (int64_t d = 0; d < dim; d++) values[d] = widened(v[d]);
        for (int64_t d = dim; d < padded; d++) keys[d] = values[d] = 0;
    }

    void start() {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t head = share.head * group + row % group;
            const float *from = a.q + (share.token + row / group) * a.q_stride + head * dim;
            float *q = queries + row * padded, *sum = sums + row * padded;
            for (int64_t d = 0; d < padded; d++) q[d] = d < dim ? from[d] : 0, sum[d] = 0;
            states[row] = {q, sum, {}, -INFINITY};
        }
        for (int64_t slot = tree; slot < tree_end; slot++) {
            float *keys = branches + (slot - tree) * padded;
            widen(places[slot], keys, keys + (tree_end - tree) * padded);
        }
    }

    void take(int64_t first, int64_t end) {
        float *values = rows_of_block + kKeys * padded;
        int64_t at[kKeys];
        places.list(first, kKeys, end, at);
        for (int64_t i = 0; i < kKeys && first + i < end; i++) {
            widen(at[i], rows_of_block + i * padded, values + i * padded);
        }
        Block block{padded, {}, {}};
        for (int64_t t = 0; t < share.tokens; t++) {
            const Reach &seen = reach[t];
            const int from = int(std::max<int64_t>(0, seen.low - first));
            const int to = int(std::min<int64_t>(kKeys, seen.length - first));
            if (from >= to) continue;
            int64_t slots[kKeys];
            if (seen.straight < first + to) slots_of(seen, first, to, slots);
            for (int j = from; j < to; j++) {
                const bool branch = first + j >= seen.straight;
                const int64_t row = branch ? slots[j] - tree : j;
                block.keys[j] = (branch ? branches : rows_of_block) + row * padded;
                block.values[j] = (branch ? branches + (tree_end - tree) * padded : values) + row * padded;
            }
            for (int64_t g = 0; g < group; g++) take_block(block, from, to, states[t * group + g]);
        }
    }

    void finish() const {
        for (int64_t row = 0; row < rows; row++) {
            const float scale = 1 / total(load(states[row].weights));
            T *to = static_cast<T *>(a.out) +
                    ((share.token + row / group) * a.heads + share.head * group + row % group) * dim;
            for (int64_t d = 0; d < dim; d++) narrow(states[row].sum[d] * scale, to + d);
        }
    }

    void run() {
        int64_t low = INT64_MAX, end = 0, straight = 0;
        for (int64_t t = 0; t < share.tokens; t++) {
            low = std::min(low, reach[t].low);
            end = std::max(end, reach[t].length);
            straight = std::max(straight, reach[t].straight);
        }
        start();
        for (int64_t first = low / kKeys * kKeys; first < end; first += kKeys) take(first, std::min(end, straight));
        finish();
    }
};

static void attend(Member &member, const Attention &a, const Sight &sight) {
    const int64_t size = tokens_of_a_share(member, a, sight, 192);
    Share share;
    while (find_share(a, sight, size, member.take(), share)) {
        if (a.kv_wide) {
            PlainShare<float>(member, a, sight, share).run();
        } else {
            PlainShare<uint16_t>(member, a, sight, share).run();
        }
    }
}
