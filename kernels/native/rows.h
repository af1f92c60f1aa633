// Rows of tensors, buffers, and the merge into a state: what both kinds of attention share.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "interface.h"
#include "simd.h"

namespace loong {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct FreeBuffer {
    void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, FreeBuffer>;
inline Buffer make_buffer(int64_t words) {
    void* p = std::aligned_alloc(64, round_up(std::max<int64_t>(words, 16) * 4, 64));
    if (p == nullptr) throw std::bad_alloc();
    return Buffer(static_cast<float*>(p));
}

template <class T>
const T* row_of(const LoongTensor& tensor, int64_t token, int64_t head) {
    return static_cast<const T*>(tensor.data) + token * tensor.stride_token + head * tensor.stride_head;
}

// Bring a row of this many elements near: rows of one head are too far apart for the machine to foresee.
template <class T>
void prefetch_row(const T* row, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(row + i);
}

// The keys that query `a` of a sequence can see: those in first..last-1.
inline void visible(const LoongShape& s, int64_t sequence, int64_t a, int64_t& first, int64_t& last) {
    first = 0, last = s.k_ends[sequence] - s.k_begins[sequence];
    if (s.upper != nullptr) last = std::min(last, a + s.upper[sequence] + 1);
    if (s.lower != nullptr) first = std::max(first, a + s.lower[sequence]);
    if (s.first != nullptr) first = std::max(first, s.first[s.q_begins[sequence] + a]);
    if (first >= last) first = last = 0;
}

// Copy rows begin..end-1 that have a slot.
template <class T>
void save_rows(const LoongTensor& k, const LoongTensor& v, const int64_t* slots, const LoongTensor& k_cache,
               const LoongTensor& v_cache, int64_t begin, int64_t end, int64_t head, int64_t head_dim) {
    for (int64_t row = begin; row < end; ++row) {
        int64_t slot = slots[row];
        if (slot < 0) continue;
        std::memcpy(const_cast<T*>(row_of<T>(k_cache, slot, head)), row_of<T>(k, row, head), head_dim * sizeof(T));
        std::memcpy(const_cast<T*>(row_of<T>(v_cache, slot, head)), row_of<T>(v, row, head), head_dim * sizeof(T));
    }
}

// Take the row (acc / row_sum, row_max in base 2) into the state of a query and head; a row that saw nothing, of sum 0,
// leaves it as it is.
inline void merge_row(const LoongState& state, int64_t query, int64_t head, int64_t head_dim, const float* acc,
                      float row_max, float row_sum) {
    if (row_sum == 0) return;
    float* lse = state.lse + query * state.stride_lse_token + head * state.stride_lse_head;
    float* out = state.out + query * state.stride_out_token + head * state.stride_out_head;
    float old_max = *lse * LOG2_E;
    float top = std::fmax(row_max, old_max), shift = top == -INF ? 0 : top;
    float alpha = std::exp2(row_max - shift), old_weight = old_max == -INF ? 0 : std::exp2(old_max - shift);
    float total = row_sum * alpha + old_weight;
    *lse = (top + std::log2(total)) * LN_2;
    float factor = alpha / total, old_factor = old_weight / total;
    // Not by a factor of 0: what an empty state holds may be NaN.
    if (old_weight == 0)
        for (int64_t d = 0; d < head_dim; ++d) out[d] = acc[d] * factor;
    else
        for (int64_t d = 0; d < head_dim; ++d) out[d] = acc[d] * factor + out[d] * old_factor;
}

}  // namespace loong
