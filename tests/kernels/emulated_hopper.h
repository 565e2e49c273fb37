// What csrc/block_scaled_gemm.cu takes from Hopper, for the threads of a CPU: one C++ thread is one CUDA thread. It is
// included in the middle of that file.
//
// Copies happen at once. A block of wgmma is read when it is waited for, the last moment at which the hardware may read
// it; so memory that is released too early gives a wrong product. Shared memory begins as NaN. A wait that does not end
// ends the process.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __launch_bounds__(threads, blocks)
#define __grid_constant__

struct uint4 {
  u32 x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static u32 __float_as_uint(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }

// A tensor map as kernels/extension.py's tensor_map takes it.
struct TensorMap {
  const u8* address;
  int rank;
  long sizes[5], strides[5], box[5];
};

struct Index {
  int x;
};
static thread_local Index threadIdx, blockIdx, gridDim;

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "%s (block %d, thread %d)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

// What threads wait for. Each has its own lock, so that a tool that looks for races sees what orders what.
struct Condition {
  std::mutex lock;
  std::condition_variable changed;

  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& held, const char* what, Predicate is_over) {
    if (!changed.wait_for(held, std::chrono::seconds(300), is_over)) fail(what);
  }
};

struct Mbarrier : Condition {
  long count = 0, pending = 0, bytes = 0;
  u32 phase = 0;

  void change(long arrivals, long more_bytes) {
    std::unique_lock<std::mutex> held(lock);
    pending -= arrivals;
    bytes += more_bytes;
    if (pending < 0) fail("too many arrivals at an mbarrier");
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = count;
    changed.notify_all();
  }
  void wait_for_phase(u32 parity) {
    std::unique_lock<std::mutex> held(lock);
    wait(held, "waits for ever at an mbarrier", [&] { return phase != parity; });
  }
};

// Threads that meet: __syncwarp, __syncthreads.
struct Meeting : Condition {
  int arrived = 0;
  long round = 0;

  void meet(int threads) {
    std::unique_lock<std::mutex> held(lock);
    const long own = round;
    if (++arrived == threads) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    wait(held, "waits for ever for other threads", [&] { return round != own; });
  }
};

constexpr u32 SHARED_BEGIN = 1024;
constexpr int SHARED_BYTES = BARRIERS + 2 * STAGES * 8;

struct Block {
  std::vector<u8> memory = std::vector<u8>(SHARED_BYTES, 0xff);
  std::map<u32, Mbarrier> barriers;
  Meeting all, warps[THREADS / 32];

  u8* at(u32 address, long bytes) {
    if (address < SHARED_BEGIN || address + bytes > SHARED_BEGIN + BARRIERS) fail("no such shared memory");
    return memory.data() + (address - SHARED_BEGIN);
  }
};

static thread_local Block* block;
static thread_local u64 of_a, of_b;  // the descriptors of the block that runs

static u32 shared_memory() { return SHARED_BEGIN; }
static int __shfl_sync(u32, int value, int) { return value; }  // called with a warp's own number
static bool is_elected() { return threadIdx.x % 32 == 0; }
static void give_registers() {}
static void take_registers() {}
static void publish_barriers() {}
static void prefetch_line(const u8*) {}

// One thread makes them, before all threads meet.
static void start_barrier(u32 barrier, u32 arrivals) {
  Mbarrier& own = block->barriers[barrier];
  own.count = own.pending = arrivals;
}
static void expect_bytes(u32 barrier, u32 bytes) { block->barriers.at(barrier).change(1, bytes); }
static void wait_for(u32 barrier, u32 parity) { block->barriers.at(barrier).wait_for_phase(parity); }
static void arrive_at(u32 barrier) { block->barriers.at(barrier).change(1, 0); }

static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void copy_box(u32 target, const TensorMap& map, const long (&first)[5], u32 barrier) {
  long bytes = 1;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  for (long i = 0; i < bytes; ++i) {
    long rest = i, offset = 0;
    bool is_inside = true;
    for (int d = 0; d < map.rank; ++d) {
      const long at = first[d] + rest % map.box[d];
      rest /= map.box[d];
      is_inside = is_inside && at < map.sizes[d];
      offset += at * map.strides[d];
    }
    *block->at(swizzled(target + i), 1) = is_inside ? map.address[offset] : 0;
  }
  block->barriers.at(barrier).change(0, -bytes);
}

