// All that belongs to single kinds of components; `_triton_components.py` is its counterpart in
// Triton, and has the derivations. KINDS has bit k for kind k of `_components.py`, so every
// `if constexpr` on it is decided at compilation: a kernel has the instructions of its own kinds.
//
// With x the logits and y the reference's, both times log2(e) / T, shifts m and m' near the
// largest, levels log2 sum 2^(x - m), p = 2^(x - m - level), q of the reference, d = ln p - ln q in
// units of ln 2, M = (p + q) / 2, e_t the one-hot target, lse = ln sum exp(logits / T):
//
//                       value                            gradient by the scaled logits
//   ENTROPY             H = level - sum p (x - m)        -p (ln p + H)
//   FORWARD             K = sum p d                      p (d - K)
//   REVERSE             K = -sum q d                     p - q
//   JS                  (sum p ln p/M + q ln q/M) / 2    p (ln p/M - sum p ln p/M) / 2
//   Z_LOSS              lse^2                            2 lse p
//   CROSS_ENTROPY       lse - x_t                        p - e_t

constexpr int ENTROPY = 0, FORWARD = 1, REVERSE = 2, JS = 3, Z_LOSS = 4, CROSS_ENTROPY = 5;
constexpr int KIND_COUNT = 6;
__host__ __device__ constexpr bool has(int kind) { return (KINDS >> kind) & 1; }
constexpr bool LIMITS = has(FORWARD) || has(REVERSE);  // a log ratio may have to be clamped
constexpr bool COMPARES = LIMITS || has(JS);
constexpr int INPUTS = COMPARES ? 2 : 1;
// JS alone needs the reference in the gradient only for log2 p/M, which its middle pass computed.
// It is kept as float16, more precise than the gradient only if that is bfloat16; or as float32.
constexpr bool KEEPS_SHARE = has(JS) && !LIMITS && GZ && !GRAM && !GR && DTYPE != 1;
// Without entropy the gradient needs the logits only for p, which that pass computed as well. In 16
// bits it is kept as float16 times 2^15: with 11 bits of precision from 2e-9 to 1.
constexpr bool KEEPS_P = KEEPS_SHARE && !has(ENTROPY);
constexpr float KEPT_SCALE = DTYPE == 2 ? 1 : 32768;

// Inputs and outputs of a launch; `launch.py` fills the same structure.
struct Problem {
  const element* logits;     // [rows, classes], with `logits_stride`
  const element* reference;
  const long long* targets;  // [rows]
  const float* scale;        // [rows]: factor of each row, 0 for rows that are not read; or null
  float* values;             // [components + 1, rows]: times the factor; last, the weighted total
  element* by_logits;
  element* by_reference;
  double* gram;              // [pairs, warps of the grid]: inner products of the gradients
  long long logits_stride, reference_stride, by_logits_stride, by_reference_stride;
  int rows, classes;
  float inverse_temperature;
  float weights[KIND_COUNT];  // 0 for kinds that are not computed
  float limits[KIND_COUNT];   // of the log ratios, in nats
};

constexpr int NO_CLASS = -(1 << 30);

// 1. Statistics: sums over a part of a row, relative to its own shifts. Merging two parts corrects
// each for the difference of its shift to the common one (online softmax: Milakov & Gimelshein,
// arXiv:1805.02867): sum e (x - m) = sum_i 2^(m_i - m) (moment_i + S_i (m_i - m)).

// Places of the sums, those of the kinds that are there one after the other.
constexpr int SUM = 0;                                // sum e = sum 2^(x - m)
constexpr int SUM_R = SUM + 1;                        // the same of the reference, sum f
constexpr int MOMENT = SUM_R + COMPARES;              // sum e (x - m)
constexpr int CROSS_F = MOMENT + has(ENTROPY);        // sum e d, with d = (x - m) - (y - m')
constexpr int CROSS_R = CROSS_F + has(FORWARD);       // -sum f d
constexpr int SUMS = CROSS_R + has(REVERSE);
constexpr float OVERFLOWING = 1e30f;  // float32 ends at 3e38

struct alignas(16) Statistics {
  float top = -INF, top_r = -INF;  // m, and m' of the reference
  float max_d = 0;                 // max |d|
  float sums[5] = {};

