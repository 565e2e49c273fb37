// out = Σ_j (a_j b_jᵀ) · scales_a_j · scales_b_j (+ bias) (+ addend) for Hopper, over the blocks j of 128 along K: the
// GEMM of kernels/gemm/reference.py (block_scaled_mm_into_). The tensor core adds up one block. Its sum is then promoted:
// scaled, and added to an FP32 sum in registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
//
// What bounds a tile TILE_M × 128 on one SM, in clocks for one block of 128:
// - Tensor cores do 4,096 multiply-adds a clock: T = 4 · TILE_M. A tile of 192×128 takes T = 768.
// - Promotion is one FFMA an element. The four schedulers issue 128 lanes a clock: T / 4, a quarter of the issue slots.
//   Where both scales are of blocks, their product is one FMUL an element more: T / 2.
//   A warpgroup cannot issue wgmma while it promotes; then others do. With three, the tensor cores have two products
//   queued while one warpgroup promotes.
// - A thread holds 64 sums a wave, and 64 of the block that runs: 128 of 160 registers with three warpgroups of one wave,
//   192 of 232 with two of two.
// - wgmma m64n128k32 reads 2 KB of a and 4 KB of b from shared memory in 64 clocks of 128 bytes: 75%. m64n64k32 would
//   take all of it. Scales of columns are 32 a thread: 3 · 128 · 128 bytes more, if both scales are of blocks.
// - L2 gives an SM about 40 bytes a clock. A tile loads (TILE_M + 128) · 128 bytes in T clocks: 53 a clock at 192×128.
//   (Two blocks that share a's rows, or b's, load less, but wait for one another; they were slower.)
//
// All warpgroups but the last compute; one thread of the last one loads, STAGES blocks ahead. The rows of b (columns of
// the result) come in another order, so that a thread's values are 8 neighbours of a row: 16 bytes in BF16, and of four
// threads whole sectors. So results need no shared memory. kernels/extension.py compiles this file; it needs no header.
// tests/kernels/test_block_gemm.py runs it on a CPU, with the hardware's functions emulated.
//
// GROUPED: a's rows are of experts, each with its own b (grouped_mm of kernels/grouped/gemm_reference.py). Expert e's rows
// are offsets[e] to offsets[e + 1], multiples of 128 that only the device knows. The loading thread finds each tile's
// expert, and tells the others in shared memory, beside the tile's first stage. An expert's last tile may have 64 or 128
// rows; the other warpgroups have no work then, and the tile takes less time.

#ifndef GROUPED
#error "define WARPGROUPS, WAVES, STAGES, A_IS_E5M2, B_IS_E5M2, B_HAS_TILES, OUT_IS_FP32, GROUPED"
#endif

#ifdef __CUDACC__
#define ON_DEVICE __device__ __forceinline__
#else
#define ON_DEVICE static inline
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BLOCK = 128;  // elements and bytes along K
constexpr int TILE_N = 128;
constexpr int WAVE_M = 64;                  // rows of a wgmma
constexpr int WARPGROUP_M = WAVES * WAVE_M;  // rows of a warpgroup
constexpr int TILE_M = WARPGROUPS * WARPGROUP_M;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int WARPS = 4 * WARPGROUPS;  // that compute
constexpr int GROUP = (2048 + TILE_M / 2) / TILE_M;  // rows of tiles whose b is read from L2 together

// A stage of shared memory. Scales of tiles: four, of which one is the block's. Those of experts' tiles are not copied.
constexpr int A_BYTES = TILE_M * BLOCK, B_BYTES = TILE_N * BLOCK;
constexpr int A_SCALE_BYTES = TILE_M * 4;
constexpr int B_SCALE_BYTES = GROUPED ? 0 : B_HAS_TILES ? 16 : TILE_N * 4;
constexpr int TASK_BYTES = GROUPED ? 16 : 0;
constexpr int BARRIERS = STAGES * (A_BYTES + B_BYTES + A_SCALE_BYTES + B_SCALE_BYTES + TASK_BYTES);  // where they begin

static_assert(A_BYTES % 1024 == 0 && TILE_M <= 256, "whole atoms of the swizzle, one copy");

struct Place {
  int m, n;  // the first row and column of a block's tile
};

