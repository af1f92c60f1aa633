// Attention of many queries, tile by tile: packed K and V, register tiles, an online softmax in base 2.
//
// The rows of a tile are the queries of one KV head: row r is query r / group and the group's head r % group, so that
// the heads of a group share K and V. Keys are packed a chunk at a time into panels that the register tiles read in
// order: K as [panel][word of the head][key], V as [columns][key][column]. All tiles of rows then run over the chunk
// and merge into the state in memory. Tiles, and in them strips of ROWS rows, visit only the panels they can see.
#pragma once

#include <algorithm>
#include <vector>

#include "interface.h"
#include "pool.h"
#include "rows.h"

namespace loong {

// Rows of a register tile, and of what is computed at a time.
constexpr int ROWS = 6;
constexpr int PANEL = TILE_VECTORS * LANES;
constexpr int64_t TILE_ROWS = 16 * ROWS;
constexpr int64_t TILE_KEYS = 256;
// A row of a buffer: not a power of two, so that rows fall into different sets of the cache.
constexpr int64_t PITCH = TILE_KEYS + 16;
// How far ahead rows to be packed are prefetched.
constexpr int64_t PREFETCHED_KEYS = 16;
// Keys that are packed at a time, and how many words of all heads and sequences.
constexpr int64_t CHUNK_KEYS = 4096;
constexpr int64_t BATCH_WORDS = 1 << 20;

// c[row] = c[row] * alpha[row] + a[row] b, or without alpha a[row] b: `a` is [R, steps] words with pitch PITCH.
template <class A, int R, int V>
void multiply(const float* a, const float* b, int64_t b_pitch, int64_t steps, float* c, const float* alpha) {
    vec sums[R][V];
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j)
            sums[i][j] = alpha == nullptr ? vec{} : load(c + i * PITCH + j * LANES) * splat(alpha[i]);
#pragma GCC unroll 2
    for (int64_t step = 0; step < steps; ++step) {
        vec columns[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) columns[j] = load(b + step * b_pitch + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) sums[i][j] = A::madd(sums[i][j], a[i * PITCH + step], columns[j]);
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) store(c + i * PITCH + j * LANES, sums[i][j]);
}

using Multiply = void (*)(const float*, const float*, int64_t, int64_t, float*, const float*);

template <class A, int R>
Multiply choose_multiply(int64_t vectors) {
    if constexpr (TILE_VECTORS >= 4) {
        if (vectors == 4) return multiply<A, R, 4>;
        if (vectors == 3) return multiply<A, R, 3>;
    }
    return vectors == 2 ? multiply<A, R, 2> : multiply<A, R, 1>;
}

template <class A>
Multiply choose_multiply(int64_t rows, int64_t vectors) {
    switch (rows) {
        case 1: return choose_multiply<A, 1>(vectors);
        case 2: return choose_multiply<A, 2>(vectors);
        case 3: return choose_multiply<A, 3>(vectors);
        case 4: return choose_multiply<A, 4>(vectors);
        case 5: return choose_multiply<A, 5>(vectors);
        default: return choose_multiply<A, 6>(vectors);
    }
}

// to[p * PANEL + j] = rows[j][p] for 8 x 8 words.
#if defined(__AVX2__)
inline void transpose8(const float* const* rows, int64_t p, float* to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i] + p);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#else
inline void transpose8(const float* const* rows, int64_t p, float* to) {
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) to[i * PANEL + j] = rows[j][p + i];
}
#endif

// A row as the words of a product's left side or of K: float32, or bfloat16 pairs as they lie in memory.
template <class A, class T>
void words_of(const T* row, float* words, int64_t head_dim) {
    if constexpr (A::PER_WORD == 2) std::memcpy(words, row, head_dim * 2);
    else widen_row(row, words, head_dim);
}

// One thread's tile: queries, scores (then weights) and outputs with pitch PITCH.
struct Scratch {
    Buffer q = make_buffer(TILE_ROWS * PITCH), scores = make_buffer(TILE_ROWS * PITCH);
    Buffer out = make_buffer(TILE_ROWS * PITCH);
    float row_max[TILE_ROWS], row_sum[TILE_ROWS], alpha[TILE_ROWS];
    int64_t first[TILE_ROWS], last[TILE_ROWS];
    // Keys that any row of a strip sees.
    int64_t strip_first[TILE_ROWS / ROWS], strip_last[TILE_ROWS / ROWS];
};

