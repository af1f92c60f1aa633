// Attention of few queries (decode): keys are read once, as they lie, at the speed of memory.
//
// A block of keys at a time: scores of all heads, softmax, then the weighted sum of V. The rows of a KV head are its
// group's heads, of one query or some, and share every load. While the scores of a block are computed its rows of V are
// prefetched, and while those are summed the next block's rows of K, in the same order: memory is asked evenly.
// Sequences are cut into parts where there are threads for them; parts merge at the end.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "rows.h"

namespace loong {

constexpr int64_t MAX_BLOCK_KEYS = 64;
// Rows of K and V of a block and of the next one's K stay in the second cache.
constexpr int64_t BLOCK_BYTES = 64 << 10;
constexpr int64_t MIN_PART_KEYS = 512;
constexpr int64_t CACHE_LINE = 64;

// Rows that are computed together: their sums, with the keys or columns below, are what the registers hold.
constexpr int MAX_TILE_ROWS = 6;
constexpr int keys_of_tile(int rows) { return TILE_VECTORS == 4 || rows <= 3 ? 4 : 2; }
constexpr int columns_of_tile(int rows) { return rows == 1 ? 4 : TILE_VECTORS == 4 || rows <= 3 ? 2 : 1; }

// The keys of a block in one KV head of K or V: key i begins at base + offsets[i].
template <class T>
struct Keys {
    const T* base;
    const int64_t* offsets;
    const T* operator[](int64_t i) const { return base + offsets[i]; }
};

// Half of the elements d..d+PAIR-1 of a row, 0 beyond its end.
template <int HALF, bool PARTIAL, class T>
inline vec load_part(const T* row, int64_t d, int64_t head_dim) {
    if (!PARTIAL || d + PAIR <= head_dim) return load_half<HALF>(row + d);
    T rest[PAIR] = {};
    std::memcpy(rest, row + d, (head_dim - d) * sizeof(T));
    return load_half<HALF>(rest);
}

// sums[r][i] += q[r] . k[i] over half of a pair. The order keeps all sums, the queries and one vector in registers.
template <int HALF, int R, int K, bool PARTIAL, class T>
inline void score_half(Keys<T> k, int64_t key, const float* q, int64_t pitch, int64_t d, int64_t head_dim,
                       vec sums[R][K]) {
    vec x[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) x[r] = load(q + r * pitch + d + HALF * LANES);
#pragma GCC unroll 4
    for (int i = 0; i < K; ++i) {
        vec y = load_part<HALF, PARTIAL>(k[key + i], d, head_dim);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sums[r][i] = x[r] * y + sums[r][i];
    }
}

// scores[r][i] = q[r] . k[i] for keys that fill tiles; rows of `ahead` are prefetched.
template <int R, bool PARTIAL, class T>
__attribute__((noinline)) void score_keys(Keys<T> k, Keys<T> ahead, int64_t keys, const float* q, int64_t pitch,
                                          int64_t head_dim, float* scores) {
    constexpr int K = keys_of_tile(R);
    for (int64_t key = 0; key < keys; key += K) {
        vec sums[R][K] = {};
        for (int64_t d = 0; d < head_dim; d += PAIR) {
            if (d * sizeof(T) % CACHE_LINE == 0)
                for (int i = 0; i < K; ++i) prefetch(ahead[key + i] + d);
            score_half<0, R, K, PARTIAL>(k, key, q, pitch, d, head_dim, sums);
            score_half<1, R, K, PARTIAL>(k, key, q, pitch, d, head_dim, sums);
        }
        float* to = scores + key;
        if constexpr (K == 4) {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
                sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], to + r * MAX_BLOCK_KEYS);
        } else {
#pragma GCC unroll 3
            for (int r = 0; r < R; r += 2) {
                int second = r + 1 < R ? r + 1 : r;
                float both[4];
                sum4(sums[r][0], sums[r][1], sums[second][0], sums[second][1], both);
                std::memcpy(to + r * MAX_BLOCK_KEYS, both, 8);
                std::memcpy(to + second * MAX_BLOCK_KEYS, both + 2, 8);
            }
        }
    }
}

