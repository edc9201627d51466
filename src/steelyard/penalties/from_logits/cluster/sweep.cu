// Every component of a row in one visit to memory: a cluster of blocks holds the row in its shared
// memory while its sums are computed, and then computes the gradient from there.
//
// The gradient needs the sums over its whole row. 128256 classes of bfloat16 and of a reference are
// 512 kB, more than the shared memory of a multiprocessor, but a cluster of 8 blocks holds them in
// 64 kB each. A block has room for SLOTS such parts, of as many rows: while the gradient of one is
// computed, the sums of the next are merged, and the ones after that are copied from memory.
//
// A row is cut into vectors of 16 bytes at addresses that are multiples of 16, so the first and the
// last may be partial. Block r of a cluster has the vectors [r * CAPACITY, (r + 1) * CAPACITY), and
// vector i of a block belongs to thread i % THREADS in every pass: a thread reads only what it
// copied itself. When the last pass has read a vector, its thread copies a later row's over it.
//
// The computing warps of a block run independently of each other:
//
//     for each row k of the cluster:
//       sums of row k + 1        (`statistics`; each warp hands its own to the merging warp)
//       gradient of row k        (`last_pass`, when the merging warp has handed row k out)
//
// With JS and three slots the sums are those of row k + 2; a middle pass over row k + 1 follows.
//
// One more warp merges: first the parts of its block's warps, then, sent between the blocks, those
// of the cluster. All this takes a few microseconds, in which the others compute. Some rows are
// merged twice, after a middle pass: for JS all of them, else those in which a log ratio exceeds
// the limit.
//
// Macros beside those of `primitives.cuh`: KINDS (bits), GZ, GR, GRAM (outputs: the gradients by
// logits and reference, inner products), ALIGNED (all rows begin and end at multiples of 16 bytes),
// CAPACITY (vectors of a block in a slot, for each input), SLOTS (2 or 3), MIN_BLOCKS (on a
// multiprocessor, limits the registers).

constexpr bool GRADIENTS = GZ || GR || GRAM;
constexpr bool PLAIN = GZ && !GR && !GRAM;  // the total gradient alone, by `LinearFactors`
// Rows by which the sums are ahead of the gradient. With JS every row has a middle pass, and two
// merges to hide: it is at row k + 1 when the gradient is at row k and the sums are at row k + 2.
constexpr int AHEAD = has(JS) && SLOTS > 2 ? 2 : 1;
constexpr bool MIDDLE_FIRST = has(JS) && AHEAD == 1;  // no slot is free: before the next row's sums
constexpr int ROWS = 4;  // rows handed out at a time: two, each perhaps merged twice
constexpr int STORING_LANES = 4;  // of a warp, in `store_sums`
constexpr int CLUSTER_LANES = CLUSTER > 8 ? 16 : CLUSTER > 4 ? 8 : CLUSTER > 2 ? 4 : 2;

// What is there twice alternates, since a merge may begin while the one before is still read.
struct Shared {
  float4 of_warps[2][WARPS][2];
  float4 of_blocks[2][CLUSTER][2];
  Row rows[ROWS];
  LinearFactors factors[ROWS];
  u64 warps_done[2], blocks_done[2], row_done[ROWS];
};

// Rare, so not inlined: vectors at other addresses than multiples of 16, or at the array's ends.
__device__ __noinline__ void copy_elements(uint4* to, const element* from, int start, int classes) {
  uint4 vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int lane = 0; lane < VECTOR; lane++) {
    const int at = start + lane;
    set_element(&vector, lane, at >= 0 && at < classes ? from[lane] : beside_row());
  }
  *to = vector;
}

__device__ __noinline__ void store_elements(element* to, uint4 raw, int start, int classes) {
#pragma unroll
  for (int lane = 0; lane < VECTOR; lane++) {
    const int at = start + lane;
    if (at >= 0 && at < classes) to[lane] = get_element(&raw, lane);
  }
}

