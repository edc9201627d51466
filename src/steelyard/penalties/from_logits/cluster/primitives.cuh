// Instructions, vectors of 16 bytes, and sums across a warp and a cluster.
//
// The source is compiled by NVRTC, which has no headers, so everything is written out here. Macros
// given on the command line: DTYPE (0 bfloat16, 1 float16, 2 float32), CLUSTER (blocks in a
// cluster, at most 16) and WARPS (in a block, without the one that merges).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int THREADS = 32 * WARPS;  // that compute
constexpr float LN2 = 0.6931471805599453f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOG_ZERO = -1e30f;  // stands for log 0: 0 * LOG_ZERO is 0, not NaN
constexpr float HUGE_RATIO = 1e29f;  // a log ratio above it has LOG_ZERO on one side
constexpr float TINY = 1e-37f;      // smallest argument of `log2`, which flushes subnormal numbers
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define DEVICE __device__ __forceinline__

// 1. Functions of one number. Logarithms are to the base 2: the hardware has `ex2` and `lg2`.

DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Maximum that is NaN if one of both is; `fmaxf` would return the other.
DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// `x * log2(e) / T - top`, at least `least`: its product with probability 0 is 0. NaN stays NaN.
// Logits in bfloat16 are clamped already, two at a time (`unpack_clamped`).
DEVICE float clamped_log2(float x, float log2_scale, float top, float least = LOG_ZERO) {
  const float offset = fmaf(x, log2_scale, -top);
  return DTYPE == 0 ? offset : max_nan(offset, least);
}

// 2. Vectors: 16 bytes are VECTOR neighbouring classes.

#if DTYPE == 2
typedef float element;
#else
typedef u16 element;
#endif
constexpr int VECTOR = 16 / sizeof(element);

DEVICE float to_float(element x) {
#if DTYPE == 0
  return __uint_as_float(u32(x) << 16);  // bfloat16 is the upper half of float32
#elif DTYPE == 1
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return x;
#endif
}

DEVICE element from_float(float x) {
#if DTYPE == 0
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#elif DTYPE == 1
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  return x;
#endif
}

DEVICE element negative_infinity() {
#if DTYPE == 0
  return 0xff80;
#elif DTYPE == 1
  return 0xfc00;
#else
  return -INF;
#endif
}

// Element `at` of an array of vectors, as part of a word, which vectors consist of: the compiler
// may assume that pointers to other types point elsewhere.
DEVICE element get_element(const uint4* vectors, int at) {
#if DTYPE == 2
  return __uint_as_float(((const u32*)vectors)[at]);
#else
  return u16(((const u32*)vectors)[at / 2] >> 16 * (at % 2));
#endif
}

DEVICE void set_element(uint4* vectors, int at, element x) {
#if DTYPE == 2
  ((u32*)vectors)[at] = __float_as_uint(x);
#else
  u32* word = (u32*)vectors + at / 2;
  const int shift = 16 * (at % 2);
  *word = (*word & ~(0xffffu << shift)) | u32(x) << shift;
#endif
}

// What stands beside a row in its first and last vector: probability 0. A finite number spares the
// clamps that -inf needs (`add_vectors`); float16 has none that is small enough.
DEVICE element beside_row() {
#if DTYPE == 0
  return 0xf99a;  // -1e35
#elif DTYPE == 1
  return negative_infinity();
#else
  return -1e35f;
#endif
}

DEVICE void unpack_half_floats(u32 word, float& low, float& high) {
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high) : "r"(word));
}

DEVICE u32 pack_half_floats(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE void unpack(uint4 raw, float (&x)[VECTOR]) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE == 0
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#elif DTYPE == 1
    unpack_half_floats(words[i], x[2 * i], x[2 * i + 1]);
#else
    x[i] = __uint_as_float(words[i]);
#endif
  }
}

// As `unpack`, but in bfloat16 at least `least`, a pair of the same number. That of LOG_ZERO_PAIR,
// -1e35, stands for log 0 at any usual temperature.
constexpr u32 LOG_ZERO_PAIR = 0xf99af99au;

DEVICE void unpack_clamped(uint4 raw, float (&x)[VECTOR], u32 least = LOG_ZERO_PAIR) {
#if DTYPE == 0
  u32* words = &raw.x;
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(words[i]) : "r"(least));
#endif
  unpack(raw, x);
}

