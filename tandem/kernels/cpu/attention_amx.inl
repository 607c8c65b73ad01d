// Attention over pages with AMX bf16 tiles: the context of a row is read once for all queries of a key head.
//
//     scores^T [16 keys, 16 queries]  = K [16 keys, 32 d] Q^T [16 pairs of d, 16 queries x 2]
//     sums     [16 queries, 16 d]    += weights [16 queries, 32 keys] V [16 pairs of keys, 16 d x 2]
//
// K tiles come straight from the pages. V is interleaved pair by pair once per block. A block has 256 keys, from
// virtual position 0 on; the online softmax goes from block to block, the sums within from step to step of 32 keys.
//
// A tile's product sums even and odd inputs apart and in order, so bits depend on the virtual position of each key, not
// on the slot. From the step on in which a node's virtual positions leave the slots, its entries are gathered: scores,
// which depend on no position, are computed for all tree slots, once for each block and pair of tiles, and picked;
// weights times V is a product of its own for the node's query rows.

namespace plain {
#include "attention_plain.inl"
}

namespace tiles {

using plain::Reach;
using plain::Share;

#include "attention_steps_amx.inl"

// One share: its buffers, and what bounds its work.
class Tiles {
  public:
    Tiles(Member &member, const Attention &a, const Sight &sight, const Share &share);
    void run();

  private:
    const Attention &a_;
    const Share &share_;
    const plain::Places places_;
    const uint16_t *keys_, *values_;
    const int64_t dim_, group_, rows_;
    const int tiles_;
    int piece_ = 16;  // rows of one gathered product: they divide a token's
    Reach *reach_;        // [tokens]
    Tile *tile_;          // [tiles]
    uint32_t *queries_;   // [tiles, dim / 32, 16 pairs, 16]
    float *sums_;         // [tiles * 16, dim]
    float *scores_;       // [2, kBlock, 16]
    uint16_t *weights_;   // [2, kSteps, 16, 32]
    uint32_t *pairs_;     // [kSteps, dim / 16, 16 pairs, 16] V of a block
    uint16_t *copied_;    // [kBlock, dim] keys where pages have no tiles of 16
    uint16_t *zeros_;     // [16, dim]
    const uint16_t *key_tiles_[kBlock / 16];
    int64_t at_[2][kBlock];  // places of the block's keys, and of the next block's
    int64_t low_ = INT64_MAX, length_ = 0, shared_ = 0, slots_ = 0;

    // Where queries branch: the slots tree_ .. slots_ - 1, in tiles of 16 keys.
    int64_t tree_ = INT64_MAX;
    int tree_tiles_ = 0;
    const uint16_t **tree_keys_ = nullptr;  // [tree_tiles]
    float *tree_scores_ = nullptr;          // [2, tree_tiles, 16, 16]
    int64_t *tree_places_ = nullptr;        // [tree_tiles * 16]
    uint16_t *own_weights_ = nullptr;       // [tiles * 16, kSteps, 32]
    uint32_t *own_pairs_ = nullptr;         // [kSteps, dim / 16, 16 pairs, 16]