// Hide the elements [from, to) of vector i, in each input.
__device__ __noinline__ void hide_elements(uint4* slot, int i, int from, int to) {
#pragma unroll
  for (int input = 0; input < INPUTS; input++, slot += CAPACITY) {
    uint4 vector = slot[i];
#pragma unroll
    for (int lane = 0; lane < VECTOR; lane++)
      if (lane >= from && lane < to) set_element(&vector, lane, beside_row());
    slot[i] = vector;
  }
}

// The part of a row that this block holds.
struct Window {
  int row;
  int first;    // class of the block's first element; negative in the first vector of a row
  int vectors;
  const element *logits, *reference;  // at the block's first element
  bool alike;    // whether the reference's vectors begin at the same classes
  bool at_edge;  // of the array, in the first or last row: what surrounds it may be outside

  DEVICE Window(const Problem& in, int row, u32 rank) : row(row) {
    logits = in.logits + row * in.logits_stride;
    reference = COMPARES ? in.reference + row * in.reference_stride : logits;
    // Elements of the first vector that belong to the row before.
    const int before = ALIGNED ? 0 : (u64(logits) & 15) / sizeof(element);
    const int all = (before + in.classes + VECTOR - 1) / VECTOR;
    vectors = max(0, min(CAPACITY, all - int(rank) * CAPACITY));
    first = int(rank) * CAPACITY * VECTOR - before;
    alike = ((u64(reference) ^ u64(logits)) & 15) == 0;
    at_edge = row == 0 || row + 1 == in.rows;
    logits += first, reference += first;
  }

  // Copy vector i, which is at `from` in the logits and at `from_r` in the reference.
  DEVICE void copy(const Problem& in, int i, const element* from, const element* from_r, uint4* x,
                   uint4* y) const {
    const int start = first + i * VECTOR;
    const bool whole = !at_edge || (start >= 0 && start + VECTOR <= in.classes);
    if (ALIGNED || (alike && whole)) {
      copy_async(x, from);
      if constexpr (COMPARES) copy_async(y, from_r);
    } else {
      copy_elements(x, from, start, in.classes);
      if constexpr (COMPARES) copy_elements(y, from_r, start, in.classes);
    }
  }

  // Hide the elements around the row, in the vectors of this thread.
  DEVICE void hide_neighbours(const Problem& in, uint4* slot) const {
    if (ALIGNED) return;
    const int end = in.classes - first;  // of the row, in elements of the window
    const u32 tail = u32(end) / VECTOR;
    if (first < 0 && threadIdx.x == 0) hide_elements(slot, 0, 0, -first);
    if (end > 0 && tail < vectors && tail % THREADS == threadIdx.x && end % VECTOR != 0)
      hide_elements(slot, tail, end % VECTOR, VECTOR);
  }

  // Class from which on vectors of a gradient can be stored whole: none if the row `to`, at the
  // window's first element, is not aligned as the logits are.
  static DEVICE int whole_from(const element* to, int classes) {
    return (u64(to) & 15) == 0 ? 0 : classes;
  }

  // Store vector i of a gradient at `to`. Classes are compared, not indices of vectors: ptxas 13.0
  // was seen to compile `u32(i - (first < 0)) < whole` wrongly, and a neighbour was overwritten.
  DEVICE void store(element* to, const float (&x)[VECTOR], int i, int classes,
                    int whole_from) const {
    const uint4 raw = pack(x);
    const int start = first + i * VECTOR;
    if (ALIGNED || (start >= whole_from && start + VECTOR <= classes)) __stcs((uint4*)to, raw);
    else store_elements(to, raw, start, classes);
  }
};

// The merges of a block, counted by both sides. A merge waits for the parts of all warps and all
// blocks, and they wait for its result before they take part in the next but one: two of everything
// that goes into a merge are enough.
struct Merges {
  Shared& shared;
  const u32 rank;
  u32 count = 0;

  DEVICE u32 half() const { return count & 1; }
  DEVICE u32 parity() const { return count >> 1 & 1; }