static void copy_a(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
  copy_box(target, *map, {k, row}, barrier);
}

static void copy_b(u32 target, const TensorMap* map, int k, int row, u32 barrier) {
  copy_box(target, *map, {k, 0, 0, 0, row / 32}, barrier);
}

static void copy_scales(u32 target, const float* source, u32 bytes, u32 barrier) {
  if (bytes % 16 || target % 16 || reinterpret_cast<u64>(source) % 16) fail("a copy that is not whole vectors");
  std::memcpy(block->at(target, bytes), source, bytes);
  block->barriers.at(barrier).change(0, -static_cast<long>(bytes));
}

static void store_task(u32 address, const Task& task) { std::memcpy(block->at(address, 16), &task, 16); }

static Task load_task(u32 address) {
  Task task;
  std::memcpy(&task, block->at(address, 16), 16);
  return task;
}

static float load_shared(u32 address) {
  float value;
  std::memcpy(&value, block->at(address, 4), 4);
  return value;
}

static float4 load_shared_4(u32 address) {
  float4 value;
  std::memcpy(&value, block->at(address, 16), 16);
  return value;
}

static float decoded(u8 code, bool is_e5m2) {
  const int mantissa_bits = is_e5m2 ? 2 : 3, bias = is_e5m2 ? 15 : 7;
  const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const bool is_nan = is_e5m2 ? exponent == 31 : (code & 0x7f) == 0x7f;  // no test has an infinity
  const float size = exponent == 0 ? std::ldexp(float(mantissa), 1 - bias - mantissa_bits)
                                   : std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  return is_nan ? NAN : code & 0x80 ? -size : size;
}

struct Decoded {
  float values[256];

  explicit Decoded(bool is_e5m2) {
    for (int code = 0; code < 256; ++code) values[code] = decoded(code, is_e5m2);
  }
};
static const Decoded A_VALUES(A_IS_E5M2), B_VALUES(B_IS_E5M2);

// A row of wgmma's operand, in four steps along K: K-major, rows of 128 bytes swizzled.
static void load_row(float (&values)[BLOCK], u64 descriptor, int row, const Decoded& decoded) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("an operand that is not swizzled by 128 bytes");
  const u32 of_eight = (descriptor >> 32 & 0x3fff) << 4;
  for (int step = 0; step < 4; ++step) {
    const u32 first = (descriptor + step * NEXT_K & 0x3fff) << 4;
    for (int k = 0; k < 32; ++k)
      values[step * 32 + k] = decoded.values[*block->at(swizzled(first + row / 8 * of_eight + row % 8 * 128 + k), 1)];
  }
}

static void begin_block(float (&part)[64], u64 a, u64 b) {
  of_a = a, of_b = b;
  std::fill(part, part + 64, NAN);
}

static void end_block(float (&part)[64]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float rows[2][BLOCK], column[BLOCK];
  for (int half = 0; half < 2; ++half) load_row(rows[half], of_a, warp * 16 + lane / 4 + half * 8, A_VALUES);
  for (int i = 0; i < 64; i += i % 2 ? 3 : 1) {  // 0, 1, 4, 5, …
    load_row(column, of_b, i / 4 * 8 + lane % 4 * 2 + i % 2, B_VALUES);
    for (int half = 0; half < 2; ++half) {
      double sum = 0;
      for (int k = 0; k < BLOCK; ++k) sum += double(rows[half][k]) * column[k];
      part[i + half * 2] = float(sum);
    }
  }
}

static void __syncwarp() { block->warps[threadIdx.x / 32].meet(32); }
static void __syncthreads() { block->all.meet(THREADS); }

static u32 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 to_bf16_pair(float first, float second) { return to_bf16(first) | to_bf16(second) << 16; }

// Run a kernel's blocks, one after the other.
template <class Kernel>
void run_blocks(int num_blocks, Kernel kernel) {
  for (int which = 0; which < num_blocks; ++which) {
    Block one;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < THREADS; ++thread)
      threads.emplace_back([&, thread] {
        threadIdx = {thread}, blockIdx = {which}, gridDim = {num_blocks};
        block = &one;
        kernel();
      });
    for (std::thread& thread : threads) thread.join();
  }
}