// out[r][d..] = out[r][d..] * alpha[r] + sum over keys of weights[r][key] * v[key][d..], for C pairs of vectors.
template <int R, int C, bool PARTIAL, class T>
__attribute__((noinline)) void weigh_values(Keys<T> v, Keys<T> ahead, int64_t keys, const float* weights,
                                            const float* alpha, int64_t d, int64_t head_dim, float* out,
                                            int64_t pitch) {
    vec sums[R][C][2];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            for (int i = 0; i < 2; ++i)
                sums[r][c][i] = load(out + r * pitch + d + c * PAIR + i * LANES) * splat(alpha[r]);
    for (int64_t key = 0; key < keys; ++key) {
        vec weight[R];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) weight[r] = splat(weights[r * MAX_BLOCK_KEYS + key]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            int64_t column = d + c * PAIR;
            if (column * sizeof(T) % CACHE_LINE == 0) prefetch(ahead[key] + column);
            vec a = load_part<0, PARTIAL>(v[key], column, head_dim);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) sums[r][c][0] = weight[r] * a + sums[r][c][0];
            vec b = load_part<1, PARTIAL>(v[key], column, head_dim);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) sums[r][c][1] = weight[r] * b + sums[r][c][1];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            for (int i = 0; i < 2; ++i) store(out + r * pitch + d + c * PAIR + i * LANES, sums[r][c][i]);
}

template <class T>
class Streamed {
public:
    Streamed(const LoongShape& shape, const LoongTensor& q, const LoongTensor& k, const LoongTensor& v,
             const LoongState& state)
        : s_(shape), q_(q), k_(k), v_(v), state_(state), group_(shape.q_heads / shape.kv_heads),
          pitch_(round_up(shape.head_dim, PAIR)),
          block_keys_(std::clamp<int64_t>(BLOCK_BYTES / (2 * shape.kv_heads * shape.head_dim * sizeof(T)) / 8 * 8, 8,
                                          MAX_BLOCK_KEYS)) {}

    void save(const int64_t* slots, const LoongTensor& k_cache, const LoongTensor& v_cache) const {
        for (int64_t i = 0; i < s_.sequences; ++i)
            for (int64_t head = 0; head < s_.kv_heads; ++head)
                save_rows<T>(k_, v_, slots, k_cache, v_cache, s_.k_begins[i], s_.k_ends[i], head, s_.head_dim);
    }

    void run() {
        std::vector<Part> parts;
        int64_t total = 0, most_rows = 0, words = 0;
        for (int64_t i = 0; i < s_.sequences; ++i) {
            int64_t first, last;
            visible(s_, i, 0, first, last);
            if (s_.q_begins[i] < s_.q_ends[i]) total += last - first;
        }
        int64_t share = std::max(MIN_PART_KEYS, total / (std::max<int64_t>(s_.threads, 1) * 4));
        if (s_.threads <= 1) share = INT64_MAX;
        for (int64_t i = 0; i < s_.sequences; ++i) {
            int64_t first, last, rows = (s_.q_ends[i] - s_.q_begins[i]) * group_ * s_.kv_heads;
            visible(s_, i, 0, first, last);
            if (rows == 0 || first == last) continue;
            most_rows = std::max(most_rows, rows);
            int64_t count = (last - first - 1) / share + 1;
            for (int64_t part = 0; part < count; ++part) {
                int64_t begin = first + (last - first) * part / count, end = first + (last - first) * (part + 1) / count;
                // Alone in its sequence, a part merges into the state at once.
                parts.push_back({i, begin, end, rows, count == 1 ? -1 : words});
                if (count > 1) words += rows * (pitch_ + 2);
            }
        }
        int64_t threads = std::min<int64_t>(std::max<int64_t>(s_.threads, 1), parts.size());
        std::vector<Buffer> scratch;
        for (int64_t i = 0; i < threads; ++i) scratch.push_back(make_buffer(most_rows * (2 * pitch_ + MAX_BLOCK_KEYS + 3)));
        Buffer partial = make_buffer(words);
        pool().run(static_cast<int64_t>(parts.size()), s_.threads, [&](int64_t item, int64_t worker) {
            attend(parts[item], scratch[worker].get(), most_rows, partial.get());
        });
        for (const Part& part : parts) {
            if (part.offset < 0) continue;
            const float* out = partial.get() + part.offset;
            finish(part, out, out + part.rows * pitch_, out + part.rows * (pitch_ + 1));
        }
    }

private:
    struct Part {
        int64_t sequence, begin, end, rows, offset;
    };