    const uint16_t *key_tile(const int64_t *places, uint16_t *copy) const;
    void bound(int tile);
    void pack(int tile);
    void start_tree(Member &member);
    void take_block(int64_t start, const int64_t *at, const int64_t *ahead);
    void prefetch(int64_t place) const;
    void interleave_block(int from, int to, int64_t start, const int64_t *at, const int64_t *ahead);
    template <int Q>
    void take_tiles(int tile, int64_t start);
    void pick(int tile, int64_t start, const float *tree, float *scores) const;
    void set_apart(int tile, int64_t start, int from, int to, uint16_t *weights);
    void gather(int64_t start);
    void gather_pairs(const int32_t *slots, int32_t *present, uint32_t *pairs) const;
    void finish() const;
};

Tiles::Tiles(Member &member, const Attention &a, const Sight &sight, const Share &share)
    : a_(a), share_(share), places_(a, sight, share.row, share.head), keys_(static_cast<const uint16_t *>(a.keys)),
      values_(static_cast<const uint16_t *>(a.values)), dim_(a.head_dim), group_(a.heads / a.kv_heads),
      rows_(share.tokens * group_), tiles_(int((rows_ + 15) / 16)) {
    while (group_ % piece_ != 0) piece_--;
    reach_ = static_cast<Reach *>(member.scratch(0, share.tokens * sizeof(Reach)));
    tile_ = static_cast<Tile *>(member.scratch(1, tiles_ * sizeof(Tile)));
    queries_ = static_cast<uint32_t *>(member.scratch(2, tiles_ * dim_ * 32));
    sums_ = static_cast<float *>(member.scratch(3, tiles_ * dim_ * 64));
    scores_ = static_cast<float *>(member.scratch(4, 2 * kScores * sizeof(float)));
    weights_ = static_cast<uint16_t *>(member.scratch(5, 2 * kWeights * sizeof(uint16_t)));
    pairs_ = static_cast<uint32_t *>(member.scratch(6, kBlock * dim_ * sizeof(uint16_t)));
    copied_ = static_cast<uint16_t *>(member.scratch(7, kBlock * dim_ * sizeof(uint16_t)));
    zeros_ = static_cast<uint16_t *>(member.scratch(8, 16 * dim_ * sizeof(uint16_t)));
    std::memset(zeros_, 0, 16 * dim_ * sizeof(uint16_t));
    std::memset(sums_, 0, tiles_ * dim_ * 64);
    for (int64_t t = 0; t < share.tokens; t++) {
        reach_[t] = plain::reach_of(sight, share.token + t, a.window);
        slots_ = std::max(slots_, reach_[t].slots());
        if (reach_[t].branches()) tree_ = std::min(tree_, reach_[t].straight / kStep * kStep);
    }
    for (int tile = 0; tile < tiles_; tile++) {
        bound(tile);
        pack(tile);
    }
    if (tree_ < slots_) start_tree(member);
}

void Tiles::bound(int number) {
    Tile &tile = tile_[number];
    tile.low_of_any = tile.length_of_all = tile.branches = INT64_MAX;
    tile.low_of_all = tile.length_of_any = tile.shared = tile.roots = 0;
    for (int lane = 0; lane < 16; lane++) {
        // Lanes past the last row repeat it.
        const Reach &reach = reach_[std::min(number * 16 + lane, int(rows_ - 1)) / group_];
        tile.low[lane] = int32_t(reach.low);
        tile.length[lane] = int32_t(reach.length);
        tile.top[lane] = -INFINITY;
        tile.total[lane] = 0;
        tile.low_of_any = std::min(tile.low_of_any, reach.low);
        tile.low_of_all = std::max(tile.low_of_all, reach.low);
        tile.length_of_any = std::max(tile.length_of_any, reach.length);
        tile.length_of_all = std::min(tile.length_of_all, reach.length);
        const int64_t straight = reach.straight / kStep * kStep;
        tile.shared = std::max(tile.shared, reach.branches() ? straight : reach.length);
        if (!reach.branches()) continue;
        tile.branches = std::min(tile.branches, straight);
        tile.roots = std::max(tile.roots, reach.root + 1);
    }
    low_ = std::min(low_, tile.low_of_any);
    length_ = std::max(length_, tile.length_of_any);
    shared_ = std::max(shared_, tile.shared);
}

// Round the queries of a tile to bf16 and lay them out as the right side of a product.
void Tiles::pack(int tile) {
    uint16_t *narrow = copied_;  // [16, dim], no key is copied yet
    for (int lane = 0; lane < 16; lane++) {
        const int64_t row = tile * 16 + lane, at = share_.head * group_ + row % group_;
        uint16_t *to = narrow + lane * dim_;
        if (row >= rows_) std::memset(to, 0, dim_ * sizeof(uint16_t));
        for (int64_t d = 0; d < dim_ && row < rows_; d += 32) {
            const float *q = a_.q + (share_.token + row / group_) * a_.q_stride + at * dim_ + d;
            const __m512 low = _mm512_loadu_ps(q), high = _mm512_loadu_ps(q + 16);
            _mm512_store_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
    settle();
    for (int64_t d = 0; d < dim_; d += 32) {
        turn(reinterpret_cast<uint32_t *>(narrow + d), dim_ / 2, queries_ + tile * dim_ * 8 + d * 8);
    }
}

// Where the tile of 16 keys at these places is, or its copy.
const uint16_t *Tiles::key_tile(const int64_t *places, uint16_t *copy) const {
    if (places[0] < 0) return zeros_;
    if (a_.page_size % 16 == 0) return keys_ + places[0];
    for (int i = 0; i < 16; i++) {
        std::memcpy(copy + i * dim_, places[i] < 0 ? zeros_ : keys_ + places[i], dim_ * sizeof(uint16_t));
    }
    return copy;
}

void Tiles::start_tree(Member &member) {
    tree_tiles_ = int((slots_ - tree_ + 63) / 64 * 4);
    tree_keys_ = static_cast<const uint16_t **>(member.scratch(9, tree_tiles_ * sizeof(uint16_t *)));
    tree_scores_ = static_cast<float *>(member.scratch(10, tree_tiles_ * 512 * sizeof(float)));
    own_weights_ = static_cast<uint16_t *>(member.scratch(11, tiles_ * kWeights * sizeof(uint16_t)));
    own_pairs_ = static_cast<uint32_t *>(member.scratch(12, kBlock * dim_ * sizeof(uint16_t)));
    uint16_t *copies = static_cast<uint16_t *>(member.scratch(13, tree_tiles_ * 16 * dim_ * sizeof(uint16_t)));
    tree_places_ = static_cast<int64_t *>(member.scratch(14, tree_tiles_ * 16 * sizeof(int64_t)));
    places_.list(tree_, tree_tiles_ * 16, slots_, tree_places_);
    for (int i = 0; i < tree_tiles_; i++) tree_keys_[i] = key_tile(tree_places_ + i * 16, copies + i * 16 * dim_);
}

// Interleave V of the steps from .. to - 1, and ask for the next block's keys and values meanwhile.
void Tiles::interleave_block(int from, int to, int64_t start, const int64_t *at, const int64_t *ahead) {
    for (int j = from * kStep; j < to * kStep; j += 2) {
        const bool even = at[j] >= 0 && start + j < shared_, odd = at[j + 1] >= 0 && start + j + 1 < shared_;
        interleave(even ? values_ + at[j] : zeros_, odd ? values_ + at[j + 1] : zeros_, dim_,
                   pairs_ + j / kStep * dim_ * 16 + j % kStep * 8);
        prefetch(ahead[j]);
        prefetch(ahead[j + 1]);
    }
}

// Have the key and the value at this place fetched.
void Tiles::prefetch(int64_t place) const {
    for (int64_t d = 0; place >= 0 && d < dim_; d += 32) {
        _mm_prefetch(keys_ + place + d, _MM_HINT_T1);
        _mm_prefetch(values_ + place + d, _MM_HINT_T1);
    }
}

static int step_at(int64_t position, int64_t start) {
    return int(std::clamp<int64_t>((position - start + kStep - 1) / kStep, 0, kSteps));
}

static int step_of(int64_t position, int64_t start) {
    return int(std::clamp<int64_t>((position - start) / kStep, 0, kSteps));
}

void Tiles::take_block(int64_t start, const int64_t *at, const int64_t *ahead) {
    for (int i = 0; i < kBlock / 16; i++) key_tiles_[i] = key_tile(at + i * 16, copied_ + i * 16 * dim_);
    interleave_block(step_of(low_, start), step_at(shared_, start), start, at, ahead);
    settle();
    int tile = 0;
    for (; tile + 2 <= tiles_; tile += 2) take_tiles<2>(tile, start);
    if (tile < tiles_) take_tiles<1>(tile, start);
    if (tree_ < std::min(slots_, start + kBlock)) gather(start);
}

template <int Q>
void Tiles::take_tiles(int number, int64_t start) {
    Tile *tile = tile_ + number, &last = tile[Q - 1];
    const int from = step_of(std::min(tile->low_of_any, last.low_of_any), start);
    const int to = step_at(std::max(tile->length_of_any, last.length_of_any), start);
    if (from >= to) return;
    constexpr int kUnit = 4 / Q;
    const int shared = std::min(to, step_at(std::max(tile->shared, last.shared), start));
    const int first = from * 2 / kUnit * kUnit, end = int(round_up(shared * 2, kUnit));
    const uint32_t *queries = queries_ + number * dim_ * 8;
    float *sums = sums_ + number * 16 * dim_;
    if (from < shared) score<Q>(key_tiles_ + first, end - first, queries, dim_, scores_ + first * 256, kScores);
    const int64_t tree_size = tree_tiles_ * 256;
    if (std::min(tile->branches, last.branches) < start + kBlock) {
        score<Q>(tree_keys_, int(round_up((slots_ - tree_ + 15) / 16, kUnit)), queries, dim_, tree_scores_, tree_size);
    }
    for (int i = 0; i < Q; i++) {
        float *scores = scores_ + i * kScores;
        uint16_t *weights = weights_ + i * kWeights;
        const bool branches = tile[i].branches < start + kBlock;
        alignas(64) float decay[16];
        if (branches) pick(number + i, start, tree_scores_ + i * tree_size, scores);
        hide(tile[i], start, from, to, scores);
        if (weigh(tile[i], scores, from, to, weights, decay)) {
            fade(decay, std::min<int64_t>(16, rows_ - (number + i) * 16), dim_, sums + i * 16 * dim_);
        }
        if (branches) set_apart(number + i, start, from, to, weights);
    }
    settle();
    if (from >= shared) return;
    if constexpr (Q == 2) {
        add_two(weights_, pairs_, from, shared, dim_, sums);
    } else {
        add_one<kShared>(weights_, pairs_, from, shared, dim_, sums);
    }
}

// The lanes of a tile that belong to a token.
static __mmask16 lanes_of(int64_t token, int64_t group, int tile) {
    const int64_t first = std::max<int64_t>(0, token * group - tile * 16);
    const int64_t end = std::min<int64_t>(16, (token + 1) * group - tile * 16);
    return __mmask16((1u << end) - (1u << first));
}

// Put the scores of slots where the virtual positions are that see them, in the steps that are gathered.
void Tiles::pick(int number, int64_t start, const float *tree, float *scores) const {
    const Tile &tile = tile_[number];
    const int64_t first = std::max(tile.branches, start), past = start + kBlock;
    for (int64_t slot = first; slot < std::min(tile.roots, past); slot++) {
        _mm512_store_ps(scores + (slot - start) * 16, _mm512_load_ps(tree + (slot - tree_) * 16));
    }
    const int64_t end = std::min<int64_t>(share_.tokens, (number * 16 + 15) / group_ + 1);
    for (int64_t token = number * 16 / group_; token < end; token++) {
        const Reach &reach = reach_[token];
        if (!reach.branches()) continue;
        const __mmask16 lanes = lanes_of(token, group_, number);
        const float *nodes = tree + (reach.root + 1 - tree_) * 16;
        int64_t position = reach.root + 1;
        for (uint64_t later = reach.later; later != 0; later &= later - 1, position++) {
            if (position < first || position >= past) continue;
            const __m512 row = _mm512_load_ps(nodes + __builtin_ctzll(later) * 16);
            _mm512_mask_storeu_ps(scores + (position - start) * 16, lanes, row);
        }
    }
}

// Move the weights of a tile that want gathered values to own_weights_.
void Tiles::set_apart(int tile, int64_t start, int from, int to, uint16_t *weights) {
    for (int64_t row = tile * 16; row < std::min<int64_t>(rows_, tile * 16 + 16); row++) {
        const Reach &reach = reach_[row / group_];
        if (!reach.branches()) continue;
        for (int step = std::max(from, step_of(reach.straight, start)); step < to; step++) {
            uint16_t *at = weights + step * 512 + row % 16 * 32;
            _mm512_store_si512(own_weights_ + (row * kSteps + step) * 32, _mm512_load_si512(at));
            _mm512_store_si512(at, _mm512_setzero_si512());
        }
    }
}

// The slots of a step's virtual positions; -1 for those that the query does not see.
static void slots_of_step(const Reach &reach, int64_t first, int32_t *slots) {
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_set1_epi32(int32_t(reach.low)), length = _mm512_set1_epi32(int32_t(reach.length));
    for (int i = 0; i < kStep; i += 16) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(int32_t(first + i)), ramp);
        const __mmask16 seen = _mm512_cmpge_epi32_mask(at, low) & _mm512_cmplt_epi32_mask(at, length);
        _mm512_store_si512(slots + i, _mm512_mask_mov_epi32(_mm512_set1_epi32(-1), seen, at));
    }
    int64_t position = reach.root + 1;
    for (uint64_t later = reach.later; later != 0; later &= later - 1, position++) {
        if (position < first || position >= first + kStep || position < reach.low) continue;
        slots[position - first] = int32_t(reach.root + 1 + __builtin_ctzll(later));
    }
}

// Weights times V for the rows of nodes, from the step on in which their virtual positions leave the slots.
void Tiles::gather(int64_t start) {
    TileConfig config;
    for (int i = 0; i < 5; i++) config.rows[i] = uint8_t(piece_);
    asm volatile("" ::"m"(config) : "memory");
    _tile_loadconfig(&config);
    alignas(64) int32_t slots[kStep], present[kBlock];
    for (int32_t &slot : present) slot = -2;
    for (int64_t token = 0; token < share_.tokens; token++) {
        const Reach &reach = reach_[token];
        if (!reach.branches()) continue;
        // What `set_apart` wrote: the steps below a window's first are as an earlier batch left them.
        const int from = step_of(std::max(reach.straight, reach.low), start), to = step_at(reach.length, start);
        if (from >= to) continue;
        for (int step = from; step < to; step++) {
            slots_of_step(reach, start + step * kStep, slots);
            gather_pairs(slots, present + step * kStep, own_pairs_ + step * dim_ * 16);
        }
        settle();
        for (int64_t row = token * group_; row < (token + 1) * group_; row += piece_) {
            add_one<kOwn>(own_weights_ + row * kSteps * 32, own_pairs_, from, to, dim_, sums_ + row * dim_);
        }
    }
    configure_tiles();
}

// Make the pairs of a step those of these slots; those of the slots `present` are there already.
void Tiles::gather_pairs(const int32_t *slots, int32_t *present, uint32_t *pairs) const {
    uint32_t changed = 0;
    for (int i = 0; i < kStep; i += 16) {
        const __m512i now = _mm512_load_si512(slots + i), before = _mm512_load_si512(present + i);
        changed |= uint32_t(_mm512_cmpneq_epi32_mask(now, before)) << i;
        _mm512_store_si512(present + i, now);
    }
    auto values = [&](int32_t slot) { return slot < 0 ? zeros_ : values_ + tree_places_[slot - tree_]; };
    for (changed = (changed | changed >> 1) & 0x55555555; changed != 0; changed &= changed - 1) {
        const int i = __builtin_ctz(changed);
        interleave(values(slots[i]), values(slots[i + 1]), dim_, pairs + i * 8);
    }
}

void Tiles::finish() const {
    // Columns back in order: see `interleave`.
    alignas(64) static const uint16_t kOrder[32] = {0, 1, 2,  3,  16, 17, 18, 19, 4,  5,  6,  7,  20, 21, 22, 23,
                                                    8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const __m512i order = _mm512_load_si512(kOrder);
    for (int64_t row = 0; row < rows_; row++) {
        const __m512 scale = _mm512_set1_ps(1 / tile_[row / 16].total[row % 16]);
        const int64_t head = share_.head * group_ + row % group_;
        uint16_t *out = static_cast<uint16_t *>(a_.out) + ((share_.token + row / group_) * a_.heads + head) * dim_;
        for (int64_t d = 0; d < dim_; d += 32) {
            const float *sums = sums_ + row * dim_ + d;
            const __m512 first = _mm512_mul_ps(_mm512_load_ps(sums), scale);
            const __m512 second = _mm512_mul_ps(_mm512_load_ps(sums + 16), scale);
            const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(out + d, _mm512_permutexvar_epi16(order, words));
        }
    }
}

void Tiles::run() {
    const int64_t first = low_ / kBlock * kBlock;
    places_.list(first, kBlock, std::min(slots_, length_), at_[0]);
    for (int64_t place : at_[0]) prefetch(place);
    for (int64_t start = first, i = 0; start < length_; start += kBlock, i ^= 1) {
        places_.list(start + kBlock, kBlock, std::min(slots_, length_), at_[i ^ 1]);
        take_block(start, at_[i], at_[i ^ 1]);
    }
    settle();
    finish();
}

}  // namespace tiles

static void attend(Member &member, const Attention &a, const Sight &sight) {
    if (a.kv_wide || a.head_dim % 32 != 0) return plain::attend(member, a, sight);
    configure_tiles();
    const int64_t size = plain::tokens_of_a_share(member, a, sight, tiles::kRows);
    plain::Share share;
    while (plain::find_share(a, sight, size, member.take(), share)) tiles::Tiles(member, a, sight, share).run();
}