  // Computing warps: hand the sums of a warp's lanes to the merging warp.
  template <class Sums>
  DEVICE void hand_in(const Sums& sums) {
    static_assert(sizeof(Sums) == sizeof(float4[2]), "two vectors are sent");
    sums.store_sums((float*)shared.of_warps[half()][threadIdx.x / 32]);
    if (threadIdx.x % 32 < STORING_LANES) arrive(&shared.warps_done[half()]);
    count++;
  }

  // The merging warp: merge all of a cluster's.
  template <class Sums>
  DEVICE Sums merge() {
    const int lane = threadIdx.x % 32;
    wait_for(&shared.warps_done[half()], parity());
    Sums sums = lane < WARPS ? *(Sums*)shared.of_warps[half()][lane] : Sums();
    sums.template merge<32>();
    if constexpr (CLUSTER > 1) {
      u64* barrier = &shared.blocks_done[half()];
      if (lane == 0) arrive_and_expect(barrier, CLUSTER * sizeof(Sums));
      if (lane < CLUSTER) {
        const float4* mine = (const float4*)&sums;
        send(&shared.of_blocks[half()][rank][0], barrier, lane, mine[0]);
        send(&shared.of_blocks[half()][rank][1], barrier, lane, mine[1]);
      }
      wait_for_cluster(barrier, parity());
      const int of = lane % CLUSTER_LANES;
      sums = of < CLUSTER ? *(Sums*)shared.of_blocks[half()][of] : Sums();
      sums.template merge<CLUSTER_LANES>();
    }
    return sums;
  }

  // The merging warp: hand the row out; it is complete if no middle pass follows.
  DEVICE void hand_out(const Row& row, const Problem& in, bool complete) {
    if (threadIdx.x % 32 == 0) {
      shared.rows[count % ROWS] = row;
      if (PLAIN && complete) shared.factors[count % ROWS].set(row, in);
      arrive(&shared.row_done[count % ROWS]);
    }
    count++;
  }

  // Computing warps: wait for the row that merge `number` gave.
  DEVICE const Row& row(u32 number) const {
    wait_for(&shared.row_done[number % ROWS], number / ROWS & 1);
    return shared.rows[number % ROWS];
  }

  DEVICE const LinearFactors& factors(u32 number) const { return shared.factors[number % ROWS]; }
};

// Add a warp's vectors to its statistics, which have their shifts. In bfloat16 a clamp (`CLAMPS`)
// takes an instruction an element, and is needed only if a logit is -inf.
template <bool CLAMPS>
DEVICE void add_vectors(Statistics& s, const uint4* x, const uint4* y, int vectors,
                        float log2_scale) {
  const float shift = CLAMPS && s.top == -INF ? 0 : s.top;
  const float shift_r = CLAMPS && s.top_r == -INF ? 0 : s.top_r;
#pragma unroll 1
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    float a[VECTOR], b[VECTOR];
    unpack_as<CLAMPS>(x[i], a);
    if constexpr (COMPARES) unpack_as<CLAMPS>(y[i], b);
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
      s.add(offset<CLAMPS>(a[k], log2_scale, shift),
            COMPARES ? offset<CLAMPS>(b[k], log2_scale, shift_r) : 0);
  }
}

// Rare, so not inlined: the shifts are the true maxima, and every logit may be -inf.
__device__ __noinline__ Statistics exact_statistics(const uint4* x, const uint4* y, int vectors,
                                                    float log2_scale) {
  Statistics s;
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    s.top = fmaxf(s.top, largest(x[i]));
    if constexpr (COMPARES) s.top_r = fmaxf(s.top_r, largest(y[i]));
  }
  s.top = warp_max<32>(s.top) * log2_scale, s.top_r = warp_max<32>(s.top_r) * log2_scale;
  add_vectors<true>(s, x, y, vectors, log2_scale);
  return s;
}