// What a calling thread keeps from call to call, some MiB: the system takes its time to give memory anew.
struct Workspace {
    std::vector<Scratch> scratch;

    float* packed(int64_t words) {
        if (words > packed_words_) packed_ = make_buffer(words), packed_words_ = words;
        return packed_.get();
    }

private:
    Buffer packed_;
    int64_t packed_words_ = 0;
};

inline Workspace& workspace() {
    static thread_local Workspace instance;
    return instance;
}

template <class A, class T>
class Tiled {
public:
    Tiled(const LoongShape& shape, const LoongTensor& q, const LoongTensor& k, const LoongTensor& v,
          const LoongState& state, const int64_t* save_slots, const LoongTensor* k_cache, const LoongTensor* v_cache)
        : s_(shape), q_(q), k_(k), v_(v), state_(state), save_slots_(save_slots), k_cache_(k_cache), v_cache_(v_cache),
          group_(shape.q_heads / shape.kv_heads), words_(shape.head_dim / A::PER_WORD),
          width_(round_up(shape.head_dim, LANES)) {}

    void run() {
        std::vector<Unit> units;
        int64_t words = 0, last_sequence = -1, last_head = -1;
        auto flush = [&] {
            run_batch(units, words);
            units.clear();
            words = 0;
        };
        for (int64_t sequence = 0; sequence < s_.sequences; ++sequence) {
            int64_t begin, end;
            find_keys(sequence, begin, end);
            int64_t keys = s_.k_ends[sequence] - s_.k_begins[sequence];
            for (int64_t head = 0; head < s_.kv_heads; ++head) {
                // Chunks save their own; here are the keys that nobody sees.
                save(sequence, head, 0, begin), save(sequence, head, end, keys);
                for (int64_t key = begin; key < end; key += CHUNK_KEYS) {
                    Unit unit{sequence, head, key, std::min(end, key + CHUNK_KEYS), words};
                    int64_t size = round_up(unit.end - unit.begin, PANEL) * (words_ + width_);
                    // Two chunks of one head would merge into the same states at once.
                    bool again = sequence == last_sequence && head == last_head;
                    if (!units.empty() && (again || words + size > BATCH_WORDS)) flush(), unit.offset = 0;
                    units.push_back(unit);
                    words += size, last_sequence = sequence, last_head = head;
                }
            }
        }
        flush();
    }

private:
    // A chunk of the keys of one sequence and KV head.
    struct Unit {
        int64_t sequence, head, begin, end, offset;
    };
    struct RowTile {
        int64_t unit, begin, end;
    };

    // The keys that any query of a sequence sees.
    void find_keys(int64_t sequence, int64_t& begin, int64_t& end) const {
        int64_t queries = s_.q_ends[sequence] - s_.q_begins[sequence];
        begin = INT64_MAX, end = 0;
        if (s_.lower == nullptr && s_.first == nullptr) {
            if (queries != 0) visible(s_, sequence, queries - 1, begin, end);
        } else {
            for (int64_t a = 0; a < queries; ++a) {
                int64_t first, last;
                visible(s_, sequence, a, first, last);
                if (first < last) begin = std::min(begin, first), end = std::max(end, last);
            }
        }
        if (begin >= end) begin = end = 0;
    }

    void save(int64_t sequence, int64_t head, int64_t begin, int64_t end) const {
        if (save_slots_ == nullptr) return;
        int64_t first = s_.k_begins[sequence];
        save_rows<T>(k_, v_, save_slots_, *k_cache_, *v_cache_, first + begin, first + end, head, s_.head_dim);
    }

    void run_batch(const std::vector<Unit>& units, int64_t words) {
        if (units.empty()) return;
        packed_ = workspace().packed(words);
        std::vector<std::pair<int64_t, int64_t>> tiles_of_keys;
        std::vector<RowTile> row_tiles;
        for (size_t i = 0; i < units.size(); ++i) {
            for (int64_t key = units[i].begin; key < units[i].end; key += TILE_KEYS) tiles_of_keys.push_back({i, key});
            int64_t sequence = units[i].sequence;
            int64_t rows = (s_.q_ends[sequence] - s_.q_begins[sequence]) * group_;
            // The last rows see the most keys: first, so that threads end together.
            for (int64_t begin = (rows - 1) / TILE_ROWS * TILE_ROWS; begin >= 0; begin -= TILE_ROWS)
                row_tiles.push_back({static_cast<int64_t>(i), begin, std::min(rows, begin + TILE_ROWS)});
        }
        pool().run(static_cast<int64_t>(tiles_of_keys.size()), s_.threads, [&](int64_t item, int64_t) {
            const Unit& unit = units[tiles_of_keys[item].first];
            pack(unit, tiles_of_keys[item].second);
        });
        // Here, since nothing may throw in a worker.
        std::vector<Scratch>& scratch = workspace().scratch;
        while (static_cast<int64_t>(scratch.size()) < std::min<int64_t>(s_.threads, row_tiles.size()))
            scratch.emplace_back();
        pool().run(static_cast<int64_t>(row_tiles.size()), s_.threads, [&](int64_t item, int64_t worker) {
            const RowTile& tile = row_tiles[item];
            attend(units[tile.unit], tile.begin, tile.end, scratch[worker]);
        });
    }