  DEVICE void add(float x, float y) {
    const float e = exp2_(x);
    sums[SUM] += e;
    if constexpr (has(ENTROPY)) sums[MOMENT] = fmaf(e, x, sums[MOMENT]);
    if constexpr (COMPARES) {
      const float f = exp2_(y);
      sums[SUM_R] += f;
      if constexpr (LIMITS) {
        const float d = x - y;
        if constexpr (has(FORWARD)) sums[CROSS_F] = fmaf(e, d, sums[CROSS_F]);
        if constexpr (has(REVERSE)) sums[CROSS_R] = fmaf(-f, d, sums[CROSS_R]);
        max_d = fmaxf(max_d, fabsf(d));
      }
    }
  }

  // Whether a lane's sums are good: no shift too small, and no 0 * -inf.
  DEVICE bool is_finite() const {
    float all = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all += fabsf(sums[i]);
    return all < OVERFLOWING;
  }

  // Store the sums across a warp, whose lanes have the same shifts, where a `Statistics` is.
  DEVICE void store_sums(float* to) const {
    const int lane = threadIdx.x % 32;
    const float largest = LIMITS ? warp_max_positive(max_d) : 0;
    float first;
    if constexpr (SUMS <= 4) {
      first = scattered_sums<(SUMS < 4 ? SUMS : 4)>(sums);
      if (lane > 0 && lane < SUMS) to[3 + lane] = first;
    } else {
      first = warp_sum<32>(sums[0]);
      const float others = scattered_sums<4>(sums + 1);
      if (lane < 4) to[4 + lane] = others;
    }
    if (lane == 0) *(float4*)to = make_float4(top, top_r, largest, first);
  }

  DEVICE void shift_to(float common, float common_r) {
    const float offset = top == -INF ? 0 : top - common;
    const float part = top == -INF ? 0 : exp2_(offset);
    if constexpr (has(ENTROPY)) sums[MOMENT] = part * fmaf(sums[SUM], offset, sums[MOMENT]);
    if constexpr (COMPARES) {
      const float offset_r = top_r == -INF ? 0 : top_r - common_r;
      const float part_r = top_r == -INF ? 0 : exp2_(offset_r);
      const float shift = offset - offset_r;
      if constexpr (has(FORWARD)) sums[CROSS_F] = part * fmaf(sums[SUM], shift, sums[CROSS_F]);
      if constexpr (has(REVERSE))
        sums[CROSS_R] = part_r * fmaf(-sums[SUM_R], shift, sums[CROSS_R]);
      if constexpr (LIMITS) max_d += fabsf(shift);
      sums[SUM_R] *= part_r;
    }
    sums[SUM] *= part;
    top = common, top_r = common_r;
  }

  template <int WIDTH>
  DEVICE void merge() {  // the parts that the lanes of a warp hold, with shifts of their own
    shift_to(warp_max<WIDTH>(top), COMPARES ? warp_max<WIDTH>(top_r) : 0);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = warp_sum<WIDTH>(sums[i]);
    if constexpr (LIMITS) max_d = warp_max<WIDTH>(max_d);
  }
};

// 2. A row: its softmax, and the values and coefficients of its components. Logarithms base 2.

struct alignas(16) Row {
  int row;
  float factor;                         // of the row
  int target;                           // NO_CLASS if it is none
  float top, level, inverse_sum;        // log2 p = x - top - level
  float top_r, level_r, inverse_sum_r;
  float two_lse;
  float h;                              // entropy
  float k_f, mass_f;                    // forward KL, and the mass of p inside the limit
  float k_r, mass_r;                    // reverse KL, and the mass of q inside the limit
  float k_p, k_q;                       // sum p log2 p/M, sum q log2 q/M
  bool no_mass, limited;                // all -inf; a log ratio may exceed the limit