// Statistics of a lane's vectors. The shift, the same in a warp, is the largest number of its first
// vector: that takes no pass of its own. It is good enough unless the sum overflows (which takes a
// logit that is larger by 70) or a logit is -inf; then the warp does it again.
DEVICE Statistics statistics(const uint4* x, const uint4* y, int vectors, float log2_scale) {
  Statistics s;
  float top = -INF, top_r = -INF;
  if (threadIdx.x < vectors) {
    top = largest(x[threadIdx.x]);
    if constexpr (COMPARES) top_r = largest(y[threadIdx.x]);
  }
  s.top = __shfl_sync(~0u, top, 0) * log2_scale;
  if constexpr (COMPARES) s.top_r = __shfl_sync(~0u, top_r, 0) * log2_scale;
  add_vectors<false>(s, x, y, vectors, log2_scale);
  if (!__all_sync(~0u, s.is_finite())) s = exact_statistics(x, y, vectors, log2_scale);
  return s;
}

// Numbers of the middle pass that are kept for the gradient, in place of logits and reference.
DEVICE uint4 pack_kept(const float (&x)[VECTOR]) {
#if DTYPE == 2
  return pack(x);
#else
  return make_uint4(pack_half_floats(x[0], x[1]), pack_half_floats(x[2], x[3]),
                    pack_half_floats(x[4], x[5]), pack_half_floats(x[6], x[7]));
#endif
}

DEVICE void unpack_kept(uint4 raw, float (&x)[VECTOR]) {
#if DTYPE == 2
  unpack(raw, x);
#else
  unpack_half_floats(raw.x, x[0], x[1]);
  unpack_half_floats(raw.y, x[2], x[3]);
  unpack_half_floats(raw.z, x[4], x[5]);
  unpack_half_floats(raw.w, x[6], x[7]);
#endif
}

DEVICE float kept_to_float(element x) {
#if DTYPE == 2
  return x;
#else
  float kept, other;
  unpack_half_floats(x, kept, other);
  return kept;
#endif
}

template <bool LIMITED>
DEVICE MiddleSums middle_sums(uint4* x, uint4* y, int vectors, const Row& row, const Problem& in,
                              float log2_scale) {
  MiddleSums sums;
  const MiddleShifts<LIMITED> shifts(row, log2_scale);
  const float kept_scale = row.inverse_sum * KEPT_SCALE;
#pragma unroll 1
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    float a[VECTOR], b[VECTOR], p[VECTOR], share[VECTOR];
    unpack_clamped(x[i], a, shifts.pair);
    unpack_clamped(y[i], b, shifts.pair_r);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
      share[k] = sums.template add<LIMITED>(shifts.of_p(a[k]), shifts.of_q(b[k]), in, p[k]);
      p[k] *= kept_scale;
    }
    if constexpr (KEEPS_SHARE) y[i] = pack_kept(share);
    if constexpr (KEEPS_P) x[i] = pack_kept(p);
  }
  return sums;
}

// The total gradient by the logits of a class, by `LinearFactors`.
struct TotalGradient {
  static constexpr bool CLAMPS = has(ENTROPY) || has(FORWARD) || has(JS);
  static constexpr bool CLAMPS_R = has(FORWARD) || has(JS);
  const LinearFactors factors;
  const float log2_scale;

  DEVICE void unpack_inputs(uint4 x, uint4 y, float (&a)[VECTOR], float (&b)[VECTOR]) const {
    if constexpr (KEEPS_P) unpack_kept(x, a);
    else unpack_as<CLAMPS>(x, a);
    if constexpr (KEEPS_SHARE) unpack_kept(y, b);
    else if constexpr (COMPARES) unpack_as<CLAMPS_R>(y, b);
  }

  DEVICE void compute(float& x, float& y) {
    const float log_p = KEEPS_P ? x : offset<CLAMPS>(x, log2_scale, factors.top);
    float log_q = 0;
    if constexpr (COMPARES && !KEEPS_SHARE) log_q = offset<CLAMPS_R>(y, log2_scale, factors.top_r);
    x = factors.gradient(log_p, log_q, y);
  }

  DEVICE void compute_target(float& x, float& y) {
    compute(x, y);
    x -= factors.of_target;
  }

  DEVICE void finish() {}
};