    // Words of the packed keys of a unit that come before those of the tile at `key`, a multiple of TILE_KEYS.
    float* packed_tile(const Unit& unit, int64_t key) const {
        return packed_ + unit.offset + (key - unit.begin) * (words_ + width_);
    }

    void pack(const Unit& unit, int64_t tile_begin) const {
        int64_t keys = std::min(TILE_KEYS, unit.end - tile_begin), padded = round_up(keys, PANEL);
        int64_t first = s_.k_begins[unit.sequence] + tile_begin;
        float* packed_k = packed_tile(unit, tile_begin);
        float* packed_v = packed_k + padded * words_;
        static_assert(PANEL % 8 == 0);
        alignas(64) float rows[8][PITCH];
        const float* pointers[8];
        for (int i = 0; i < 8; ++i) pointers[i] = rows[i];
        save(unit.sequence, unit.head, tile_begin, tile_begin + keys);
        for (int64_t key = 0; key < padded; key += 8) {
            for (int64_t i = key + PREFETCHED_KEYS; i < std::min(key + PREFETCHED_KEYS + 8, keys); ++i) {
                prefetch_row(row_of<T>(k_, slot(first + i), unit.head), s_.head_dim);
                prefetch_row(row_of<T>(v_, slot(first + i), unit.head), s_.head_dim);
            }
            for (int64_t i = 0; i < 8; ++i) {
                if (key + i < keys) words_of<A>(row_of<T>(k_, slot(first + key + i), unit.head), rows[i], s_.head_dim);
                else std::memset(rows[i], 0, words_ * 4);
            }
            float* to = packed_k + key / PANEL * PANEL * words_ + key % PANEL;
            int64_t p = 0;
            for (; p + 8 <= words_; p += 8) transpose8(pointers, p, to + p * PANEL);
            for (; p < words_; ++p)
                for (int64_t i = 0; i < 8; ++i) to[p * PANEL + i] = rows[i][p];
        }
        int64_t steps = padded / A::PER_WORD;
        for (int64_t step = 0; step < steps; ++step)
            for (int64_t column = 0; column < width_; column += PANEL) {
                int64_t columns = std::min<int64_t>(PANEL, width_ - column);
                v_words(first, step, keys, unit.head, column, columns, packed_v + column * steps + step * columns);
            }
    }

    int64_t slot(int64_t key) const { return s_.slots == nullptr ? key : s_.slots[key]; }

