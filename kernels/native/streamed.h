// Attention of few queries (decode): keys are read once, as they lie, at the speed of memory.
//
// A block of keys at a time: scores of all heads, softmax, then the weighted sum of V. The rows of a KV head are its
// group's heads, of one query or some, and share every load. Rows of K and V that the next block needs are prefetched
// while this one is computed. Sequences are cut into parts where there are threads for them; parts merge at the end.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "rows.h"

namespace loong {

constexpr int64_t BLOCK_KEYS = 64;
constexpr int64_t MIN_PART_KEYS = 512;

// Rows whose sums fit the registers: four keys each for scores, two vectors or four for outputs.
constexpr int SCORE_ROWS = TILE_VECTORS == 4 ? 6 : 3;
constexpr int64_t VALUE_ROWS = 4;

// Elements d..d+PAIR-1 of a row, 0 beyond its end.
template <bool PARTIAL, class T>
inline void load_part(const T* row, int64_t d, int64_t head_dim, vec& a, vec& b) {
    if (!PARTIAL || d + PAIR <= head_dim) return load_pair(row + d, a, b);
    T rest[PAIR] = {};
    std::memcpy(rest, row + d, (head_dim - d) * sizeof(T));
    load_pair(rest, a, b);
}

// scores[r][0..3] = q[r] . rows[0..3]
template <int R, bool PARTIAL, class T>
__attribute__((noinline)) void score_keys(const T* const* rows, const float* q, int64_t pitch, int64_t head_dim, float* scores) {
    vec sums[R][4] = {};
    for (int64_t d = 0; d < head_dim; d += PAIR) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            vec a, b;
            load_part<PARTIAL>(rows[i], d, head_dim, a, b);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                sums[r][i] = load(q + r * pitch + d) * a + sums[r][i];
                sums[r][i] = load(q + r * pitch + d + LANES) * b + sums[r][i];
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * BLOCK_KEYS);
}