    int64_t slot(int64_t key) const { return s_.slots == nullptr ? key : s_.slots[key]; }

    // Row r of a KV head is query r / group.
    void finish(const Part& part, const float* out, const float* row_max, const float* row_sum) const {
        int64_t rows = part.rows / s_.kv_heads;
        float in_order[PITCH_ROW];
        for (int64_t row = 0; row < part.rows; ++row) {
            int64_t head = row / rows, r = row % rows;
            for (int64_t d = 0; d < s_.head_dim; ++d) in_order[d] = out[row * pitch_ + permute_pairs<T>(d)];
            merge_row(state_, s_.q_begins[part.sequence] + r / group_, head * group_ + r % group_, s_.head_dim, in_order,
                      row_max[row], row_sum[row]);
        }
    }

    void attend(const Part& part, float* scratch, int64_t most_rows, float* partial) const {
        int64_t rows = part.rows / s_.kv_heads;
        float *q = scratch, *scores = q + most_rows * pitch_, *alpha = scores + most_rows * MAX_BLOCK_KEYS;
        float* out = alpha + most_rows;
        float *row_max = out + part.rows * pitch_, *row_sum = row_max + part.rows;
        if (part.offset >= 0) {
            out = partial + part.offset;
            row_max = out + part.rows * pitch_, row_sum = row_max + part.rows;
        }
        std::memset(q, 0, part.rows * pitch_ * 4), std::memset(out, 0, part.rows * pitch_ * 4);
        for (int64_t row = 0; row < part.rows; ++row) {
            int64_t head = row / rows, r = row % rows;
            const T* from = row_of<T>(q_, s_.q_begins[part.sequence] + r / group_, head * group_ + r % group_);
            for (int64_t d = 0; d < s_.head_dim; ++d) q[row * pitch_ + permute_pairs<T>(d)] = widen(from[d]);
            row_max[row] = -INF, row_sum[row] = 0;
        }
        int64_t first = s_.k_begins[part.sequence] + part.begin, last = s_.k_begins[part.sequence] + part.end;
        Block blocks[2];
        find(first, last, blocks[0]);
        for (int64_t key = first, turn = 0; key < last; key += block_keys_, turn ^= 1) {
            const Block& block = blocks[turn];
            Block& next = blocks[turn ^ 1];
            // After the last block its own rows stand in for the next one's, and are in the cache.
            if (key + block_keys_ < last) find(key + block_keys_, last, next);
            else next = block;
            for (int64_t head = 0; head < s_.kv_heads; ++head) {
                int64_t row = head * rows;
                score_head(keys_of(k_, head, block.k), keys_of(v_, head, block.v), block.keys, q + row * pitch_, rows,
                           scores + row * MAX_BLOCK_KEYS);
            }
            for (int64_t row = 0; row < part.rows; ++row)
                weigh(scores + row * MAX_BLOCK_KEYS, block.keys, row_max[row], row_sum[row], alpha[row]);
            for (int64_t head = 0; head < s_.kv_heads; ++head) {
                int64_t row = head * rows;
                add_values(keys_of(v_, head, block.v), keys_of(k_, head, next.k), block.keys,
                           scores + row * MAX_BLOCK_KEYS, alpha + row, rows, out + row * pitch_);
            }
        }
        if (part.offset < 0) finish(part, out, row_max, row_sum);
    }

    // Where the rows of a block lie: offsets within K and V, in elements. The last key stands in for those missing.
    struct Block {
        int64_t keys, k[MAX_BLOCK_KEYS], v[MAX_BLOCK_KEYS];
    };

    void find(int64_t key, int64_t last, Block& block) const {
        block.keys = std::min(block_keys_, last - key);
        for (int64_t i = 0; i < block_keys_; ++i) {
            int64_t row = slot(key + std::min(i, block.keys - 1));
            block.k[i] = row * k_.stride_token, block.v[i] = row * v_.stride_token;
        }
    }

    static Keys<T> keys_of(const LoongTensor& tensor, int64_t head, const int64_t* offsets) {
        return {static_cast<const T*>(tensor.data) + head * tensor.stride_head, offsets};
    }