    // Columns of the step'th key, or pair of keys, of V; 0 beyond the keys and beyond the head.
    void v_words(int64_t first, int64_t step, int64_t keys, int64_t head, int64_t column, int64_t columns,
                 float* words) const {
        int64_t present = A::PER_WORD * step < keys ? std::min(columns, s_.head_dim - column) : 0;
        std::memset(words + present, 0, (columns - present) * 4);
        if (present == 0) return;
        const T* even = row_of<T>(v_, slot(first + A::PER_WORD * step), head) + column;
        if constexpr (A::PER_WORD == 1) {
            widen_row(even, words, present);
        } else {
            static const bf16 zeros[PANEL] = {};
            bool pair = 2 * step + 1 < keys;
            const bf16* odd = pair ? row_of<bf16>(v_, slot(first + 2 * step + 1), head) + column : zeros;
            uint32_t* pairs = reinterpret_cast<uint32_t*>(words);
            for (int64_t d = 0; d < present; ++d)
                pairs[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
        }
    }

    void attend(const Unit& unit, int64_t row_begin, int64_t row_end, Scratch& t) const {
        int64_t rows = row_end - row_begin, strips = (rows + ROWS - 1) / ROWS, first_query = s_.q_begins[unit.sequence];
        int64_t tile_first = INT64_MAX, tile_last = 0;
        for (int64_t strip = 0; strip < strips; ++strip) t.strip_first[strip] = INT64_MAX, t.strip_last[strip] = 0;
        for (int64_t row = 0; row < rows; ++row) {
            visible(s_, unit.sequence, (row_begin + row) / group_, t.first[row], t.last[row]);
            t.first[row] = std::max(t.first[row], unit.begin), t.last[row] = std::min(t.last[row], unit.end);
            if (t.first[row] >= t.last[row]) continue;
            int64_t strip = row / ROWS;
            t.strip_first[strip] = std::min(t.strip_first[strip], t.first[row]);
            t.strip_last[strip] = std::max(t.strip_last[strip], t.last[row]);
            tile_first = std::min(tile_first, t.first[row]), tile_last = std::max(tile_last, t.last[row]);
        }
        if (tile_first >= tile_last) return;
        for (int64_t row = 0; row < rows; ++row) {
            int64_t query = (row_begin + row) / group_, head = unit.head * group_ + (row_begin + row) % group_;
            prefetch_row(row_of<T>(q_, first_query + query, head), s_.head_dim);
        }
        for (int64_t row = 0; row < rows; ++row) {
            int64_t query = (row_begin + row) / group_, head = unit.head * group_ + (row_begin + row) % group_;
            words_of<A>(row_of<T>(q_, first_query + query, head), t.q.get() + row * PITCH, s_.head_dim);
            t.row_max[row] = -INF, t.row_sum[row] = 0;
            std::memset(t.out.get() + row * PITCH, 0, width_ * 4);
        }
        int64_t begin = unit.begin + (tile_first - unit.begin) / TILE_KEYS * TILE_KEYS;
        for (; begin < tile_last; begin += TILE_KEYS) {
            // Not all at the end, when there is nothing else to do.
            if (begin + TILE_KEYS >= tile_last) prefetch_state(unit, row_begin, row_end);
            attend_keys(unit, begin, rows, t);
        }
        for (int64_t row = 0; row < rows; ++row) {
            int64_t query = (row_begin + row) / group_, head = unit.head * group_ + (row_begin + row) % group_;
            merge_row(state_, first_query + query, head, s_.head_dim, t.out.get() + row * PITCH, t.row_max[row], t.row_sum[row]);
        }
    }

    void prefetch_state(const Unit& unit, int64_t row_begin, int64_t row_end) const {
        for (int64_t row = row_begin; row < row_end; ++row) {
            int64_t query = s_.q_begins[unit.sequence] + row / group_, head = unit.head * group_ + row % group_;
            const float* out = state_.out + query * state_.stride_out_token + head * state_.stride_out_head;
            prefetch_row(out, s_.head_dim);
            prefetch(state_.lse + query * state_.stride_lse_token + head * state_.stride_lse_head);
        }
    }

    void attend_keys(const Unit& unit, int64_t tile_begin, int64_t rows, Scratch& t) const {
        int64_t keys = std::min(TILE_KEYS, unit.end - tile_begin), padded = round_up(keys, PANEL);
        int64_t steps = padded / A::PER_WORD, strips = (rows + ROWS - 1) / ROWS;
        const float* packed_k = packed_tile(unit, tile_begin);
        const float* packed_v = packed_k + padded * words_;
        auto strip_keys = [&](int64_t strip, int64_t& first, int64_t& last) {
            first = std::max<int64_t>(t.strip_first[strip] - tile_begin, 0);
            last = std::min(t.strip_last[strip] - tile_begin, keys);
            return first < last;
        };
        int64_t first, last;
        for (int64_t panel = 0; panel < padded; panel += PANEL) {
            for (int64_t strip = 0; strip < strips; ++strip) {
                if (!strip_keys(strip, first, last) || last <= panel || first >= panel + PANEL) continue;
                int64_t vectors = std::min<int64_t>(TILE_VECTORS, (last - panel + LANES - 1) / LANES);
                Multiply kernel = choose_multiply<A>(std::min<int64_t>(ROWS, rows - strip * ROWS), vectors);
                kernel(t.q.get() + strip * ROWS * PITCH, packed_k + panel * words_, PANEL, words_,
                       t.scores.get() + strip * ROWS * PITCH + panel, nullptr);
            }
        }
        for (int64_t strip = 0; strip < strips; ++strip) {
            if (!strip_keys(strip, first, last)) continue;
            first = first / LANES * LANES, last = round_up(last, LANES);
            for (int64_t row = strip * ROWS; row < std::min(rows, (strip + 1) * ROWS); ++row)
                weigh(t, row, std::max<int64_t>(t.first[row] - tile_begin, 0),
                      std::min(t.last[row] - tile_begin, keys), first, last);
        }
        for (int64_t column = 0; column < width_; column += PANEL) {
            int64_t columns = std::min<int64_t>(PANEL, width_ - column);
            for (int64_t strip = 0; strip < strips; ++strip) {
                if (!strip_keys(strip, first, last)) continue;
                first = first / LANES * LANES / A::PER_WORD, last = (last + A::PER_WORD - 1) / A::PER_WORD;
                int64_t strip_rows = std::min<int64_t>(ROWS, rows - strip * ROWS);
                Multiply kernel = choose_multiply<A>(strip_rows, columns / LANES);
                kernel(t.scores.get() + strip * ROWS * PITCH + first, packed_v + column * steps + first * columns,
                       columns, last - first, t.out.get() + strip * ROWS * PITCH + column, t.alpha + strip * ROWS);
            }
        }
    }

    // Turn the scores first..last-1 of a row into weights, and begin..first-1 and last..end-1 into 0.
    void weigh(Scratch& t, int64_t row, int64_t first, int64_t last, int64_t begin, int64_t end) const {
        float* scores = t.scores.get() + row * PITCH;
        t.alpha[row] = 1;
        auto clear = [&](int64_t from, int64_t to) {
            if (from >= to) return;
            if constexpr (A::PER_WORD == 2) std::memset(reinterpret_cast<uint16_t*>(scores) + from, 0, (to - from) * 2);
            else std::memset(scores + from, 0, (to - from) * 4);
        };
        if (first >= last) {
            clear(begin, end);
            return;
        }
        // What must not be seen stands in as a score that is seen, so that whole vectors can be taken.
        int64_t vector_first = first / LANES * LANES, vector_last = round_up(last, LANES);
        for (int64_t key = vector_first; key < first; ++key) scores[key] = scores[first];
        for (int64_t key = last; key < vector_last; ++key) scores[key] = scores[first];
        float factor = s_.scale * LOG2_E;
        if (s_.soft_cap != 0 || !(factor > 0)) {
            factor = 1;
            for (int64_t key = vector_first; key < vector_last; key += LANES) {
                vec x = load(scores + key) * s_.scale;
                if (s_.soft_cap != 0) x = tanh(x * (1 / s_.soft_cap)) * s_.soft_cap;
                store(scores + key, x * LOG2_E);
            }
        }
        vec tops = load(scores + vector_first);
        for (int64_t key = vector_first + LANES; key < vector_last; key += LANES) tops = max(tops, load(scores + key));
        float top = std::max(t.row_max[row], max(tops) * factor);
        float shift = top == -INF ? 0 : top;
        vec sums = {};
        auto take = [&](int64_t key, bool at_edge) {
            vec weights = exp2(load(scores + key) * factor - shift);
            if (at_edge)
                for (int i = 0; i < LANES; ++i)
                    if (key + i < first || key + i >= last) weights[i] = 0;
            sums += weights;
            if constexpr (A::PER_WORD == 2)
                *reinterpret_cast<unaligned_half_vec*>(reinterpret_cast<uint16_t*>(scores) + key) = round_bf16(weights);
            else store(scores + key, weights);
        };
        int64_t key = vector_first;
        if (key < first) take(key, true), key += LANES;
        for (; key + LANES <= last; key += LANES) take(key, false);
        if (key < vector_last) take(key, true);
        clear(begin, first), clear(last, end);
        float alpha = t.row_max[row] == -INF ? 0 : std::exp2(t.row_max[row] - shift);
        t.row_sum[row] = t.row_sum[row] * alpha + sum(sums);
        t.row_max[row] = top, t.alpha[row] = alpha;
    }

    const LoongShape& s_;
    const LoongTensor &q_, &k_, &v_;
    const LoongState& state_;
    const int64_t* save_slots_;
    const LoongTensor *k_cache_, *v_cache_;
    // Query heads a KV head, words of a row of Q and K, and columns of V as packed.
    const int64_t group_, words_, width_;
    float* packed_ = nullptr;
};

}  // namespace loong