  DEVICE void set(Statistics s, const Problem& in) {
    h = k_f = k_r = k_p = k_q = 0;
    mass_f = mass_r = 1;
    top_r = level_r = inverse_sum_r = 0;
    limited = false;
    softmax(s.top, s.sums[SUM], top, level, inverse_sum, no_mass);
    two_lse = 2 * (top + level) * LN2;
    if constexpr (has(ENTROPY)) h = level - s.sums[MOMENT] * inverse_sum;
    if constexpr (COMPARES) {
      bool no_mass_r;
      softmax(s.top_r, s.sums[SUM_R], top_r, level_r, inverse_sum_r, no_mass_r);
      if constexpr (LIMITS) {
        const float gap = level_r - level;
        float bound = HUGE_RATIO;
        if constexpr (has(FORWARD)) {
          k_f = fmaf(s.sums[CROSS_F], inverse_sum, gap);
          bound = fminf(bound, in.limits[FORWARD] * LOG2E);
        }
        if constexpr (has(REVERSE)) {
          k_r = fmaf(s.sums[CROSS_R], inverse_sum_r, -gap);
          bound = fminf(bound, in.limits[REVERSE] * LOG2E);
        }
        // |log2 p - log2 q| <= |d| + |gap|: an upper bound for all classes of the row.
        limited = s.max_d + fabsf(gap) > bound || no_mass || no_mass_r;
      }
    }
  }

  static DEVICE void softmax(float shift, float total, float& top, float& level, float& inverse,
                             bool& no_mass) {
    top = shift == -INF ? 0 : shift;
    no_mass = total == 0;  // then the sum counts as 1
    level = no_mass ? 0 : log2f(total);
    inverse = no_mass ? 1 : 1 / total;
  }

  // Store the values, each times the row's factor, and then the weighted total.
  DEVICE void store_values(const Problem& in, float target_logit) const {
    const float lse = no_mass ? INF : (top + level) * LN2;
    const float scaled = target_logit * in.inverse_temperature * LOG2E - top;
    const float values[KIND_COUNT] = {
        h * LN2, k_f * LN2, k_r * LN2, max_nan(0.5f * (k_p + k_q) * LN2, 0), lse * lse,
        (level - scaled) * LN2};
    float total = 0;
    int at = row;
#pragma unroll
    for (int kind = 0; kind < KIND_COUNT; kind++) {
      if (!has(kind)) continue;
      total = fmaf(in.weights[kind], values[kind], total);
      in.values[at] = factor * values[kind];
      at += in.rows;
    }
    in.values[at] = factor * total;
  }
};

// Log ratio clamped to the limit, 0 where p = 0; `inside` is 1 where it passes a gradient.
DEVICE float limit_ratio(float p, float d, float limit, float& inside) {
  const float ratio = fminf(fmaxf(d > HUGE_RATIO ? INF : d, -limit), limit);  // HUGE: log 0
  inside = fabsf(d) <= limit ? 1 : 0;
  return p == 0 ? 0 : ratio;
}

// 3. Sums that need p and q themselves: a pass of its own between statistics and gradients.

// Offsets, in log2, that stand for log 0 where no limit is. 2^LEAST_P is 0 and a kept log2 p/M fits
// float16; 2^LEAST_Q is not 0, so that log2 M is finite, and counts for nothing.
constexpr float LEAST_P = -1000, LEAST_Q = -120;

// Shifts of a row's inputs in this pass. p and q are both taken times 2^level, and the sums divided
// by it in the end: the argument of the logarithm, most precise near 1, is near 1 where most of the
// mass is.
template <bool LIMITED>
struct MiddleShifts {
  static constexpr float LEAST = LIMITED ? LOG_ZERO : LEAST_P;
  static constexpr float LEAST_R = LIMITED ? LOG_ZERO : LEAST_Q;
  float log2_scale, top, top_r;
  u32 pair, pair_r;  // of `unpack_clamped`

  DEVICE MiddleShifts(const Row& row, float log2_scale)
      : log2_scale(log2_scale), top(row.top), top_r(row.top_r + (row.level_r - row.level)) {
    pair = LIMITED ? LOG_ZERO_PAIR : bfloat16_pair(LEAST_P, log2_scale, top);
    pair_r = LIMITED ? LOG_ZERO_PAIR : bfloat16_pair(LEAST_Q, log2_scale, top_r);
  }

  DEVICE float of_p(float x) const { return clamped_log2(x, log2_scale, top, LEAST); }
  DEVICE float of_q(float y) const { return clamped_log2(y, log2_scale, top_r, LEAST_R); }
};

struct alignas(16) MiddleSums {
  // Only for rows that are limited: forward KL and the mass of p outside of the limit (1 minus it
  // is exact where nothing is), and the same of reverse KL and q.
  float limited[4] = {};
  float js[2] = {};      // sum p log2 p/M, sum q log2 q/M
  float unused[2] = {};  // as large as `Statistics`

