// What Python's ctypes passes: plain structs of 64-bit fields, mirrored in native.py.
#pragma once

#include <cstdint>

extern "C" {

// Strides in elements; the last dimension is contiguous. `dtype` is that of all tensors but states.
struct LoongTensor {
    void* data;
    int64_t stride_token, stride_head;
};

struct LoongState {
    // [tokens, heads, head_dim] and [tokens, heads] float32.
    float *out, *lse;
    int64_t stride_out_token, stride_out_head, stride_lse_token, stride_lse_head;
};

struct LoongShape {
    int64_t q_heads, kv_heads, head_dim, dtype, sequences;
    // [sequences]: ranges of queries and of keys.
    const int64_t *q_begins, *q_ends, *k_begins, *k_ends;
    // [sequences]: key b is visible to query a iff a + lower <= b <= a + upper. Null: no bound.
    const int64_t *upper, *lower;
    // [queries]: first visible key of each query. Null: 0.
    const int64_t* first;
    // [keys]: rows of K and V that the keys lie in. Null: they lie in order.
    const int64_t* slots;
    float scale, soft_cap;
    int64_t threads;
};

// All functions answer 0, or 1 when there is no memory.

// Merge attention into the state; with `save_slots` [keys] (-1: none) copy rows of K and V to the caches.
int64_t loong_tiled_attention(const LoongShape*, const LoongTensor* q, const LoongTensor* k, const LoongTensor* v,
                              const LoongState*, const int64_t* save_slots, const LoongTensor* k_cache,
                              const LoongTensor* v_cache);

// The same for few queries a sequence, all of which see what the first one sees.
int64_t loong_streamed_attention(const LoongShape*, const LoongTensor* q, const LoongTensor* k, const LoongTensor* v,
                                 const LoongState*, const int64_t* save_slots, const LoongTensor* k_cache,
                                 const LoongTensor* v_cache);

// out [rows, outputs] float32 or bfloat16 = x [rows, inputs] times weight [outputs, inputs], its rows times `scales`.
int64_t loong_small_linear(const void* x, int64_t x_dtype, int64_t stride_x, const void* weight, int64_t weight_dtype,
                           int64_t stride_weight, const float* scales, void* out, int64_t out_dtype,
                           int64_t stride_out, int64_t rows, int64_t inputs, int64_t outputs, int64_t threads);

// Read `bytes` of memory with plain vector loads and answer a sum: what benchmarks compare with.
int64_t loong_read_memory(const void* data, int64_t bytes, int64_t threads);

}
