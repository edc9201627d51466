// What remains after a sweep: the sums over rows, the norms and cosines of the terms' gradients,
// and the upstream factor of the backward pass. Each is one small launch, where operations of torch
// would take a dozen: on a GPU each of them costs more than its arithmetic.
//
// Macros: those of `primitives.cuh`.

constexpr int SUM_THREADS = 256;  // of a block of `reduce_rows`
constexpr int MAX_TERMS = 16, MAX_COMPONENTS = 6;

struct Totals {
  const float* values;  // [components + 1, rows]: the components, and the weighted total
  const double* gram;   // [pairs, parts]: parts of the inner products, or null
  float* total;         // sum of the weighted total
  float* reduced;       // [components]: share * sum of each
  double* products;     // [components, components]: share^2 * the Gram matrix
  double share;
  int rows, components, parts;
};

template <class Number>
DEVICE double block_sum(const Number* from, int count) {
  __shared__ double of_warps[SUM_THREADS / 32];
  double sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += SUM_THREADS) sum += double(from[i]);
  sum = warp_sum<32>(sum);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  return warp_sum<SUM_THREADS / 32>(of_warps[threadIdx.x % (SUM_THREADS / 32)]);
}

// Block b has row b of the values or, after them, a pair of components.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
reduce_rows(const __grid_constant__ Totals in) {
  const int n = in.components, block = blockIdx.x;
  if (block <= n) {
    const double sum = block_sum(in.values + u64(block) * in.rows, in.rows);
    if (threadIdx.x != 0) return;
    if (block < n) in.reduced[block] = float(in.share * sum);
    else *in.total = float(sum);
  } else {
    int pair = block - n - 1, i = 0;
    const double sum = block_sum(in.gram + u64(pair) * in.parts, in.parts);
    for (; pair >= n - i; i++) pair -= n - i;  // pairs (0, 0), (0, 1), ..., (1, 1), ...
    const int j = i + pair;
    if (threadIdx.x == 0)
      in.products[i * n + j] = in.products[j * n + i] = in.share * in.share * sum;
  }
}

struct Norms {
  const double* products;  // [components, components]: the Gram matrix G
  double* found;           // [terms]: norms; then the cosines of all pairs but those of the last
  int terms, components;   // the last term is the weighted total
  double shares[MAX_TERMS * MAX_COMPONENTS];  // [terms, components]: S
};

// Thread (i, j) computes the inner product of the gradients of terms i and j, sum S_ik S_jl G_kl. A
// factor of 0 gives 0 even if another term's component is infinite.
extern "C" __global__ void __launch_bounds__(MAX_TERMS* MAX_TERMS)
compare_gradients(const __grid_constant__ Norms in) {
  __shared__ double shares[MAX_TERMS * MAX_COMPONENTS], products[MAX_COMPONENTS * MAX_COMPONENTS];
  __shared__ double inner[MAX_TERMS][MAX_TERMS];
  const int at = threadIdx.x, n = in.components, named = in.terms - 1;
  if (at < in.terms * n) shares[at] = in.shares[at];
  if (at < n * n) products[at] = in.products[at];
  __syncthreads();
  int i = at / MAX_TERMS, j = at % MAX_TERMS;
  if (i < in.terms && j < in.terms) {
    double sum = 0;
    for (int k = 0; k < n; k++)
      for (int l = 0; l < n; l++) {
        const double factor = shares[i * n + k] * shares[j * n + l];
        if (factor != 0) sum += factor * products[k * n + l];
      }
    inner[i][j] = sum;
  }
  __syncthreads();
  auto norm = [&](int term) {
    const double square = inner[term][term];
    return sqrt(square < 0 ? 0 : square);  // NaN stays NaN
  };
  if (at < in.terms) in.found[at] = norm(at);
  int pair = at - in.terms;
  if (pair < 0 || pair >= named * (named - 1) / 2) return;
  for (i = 0; pair >= named - 1 - i; i++) pair -= named - 1 - i;  // (0, 1), (0, 2), ..., (1, 2)
  j = i + 1 + pair;
  const double both = norm(i) * norm(j);
  in.found[at] = both == 0 ? 0 : inner[i][j] / both;
}

struct Factor {
  uint4* x;  // at a multiple of 16 bytes
  const float* factor;
  long long size;
};

// Multiply in place; by 1, the usual factor of a loss, read and write nothing.
extern "C" __global__ void multiply(const __grid_constant__ Factor in) {
  const float factor = *in.factor;
  if (factor == 1) return;
  const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  for (long long i = first; i < in.size / VECTOR; i += gridDim.x * (long long)blockDim.x) {
    float x[VECTOR];
    unpack(in.x[i], x);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) x[k] *= factor;
    in.x[i] = pack(x);
  }
  const long long last = in.size / VECTOR * VECTOR + first;
  if (last < in.size && first < VECTOR) {
    element* x = (element*)in.x + last;
    *x = from_float(to_float(*x) * factor);
  }
}