// Each component's gradient by itself: totals by logits and reference, and inner products.
template <bool LIMITED>
struct SingleGradients {
  static constexpr bool CLAMPS = TotalGradient::CLAMPS || GR || LIMITED;
  static constexpr bool CLAMPS_R = TotalGradient::CLAMPS_R || GR || LIMITED;
  const float log2_scale, factor;
  const EachGradient<LIMITED> each;
  float (&gram)[KIND_PAIRS];
  float products[FUNCTION_PAIRS] = {};

  DEVICE SingleGradients(const Problem& in, const Row& row, float log2_scale,
                         float (&gram)[KIND_PAIRS])
      : log2_scale(log2_scale), factor(row.factor * in.inverse_temperature), each(row, in, factor),
        gram(gram) {}

  DEVICE void unpack_inputs(uint4 x, uint4 y, float (&a)[VECTOR], float (&b)[VECTOR]) const {
    unpack_as<CLAMPS>(x, a);
    if constexpr (COMPARES) unpack_as<CLAMPS_R>(y, b);
  }

  DEVICE void compute(float& x, float& y, float (&g)[FUNCTIONS]) {
    each.compute(offset<CLAMPS>(x, log2_scale, each.top),
                 COMPARES ? offset<CLAMPS_R>(y, log2_scale, each.top_r) : 0, g, y);
    x = each.total(g);
  }

  DEVICE void compute(float& x, float& y) {
    float g[FUNCTIONS];
    compute(x, y, g);
    if constexpr (GRAM) each.multiply(g, products);
  }

  DEVICE void compute_target(float& x, float& y) {
    float g[FUNCTIONS];
    compute(x, y, g);
    x -= factor * each.in.weights[CROSS_ENTROPY];
    if constexpr (GRAM) each.add_target(g, factor, gram);
  }

  DEVICE void finish() {
    if constexpr (GRAM) each.add_products(products, gram);
  }
};

// The target of a row, for cross-entropy: the one class whose gradient is not p times a factor. The
// thread that holds it takes it out of the row, as a class of probability 0, before the last pass,
// and adds its gradient and inner products afterwards.
struct Target {
  int at = -1;  // place in the window, in the thread that holds it
  float x = 0, y = 0;

  DEVICE void take(int target, const Window& here, uint4* xs, uint4* ys) {
    const u32 place = target - here.first, i = place / VECTOR;  // large if it is in another block
    if (i >= here.vectors || i % THREADS != threadIdx.x) return;
    at = place;
    x = KEEPS_P ? kept_to_float(get_element(xs, at)) : to_float(get_element(xs, at));
    set_element(xs, at, KEEPS_P ? element(0) : negative_infinity());
    if constexpr (KEEPS_SHARE) {
      y = kept_to_float(get_element(ys, at));
    } else if constexpr (COMPARES) {
      y = to_float(get_element(ys, at));
      set_element(ys, at, negative_infinity());
    }
  }

  template <class Gradient>
  DEVICE void store(Gradient& gradient, element* to, element* to_r) {
    gradient.compute_target(x, y);
    if constexpr (GZ) to[at] = from_float(x);
    if constexpr (GR) to_r[at] = from_float(y);
  }
};

DEVICE void load(const Problem& in, const Window& window, uint4* x, uint4* y) {
  if (window.row < in.rows)
    for (int i = threadIdx.x; i < window.vectors; i += THREADS)
      window.copy(in, i, window.logits + i * VECTOR, window.reference + i * VECTOR, x + i, y + i);
  end_group();
}

