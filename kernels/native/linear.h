// Products of few rows with a weight matrix, which is read once, at the speed of memory.
//
// Rows of x become float32 in the order in which `load_pair` reads the weights. A register tile holds the sums of some
// outputs and rows along the inputs; they are added up at its end. The outputs of a tile lie far apart, and those of the
// next tile follow them: memory is read in as many streams, each without a break, which is faster than one.
#pragma once

#include <algorithm>

#include "pool.h"
#include "rows.h"

namespace loong {

constexpr int MAX_OUTPUTS = 4;
// Long streams, and still several items a thread.
constexpr int64_t OUTPUTS_AN_ITEM = 192;

// sums[r][o] = x[r] . rows[o] over whole pairs of vectors, of x with this pitch; weights `ahead` are prefetched.
template <int O, int R, class T>
void multiply_rows(const T* const* rows, int64_t ahead, const float* x, int64_t pitch, int64_t inputs,
                   float sums[R][MAX_OUTPUTS]) {
    // Few sums alone would wait for each other.
    constexpr int CHAINS = O * R <= 4 ? 2 : 1;
    vec acc[O][R][CHAINS] = {};
    for (int64_t i = 0; i < inputs; i += PAIR) {
        vec even[O], odd[O];
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) load_pair(rows[o] + i, even[o], odd[o]);
        if (i * sizeof(T) % 64 == 0)
            for (int o = 0; o < O; ++o) prefetch(rows[o] + i + ahead);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            vec a = load(x + r * pitch + i);
#pragma GCC unroll 4
            for (int o = 0; o < O; ++o) acc[o][r][0] = a * even[o] + acc[o][r][0];
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            vec b = load(x + r * pitch + i + LANES);
#pragma GCC unroll 4
            for (int o = 0; o < O; ++o) acc[o][r][CHAINS - 1] = b * odd[o] + acc[o][r][CHAINS - 1];
        }
    }
    for (int r = 0; r < R; ++r) {
        vec total[MAX_OUTPUTS] = {};
        for (int o = 0; o < O; ++o)
            for (int c = 0; c < CHAINS; ++c) total[o] += acc[o][r][c];
        sum4(total[0], total[1], total[2], total[3], sums[r]);
    }
}

// Outputs a tile: 12 sums of 16 registers, or 16 of 32.
constexpr int WIDE_OUTPUTS = TILE_VECTORS == 4 ? 4 : 3;

template <class T>
class SmallLinear {
public:
    SmallLinear(const T* weight, int64_t stride_weight, const float* scales, int64_t rows, int64_t inputs,
                int64_t outputs)
        : weight_(weight), stride_weight_(stride_weight), scales_(scales), rows_(rows), inputs_(inputs),
          outputs_(outputs), whole_(inputs / PAIR * PAIR), pitch_(round_up(inputs, PAIR) + 16),
          x_(make_buffer(rows * pitch_)) {}

    template <class X>
    void take(const X* x, int64_t stride) {
        for (int64_t row = 0; row < rows_; ++row) {
            float* to = x_.get() + row * pitch_;
            for (int64_t i = 0; i < whole_; ++i) to[permute_pairs<T>(i)] = widen(x[row * stride + i]);
            for (int64_t i = whole_; i < inputs_; ++i) to[i] = widen(x[row * stride + i]);
        }
    }

    template <class O>
    void run(O* out, int64_t stride_out, int64_t threads) const {
        int64_t items = (outputs_ + OUTPUTS_AN_ITEM - 1) / OUTPUTS_AN_ITEM;
        pool().run(items, threads, [&](int64_t item, int64_t) {
            int64_t begin = item * OUTPUTS_AN_ITEM, end = std::min(outputs_, begin + OUTPUTS_AN_ITEM);
            int64_t width = rows_ <= 2 ? MAX_OUTPUTS : WIDE_OUTPUTS, apart = (end - begin + width - 1) / width;
            for (int64_t i = 0; i < apart; ++i) compute(begin + i, apart, end, out, stride_out);
        });
    }

private:
    template <class O>
    void compute(int64_t first, int64_t apart, int64_t end, O* out, int64_t stride_out) const {
        const T* rows[MAX_OUTPUTS];
        int64_t outputs[MAX_OUTPUTS], count = 0;
        for (int64_t o = first; count < MAX_OUTPUTS && o < end; o += apart) outputs[count++] = o;
        // A tile that is not full computes its last output again.
        for (int64_t o = 0; o < MAX_OUTPUTS; ++o) rows[o] = weight_ + outputs[std::min(o, count - 1)] * stride_weight_;
        constexpr int64_t ahead = 2048 / sizeof(T);
        for (int64_t row = 0; row < rows_;) {
            float sums[4][MAX_OUTPUTS];
            const float* x = x_.get() + row * pitch_;
            int64_t taken = std::min<int64_t>(4, rows_ - row);
            if (rows_ == 1) multiply_rows<MAX_OUTPUTS, 1>(rows, ahead, x, pitch_, whole_, sums);
            else if (rows_ == 2) multiply_rows<MAX_OUTPUTS, 2>(rows, ahead, x, pitch_, whole_, sums);
            else if (taken == 4) multiply_rows<WIDE_OUTPUTS, 4>(rows, ahead, x, pitch_, whole_, sums);
            else if (taken == 3) multiply_rows<WIDE_OUTPUTS, 3>(rows, ahead, x, pitch_, whole_, sums);
            else if (taken == 2) multiply_rows<WIDE_OUTPUTS, 2>(rows, ahead, x, pitch_, whole_, sums);
            else multiply_rows<WIDE_OUTPUTS, 1>(rows, ahead, x, pitch_, whole_, sums);
            for (int64_t r = 0; r < taken; ++r)
                for (int64_t o = 0; o < count; ++o) {
                    float total = sums[r][o];
                    for (int64_t i = whole_; i < inputs_; ++i) total += x[r * pitch_ + i] * widen(rows[o][i]);
                    if (scales_ != nullptr) total *= scales_[outputs[o]];
                    put(out + (row + r) * stride_out + outputs[o], total);
                }
            row += taken;
        }
    }

    static void put(float* to, float value) { *to = value; }
    static void put(bf16* to, float value) { to->bits = round_bf16(value); }

    const T* weight_;
    const int64_t stride_weight_;
    const float* scales_;
    const int64_t rows_, inputs_, outputs_, whole_, pitch_;
    Buffer x_;
};

}  // namespace loong
