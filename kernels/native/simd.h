// One vector type for every instruction set: LANES float32 lanes, in the compiler's vector extensions.
//
// Kernels are written once against this file; what differs between AVX2, AVX-512 and the portable path is in here. The
// compiler contracts a * b + c to one fused instruction where the machine has it (-ffp-contract=fast).
//
// Numbers below float32 are read two vectors at a time, because the cheapest way to widen bfloat16 gives the even
// elements in one vector and the odd ones in the other: `load_half` gives that order, as do the
// rows that `permute_pairs` has brought into it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace loong {

#if defined(__AVX512F__)
constexpr int LANES = 16;
// Vectors of a register tile's row: 6 x 4 sums of 32 registers.
constexpr int TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8;
// 6 x 2 sums of 16 registers.
constexpr int TILE_VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int TILE_VECTORS = 4;
#else
constexpr int LANES = 4;
constexpr int TILE_VECTORS = 2;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef uint16_t unaligned_half_vec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t byte_vec __attribute__((vector_size(LANES)));
typedef int8_t unaligned_byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));

// Elements that load_pair reads.
constexpr int64_t PAIR = 2 * LANES;

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Element types of tensors; the numbers are the C interface's.
enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<unaligned_vec*>(p) = v; }
inline vec as_float(ivec v) { return reinterpret_cast<vec>(v); }
inline ivec as_int(vec v) { return reinterpret_cast<ivec>(v); }

inline vec splat(float a) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(a);
#elif defined(__AVX2__)
    return _mm256_set1_ps(a);
#else
    return vec{a, a, a, a};
#endif
}

inline ivec splat_int(int32_t a) { return ivec{} + a; }
// A comparison with NaN is false, so that b is answered: keep the operand that may be NaN there.
inline vec max(vec a, vec b) { return a > b ? a : b; }

inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}

inline float max(vec v) {
    float top = v[0];
    for (int i = 1; i < LANES; ++i) top = v[i] > top ? v[i] : top;
    return top;
}

// Sums of four vectors at once.
inline void sum4(vec a, vec b, vec c, vec d, float* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif defined(__AVX512F__)
    auto halves = [](vec v) {
        return _mm256_add_ps(_mm512_castps512_ps256(v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
    };
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halves(a), halves(b)), _mm256_hadd_ps(halves(c), halves(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// 2^x to 1e-7 for x up to 127; below -126 it stays at 2^-126. NaN stays NaN.
inline vec exp2(vec x) {
    // Adding it leaves the nearest integer in the low bits.
    const float round = 12582912.0f;
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
    vec shifted = x + round;
    vec f = x - (shifted - round);
    vec p = f * 0.0013276472454890609f + 0.009675541892647743f;
    p = p * f + 0.05550713092088699f;
    p = p * f + 0.24022120237350464f;
    p = p * f + 0.6931469440460205f;
    p = p * f + 1.0000001192092896f;
    return as_float(as_int(p) + (as_int(shifted) << 23));
}

inline vec tanh(vec x) {
    vec size = as_float(as_int(x) & 0x7fffffff);
    // Where the other formula would cancel; coefficients of Cephes' tanhf.
    vec z = x * x;
    vec p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    vec small = x + x * z * p;
    vec bounded = size < splat(20.0f) ? size : splat(20.0f);
    vec large = 1.0f - 2.0f / (exp2(bounded * (2 * LOG2_E)) + 1.0f);
    large = as_float(as_int(large) | (as_int(x) & INT32_MIN));
    vec result = size < splat(0.625f) ? small : large;
    return x != x ? x : result;
}

inline vec widen_f16(half_vec half) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(half));
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(half));
#else
    ivec bits = __builtin_convertvector(half, ivec);
    ivec size = bits & 0x7fff;
    // 2^112 moves the exponent's bias, subnormals included.
    vec value = as_float(size << 13) * 5.192296858534828e33f;
    ivec special = as_int(value) | 0x7f800000;
    ivec magnitude = size >= splat_int(0x7c00) ? special : as_int(value);
    return as_float(magnitude | ((bits & 0x8000) << 16));
#endif
}

// One of the two vectors of 2 * LANES elements: HALF 0 is the first half and HALF 1 the second for all types but bfloat16,
// of which they are the even and the odd ones.
template <int HALF>
inline vec load_half(const float* p) { return load(p + HALF * LANES); }
template <int HALF>
inline vec load_half(const bf16* p) {
    ivec words = *reinterpret_cast<const unaligned_ivec*>(p);
    return as_float(HALF == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
}
template <int HALF>
inline vec load_half(const f16* p) {
    return widen_f16(*reinterpret_cast<const unaligned_half_vec*>(p + HALF * LANES));
}
template <int HALF>
inline vec load_half(const int8_t* p) {
    p += HALF * LANES;
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const unaligned_byte_vec*>(p), vec);
#endif
}

template <class T>
inline void load_pair(const T* p, vec& a, vec& b) { a = load_half<0>(p), b = load_half<1>(p); }

// Where element d of a row lies once the row is in the order of load_pair.
template <class T>
inline int64_t permute_pairs(int64_t) = delete;
template <>
inline int64_t permute_pairs<float>(int64_t d) { return d; }
template <>
inline int64_t permute_pairs<f16>(int64_t d) { return d; }
template <>
inline int64_t permute_pairs<int8_t>(int64_t d) { return d; }
template <>
inline int64_t permute_pairs<bf16>(int64_t d) {
    int64_t block = d / (2 * LANES) * (2 * LANES), in_block = d - block;
    return block + (in_block & 1) * LANES + in_block / 2;
}

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline float widen(f16 x) {
    half_vec half = {};
    half[0] = x.bits;
    return widen_f16(half)[0];
}

// n elements as float32, in their own order.
template <class T>
inline void widen_row(const T* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}
template <>
inline void widen_row<bf16>(const bf16* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        half_vec half = *reinterpret_cast<const unaligned_half_vec*>(from + i);
        store(to + i, as_float(__builtin_convertvector(half, ivec) << 16));
    }
    for (; i < n; ++i) to[i] = widen(from[i]);
}
template <>
inline void widen_row<f16>(const f16* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, widen_f16(*reinterpret_cast<const unaligned_half_vec*>(from + i)));
    for (; i < n; ++i) to[i] = widen(from[i]);
}

// To nearest even; NaN stays NaN.
inline uint16_t round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline half_vec round_bf16(vec x) {
    ivec bits = as_int(x);
    ivec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    ivec quiet = bits >> 16 | 0x40;
    ivec kept = x == x ? rounded : quiet;
    return __builtin_convertvector(kept & 0xffff, half_vec);
}

template <class T>
inline void prefetch(const T* p) { __builtin_prefetch(p, 0, 3); }

// The arithmetic of matrix products: 32-bit words that are one float32 or a pair of bfloat16.
struct Float32 {
    static constexpr int PER_WORD = 1;
    static vec madd(vec sum, float a, vec b) { return splat(a) * b + sum; }
};

struct Bfloat16Pairs {
    static constexpr int PER_WORD = 2;
#if defined(__AVX512BF16__)
    static vec madd(vec sum, float a, vec b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(splat(a)), (__m512bh)_mm512_castps_si512(b));
    }
#else
    static vec madd(vec sum, float a, vec b) {
        const int32_t high = static_cast<int32_t>(0xffff0000);
        ivec x = as_int(splat(a)), y = as_int(b);
        sum = as_float(x << 16) * as_float(y << 16) + sum;
        return as_float(x & high) * as_float(y & high) + sum;
    }
#endif
};

}  // namespace loong
