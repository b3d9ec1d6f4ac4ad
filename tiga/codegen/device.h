// Pieces of the C++ kernels: vectors, functions that compilers vectorise, and the two products.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace tiga {

using i64 = int64_t;

#if defined(__AVX512F__)
constexpr int BYTES = 64;
constexpr int DEEP = 4;  // vectors of an accumulator beside each other
#elif defined(__AVX__)
constexpr int BYTES = 32;
constexpr int DEEP = 2;
#else
constexpr int BYTES = 16;
constexpr int DEEP = 2;
#endif

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(BYTES)));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(BYTES)));
};
template <class T>
constexpr int LANES = BYTES / int(sizeof(T));

template <class T>
inline typename Vector<T>::type load(const T* p) {
  typename Vector<T>::type v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline void store(T* p, typename Vector<T>::type v) {
  std::memcpy(p, &v, sizeof v);
}

template <class To, class From>
inline To bits(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Functions without branches, so that loops over them become vectors.

// e^x, of a power of two and a polynomial: within 1 ulp; two factors, so that results below the least normal are rounded
inline float exp(float x) {
  float c = x < -105.0f ? -105.0f : x;  // nan stays
  c = c > 89.0f ? 89.0f : c;
  float t = c * 1.44269504088896341f + 0x1.8p23f;
  float n = t - 0x1.8p23f;
  float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  int32_t k = bits<int32_t>(t) - 0x4b400000;
  int32_t half = k >> 1;
  return y * bits<float>(uint32_t(half + 127) << 23) * bits<float>(uint32_t(k - half + 127) << 23);
}

inline double exp(double x) {
  double c = x < -746.0 ? -746.0 : x;
  c = c > 710.0 ? 710.0 : c;
  double t = c * 1.4426950408889634 + 0x1.8p52;
  double n = t - 0x1.8p52;
  double r = (c - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double y = 1.0 / 6227020800;
  y = y * r + 1.0 / 479001600;
  y = y * r + 1.0 / 39916800;
  y = y * r + 1.0 / 3628800;
  y = y * r + 1.0 / 362880;
  y = y * r + 1.0 / 40320;
  y = y * r + 1.0 / 5040;
  y = y * r + 1.0 / 720;
  y = y * r + 1.0 / 120;
  y = y * r + 1.0 / 24;
  y = y * r + 1.0 / 6;
  y = y * r + 0.5;
  y = y * r * r + r + 1.0;
  i64 k = bits<i64>(t) - 0x4338000000000000;
  i64 half = k >> 1;
  return y * bits<double>(uint64_t(half + 1023) << 52) * bits<double>(uint64_t(k - half + 1023) << 52);
}

// near 0 a quotient of polynomials (Cephes), else of exponentials
inline float tanh(float x) {
  float z = x * x, a = std::fabs(x);
  float near = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z;
  near = x + x * ((near - 3.33332819422e-1f) * z);
  float far = 1 - 2 / (exp(2 * (a > 30 ? 30 : a)) + 1);
  return a < 0.625f ? near : std::copysign(far, x);
}
inline double tanh(double x) {
  double z = x * x, a = std::fabs(x);
  double above = ((-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3) * z;
  double below = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
  double near = x + x * (above / below);
  double far = 1 - 2 / (exp(2 * (a > 30 ? 30 : a)) + 1);
  return a < 0.625 ? near : std::copysign(far, x);
}

template <class T>
inline T exp2(T x) {
  return std::exp2(x);
}
template <class T>
inline T sigmoid(T x) {
  return 1 / (1 + exp(-x));
}
template <class T>
inline T rsqrt(T x) {
  return 1 / std::sqrt(x);
}
template <class T>
inline T sign(T x) {
  T y = T((x > 0) - (x < 0));
  return x != x ? x : y;
}
template <class T>
inline T absolute(T x) {
  return x < 0 ? T(-x) : x == 0 ? T(0) : x;
}
template <class T>
inline T maximum(T a, T b) {
  return (a != a) | (a > b) ? a : b;
}
template <class T>
inline T minimum(T a, T b) {
  return (a != a) | (a < b) ? a : b;
}
inline float remainder(float x, float y) {
  float r = std::fmod(x, y);
  return (r != 0) & ((r < 0) != (y < 0)) ? r + y : r;
}
inline double remainder(double x, double y) {
  double r = std::fmod(x, y);
  return (r != 0) & ((r < 0) != (y < 0)) ? r + y : r;
}
template <class T>
inline T remainder(T x, T y) {
  if (y == 0) return 0;
  T r = y == T(-1) ? T(0) : T(x % y);
  return r != 0 && ((r < 0) != (y < 0)) ? T(r + y) : r;
}
inline float fmod(float x, float y) { return std::fmod(x, y); }
inline double fmod(double x, double y) { return std::fmod(x, y); }
template <class T>
inline T fmod(T x, T y) {
  return y == 0 || y == T(-1) ? T(0) : T(x % y);
}
inline float pow(float x, float y) { return std::pow(x, y); }
inline double pow(double x, double y) { return std::pow(x, y); }
template <class T>
inline T pow(T x, T y) {
  if (y < 0) return x == 1 ? T(1) : x == T(-1) ? (y % 2 ? T(-1) : T(1)) : T(0);
  T z = 1;
  for (; y > 0; y >>= 1, x *= x)
    if (y & 1) z *= x;
  return z;
}
inline bool pow(bool x, bool y) { return x | !y; }
template <class T>
inline T round_even(T x) {
  return std::nearbyint(x);
}

// uniform in [0, 1), of (seed, edge number, feature) alone: two rounds of splitmix64
inline float hash_uniform(i64 seed, i64 number, i64 feature) {
  uint64_t x = uint64_t(seed) + uint64_t(number) * 0x9e3779b97f4a7c15u + uint64_t(feature) * 0xc2b2ae3d27d4eb4fu;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x = x ^ (x >> 31);
  return float((x >> 40) & 0xffffff) * 0x1p-24f;
}

// best, at <- the better of them and x, of edge `number`: nan beats all numbers, the lowest number equals
template <class T, bool LARGEST>
inline void extreme(T x, i64 number, T& best, i64& at) {
  bool more = (LARGEST ? x > best : x < best) | ((x != x) & (best == best));
  bool same = (x == best) | ((x != x) & (best != best));
  bool take = (at < 0) | more | (same & (number < at));
  best = take ? x : best;
  at = take ? number : at;
}

// the sum of N numbers, N a power of two: of halves, of their halves, ...
template <class T, int N>
inline T total(const T* s) {
  if constexpr (N == 1) {
    return s[0];
  } else {
    constexpr int M = N / 2;
    T half[M];
    for (int i = 0; i < M; i++) half[i] = s[i] + s[i + M];
    return total<T, M>(half);
  }
}

// what an edge's row holds, on its way to the cache
template <int SIZE>
inline void fetch(const void* row) {
  for (int b = 0; b < SIZE; b += 64) __builtin_prefetch(static_cast<const char*>(row) + b);
}

// total[d] += sum over edges of weight[e] * x[far[e]][d], D features that lie together
template <class T, int K>
inline void add_vectors(T* total, const T* weight, const T* x, i64 row, const i64* far, i64 edges) {
  typename Vector<T>::type sum[K];
  for (int k = 0; k < K; k++) sum[k] = load(total + k * LANES<T>);
  for (i64 e = 0; e < edges; e++) {
    const T* from = x + far[e] * row;
    for (int k = 0; k < K; k++) sum[k] += weight[e] * load(from + k * LANES<T>);
  }
  for (int k = 0; k < K; k++) store(total + k * LANES<T>, sum[k]);
}
template <class T, int D>
inline void add_rows(T* total, const T* weight, const T* x, i64 row, const i64* far, i64 edges) {
  constexpr int L = LANES<T>, WIDE = 4 * L, REST = D % WIDE / L;
  int d = 0;
  for (; d + WIDE <= D; d += WIDE) add_vectors<T, 4>(total + d, weight, x + d, row, far, edges);
  if constexpr (REST > 0) add_vectors<T, REST>(total + d, weight, x + d, row, far, edges);
  for (d += REST * L; d < D; d++) {
    T sum = total[d];
    for (i64 e = 0; e < edges; e++) sum += weight[e] * x[far[e] * row + d];
    total[d] = sum;
  }
}

// The products of a tile. N: others in a tile, a multiple of a vector.

// s[m][n] = sum over d of a[m][d] * b[d][n]
template <class T, int R, int N>
inline void inner_rows(T* s, const T* a, i64 row, const T* b, int D) {
  typedef typename Vector<T>::type V;
  constexpr int L = LANES<T>, WIDE = N < L * DEEP ? N : L * DEEP, K = WIDE / L;
  for (int n = 0; n < N; n += WIDE) {
    V sum[R][K] = {};
    for (int d = 0; d < D; d++) {
      V each[K];
      for (int k = 0; k < K; k++) each[k] = load(b + d * N + n + k * L);
      for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++) sum[r][k] += a[r * row + d] * each[k];
    }
    for (int r = 0; r < R; r++)
      for (int k = 0; k < K; k++) store(s + r * N + n + k * L, sum[r][k]);
  }
}
template <class T, int N>
inline void inner(T* s, const T* a, i64 row, const T* b, int D, int rows) {
  int m = 0;
  for (; m + 4 <= rows; m += 4) inner_rows<T, 4, N>(s + m * N, a + m * row, row, b, D);
  for (; m < rows; m++) inner_rows<T, 1, N>(s + m * N, a + m * row, row, b, D);
}

// total[m][d] += sum over n of weight[m][n] * x[n][d]
template <class T, int R, int N, int K>
inline void weighted_columns(T* total, i64 wide, const T* weight, const T* x, int D) {
  typedef typename Vector<T>::type V;
  constexpr int L = LANES<T>;
  V sum[R][K];
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k++) sum[r][k] = load(total + r * wide + k * L);
  for (int n = 0; n < N; n++) {
    V each[K];
    for (int k = 0; k < K; k++) each[k] = load(x + n * D + k * L);
    for (int r = 0; r < R; r++)
      for (int k = 0; k < K; k++) sum[r][k] += weight[r * N + n] * each[k];
  }
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k++) store(total + r * wide + k * L, sum[r][k]);
}
template <class T, int R, int N, int D>
inline void weighted_rows(T* total, i64 wide, const T* weight, const T* x) {
  constexpr int L = LANES<T>, WIDE = L * DEEP;
  int d = 0;
  for (; d + WIDE <= D; d += WIDE) weighted_columns<T, R, N, DEEP>(total + d, wide, weight, x + d, D);
  for (; d + L <= D; d += L) weighted_columns<T, R, N, 1>(total + d, wide, weight, x + d, D);
  for (; d < D; d++)
    for (int r = 0; r < R; r++) {
      T sum = total[r * wide + d];
      for (int n = 0; n < N; n++) sum += weight[r * N + n] * x[n * D + d];
      total[r * wide + d] = sum;
    }
}
template <class T, int N, int D>
inline void weighted(T* total, i64 wide, const T* weight, const T* x, int rows) {
  int m = 0;
  for (; m + 4 <= rows; m += 4) weighted_rows<T, 4, N, D>(total + m * wide, wide, weight + m * N, x);
  for (; m < rows; m++) weighted_rows<T, 1, N, D>(total + m * wide, wide, weight + m * N, x);
}
// the same of one row, and of its edges alone: pairs that are none let nothing through
template <class T, int N, int D>
inline void weighted_some(T* total, const T* weight, const T* x, const unsigned char* live) {
  for (int n = 0; n < N; n++)
    if (live[n]) {
      T w = weight[n];
      for (int d = 0; d < D; d++) total[d] += w * x[n * D + d];
    }
}

}  // namespace tiga
