// Backward of LayerNorm or RMSNorm, plus the residual gradient, and the cast of the sum to E5M2 with its column
// sums. The norm's input gradient is the output gradient of the linear layer in front of it.
//
// An element moves 10 bytes of HBM (PARTS = 1): gradient, x and residual gradient are read, and the sum is written in
// BF16 and in two FP8 layouts. Two separate kernels move 12 and need one launch more. A norm needs whole rows, and a
// transposed store needs many of them. 32 rows of FP8 therefore stay in shared memory until all have come; a tile of
// Triton's cannot hold as many. (16 rows would fill half a sector of each column: measured slower than two kernels.)
//
// Bulk copies load rows, STAGES ahead. GROUPS groups of ROW_THREADS threads take one row each. A thread always takes
// the same columns, so its column sums stay in registers. kernels/extension.py compiles this file; it needs no header.

#ifndef COLUMNS
// TRANSPOSED: both layouts, TILE_ROWS is 32; else rows alone, TILE_ROWS is GROUPS. PARTS: summands of the gradient.
#error "define COLUMNS, ROW_THREADS, GROUPS, TILE_ROWS, STAGES, PARTS, TRANSPOSED, IS_RMS, HAS_BIAS, HAS_RESIDUAL"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = ROW_THREADS * GROUPS;
constexpr int VECTORS = COLUMNS / (ROW_THREADS * 8);  // of 8 columns, a thread's
constexpr int WARPS_A_ROW = ROW_THREADS / 32;
constexpr int ROWS_A_GROUP = TILE_ROWS / GROUPS;
constexpr int WORDS = COLUMNS / 4;  // of four FP8 values, in a row
constexpr u32 ROW_BYTES = COLUMNS * 2;
constexpr float CLAMPED_ABOVE = 61440.0f;  // half a unit beyond the largest E5M2
constexpr int NUM_SUMS = 3;  // norm weight, norm bias, the result's columns

static_assert(VECTORS * ROW_THREADS * 8 == COLUMNS && ROW_THREADS % 32 == 0, "a thread has whole vectors");
static_assert(ROWS_A_GROUP * GROUPS == TILE_ROWS, "whole rows");
static_assert(!TRANSPOSED || TILE_ROWS == 32, "whole sectors");
static_assert(!TRANSPOSED || WORDS % 32 == 0, "the halves of a tile are in different banks");

// Shared memory: the tile in FP8, the rows that are coming, two values a warp (twice: a fast warp is a row ahead), the
// barriers of the rows.
constexpr int TILE_BYTES = TRANSPOSED ? TILE_ROWS * COLUMNS : 0;
constexpr u32 STAGE_BYTES = (PARTS + 1) * ROW_BYTES;  // a row of each summand, then of x
constexpr int RING_BYTES = GROUPS * STAGES * STAGE_BYTES;
constexpr int SLOTS_BYTES = 2 * GROUPS * WARPS_A_ROW * 8;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void expect_rows(u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE_BYTES) : "memory");
}