// Both with clamps or without: a clamp takes an instruction an element or a half, and is needed
// only where a logit of -inf is multiplied with a probability.
template <bool CLAMPS>
DEVICE void unpack_as(uint4 raw, float (&x)[VECTOR]) {
  if constexpr (CLAMPS) unpack_clamped(raw, x);
  else unpack(raw, x);
}

template <bool CLAMPS>
DEVICE float offset(float x, float log2_scale, float top) {
  return CLAMPS ? clamped_log2(x, log2_scale, top) : fmaf(x, log2_scale, -top);
}

// Such a pair for `clamped_log2(x, log2_scale, top)` to be `least` at least, or nearly.
DEVICE u32 bfloat16_pair(float least, float log2_scale, float top) {
  const float x = __fdividef(top + least, log2_scale);
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
  return pair;
}

// Largest number of a vector; NaN is left out.
DEVICE float largest(uint4 raw) {
#if DTYPE == 2
  return fmaxf(fmaxf(__uint_as_float(raw.x), __uint_as_float(raw.y)),
               fmaxf(__uint_as_float(raw.z), __uint_as_float(raw.w)));
#else
  u32 most = raw.x;
  const u32 others[3] = {raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 3; i++) {
#if DTYPE == 0
    asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(others[i]));
#else
    asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(others[i]));
#endif
  }
  return fmaxf(to_float(u16(most)), to_float(u16(most >> 16)));
#endif
}

DEVICE uint4 pack(const float (&x)[VECTOR]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if DTYPE == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
#elif DTYPE == 1
    words[i] = pack_half_floats(x[2 * i], x[2 * i + 1]);
#else
    words[i] = __float_as_uint(x[i]);
#endif
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copy 16 bytes from global to shared memory, without waiting for them.
DEVICE void copy_async(uint4* to, const element* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
               :: "r"(shared_address(to)), "l"(from) : "memory");
}

// Copies form groups. Wait until at most `PENDING` of the last groups of this thread are under way.
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void wait_for_group() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// 3. Warps and clusters. Reductions are over WIDTH lanes; the lanes beyond repeat theirs.

template <int WIDTH, class Number>
DEVICE Number warp_sum(Number x) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

template <int WIDTH>
DEVICE float warp_max(float x) {
#pragma unroll
  for (int o = WIDTH / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// Sums of COUNT numbers across a warp: lane i receives that of number i % PADDED. Each exchange
// halves the numbers of a lane, so that four numbers take 6 shuffles in place of 20.
template <int COUNT>
DEVICE float scattered_sums(const float* numbers) {
  constexpr int PADDED = COUNT > 2 ? 4 : COUNT;
  static_assert(COUNT >= 1 && COUNT <= 4, "");
  float x[PADDED];
#pragma unroll
  for (int i = 0; i < PADDED; i++) x[i] = i < COUNT ? numbers[i] : 0;
#pragma unroll
  for (int half = PADDED / 2; half; half /= 2) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float kept = upper ? x[i + half] : x[i], sent = upper ? x[i] : x[i + half];
      x[i] = kept + __shfl_xor_sync(~0u, sent, half);
    }
  }
#pragma unroll
  for (int o = PADDED; o < 32; o *= 2) x[0] += __shfl_xor_sync(~0u, x[0], o);
  return x[0];
}

// Maximum of numbers >= 0 across a warp: their bits are ordered as they are. NaN is the largest.
DEVICE float warp_max_positive(float x) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Numbers sent between the blocks of a cluster, without a barrier of all threads: a store to
// another block's shared memory counts its bytes at its mbarrier, where the receiver waits.

DEVICE void init_mbarrier(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

DEVICE void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :: "r"(shared_address(barrier)) : "memory");
}

DEVICE void arrive_and_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Wait until a phase of the barrier is over: the first has `parity` 0, the second 1, and so on.
DEVICE void wait_for(u64* barrier, u32 parity) {  // what this block stored
  asm volatile("{ .reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again; }"
               :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

DEVICE void wait_for_cluster(u64* barrier, u32 parity) {  // what other blocks stored
  asm volatile("{ .reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again; }"
               :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Store four numbers where `to` and `barrier` are, but in the shared memory of block `rank`.
DEVICE void send(float4* to, u64* barrier, u32 rank, float4 x) {
  u32 address, signal;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(signal) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(signal) : "memory");
}