// The last pass: a vector's gradient, and then the copy of a later row's vector in its place.
template <class Gradient>
DEVICE void last_pass(Gradient& gradient, const Problem& in, const Window& here,
                      const Window& later, uint4* x, uint4* y, Target& target) {
  constexpr int STEP = THREADS * VECTOR;  // from a vector of a thread to its next, in elements
  const int mine = threadIdx.x * VECTOR;
  element* const row_to = in.by_logits + here.row * in.by_logits_stride + here.first;
  element* const row_to_r = in.by_reference + here.row * in.by_reference_stride + here.first;
  element *to = row_to + mine, *to_r = row_to_r + mine;
  const int whole = Window::whole_from(row_to, in.classes);
  const int whole_r = Window::whole_from(row_to_r, in.classes);
  const element *from = later.logits + mine, *from_r = later.reference + mine;
  const int loaded = later.row < in.rows ? later.vectors : 0;
  const int most = ALIGNED ? here.vectors : max(here.vectors, loaded);
  auto compute = [&](int i, uint4 of_x, uint4 of_y, int next) {
    float a[VECTOR], b[VECTOR];
    gradient.unpack_inputs(of_x, of_y, a, b);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) gradient.compute(a[k], b[k]);
    if constexpr (GZ) here.store(to + next, a, i, in.classes, whole);
    if constexpr (GR) here.store(to_r + next, b, i, in.classes, whole_r);
  };
  x += threadIdx.x, y += threadIdx.x;
#pragma unroll 1
  for (int i = threadIdx.x; i < most; i += 2 * THREADS) {
    const int j = i + THREADS;  // two vectors at a time, for parallel instructions
    const bool both = j < most;
    const uint4 x0 = x[0], y0 = COMPARES ? y[0] : x0;
    const uint4 x1 = both ? x[THREADS] : x0, y1 = both && COMPARES ? y[THREADS] : x1;
    if (ALIGNED || i < here.vectors) compute(i, x0, y0, 0);
    if (both && (ALIGNED || j < here.vectors)) compute(j, x1, y1, STEP);
    if (i < loaded) later.copy(in, i, from, from_r, x, y);
    if (j < loaded) later.copy(in, j, from + STEP, from_r + STEP, x + THREADS, y + THREADS);
    x += 2 * THREADS, y += 2 * THREADS, to += 2 * STEP, to_r += 2 * STEP;
    from += 2 * STEP, from_r += 2 * STEP;
  }
  end_group();
  if (has(CROSS_ENTROPY) && target.at >= 0) target.store(gradient, row_to, row_to_r);
  gradient.finish();
}

// The rows of a cluster, one after the other. Rows of factor 0 do not count: their values and
// gradients are 0, and they are not read.
struct Rows {
  const Problem& in;
  const int clusters;
  int candidate;
  float factor;  // of the candidate, loaded before it is needed

  DEVICE Rows(const Problem& in) : in(in), clusters(gridDim.x / CLUSTER) {
    candidate = blockIdx.x / CLUSTER;
    look_up();
  }

  DEVICE void look_up() { factor = in.scale && candidate < in.rows ? in.scale[candidate] : 1; }

  // The next row that counts, or one after the last; `skip` is called with those that do not.
  template <class Skip>
  DEVICE int next(float& its_factor, Skip skip) {
    while (factor == 0) {
      skip(candidate);
      candidate += clusters;
      look_up();
    }
    const int found = candidate;
    its_factor = factor;
    if (candidate < in.rows) candidate += clusters;
    look_up();
    return found;
  }
};

DEVICE void store_zeros(const Problem& in, int row, u32 rank) {
  const Window here(in, row, rank);
  element* const to = in.by_logits + row * in.by_logits_stride + here.first;
  element* const to_r = in.by_reference + row * in.by_reference_stride + here.first;
  const int whole = Window::whole_from(to, in.classes);
  const int whole_r = Window::whole_from(to_r, in.classes);
  float zeros[VECTOR] = {};
  for (int i = threadIdx.x; i < here.vectors; i += THREADS) {
    if constexpr (GZ) here.store(to + i * VECTOR, zeros, i, in.classes, whole);
    if constexpr (GR) here.store(to_r + i * VECTOR, zeros, i, in.classes, whole_r);
  }
  if (rank == 0 && threadIdx.x == 0)
    for (int kind = 0, at = row; kind <= KIND_COUNT; kind++)
      if (kind == KIND_COUNT || has(kind)) in.values[at] = 0, at += in.rows;
}

// The merging warp's side of a row.
struct MergedRow {
  Row row;
  float target_logit = NOT_A_NUMBER;  // a target that is no class gives a loss of NaN