__device__ __forceinline__ void copy_row(u32 target, const void* source, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(ROW_BYTES), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void wait_for_rows(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint4 load_once(const uint4* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// The two BF16 of a word; a vector's words are x, y, z, w.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float element(const uint4& v, int i) {
  return i % 2 ? high(word(v, i / 2)) : low(word(v, i / 2));
}

__device__ __forceinline__ u32 to_bf16_pair(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ u32 to_e5m2_pair(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

// Largest magnitude of pairs of BF16, as their bits; a NaN is above infinity.
__device__ __forceinline__ u32 larger_pair(u32 largest, u32 pair) { return __vmaxu2(largest, pair & 0x7fff7fffu); }

// A vector of the sum over the summands' rows, rounded to BF16 as if they had been summed on their own.
__device__ __forceinline__ uint4 sum_of_parts(u32 address) {
  const uint4 first = load_shared(address);
  if (PARTS == 1) return first;
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = element(first, i);
#pragma unroll
  for (int part = 1; part < PARTS; ++part) {
    const uint4 next = load_shared(address + part * ROW_BYTES);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += element(next, i);
  }
  return make_uint4(to_bf16_pair(sum[0], sum[1]), to_bf16_pair(sum[2], sum[3]), to_bf16_pair(sum[4], sum[5]),
                    to_bf16_pair(sum[6], sum[7]));
}

// The position of word `w` of row `r` in the tile: rows 16 to 31 have their words in the other 16 banks.
__device__ __forceinline__ int place(int r, int w) { return r * WORDS + (w ^ (r & 16)); }

// Bytes a0…a3, …, d0…d3 → words (a0 b0 c0 d0), …, (a3 b3 c3 d3).
__device__ __forceinline__ void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32 out[4]) {
  const u32 ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
  const u32 ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab01, cd01, 0x5410);
  out[1] = __byte_perm(ab01, cd01, 0x7632);
  out[2] = __byte_perm(ab23, cd23, 0x5410);
  out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// Write the tile's rows as columns of payload_t [COLUMNS, T]: 16 bytes a thread, of two neighbours one sector.
__device__ __forceinline__ void store_transposed(const u32* tile, u8* payload_t, long T, long first_row) {
  for (int task = threadIdx.x; task < 2 * WORDS; task += THREADS) {
    const int half = task % 2, w = task / 2;
    u32 columns[4][4];
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      const int r = half * 16 + quad * 4;
      u32 out[4];
      transpose_bytes(tile[place(r, w)], tile[place(r + 1, w)], tile[place(r + 2, w)], tile[place(r + 3, w)], out);
#pragma unroll
      for (int c = 0; c < 4; ++c) columns[c][quad] = out[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint4* target = reinterpret_cast<uint4*>(payload_t + (4l * w + c) * T + first_row + half * 16);
      *target = make_uint4(columns[c][0], columns[c][1], columns[c][2], columns[c][3]);
    }
  }
}

// grad BF16 [PARTS, T, COLUMNS], T a multiple of TILE_ROWS; residual_grad (if HAS_RESIDUAL), x, grad_x BF16 [T, COLUMNS];
// weight BF16 [COLUMNS]; mean (unless IS_RMS), rstd FP32 [T]; scale FP32 [1]; payload E5M2 [T, COLUMNS], payload_t (if
// TRANSPOSED) [COLUMNS, T]; sums FP32 [NUM_SUMS, gridDim.x, COLUMNS], to be added up over blocks (without HAS_BIAS the
// norm bias's are zero); amax_out FP32 [1] is raised, unless it is null; to counts FP32 [2], unless it is null, the
// numbers of clamped and of all elements are added.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_backward_quantize(const u16* __restrict__ grad, const u16* __restrict__ residual_grad,
                           const u16* __restrict__ x, const u16* __restrict__ weight, const float* __restrict__ mean,
                           const float* __restrict__ rstd, const float* __restrict__ scale, u16* __restrict__ grad_x,
                           u8* __restrict__ payload, u8* __restrict__ payload_t, float* __restrict__ sums,
                           int* amax_out, float* counts, long T) {
  extern __shared__ __align__(1024) u8 memory[];
  u32* tile = reinterpret_cast<u32*>(memory);
  u8* ring = memory + TILE_BYTES;
  float2* slots = reinterpret_cast<float2*>(ring + RING_BYTES);
  u64* barriers = reinterpret_cast<u64*>(ring + RING_BYTES + SLOTS_BYTES);

  const int group = threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS;
  const int lane = threadIdx.x % 32, warp = thread / 32;
  const int num_tiles = static_cast<int>(T / TILE_ROWS);
  const int own_tiles = (num_tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / gridDim.x;
  const int steps = own_tiles * ROWS_A_GROUP;
  const auto row_of = [&](int step) {
    const long tile_index = blockIdx.x + static_cast<long>(step / ROWS_A_GROUP) * gridDim.x;
    return tile_index * TILE_ROWS + (step % ROWS_A_GROUP) * GROUPS + group;
  };
  const auto column_of = [&](int e) { return (e / 8 * ROW_THREADS + thread) * 8 + e % 8; };
  const auto barrier_of = [&](int stage) { return shared_address(barriers + group * STAGES + stage); };
  const auto stage_of = [&](int stage) { return shared_address(ring) + (group * STAGES + stage) * STAGE_BYTES; };
  const auto fetch = [&](int step, int stage) {
    const long offset = row_of(step) * COLUMNS;
    expect_rows(barrier_of(stage));
    for (int part = 0; part < PARTS; ++part)
      copy_row(stage_of(stage) + part * ROW_BYTES, grad + part * T * COLUMNS + offset, barrier_of(stage));
    copy_row(stage_of(stage) + PARTS * ROW_BYTES, x + offset, barrier_of(stage));
  };

  if (thread == 0) {
    for (int stage = 0; stage < STAGES; ++stage)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_of(stage)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (thread == 0)
    for (int stage = 0; stage < STAGES && stage < steps; ++stage) fetch(stage, stage);

  uint4 w[VECTORS];
  float sum[NUM_SUMS][VECTORS * 8] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    w[v] = load_once(reinterpret_cast<const uint4*>(weight) + v * ROW_THREADS + thread);
  const float inverse = __frcp_rn(*scale);
  u32 largest = 0;

  uint4 next_residual[VECTORS];
  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto fetch_beside = [&](int step) {
    const long r = row_of(step);
    if (HAS_RESIDUAL)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        next_residual[v] =
            load_once(reinterpret_cast<const uint4*>(residual_grad + r * COLUMNS) + v * ROW_THREADS + thread);
    next_rstd = rstd[r];
    if (!IS_RMS) next_mean = mean[r];
  };
  if (steps > 0) fetch_beside(0);

  int stage = 0;
  u32 parity = 0;
  for (int step = 0; step < steps; ++step) {
    const long r = row_of(step);
    uint4 residual[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) residual[v] = next_residual[v];
    const float row_mean = next_mean, row_rstd = next_rstd;
    if (step + 1 < steps) fetch_beside(step + 1);

    wait_for_rows(barrier_of(stage), parity);
    float normalized[VECTORS * 8], weighted[VECTORS * 8];
    float along = 0.0f, across = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const u32 at = stage_of(stage) + (v * ROW_THREADS + thread) * 16;
      const uint4 g4 = sum_of_parts(at), x4 = load_shared(at + PARTS * ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int e = v * 8 + i;
        const float g = element(g4, i);
        normalized[e] = (IS_RMS ? element(x4, i) : element(x4, i) - row_mean) * row_rstd;
        sum[0][e] += g * normalized[e];
        if (HAS_BIAS) sum[1][e] += g;
        weighted[e] = g * element(w[v], i);
        along += normalized[e] * weighted[e];
        if (!IS_RMS) across += weighted[e];
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      along += __shfl_xor_sync(0xffffffffu, along, offset);
      if (!IS_RMS) across += __shfl_xor_sync(0xffffffffu, across, offset);
    }
    float2* row_slots = slots + ((step & 1) * GROUPS + group) * WARPS_A_ROW;
    if (lane == 0) row_slots[warp] = make_float2(along, across);
    meet(1 + group, ROW_THREADS);
    // All reads of this stage are done.
    if (thread == 0 && step + STAGES < steps) fetch(step + STAGES, stage);
    along = across = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS_A_ROW; ++i) {
      along += row_slots[i].x;
      across += row_slots[i].y;
    }
    along *= 1.0f / COLUMNS;
    across *= 1.0f / COLUMNS;

    const int tile_row = static_cast<int>(r % TILE_ROWS);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      u32 sixteen[4], eight[2];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int e = v * 8 + pair * 2 + i;
          value[i] = weighted[e] - normalized[e] * along;
          if (!IS_RMS) value[i] -= across;
          value[i] *= row_rstd;
          if (HAS_RESIDUAL) value[i] += element(residual[v], pair * 2 + i);
        }
        const u32 rounded = to_bf16_pair(value[0], value[1]);
        sixteen[pair] = rounded;
        largest = larger_pair(largest, rounded);
        sum[2][v * 8 + pair * 2] += low(rounded);
        sum[2][v * 8 + pair * 2 + 1] += high(rounded);
        const u32 cast = to_e5m2_pair(low(rounded) * inverse, high(rounded) * inverse);
        eight[pair / 2] = pair % 2 ? eight[pair / 2] | cast << 16 : cast;
      }
      const int column = (v * ROW_THREADS + thread) * 8;
      *reinterpret_cast<uint4*>(grad_x + r * COLUMNS + column) =
          make_uint4(sixteen[0], sixteen[1], sixteen[2], sixteen[3]);
      *reinterpret_cast<uint2*>(payload + r * COLUMNS + column) = make_uint2(eight[0], eight[1]);
      if (TRANSPOSED)
        *reinterpret_cast<uint2*>(tile + place(tile_row, column / 4)) = make_uint2(eight[0], eight[1]);
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
    if (TRANSPOSED && step % ROWS_A_GROUP == ROWS_A_GROUP - 1) {
      __syncthreads();
      store_transposed(tile, payload_t, T, r - tile_row);
      __syncthreads();
    }
  }

  // Add up the groups' column sums in the order of the groups. All rows have been read, so their memory is free.
  float* others = reinterpret_cast<float*>(memory);
  if (!TRANSPOSED) __syncthreads();
  if (group > 0)
#pragma unroll
    for (int which = 0; which < NUM_SUMS; ++which)
#pragma unroll
      for (int e = 0; e < VECTORS * 8; ++e)
        others[((group - 1) * NUM_SUMS + which) * COLUMNS + column_of(e)] = sum[which][e];
  __syncthreads();
  if (group == 0)
#pragma unroll
    for (int which = 0; which < NUM_SUMS; ++which) {
      float* target = sums + (static_cast<long>(which) * gridDim.x + blockIdx.x) * COLUMNS;
#pragma unroll
      for (int e = 0; e < VECTORS * 8; ++e) {
        float total = sum[which][e];
        for (int other = 0; other < GROUPS - 1; ++other)
          total += others[(other * NUM_SUMS + which) * COLUMNS + column_of(e)];
        target[column_of(e)] = total;
      }
    }

  if (amax_out != nullptr) {
    largest = max(largest & 0xffffu, largest >> 16);
    // A thread that clamped something reads its part of the sum again. (A NaN is not clamped, but hides what is.)
    if (counts != nullptr && !(__uint_as_float(largest << 16) * inverse <= CLAMPED_ABOVE)) {
      int clamped = 0;
#pragma unroll 1
      for (int step = 0; step < steps; ++step)
#pragma unroll 1
        for (int v = 0; v < VECTORS; ++v) {
          const uint4 value =
              *reinterpret_cast<const uint4*>(grad_x + row_of(step) * COLUMNS + (v * ROW_THREADS + thread) * 8);
#pragma unroll
          for (int i = 0; i < 8; ++i) clamped += fabsf(element(value, i) * inverse) > CLAMPED_ABOVE;
        }
      atomicAdd(counts, static_cast<float>(clamped));
    }
    if (counts != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      atomicAdd(counts + 1, static_cast<float>(T * COLUMNS));
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) atomicMax(amax_out, static_cast<int>(largest << 16));
  }
}