    // Call work(first row, tile of rows as a constant) for rows in tiles of about one size.
    template <class Work>
    static void for_tiles(int64_t rows, const Work& work) {
        int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            int64_t begin = rows * tile / tiles;
            switch (rows * (tile + 1) / tiles - begin) {
                case 6: work(begin, std::integral_constant<int, 6>()); break;
                case 5: work(begin, std::integral_constant<int, 5>()); break;
                case 4: work(begin, std::integral_constant<int, 4>()); break;
                case 3: work(begin, std::integral_constant<int, 3>()); break;
                case 2: work(begin, std::integral_constant<int, 2>()); break;
                default: work(begin, std::integral_constant<int, 1>());
            }
        }
    }

    void score_head(Keys<T> k, Keys<T> ahead, int64_t keys, const float* q, int64_t rows, float* scores) const {
        bool whole = s_.head_dim % PAIR == 0;
        for_tiles(rows, [&](int64_t row, auto count) {
            constexpr int R = decltype(count)::value;
            const float* queries = q + row * pitch_;
            float* to = scores + row * MAX_BLOCK_KEYS;
            int64_t padded = round_up(keys, keys_of_tile(R));
            if (whole) score_keys<R, false>(k, ahead, padded, queries, pitch_, s_.head_dim, to);
            else score_keys<R, true>(k, ahead, padded, queries, pitch_, s_.head_dim, to);
        });
    }

    // Turn a row's scores into weights, and answer the factor of what was summed before.
    void weigh(float* scores, int64_t keys, float& row_max, float& row_sum, float& alpha) const {
        int64_t padded = round_up(keys, LANES);
        for (int64_t key = keys; key < padded; ++key) scores[key] = scores[0];
        float top = -INF;
        vec tops = splat(-INF);
        for (int64_t key = 0; key < padded; key += LANES) {
            vec x = load(scores + key) * s_.scale;
            if (s_.soft_cap != 0) x = tanh(x * (1 / s_.soft_cap)) * s_.soft_cap;
            x = x * LOG2_E;
            store(scores + key, x);
            tops = max(tops, x);
        }
        top = std::max(row_max, max(tops));
        float shift = top == -INF ? 0 : top;
        vec sums = {};
        for (int64_t key = 0; key < padded; key += LANES) {
            vec weights = exp2(load(scores + key) - shift);
            for (int i = 0; key + LANES > keys && i < LANES; ++i)
                if (key + i >= keys) weights[i] = 0;
            sums += weights;
            store(scores + key, weights);
        }
        alpha = row_max == top ? 1 : row_max == -INF ? 0 : std::exp2(row_max - shift);
        row_sum = row_sum * alpha + sum(sums), row_max = top;
    }

    void add_values(Keys<T> v, Keys<T> ahead, int64_t keys, const float* weights, const float* alpha, int64_t rows,
                    float* out) const {
        bool whole = s_.head_dim % PAIR == 0;
        for_tiles(rows, [&](int64_t row, auto count) {
            constexpr int R = decltype(count)::value, C = columns_of_tile(R);
            const float *w = weights + row * MAX_BLOCK_KEYS, *a = alpha + row;
            float* to = out + row * pitch_;
            if (whole) add_columns<R, C, false>(v, ahead, keys, w, a, to);
            else add_columns<R, C, true>(v, ahead, keys, w, a, to);
        });
    }

    template <int R, int C, bool PARTIAL>
    void add_columns(Keys<T> v, Keys<T> ahead, int64_t keys, const float* w, const float* a, float* to) const {
        int64_t d = 0;
        for (; d + C * PAIR <= pitch_; d += C * PAIR)
            weigh_values<R, C, PARTIAL>(v, ahead, keys, w, a, d, s_.head_dim, to, pitch_);
        for (; d < pitch_; d += PAIR)
            weigh_values<R, 1, PARTIAL>(v, ahead, keys, w, a, d, s_.head_dim, to, pitch_);
    }

    static constexpr int64_t PITCH_ROW = 256;
    const LoongShape& s_;
    const LoongTensor &q_, &k_, &v_;
    const LoongState& state_;
    const int64_t group_, pitch_, block_keys_;
};

}  // namespace loong