  // Merge the statistics of the next row; whether there is one.
  DEVICE bool merge_statistics(const Problem& in, Rows& rows, Merges& merges) {
    row.row = rows.next(row.factor, [](int) {});
    if (row.row >= in.rows) return false;
    row.target = NO_CLASS;
    if constexpr (has(CROSS_ENTROPY)) {
      const long long target = in.targets[row.row];
      target_logit = NOT_A_NUMBER;
      if (target >= 0 && target < in.classes) {
        row.target = int(target);
        const element* logits = in.logits + row.row * in.logits_stride;
        target_logit = to_float(*(volatile const element*)(logits + target));
      }
      // Once this block's part is sent, a gradient may be stored over the logits: the shuffle waits
      // for the number.
      target_logit = __shfl_sync(~0u, target_logit, 0);
    }
    row.set(merges.merge<Statistics>(), in);
    merges.hand_out(row, in, !has_middle());
    return true;
  }

  DEVICE bool has_middle() const { return has(JS) || (LIMITS && row.limited); }

  DEVICE void merge_middle(const Problem& in, Merges& merges) {
    merges.merge<MiddleSums>().put_into(row);
    merges.hand_out(row, in, true);
  }

  DEVICE void store_values(const Problem& in, const Merges& merges) const {
    if (merges.rank == 0 && threadIdx.x % 32 == 0) row.store_values(in, target_logit);
  }
};

// In the order of `compute_rows`.
DEVICE void merge_rows(const Problem& in, Merges& merges) {
  Rows rows(in);
  MergedRow here, next, later;
  bool more = next.merge_statistics(in, rows, merges);
  if constexpr (AHEAD == 1) {
    while (more) {
      here = next;
      if (MIDDLE_FIRST) here.merge_middle(in, merges);
      more = next.merge_statistics(in, rows, merges);
      if (!MIDDLE_FIRST && here.has_middle()) here.merge_middle(in, merges);
      here.store_values(in, merges);
    }
  } else if (more) {
    more = later.merge_statistics(in, rows, merges);
    next.merge_middle(in, merges);
    while (true) {
      here = next, next = later;
      const bool goes_on = more;
      more = more && later.merge_statistics(in, rows, merges);
      if (goes_on) next.merge_middle(in, merges);
      here.store_values(in, merges);
      if (!goes_on) break;
    }
  }
}