// out[r][d..] = out[r][d..] * alpha[r] + sum over keys of weights[r][key] * rows[key][d..], for C pairs of vectors.
template <int R, int C, bool PARTIAL, class T>
__attribute__((noinline)) void weigh_values(const T* const* rows, int64_t keys, const float* weights, const float* alpha, int64_t d,
                  int64_t head_dim, float* out, int64_t pitch) {
    vec sums[R][C][2];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            for (int i = 0; i < 2; ++i)
                sums[r][c][i] = load(out + r * pitch + d + c * PAIR + i * LANES) * splat(alpha[r]);
    for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            vec a, b;
            load_part<PARTIAL>(rows[key], d + c * PAIR, head_dim, a, b);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                vec weight = splat(weights[r * BLOCK_KEYS + key]);
                sums[r][c][0] = weight * a + sums[r][c][0];
                sums[r][c][1] = weight * b + sums[r][c][1];
            }
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
          pitch_(round_up(shape.head_dim, PAIR)) {}

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
        for (int64_t i = 0; i < threads; ++i) scratch.push_back(make_buffer(most_rows * (2 * pitch_ + BLOCK_KEYS + 3)));
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
        float *q = scratch, *scores = q + most_rows * pitch_, *alpha = scores + most_rows * BLOCK_KEYS;
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
        for (int64_t key = first; key < last; key += BLOCK_KEYS) {
            int64_t keys = std::min(BLOCK_KEYS, last - key), next = std::min(BLOCK_KEYS, last - key - keys);
            for (int64_t head = 0; head < s_.kv_heads; ++head) {
                const T* pointers[BLOCK_KEYS];
                gather(k_, key, keys, head, pointers);
                const T* ahead[BLOCK_KEYS];
                gather(k_, key + keys, next, head, ahead);
                score_head(pointers, keys, ahead, next, q + head * rows * pitch_, rows, scores + head * rows * BLOCK_KEYS);
            }
            for (int64_t row = 0; row < part.rows; ++row)
                weigh(scores + row * BLOCK_KEYS, keys, row_max[row], row_sum[row], alpha[row]);
            for (int64_t head = 0; head < s_.kv_heads; ++head) {
                const T* pointers[BLOCK_KEYS];
                gather(v_, key + keys, next, head, pointers);
                for (int64_t i = 0; i < next; ++i) prefetch_row(pointers[i]);
                gather(v_, key, keys, head, pointers);
                int64_t row = head * rows;
                add_values(pointers, keys, scores + row * BLOCK_KEYS, alpha + row, rows, out + row * pitch_);
            }
        }
        if (part.offset < 0) finish(part, out, row_max, row_sum);
    }

    void gather(const LoongTensor& tensor, int64_t key, int64_t keys, int64_t head, const T** pointers) const {
        for (int64_t i = 0; i < keys; ++i) pointers[i] = row_of<T>(tensor, slot(key + i), head);
    }

    void prefetch_row(const T* row) const {
        const char* p = reinterpret_cast<const char*>(row);
        for (int64_t byte = 0; byte < s_.head_dim * static_cast<int64_t>(sizeof(T)); byte += 64) prefetch(p + byte);
    }

    void score_head(const T** pointers, int64_t keys, const T* const* ahead, int64_t next, const float* q, int64_t rows,
                    float* scores) const {
        // The last key stands in for the rest of four.
        const T* group[4];
        for (int64_t i = 0; i < keys; i += 4) {
            for (int64_t j = i; j < std::min(i + 4, next); ++j) prefetch_row(ahead[j]);
            for (int64_t j = 0; j < 4; ++j) group[j] = pointers[std::min(i + j, keys - 1)];
            for (int64_t r = 0; r < rows; r += SCORE_ROWS) {
                int64_t count = std::min<int64_t>(SCORE_ROWS, rows - r);
                const float* queries = q + r * pitch_;
                float* to = scores + r * BLOCK_KEYS + i;
                if (s_.head_dim % PAIR == 0) score_rows<false>(count, group, queries, to);
                else score_rows<true>(count, group, queries, to);
            }
        }
    }

    template <bool PARTIAL>
    void score_rows(int64_t count, const T* const* rows, const float* q, float* to) const {
        if constexpr (SCORE_ROWS > 3) {
            if (count == 6) return score_keys<6, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
            if (count == 5) return score_keys<5, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
            if (count == 4) return score_keys<4, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
        }
        if (count == 3) score_keys<3, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
        else if (count == 2) score_keys<2, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
        else score_keys<1, PARTIAL>(rows, q, pitch_, s_.head_dim, to);
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
        alpha = row_max == -INF ? 0 : std::exp2(row_max - shift);
        row_sum = row_sum * alpha + sum(sums), row_max = top;
    }

    void add_values(const T* const* pointers, int64_t keys, const float* weights, const float* alpha, int64_t rows,
                    float* out) const {
        for (int64_t r = 0; r < rows; r += VALUE_ROWS) {
            const float *w = weights + r * BLOCK_KEYS, *a = alpha + r;
            float* to = out + r * pitch_;
            if (s_.head_dim % PAIR == 0) add_rows<false>(std::min(VALUE_ROWS, rows - r), pointers, keys, w, a, to);
            else add_rows<true>(std::min(VALUE_ROWS, rows - r), pointers, keys, w, a, to);
        }
    }

    template <bool PARTIAL>
    void add_rows(int64_t count, const T* const* pointers, int64_t keys, const float* w, const float* a,
                  float* to) const {
        if (count == 4) add_columns<4, PARTIAL>(pointers, keys, w, a, to);
        else if (count == 3) add_columns<3, PARTIAL>(pointers, keys, w, a, to);
        else if (count == 2) add_columns<2, PARTIAL>(pointers, keys, w, a, to);
        else add_columns<1, PARTIAL>(pointers, keys, w, a, to);
    }

    template <int R, bool PARTIAL>
    void add_columns(const T* const* pointers, int64_t keys, const float* w, const float* a, float* to) const {
        int64_t d = 0;
        // Few sums alone would wait for each other, many do not fit 16 registers.
        if constexpr (R <= 2)
            for (; d + 2 * PAIR <= pitch_; d += 2 * PAIR)
                weigh_values<R, 2, PARTIAL>(pointers, keys, w, a, d, s_.head_dim, to, pitch_);
        for (; d < pitch_; d += PAIR) weigh_values<R, 1, PARTIAL>(pointers, keys, w, a, d, s_.head_dim, to, pitch_);
    }

    static constexpr int64_t PITCH_ROW = 256;
    const LoongShape& s_;
    const LoongTensor &q_, &k_, &v_;
    const LoongState& state_;
    const int64_t group_, pitch_;
};

}  // namespace loong