  // a and b are as `MiddleShifts` has them; p is 2^a, and the result log2 p/M.
  template <bool LIMITED>
  DEVICE float add(float a, float b, const Problem& in, float& p) {
    const float q = exp2_(b);
    p = exp2_(a);
    float log_share = 0;
    if constexpr (has(JS)) {
      const float mean = 0.5f * (p + q), log_mean = log2_(LIMITED ? fmaxf(mean, TINY) : mean);
      log_share = a - log_mean;
      js[0] = fmaf(p, log_share, js[0]);
      js[1] = fmaf(q, b - log_mean, js[1]);
    }
    if constexpr (LIMITED) {
      float inside;
      limited[0] = fmaf(p, limit_ratio(p, a - b, in.limits[FORWARD] * LOG2E, inside), limited[0]);
      limited[1] = fmaf(p, 1 - inside, limited[1]);
      limited[2] = fmaf(q, limit_ratio(q, b - a, in.limits[REVERSE] * LOG2E, inside), limited[2]);
      limited[3] = fmaf(q, 1 - inside, limited[3]);
    }
    return log_share;
  }

  // Store the sums across a warp where a `MiddleSums` is.
  DEVICE void store_sums(float* to) const {
    const int lane = threadIdx.x % 32;
    if constexpr (LIMITS) {
      const float sum = scattered_sums<4>(limited);
      if (lane < 4) to[lane] = sum;
    }
    if constexpr (has(JS)) {
      const float sum = scattered_sums<2>(js);
      if (lane < 2) to[4 + lane] = sum;
    }
  }

  template <int WIDTH>
  DEVICE void merge() {
#pragma unroll
    for (int i = 0; LIMITS && i < 4; i++) limited[i] = warp_sum<WIDTH>(limited[i]);
#pragma unroll
    for (int i = 0; has(JS) && i < 2; i++) js[i] = warp_sum<WIDTH>(js[i]);
  }

  DEVICE void put_into(Row& row) const {
    const float inverse = row.inverse_sum;
    if constexpr (has(JS)) row.k_p = js[0] * inverse, row.k_q = js[1] * inverse;
    if constexpr (LIMITS) {
      if (row.limited) {
        row.k_f = limited[0] * inverse, row.mass_f = 1 - limited[1] * inverse;
        row.k_r = limited[2] * inverse, row.mass_r = 1 - limited[3] * inverse;
      }
    }
  }
};

// 4a. The total gradient by the logits alone, of a row that is not limited. It is linear in a few
// functions of a class, p (constant + by_a a + by_d d + by_share log2 p/M) + by_q q - e_t, so the
// normalization and all sums of the row go into these factors: an element takes a few fused
// multiply-adds. a = x - m lacks its level, so e = 2^a is 2^level too large; the factors undo it,
// or the scale of a p that was kept.

struct alignas(16) LinearFactors {
  float top, top_r;
  float constant, by_a, by_d, by_q, by_share, level_gap;
  float of_target;
  int target;   // NO_CLASS if it is none
  int limited;  // then these factors do not hold

  DEVICE void set(const Row& row, const Problem& in) {
    const float* w = in.weights;
    const float factor = row.factor * in.inverse_temperature;
    const float of_e = factor * (KEEPS_P ? 1 / KEPT_SCALE : row.inverse_sum);
    top = row.top, top_r = row.top_r, limited = row.limited, target = row.target;
    constant = by_a = by_d = by_q = by_share = level_gap = 0;
    const float gap = COMPARES ? row.level_r - row.level : 0;
    if constexpr (has(ENTROPY)) {
      by_a = -w[ENTROPY] * LN2;
      constant = by_a * (row.h - row.level);
    }
    if constexpr (has(FORWARD)) {
      by_d = w[FORWARD] * LN2;
      constant += by_d * ((has(JS) ? 0 : gap) - row.k_f);
    }
    if constexpr (has(REVERSE)) {
      constant += w[REVERSE];
      by_q = -w[REVERSE] * factor * (has(JS) ? row.inverse_sum : row.inverse_sum_r);
    }
    if constexpr (has(JS)) {
      by_share = 0.5f * w[JS] * LN2 * of_e;
      constant -= 0.5f * w[JS] * LN2 * row.k_p;
      level_gap = gap;  // with JS q is relative to the level of p, since both are added
    }
    if constexpr (has(Z_LOSS)) constant += w[Z_LOSS] * row.two_lse;
    if constexpr (has(CROSS_ENTROPY)) constant += w[CROSS_ENTROPY];
    constant *= of_e, by_a *= of_e, by_d *= of_e;
    of_target = factor * w[CROSS_ENTROPY];
  }

