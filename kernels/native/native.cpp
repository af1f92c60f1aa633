// The C interface: chooses the arithmetic and the element type, and keeps exceptions from leaving.
#include "interface.h"
#include "linear.h"
#include "streamed.h"
#include "tiled.h"

using namespace loong;

#if defined(LOONG_BFLOAT16_PAIRS) || defined(__AVX512BF16__)
using Bfloat16Arithmetic = Bfloat16Pairs;
#else
using Bfloat16Arithmetic = Float32;
#endif

namespace {

template <class Work>
int64_t attempt(const Work& work) {
    try {
        work();
        return 0;
    } catch (...) {
        return 1;
    }
}

template <class T>
void stream(const LoongShape& shape, const LoongTensor& q, const LoongTensor& k, const LoongTensor& v,
            const LoongState& state, const int64_t* save_slots, const LoongTensor* k_cache,
            const LoongTensor* v_cache) {
    Streamed<T> streamed(shape, q, k, v, state);
    if (save_slots != nullptr) streamed.save(save_slots, *k_cache, *v_cache);
    streamed.run();
}

template <class T>
void multiply_small(const void* x, int64_t x_dtype, int64_t stride_x, const void* weight, int64_t stride_weight,
                    const float* scales, void* out, int64_t out_dtype, int64_t stride_out, int64_t rows, int64_t inputs,
                    int64_t outputs, int64_t threads) {
    SmallLinear<T> linear(static_cast<const T*>(weight), stride_weight, scales, rows, inputs, outputs);
    if (x_dtype == BFLOAT16) linear.take(static_cast<const bf16*>(x), stride_x);
    else linear.take(static_cast<const float*>(x), stride_x);
    if (out_dtype == BFLOAT16) linear.run(static_cast<bf16*>(out), stride_out, threads);
    else linear.run(static_cast<float*>(out), stride_out, threads);
}

}  // namespace

extern "C" {

int64_t loong_tiled_attention(const LoongShape* shape, const LoongTensor* q, const LoongTensor* k, const LoongTensor* v,
                              const LoongState* state, const int64_t* save_slots, const LoongTensor* k_cache,
                              const LoongTensor* v_cache) {
    return attempt([&] {
        switch (shape->dtype) {
            case FLOAT32: Tiled<Float32, float>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache).run(); break;
            case BFLOAT16:
                Tiled<Bfloat16Arithmetic, bf16>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache).run();
                break;
            default: Tiled<Float32, f16>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache).run();
        }
    });
}

int64_t loong_streamed_attention(const LoongShape* shape, const LoongTensor* q, const LoongTensor* k,
                                 const LoongTensor* v, const LoongState* state, const int64_t* save_slots,
                                 const LoongTensor* k_cache, const LoongTensor* v_cache) {
    return attempt([&] {
        switch (shape->dtype) {
            case FLOAT32: stream<float>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache); break;
            case BFLOAT16: stream<bf16>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache); break;
            default: stream<f16>(*shape, *q, *k, *v, *state, save_slots, k_cache, v_cache);
        }
    });
}

int64_t loong_small_linear(const void* x, int64_t x_dtype, int64_t stride_x, const void* weight, int64_t weight_dtype,
                           int64_t stride_weight, const float* scales, void* out, int64_t out_dtype,
                           int64_t stride_out, int64_t rows, int64_t inputs, int64_t outputs, int64_t threads) {
    return attempt([&] {
        auto choose = weight_dtype == INT8 ? multiply_small<int8_t>
                      : weight_dtype == BFLOAT16 ? multiply_small<bf16> : multiply_small<float>;
        choose(x, x_dtype, stride_x, weight, stride_weight, scales, out, out_dtype, stride_out, rows, inputs, outputs,
               threads);
    });
}

int64_t loong_read_memory(const void* data, int64_t bytes, int64_t threads) {
    constexpr int64_t CHUNK = 1 << 20;
    std::atomic<int64_t> total{0};
    pool().run((bytes + CHUNK - 1) / CHUNK, threads, [&](int64_t item, int64_t) {
        const float* p = reinterpret_cast<const float*>(static_cast<const char*>(data) + item * CHUNK);
        int64_t words = std::min(CHUNK, bytes - item * CHUNK) / 4;
        ivec sums[4] = {};
        for (int64_t i = 0; i + 4 * LANES <= words; i += 4 * LANES)
            for (int j = 0; j < 4; ++j) sums[j] ^= as_int(load(p + i + j * LANES));
        total += (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
    });
    return total;
}

}