// A tile of an expert, whose rows end at `end`.
struct Task {
  int m, n, expert, end;  // m < 0: there is no other tile
};

ON_DEVICE int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

ON_DEVICE int num_places(int m, int n) { return tiles_of(m, TILE_M) * tiles_of(n, TILE_N); }

// Tiles go down GROUP rows, then right: those that run at once share rows and columns.
ON_DEVICE Place place_of(int index, int m, int n) {
  const int rows = tiles_of(m, TILE_M), columns = tiles_of(n, TILE_N);
  const int group = index / (GROUP * columns), within = index % (GROUP * columns);
  const int left = rows - group * GROUP, height = left < GROUP ? left : GROUP;
  return {(group * GROUP + within % height) * TILE_M, within / height * TILE_N};
}

// Which of `step` tiles a block takes that has taken `rounds` before: another place in each round, so that no block has
// the short tiles of all experts.
ON_DEVICE int turned(int block, int rounds, int step) { return (block + rounds * 37) % step; }

// Of a thread's sums of a wave: wgmma gives sum[4 g + 2 half + e] of row `lane / 4 + 8 half` of the warp's 16, and of
// column 8 g + 2 (lane % 4) + e of b's rows in shared memory.
ON_DEVICE int row_of(int warpgroup, int wave, int warp, int lane, int half) {
  return warpgroup * WARPGROUP_M + wave * WAVE_M + warp * 16 + lane / 4 + half * 8;
}

// b's row 8 p + 2 q + e of 32 in shared memory is row 8 q + 2 p + e in memory. So lane % 4 = q holds 8 neighbours.
ON_DEVICE int column_of(int quarter, int lane) { return quarter * 32 + lane % 4 * 8; }
ON_DEVICE int sum_of(int quarter, int half, int i) { return quarter * 16 + i / 2 * 4 + half * 2 + i % 2; }

// wgmma's descriptor of K-major rows of 128 bytes, swizzled by 128 bytes: the address, 8 rows = 1,024 bytes apart.
ON_DEVICE u64 descriptor_of(u32 address) {
  return (address >> 4 & 0x3fff) | 1ull << 16 | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}
// Added to a descriptor.
constexpr u64 NEXT_K = 32 >> 4, NEXT_WAVE = WAVE_M * BLOCK >> 4, NEXT_A = A_BYTES >> 4, NEXT_B = B_BYTES >> 4;

// Bytes of the scales of rows from `first` on, of `size` rows, that a tile of `tile` rows reads. None may be left.
ON_DEVICE int scale_bytes(int first, int size, int tile) {
  const int rows = size - first < tile ? size - first : tile;
  return rows > 0 ? rows * 4 : 0;
}

// Where the scales of tiles of block `j` are: the row's four from a multiple of four on.
ON_DEVICE long tile_scales_at(int row, int j, int k) {
  const long stride = (tiles_of(k, BLOCK) + 3) / 4 * 4;
  return row / BLOCK * stride + (j & ~3);
}

#ifdef __CUDACC__

struct alignas(64) TensorMap {
  u64 words[16];
};

ON_DEVICE void start_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

ON_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

ON_DEVICE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

ON_DEVICE void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity)
      : "memory");
}

ON_DEVICE void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

ON_DEVICE void copy_a(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(target), "l"(map), "r"(k), "r"(row), "r"(barrier)
      : "memory");
}

// Rows of b, in the order of `column_of`: the map's dimensions are k, e, q, p, and 32 rows.
ON_DEVICE void copy_b(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %3, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(k), "r"(0), "r"(row / 32), "r"(barrier)
      : "memory");
}

ON_DEVICE void copy_scales(u32 target, const float* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

ON_DEVICE void store_task(u32 address, const Task& task) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(task.m), "r"(task.n), "r"(task.expert),
               "r"(task.end)
               : "memory");
}

ON_DEVICE Task load_task(u32 address) {
  Task task;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(task.m), "=r"(task.n), "=r"(task.expert), "=r"(task.end)
               : "r"(address));
  return task;
}

ON_DEVICE float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

ON_DEVICE float4 load_shared_4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

#define A_FORMAT_0 "e4m3"
#define A_FORMAT_1 "e5m2"
#define JOIN(x, y) x##y
#define FORMAT_OF(flag) JOIN(A_FORMAT_, flag)