  // a is clamped, b too unless only q is needed. Where they were kept, a is p and `kept_share` is
  // log2 p/M.
  DEVICE float gradient(float a, float b, float kept_share) const {
    const float e = KEEPS_P ? a : exp2_(a);
    float inner = constant, f = 0;
    if constexpr (has(ENTROPY)) inner = fmaf(a, by_a, inner);
    if constexpr (LIMITS || (has(JS) && !KEEPS_SHARE)) {
      if constexpr (has(JS)) b -= level_gap;
      if constexpr (has(REVERSE) || has(JS)) f = exp2_(b);
      if constexpr (has(FORWARD)) inner = fmaf(a - b, by_d, inner);
    }
    if constexpr (has(JS)) {
      const float share = KEEPS_SHARE ? kept_share : a - log2_(fmaxf(0.5f * (e + f), TINY));
      inner = fmaf(share, by_share, inner);
    }
    float total = e * inner;
    if constexpr (has(REVERSE)) total = fmaf(f, by_q, total);
    return total;
  }
};

// 4b. The gradient of each component by itself, for inner products, for the gradient by the
// reference and for limited rows. A kind's gradient is a factor of the row times one of the
// functions below; z-loss and cross-entropy share p (the target is treated separately).

constexpr int OF_P = 0, OF_ENTROPY = 1, OF_FORWARD = 2, OF_REVERSE = 3, OF_JS = 4, FUNCTIONS = 5;
__host__ __device__ constexpr int function_of(int kind) {
  return kind == ENTROPY ? OF_ENTROPY : kind == FORWARD ? OF_FORWARD
       : kind == REVERSE ? OF_REVERSE : kind == JS ? OF_JS : OF_P;
}
__host__ __device__ constexpr bool uses(int function) {
  for (int kind = 0; kind < KIND_COUNT; kind++)
    if (has(kind) && function_of(kind) == function) return true;
  return false;
}
__host__ __device__ constexpr int pair_of(int i, int j, int n) {  // i <= j
  return i * (2 * n - 1 - i) / 2 + j;
}
constexpr int FUNCTION_PAIRS = FUNCTIONS * (FUNCTIONS + 1) / 2;
constexpr int KIND_PAIRS = KIND_COUNT * (KIND_COUNT + 1) / 2;

template <bool LIMITED>
struct EachGradient {
  // The row's |factor| and the normalization go into the shifts of the exponents, its sign into the
  // weights. With JS they do not: its logarithm is most precise near 1 (`MiddleShifts`).
  static constexpr bool SHIFTED = !has(JS);
  const Row& row;
  const Problem& in;
  float factors[KIND_COUNT];   // of the kinds' functions
  float weights[FUNCTIONS];    // of the functions in the total
  float sign;
  float top, top_r;            // shifts of the inputs
  float to_log_p, gap;         // from offset to log2 p + H; from the difference of offsets to d
  float scale;                 // from 2^offset to p, times the row's factor

  DEVICE EachGradient(const Row& row, const Problem& in, float factor)
      : row(row), in(in), factors{-LN2, LN2, 1, 0.5f * LN2, row.two_lse, 1}, weights{} {
    sign = factor < 0 ? -1 : 1;
    const float level_gap = COMPARES ? row.level_r - row.level : 0, size = log2_(fabsf(factor));
    const float shift = SHIFTED ? row.level - size : 0;
    const float shift_r = SHIFTED ? row.level_r - size : level_gap;
    top = row.top + shift, top_r = row.top_r + shift_r;
    to_log_p = row.h - row.level + shift;
    gap = level_gap + shift - shift_r;
    scale = SHIFTED ? 1 : fabsf(factor) * row.inverse_sum;
#pragma unroll
    for (int kind = 0; kind < KIND_COUNT; kind++)
      if (has(kind)) weights[function_of(kind)] += sign * in.weights[kind] * factors[kind];
  }