// The computing warps.
DEVICE void compute_rows(const Problem& in, uint4* slots, Merges& merges,
                         float (&gram)[KIND_PAIRS]) {
  const u32 rank = merges.rank;
  const float log2_scale = in.inverse_temperature * LOG2E;
  Rows rows(in);
  auto next_row = [&] {
    float factor;
    return rows.next(factor, [&](int row) { store_zeros(in, row, rank); });
  };
  auto slot = [&](int i) { return slots + i * INPUTS * CAPACITY; };
  auto hand_in_statistics = [&](int row, uint4* x) {
    if (row >= in.rows) return;
    const Window window(in, row, rank);
    window.hide_neighbours(in, x);
    const Statistics found = statistics(x, x + CAPACITY, window.vectors, log2_scale);
    if (AHEAD > 1 && merges.count > 1) merges.row(merges.count - 2);  // as `Merges` requires
    merges.hand_in(found);
  };
  auto hand_in_middle = [&](const Row row, const Window& here, uint4* x) {  // a copy of the row
    merges.hand_in(LIMITS && row.limited
                       ? middle_sums<LIMITS>(x, x + CAPACITY, here.vectors, row, in, log2_scale)
                       : middle_sums<false>(x, x + CAPACITY, here.vectors, row, in, log2_scale));
  };
  int queue[SLOTS];  // the row in each slot, the oldest first
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    queue[i] = next_row();
    load(in, Window(in, queue[i], rank), slot(i), slot(i) + CAPACITY);
  }
  auto after = [](int k, int rows) { return k + rows < SLOTS ? k + rows : k + rows - SLOTS; };
  // Merges that give the row at hand, and the next one's statistics if they are ahead by two rows.
  u32 merge = merges.count, merge_of_next = 0;
  wait_for_group<SLOTS - 1>();
  hand_in_statistics(queue[0], slot(0));
  if constexpr (AHEAD > 1) {
    wait_for_group<SLOTS - 2>();
    merge_of_next = merges.count;
    hand_in_statistics(queue[1], slot(1));
    if (queue[0] < in.rows) {
      const Row& row = merges.row(merge);
      merge = merges.count;
      hand_in_middle(row, Window(in, queue[0], rank), slot(0));
    }
  }
  for (int k = 0; queue[0] < in.rows; k = after(k, 1)) {
    const Window here(in, queue[0], rank);
    uint4 *x = slot(k), *y = x + CAPACITY;
    if constexpr (MIDDLE_FIRST) {
      const Row& row = merges.row(merge);
      merge = merges.count;
      hand_in_middle(row, here, x);
    }
    const u32 merge_of_later = merges.count;
    wait_for_group<SLOTS - 1 - AHEAD>();
    hand_in_statistics(queue[AHEAD], slot(after(k, AHEAD)));
    const Row* handed = &merges.row(merge);
    if (LIMITS && !has(JS) && handed->limited) {
      merge = merges.count;
      hand_in_middle(*handed, here, x);
      handed = &merges.row(merge);
    }
    const Row& row = *handed;
#pragma unroll
    for (int i = 0; i + 1 < SLOTS; i++) queue[i] = queue[i + 1];
    queue[SLOTS - 1] = next_row();
    const Window later(in, queue[SLOTS - 1], rank);
    Target target;
    if constexpr (has(CROSS_ENTROPY) && GRADIENTS) target.take(row.target, here, x, y);
    if constexpr (!GRADIENTS) {
      load(in, later, x, y);
    } else if (LIMITS && row.limited) {
      SingleGradients<LIMITS> single(in, row, log2_scale, gram);
      last_pass(single, in, here, later, x, y, target);
    } else if constexpr (PLAIN) {
      TotalGradient total{merges.factors(merge), log2_scale};
      last_pass(total, in, here, later, x, y, target);
    } else {
      SingleGradients<false> single(in, row, log2_scale, gram);
      last_pass(single, in, here, later, x, y, target);
    }
    if constexpr (AHEAD > 1) {
      merge = merges.count;
      if (queue[0] < in.rows)
        hand_in_middle(merges.row(merge_of_next), Window(in, queue[0], rank), slot(after(k, 1)));
      merge_of_next = merge_of_later;
    } else {
      merge = merge_of_later;
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(THREADS + 32, MIN_BLOCKS)
sweep(const __grid_constant__ Problem in) {
  extern __shared__ uint4 slots[];
  __shared__ Shared shared;
  if (threadIdx.x < 2) {
    init_mbarrier(&shared.warps_done[threadIdx.x], WARPS * STORING_LANES);
    init_mbarrier(&shared.blocks_done[threadIdx.x], 1);
    for (int i = threadIdx.x; i < ROWS; i += 2) init_mbarrier(&shared.row_done[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_barrier();  // no block sends to one that has not begun
  Merges merges{shared, CLUSTER > 1 ? cluster_rank() : 0};
  float gram[KIND_PAIRS] = {};
  if (threadIdx.x >= THREADS) {
    merge_rows(in, merges);
    return;
  }
  compute_rows(in, slots, merges, gram);
  if constexpr (GRAM) {
    int pair = 0;
    const int warps = gridDim.x * WARPS, warp = blockIdx.x * WARPS + threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < KIND_COUNT; i++)
#pragma unroll
      for (int j = i; j < KIND_COUNT; j++) {
        if (!has(i) || !has(j)) continue;
        const double sum = warp_sum<32>(double(gram[pair_of(i, j, KIND_COUNT)]));
        if (threadIdx.x % 32 == 0) in.gram[u64(pair) * warps + warp] = sum;
        pair++;
      }
  }
}