#define WGMMA(a, b, adds)                                                                                     \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32." FORMAT_OF(A_IS_E5M2) "." FORMAT_OF(B_IS_E5M2)                \
  " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,"     \
  " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42," \
  " %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}," \
  " " a ", " b ", " adds ", 1, 1;\n"
#define FOUR(kind, i) kind(part[i]), kind(part[i + 1]), kind(part[i + 2]), kind(part[i + 3])
#define SIXTEEN(kind, i) FOUR(kind, i), FOUR(kind, i + 4), FOUR(kind, i + 8), FOUR(kind, i + 12)
#define ALL_64(kind) SIXTEEN(kind, 0), SIXTEEN(kind, 16), SIXTEEN(kind, 32), SIXTEEN(kind, 48)

// part = a_j b_jᵀ of 64 rows, begun: four wgmma, of which the first overwrites.
ON_DEVICE void begin_block(float (&part)[64], u64 a, u64 b) {
  asm volatile(
      "{\n"
      ".reg .pred adds, overwrites;\n"
      "setp.ne.u32 adds, %72, 0;\n"
      "setp.eq.u32 overwrites, %72, 0;\n"
      "wgmma.fence.sync.aligned;\n"
      WGMMA("%64", "%68", "overwrites")
      WGMMA("%65", "%69", "adds")
      WGMMA("%66", "%70", "adds")
      WGMMA("%67", "%71", "adds")
      "wgmma.commit_group.sync.aligned;\n"
      "}"
      : ALL_64("+f")
      : "l"(a), "l"(a + NEXT_K), "l"(a + 2 * NEXT_K), "l"(a + 3 * NEXT_K), "l"(b), "l"(b + NEXT_K), "l"(b + 2 * NEXT_K),
        "l"(b + 3 * NEXT_K), "r"(1)
      : "memory");
}

// The sums are read after this, and not before.
ON_DEVICE void end_block(float (&part)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" : ALL_64("+f")::"memory");
}

// True for one thread of a converged warp.
ON_DEVICE bool is_elected() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred this;\n"
      "elect.sync _|this, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, this;\n"
      "}"
      : "=r"(elected));
  return elected;
}

ON_DEVICE u32 to_bf16_pair(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// A line of memory into L2.
ON_DEVICE void prefetch_line(const u8* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Registers of a thread: the loading warpgroup gives of the launch's 168 or 128 to the others.
#if WARPGROUPS == 2
ON_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
ON_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
#elif WARPGROUPS == 3
ON_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); }
ON_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 160;"); }
#endif

ON_DEVICE u32 shared_memory() {
  extern __shared__ __align__(1024) u8 memory[];
  return static_cast<u32>(__cvta_generic_to_shared(memory));
}

#else
#include "emulated_hopper.h"  // tests/kernels: the functions above, for threads of a CPU
#endif

// sum += part · (scale of the row · scale of the tile), rounded as cuBLASLt rounds it. `part` has ended.
ON_DEVICE void promote(float (&sum)[64], const float (&part)[64], const float (&of_rows)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = __fmaf_rn(part[i], of_rows[i / 2 % 2], sum[i]);
}

// Scales of eight columns.
struct Eight {
  float4 v[2];
};
ON_DEVICE Eight load_eight_scales(u32 address) { return {{load_shared_4(address), load_shared_4(address + 16)}}; }

// sum += (part · scale of the row) · scale of the column, rounded as cuBLASLt rounds it; columns' scales begin at an
// address. `part` has ended, and the first eight are loaded. Eight are loaded while eight are used.
ON_DEVICE void promote(float (&sum)[64], const float (&part)[64], const float (&of_rows)[2], Eight next, u32 of_columns) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    const float scales[8] = {next.v[0].x, next.v[0].y, next.v[0].z, next.v[0].w,
                             next.v[1].x, next.v[1].y, next.v[1].z, next.v[1].w};
    if (quarter < 3) next = load_eight_scales(of_columns + (quarter + 1) * 128);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& total = sum[sum_of(quarter, half, i)];
        total = __fmaf_rn(__fmul_rn(part[sum_of(quarter, half, i)], of_rows[half]), scales[i], total);
      }
  }
}