  // Each function of a class, times the row's |factor|, and the total by the reference.
  DEVICE void compute(float a, float b, float (&g)[FUNCTIONS], float& by_reference) const {
    const float e = exp2_(a), p = SHIFTED ? e : e * scale;
    const float f = COMPARES ? exp2_(b) : 0, q = SHIFTED ? f : f * scale;
    const float d = SHIFTED ? a - b + gap : a - b;
    float mean = 0;
    g[OF_P] = p;
    if constexpr (has(ENTROPY)) g[OF_ENTROPY] = p * (a + to_log_p);
    if constexpr (has(JS)) {
      mean = log2_(fmaxf(0.5f * (e + f), TINY));
      g[OF_JS] = p * (a - mean - row.k_p);
    }
    float inside_f = 1, inside_r = 1, ratio_f = d, ratio_r = -d;
    if constexpr (LIMITED) {
      ratio_f = limit_ratio(p, d, in.limits[FORWARD] * LOG2E, inside_f);
      ratio_r = limit_ratio(q, -d, in.limits[REVERSE] * LOG2E, inside_r);
    }
    if constexpr (has(FORWARD)) {
      g[OF_FORWARD] = p * (ratio_f - row.k_f + (LIMITED ? (inside_f - row.mass_f) * LOG2E : 0));
      if constexpr (LIMITED) g[OF_FORWARD] = p == 0 ? 0 : g[OF_FORWARD];
    }
    if constexpr (has(REVERSE)) g[OF_REVERSE] = LIMITED ? p * row.mass_r - q * inside_r : p - q;
    by_reference = 0;
    if constexpr (has(FORWARD))
      by_reference = in.weights[FORWARD] * (LIMITED ? q * row.mass_f - p * inside_f : q - p);
    if constexpr (has(REVERSE)) {
      float inner = q * (ratio_r - row.k_r + (LIMITED ? (inside_r - row.mass_r) * LOG2E : 0));
      if constexpr (LIMITED) inner = q == 0 ? 0 : inner;
      by_reference = fmaf(in.weights[REVERSE] * LN2, inner, by_reference);
    }
    if constexpr (has(JS))
      by_reference = fmaf(0.5f * LN2 * in.weights[JS], q * (b - mean - row.k_q), by_reference);
    by_reference *= sign;
  }

  DEVICE float total(const float (&g)[FUNCTIONS]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < FUNCTIONS; i++)
      if (uses(i)) sum = fmaf(weights[i], g[i], sum);
    return sum;
  }

  DEVICE void multiply(const float (&g)[FUNCTIONS], float (&products)[FUNCTION_PAIRS]) const {
#pragma unroll
    for (int i = 0; i < FUNCTIONS; i++)
#pragma unroll
      for (int j = i; j < FUNCTIONS; j++) {
        if (!uses(i) || !uses(j)) continue;
        float& sum = products[pair_of(i, j, FUNCTIONS)];
        sum = fmaf(g[i], g[j], sum);
      }
  }

  // Inner products of the functions, summed over a thread's classes, go into those of the kinds.
  DEVICE void add_products(const float (&products)[FUNCTION_PAIRS],
                           float (&gram)[KIND_PAIRS]) const {
#pragma unroll
    for (int i = 0; i < KIND_COUNT; i++)
#pragma unroll
      for (int j = i; j < KIND_COUNT; j++) {
        if (!has(i) || !has(j)) continue;
        const int f = function_of(i), g = function_of(j), low = f < g ? f : g, high = f < g ? g : f;
        const float product = products[pair_of(low, high, FUNCTIONS)];
        float& sum = gram[pair_of(i, j, KIND_COUNT)];
        sum = fmaf(factors[i] * factors[j], product, sum);
      }
  }

  // The target's share of the inner products: there cross-entropy has p - 1 in place of p.
  DEVICE void add_target(const float (&g)[FUNCTIONS], float factor,
                         float (&gram)[KIND_PAIRS]) const {
    factor = fabsf(factor);
#pragma unroll
    for (int i = 0; i < KIND_COUNT; i++)
#pragma unroll
      for (int j = i; j < KIND_COUNT; j++) {
        if (!has(i) || !has(j)) continue;
        const float first = factors[i] * g[function_of(i)] - (i == CROSS_ENTROPY ? factor : 0);
        const float second = factors[j] * g[function_of(j)] - (j == CROSS_ENTROPY ? factor : 0);
        float& sum = gram[pair_of(i, j, KIND_COUNT)];
        sum = fmaf(first, second, sum);
      }
  }
};