ON_DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// The two BF16 of a word.
ON_DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
ON_DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Eight values of 2 bytes, at a multiple of 16 bytes or not: a bias may be a part of another tensor.
ON_DEVICE uint4 load_eight(const u8* values) {
  if (reinterpret_cast<u64>(values) % 16 == 0) return *reinterpret_cast<const uint4*>(values);
  const u16* v = reinterpret_cast<const u16*>(values);
  const auto pair = [&](int i) { return v[i] | static_cast<u32>(v[i + 1]) << 16; };
  return make_uint4(pair(0), pair(2), pair(4), pair(6));
}

constexpr int VECTORS = OUT_IS_FP32 ? 2 : 1;  // of 16 bytes in 8 values
constexpr int OUT_BYTES = OUT_IS_FP32 ? 4 : 2;

// Value i of 8 in `out`'s dtype.
ON_DEVICE float value_of(const uint4 (&v)[VECTORS], int i) {
  if (OUT_IS_FP32) return __uint_as_float(word(v[i / 4 % VECTORS], i % 4));
  return i % 2 ? high(word(v[0], i / 2)) : low(word(v[0], i / 2));
}

// Have the addend's tile in L2 when it is needed, at the tile's end. All threads that compute call this.
ON_DEVICE void prefetch_tile(const u8* addend, Place place, int m, int n) {
  constexpr int lines = TILE_N * OUT_BYTES / 128;
  for (int i = threadIdx.x; i < TILE_M * lines; i += 128 * WARPGROUPS) {
    const int row = place.m + i / lines, column = place.n + i % lines * (128 / OUT_BYTES);
    if (row < m && column < n)
      prefetch_line(addend + (static_cast<u64>(row) * n + column) * OUT_BYTES);
  }
}

// The tile's sums of one wave, plus bias and addend, rounded once. The addend, which may be `out`, is read first.
ON_DEVICE void write_wave(const float (&sum)[64], const u8* bias, const u8* addend, u8* out, int first_row,
                          int first_column, int m, int n) {
  const auto is_inside = [&](int half, int quarter) {
    return first_row + half * 8 < m && first_column + quarter * 32 < n;
  };
  const auto offset_of = [&](int half, int quarter) {
    return (static_cast<u64>(first_row + half * 8) * n + first_column + quarter * 32) * OUT_BYTES;
  };
  uint4 added[2][4][VECTORS] = {};
  if (addend != nullptr)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter)
        if (is_inside(half, quarter))
#pragma unroll
          for (int v = 0; v < VECTORS; ++v)
            added[half][quarter][v] = *reinterpret_cast<const uint4*>(addend + offset_of(half, quarter) + v * 16);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    uint4 of_bias = {};
    if (!OUT_IS_FP32 && bias != nullptr && first_column + quarter * 32 < n)
      of_bias = load_eight(bias + (first_column + quarter * 32) * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_inside(half, quarter)) continue;
      float value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[i] = sum[sum_of(quarter, half, i)];
        if (!OUT_IS_FP32) value[i] += i % 2 ? high(word(of_bias, i / 2)) : low(word(of_bias, i / 2));
        value[i] += value_of(added[half][quarter], i);
      }
      uint4* target = reinterpret_cast<uint4*>(out + offset_of(half, quarter));
      if (OUT_IS_FP32)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
          target[v] = make_uint4(__float_as_uint(value[v * 4]), __float_as_uint(value[v * 4 + 1]),
                                 __float_as_uint(value[v * 4 + 2]), __float_as_uint(value[v * 4 + 3]));
      else
        *target = make_uint4(to_bf16_pair(value[0], value[1]), to_bf16_pair(value[2], value[3]),
                             to_bf16_pair(value[4], value[5]), to_bf16_pair(value[6], value[7]));
    }
  }
}

// map_a: a FP8 [m, k], boxes of TILE_M × 128; map_b: b FP8 [n, k] in the order of `copy_b`, 128 rows × 128. Scales as
// in kernels/quantize/blocks.py. bias BF16 [n], or null; with an FP32 out it is not read. addend, or null, and out:
// [m, n], BF16 or FP32. m and k are multiples of 16, n of 32.
//
// GROUPED: b is [num_experts, n, k]; boxes of a are of 64 rows; offsets: int32 [num_experts + 1]. Scales of b's tiles:
// `expert_stride` from expert to expert, `row_stride` from 128 of n to the next, `block_stride` from 128 of k to the next.
// n and k are multiples of 128, m of 64. bias and addend are not read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    block_scaled_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                      const float* __restrict__ scales_a, const float* __restrict__ scales_b, const u8* bias,
                      const u8* addend, u8* out, int m, int n, int k
#if GROUPED
                      ,
                      const int* __restrict__ offsets, int num_experts, int expert_stride, int row_stride,
                      int block_stride
#endif
    ) {
  const u32 stages_a = shared_memory(), stages_b = stages_a + STAGES * A_BYTES;
  const u32 stages_scale_a = stages_b + STAGES * B_BYTES, stages_scale_b = stages_scale_a + STAGES * A_SCALE_BYTES;
  [[maybe_unused]] const u32 stages_task = stages_scale_b + STAGES * B_SCALE_BYTES;
  const u32 full = stages_a + BARRIERS, empty = full + STAGES * 8;

  const int warp_of_block = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp_of_block / 4;
  [[maybe_unused]] const int num_tiles = num_places(m, n);
  const int num_blocks = tiles_of(k, BLOCK);
  const int first_tile = blockIdx.x, step = gridDim.x;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      start_barrier(full + stage * 8, 1);
      start_barrier(empty + stage * 8, WARPS);
    }
    publish_barriers();
  }
  __syncthreads();

  int stage = 0;
  u32 parity = 0;
  if (warpgroup == WARPGROUPS) {
    give_registers();
    if (warp_of_block == WARPS && is_elected()) {
#if !GROUPED
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const Place place = place_of(tile, m, n);
        const u32 bytes_a = scale_bytes(place.m, m, TILE_M);
        const u32 bytes_b = B_HAS_TILES ? 16 : scale_bytes(place.n, n, TILE_N);
#pragma unroll 1
        for (int j = 0; j < num_blocks; ++j) {
          const u32 barrier = full + stage * 8;
          wait_for(empty + stage * 8, parity ^ 1);
          expect_bytes(barrier, A_BYTES + B_BYTES + bytes_a + bytes_b);
          copy_a(stages_a + stage * A_BYTES, &map_a, j * BLOCK, place.m, barrier);
          copy_b(stages_b + stage * B_BYTES, &map_b, j * BLOCK, place.n, barrier);
          copy_scales(stages_scale_a + stage * A_SCALE_BYTES, scales_a + static_cast<long>(j) * m + place.m, bytes_a,
                      barrier);
          copy_scales(stages_scale_b + stage * B_SCALE_BYTES,
                      scales_b + (B_HAS_TILES ? tile_scales_at(place.n, j, k) : static_cast<long>(j) * n + place.n),
                      bytes_b, barrier);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
#else
      const auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
      };
      int expert = 0, index = first_tile;  // of the expert's tiles
      for (int round = 0, turn = first_tile;; ++round) {
        int start = offsets[expert], stop = offsets[expert + 1];
        for (int tiles; index >= (tiles = num_places(stop - start, n)); index -= tiles) {
          if (++expert == num_experts) break;
          start = stop, stop = offsets[expert + 1];
        }
        if (expert == num_experts) break;
        Place place = place_of(index, stop - start, n);
        place.m += start;
        const int next = turned(first_tile, round + 1, step);
        index += step + next - turn, turn = next;
        const u32 bytes_of_scales = scale_bytes(place.m, stop, TILE_M);
        const int waves = tiles_of(stop - place.m, WAVE_M) < WARPGROUPS * WAVES ? tiles_of(stop - place.m, WAVE_M)
                                                                                : WARPGROUPS * WAVES;
        wait_for(empty + stage * 8, parity ^ 1);
        store_task(stages_task + stage * TASK_BYTES, {place.m, place.n, expert, stop});
#pragma unroll 1
        for (int j = 0; j < num_blocks; ++j) {
          const u32 barrier = full + stage * 8;
          wait_for(empty + stage * 8, parity ^ 1);
          expect_bytes(barrier, waves * WAVE_M * BLOCK + B_BYTES + bytes_of_scales);
          for (int wave = 0; wave < waves; ++wave)
            copy_a(stages_a + stage * A_BYTES + wave * WAVE_M * BLOCK, &map_a, j * BLOCK, place.m + wave * WAVE_M,
                   barrier);
          copy_b(stages_b + stage * B_BYTES, &map_b, j * BLOCK, expert * n + place.n, barrier);
          copy_scales(stages_scale_a + stage * A_SCALE_BYTES, scales_a + static_cast<long>(j) * m + place.m,
                      bytes_of_scales, barrier);
          advance();
        }
      }
      wait_for(empty + stage * 8, parity ^ 1);
      store_task(stages_task + stage * TASK_BYTES, {-1, 0, 0, 0});
      arrive_at(full + stage * 8);
#endif
    }
  } else {
    take_registers();
    const int lane = threadIdx.x % 32, warp = warp_of_block % 4;
    const u32 of_rows_at = stages_scale_a + row_of(warpgroup, 0, warp, lane, 0) * 4;
    const u64 first_a = descriptor_of(stages_a) + warpgroup * WAVES * NEXT_WAVE, first_b = descriptor_of(stages_b);
    u64 a = first_a, b = first_b;  // of `stage`
    const auto release = [&](int of) {
      __syncwarp();
      if (lane == 0) arrive_at(empty + of * 8);
    };
    const auto advance = [&] {
      a += NEXT_A, b += NEXT_B;
      if (++stage == STAGES) stage = 0, parity ^= 1, a = first_a, b = first_b;
    };
    if (GROUPED || first_tile < num_tiles) wait_for(full, 0);
    for (int tile = first_tile; GROUPED || tile < num_tiles; tile += step) {
#if GROUPED
      const Task task = load_task(stages_task + stage * TASK_BYTES);
      if (task.m < 0) break;
      const Place place = {task.m, task.n};
      const int end = task.end;
      const float* const tiles = scales_b + static_cast<long>(task.expert) * expert_stride + task.n / BLOCK * row_stride;
      const bool computes = place.m + warpgroup * WARPGROUP_M < end;
      if (!computes)
#pragma unroll 1
        for (int j = 0; j < num_blocks; ++j) {
          release(stage);
          advance();
          wait_for(full + stage * 8, parity);
        }
      const int computed = computes ? num_blocks : 0;
#else
      const Place place = place_of(tile, m, n);
      const int end = m, computed = num_blocks;
      if (addend != nullptr) prefetch_tile(addend, place, m, n);
#endif
      float sum[WAVES][64] = {};
#pragma unroll 1
      for (int j = 0; j < computed; ++j) {
        // This stage is full. Whatever else a block needs is done while its wgmma run, also the wait for the next stage.
        const bool has_next = GROUPED || j + 1 < num_blocks || tile + step < num_tiles;
        float part[64];
        begin_block(part, a, b);
        const int used = stage;
        const u32 of_columns = stages_scale_b + used * B_SCALE_BYTES + column_of(0, lane) * 4;
        float of_rows[WAVES][2];
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            of_rows[wave][half] = load_shared(of_rows_at + used * A_SCALE_BYTES + (wave * WAVE_M + half * 8) * 4);
        if (B_HAS_TILES) {
#if GROUPED
          const float of_tile = tiles[j * block_stride];
#else
          const float of_tile = load_shared(stages_scale_b + used * B_SCALE_BYTES + j % 4 * 4);
#endif
#pragma unroll
          for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
            for (int half = 0; half < 2; ++half) of_rows[wave][half] *= of_tile;
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) {
          if (wave > 0) begin_block(part, a + wave * NEXT_WAVE, b);
          Eight first;
          if (!B_HAS_TILES) first = load_eight_scales(of_columns);
          if (wave == WAVES - 1) {
            advance();
            if (has_next) wait_for(full + stage * 8, parity);
          }
          end_block(part);
          if (B_HAS_TILES && wave == WAVES - 1) release(used);
          if (B_HAS_TILES)
            promote(sum[wave], part, of_rows[wave]);
          else
            promote(sum[wave], part, of_rows[wave], first, of_columns);
          if (!B_HAS_TILES && wave == WAVES - 1) release(used);
        }
      }
      const int first_row = place.m + row_of(warpgroup, 0, warp, lane, 0);
#pragma unroll
      for (int wave = 0; wave < WAVES; ++wave)
        write_wave(sum[wave], GROUPED ? nullptr : bias, GROUPED ? nullptr : addend, out, first_row + wave * WAVE_M,
                   place.n + column_of(0, lane), end, n);
    }
  }
}
