// A bidirectional stack over SEQUENCES short sequences of LENGTH tokens as one program: all layers, one thread block a
// multiprocessor. A producer warp streams this block's rows of every weight through a ring in shared memory, in the
// order of their use and ahead of the barriers; eight consumer warps multiply them, each over its eighth of 1,024
// inputs. Blocks 2 i and 2 i + 1 are a cluster, which splits the inputs of the output and down projections.
//
// Compiled for sm_90a with GRID (multiprocessors), SEQUENCES, LENGTH and STAGES (of the ring) defined; 384 threads. NO_COPY
// leaves out the weights, to time the rest.
//
// The code of a layer is executed once by each warp, so its size counts: the four GEMMs share one loop, and nothing is
// unrolled that need not be.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int N = SEQUENCES, ROWS = N * LENGTH;
constexpr int HIDDEN = 1024, HEADS = 16, HEAD = 128, QUERIES = HEADS * HEAD, QKV = QUERIES + 4 * HEAD, INNER = 4096;
constexpr int WARPS = 8, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 128, SLICE = HIDDEN / WARPS;
constexpr int UNIT_ROWS = 8, PITCH = 2 * HIDDEN + 64, STAGE = UNIT_ROWS * PITCH;  // 64: no bank conflicts
constexpr int ROW_PITCH = 2 * SLICE + 64, UNITS = 8, SUMS = N * 512;
constexpr int SPARE = (2 * ROWS * ROW_PITCH + SUMS - 1) / SUMS;  // the first unit whose sums do not lie over the rows
constexpr int REGION = (SPARE + 2 > UNITS ? SPARE + 2 : UNITS) * SUMS;
constexpr int PAIRS = HIDDEN / 16, PARTS = 2 * PAIRS;
static_assert(GRID >= PARTS && GRID % 2 == 0 && HEAD == SLICE && QUERIES == 2 * HIDDEN && LENGTH <= 16, "");
static_assert((N == 1 || N == 2) && (QKV / 8 + GRID - 1) / GRID <= UNITS && 2 * ((INNER / 8 + GRID - 1) / GRID) <= UNITS, "");

struct Layer {
  const bf16 *attention_norm, *qkv, *out, *mlp_norm, *gate_up, *down;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float rounded(float a) { return low(pack(a, 0.f)); }
__device__ __forceinline__ void wait_mbarrier(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void wait_peer(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
union Eight {  // of 16 bits, contiguous inputs
  uint4 v;
  u32 r[4];
};
typedef uint4 Rows[N][4][2];  // operands of mma: lane / 4 and lane / 4 + 8 of a sequence, of 32 inputs the eight at 8 * (lane % 4)

struct Ring {
  u32 base, full, empty, stages, at, parity;
  __device__ void next() {
    if (++at == stages) at = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
// The warp's slice of x, columns first.. of rows of `width`, on its way to the warp's region.
__device__ __forceinline__ void copy_rows(u32 region, const bf16* x, int width, int first, int lane) {
#pragma unroll 4
  for (int i = lane; i < ROWS * 16; i += 32)
    copy_async(region + i / 16 * ROW_PITCH + i % 16 * 16, x + i / 16 * width + first + i % 16 * 8);
}

__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The attention of one head, in place of its queries in `region`. kv: rows of keys, then of values, of its key head.
__device__ __forceinline__ void attend(u32 region, u32 kv, int lane) {
  const float scale = 0.08838834764831845f * 1.4426950408889634f;
  const int group = lane / 4, quad = lane % 4;
  const u32 queries = region + group * ROW_PITCH + 16 * quad, keys = kv + queries - region, next = LENGTH * ROW_PITCH;
  const bool near = group < LENGTH, far = group + 8 < LENGTH;
  const uint4 none = make_uint4(0, 0, 0, 0);
  float score[N][2][2][4] = {};  // sequence, half of the sum, tile of keys
#pragma unroll
  for (int b = 0; b < 4; b++)
#pragma unroll
    for (int s = 0; s < N; s++) {
      const u32 q_at = queries + s * next + 64 * b, k_at = keys + s * next + 64 * b;
      Eight q[2], k[2];
      q[0].v = near ? load_shared(q_at) : none, q[1].v = far ? load_shared(q_at + 8 * ROW_PITCH) : none;
      k[0].v = near ? load_shared(k_at) : none, k[1].v = far ? load_shared(k_at + 8 * ROW_PITCH) : none;
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int t = 0; t < 2; t++)
          mma(score[s][m][t], q[0].r[2 * m], q[1].r[2 * m], q[0].r[2 * m + 1], q[1].r[2 * m + 1], k[t].r[2 * m], k[t].r[2 * m + 1]);
    }
  u32 p[N][2][2];  // tile of keys, rows
  float most[N][2], sum[N][2];
#pragma unroll
  for (int s = 0; s < N; s++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      most[s][half] = -1e30f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& e = score[s][0][i / 2][2 * half + i % 2];
        e = 2 * quad + i % 2 + i / 2 * 8 < LENGTH ? (e + score[s][1][i / 2][2 * half + i % 2]) * scale : -1e30f;
        most[s][half] = fmaxf(most[s][half], e);
      }
    }
#pragma unroll
  for (int k = 1; k <= 2; k++)
#pragma unroll
    for (int s = 0; s < N; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) most[s][half] = fmaxf(most[s][half], __shfl_xor_sync(~0u, most[s][half], k));
#pragma unroll
  for (int s = 0; s < N; s++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float e[4];
      sum[s][half] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) sum[s][half] += e[i] = exp2f(score[s][0][i / 2][2 * half + i % 2] - most[s][half]);
      p[s][0][half] = pack(e[0], e[1]);
      p[s][1][half] = pack(e[2], e[3]);
    }
#pragma unroll
  for (int k = 1; k <= 2; k++)
#pragma unroll
    for (int s = 0; s < N; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) sum[s][half] += __shfl_xor_sync(~0u, sum[s][half], k);
  __syncwarp();  // all queries are read
#pragma unroll
  for (int b = 0; b < 4; b++)
#pragma unroll
    for (int s = 0; s < N; s++) {
      uint2 v[4];
#pragma unroll
      for (int key = 0; key < 4; key++) {
        int row = 2 * quad + key % 2 + key / 2 * 8;
        v[key] = make_uint2(0, 0);
        if (row < LENGTH)
          asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[key].x), "=r"(v[key].y)
                       : "r"(kv + (ROWS + s * LENGTH + row) * ROW_PITCH + 64 * b + 8 * group) : "memory");
      }
      float o[4][4] = {};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        u32 select = e % 2 ? 0x7632 : 0x5410;
        u32 b0 = __byte_perm(e < 2 ? v[0].x : v[0].y, e < 2 ? v[1].x : v[1].y, select);
        u32 b1 = __byte_perm(e < 2 ? v[2].x : v[2].y, e < 2 ? v[3].x : v[3].y, select);
        mma(o[e], p[s][0][0], p[s][0][1], p[s][1][0], p[s][1][1], b0, b1);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float norm = __fdividef(1.f, sum[s][half]);
        if (half ? far : near)
          store_shared(queries + s * next + 8 * half * ROW_PITCH + 64 * b,
                       make_uint4(pack(o[0][2 * half] * norm, o[1][2 * half] * norm),
                                  pack(o[2][2 * half] * norm, o[3][2 * half] * norm),
                                  pack(o[0][2 * half + 1] * norm, o[1][2 * half + 1] * norm),
                                  pack(o[2][2 * half + 1] * norm, o[3][2 * half + 1] * norm)));
      }
    }
}

__device__ __forceinline__ void copy_unit(Ring& ring, const bf16* rows, int stride, int lane, int gap = 0) {
  wait_mbarrier(ring.empty + 8 * ring.at, ring.parity ^ 1);
  u32 bar = ring.full + 8 * ring.at;
#ifdef NO_COPY
  if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
  ring.next();
  return;
#endif
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(UNIT_ROWS * 2 * HIDDEN)
                 : "memory");
  __syncwarp();
  if (lane < UNIT_ROWS)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            ring.base + ring.at * STAGE + lane * PITCH),
        "l"(__cvta_generic_to_global(rows + (lane + lane / 4 * gap) * stride)), "r"(2 * HIDDEN), "r"(bar)
        : "memory");
  ring.next();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    local_stack(const Layer* layers, int num_layers, const bf16* final_norm, const bf16* tokens, const bf16* normed,
                const float* cos, const float* sin, bf16* x, bf16* weighted, float* squares, bf16* qkv, bf16* gated,
                u64* counter, bf16* out, double epsilon, int first_kept, int kept) {
  extern __shared__ __align__(128) unsigned char memory[];          // [WARPS] regions, then:
  float4* from_peer = (float4*)(memory + WARPS * REGION);           // [N][32]
  float* scales = (float*)(from_peer + N * 32);                     // [ROWS], 64
  float* table = scales + 64;                                       // cosines and sines [LENGTH][HEAD]
  unsigned char* keys = (unsigned char*)(table + LENGTH * HEAD);    // keys, values [2][ROWS]
  u64* barriers = (u64*)(keys + 2 * ROWS * ROW_PITCH);              // full [STAGES], empty [STAGES], peer
  const float eps = (float)epsilon;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, rank = block & 1, pair = block >> 1;
  Ring ring{(shared_address(barriers) + 8 * (2 * STAGES + 1) + 127) & ~127u, shared_address(barriers),
            shared_address(barriers) + 8 * STAGES, STAGES, 0, 0};
  const u32 region = shared_address(memory) + warp * REGION, kv = shared_address(keys);
  const u32 peer_bar = shared_address(barriers) + 16 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.full + 8 * i));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring.empty + 8 * i), "r"(WARPS));
    }
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(peer_bar), "r"(1));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  for (int i = threadIdx.x; i < LENGTH * HEAD; i += THREADS) {
    int row = i / HEAD, d = i % HEAD;
    table[i] = d < HEAD / 2 ? cos[row * (HEAD / 2) + d] : sin[row * (HEAD / 2) + d - HEAD / 2];
  }
  if (threadIdx.x < ROWS) scales[threadIdx.x] = 1.f;
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");

  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    for (int l = warp == WARPS ? 0 : num_layers; l < num_layers; l++) {
      const Layer w = layers[l];
      for (int unit = block; unit < QKV / 8; unit += GRID)
        copy_unit(ring, w.qkv + (unit / 16 * HEAD + unit % 16 * 4) * HIDDEN, HIDDEN, lane, HEAD / 2 - 4);
      if (pair < PAIRS)
        for (int h = 0; h < 2; h++)
          copy_unit(ring, w.out + (16 * pair + 8 * h) * QUERIES + HIDDEN * rank, QUERIES, lane);
      for (int unit = block; unit < INNER / 8; unit += GRID)
        for (int up = 0; up < 2; up++) copy_unit(ring, w.gate_up + (unit * 8 + up * INNER) * HIDDEN, HIDDEN, lane);
      if (pair < PAIRS)
        for (int i = 0; i < 4; i++)
          copy_unit(ring, w.down + (16 * pair + 8 * (i % 2)) * INNER + (2 * rank + i / 2) * HIDDEN, INNER, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const u64 together = (u64)GRID * 4 * num_layers;
    u64 target;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(target) : "l"(counter) : "memory");
    target = target / together * together;
    u32 peer_parity = 0;
    auto wait = [&] {  // for what all blocks wrote before they arrived
      target += GRID;
      if (threadIdx.x == 0) {
        u64 now;
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
        while (now < target);
      }
      consumers_sync();
    };
    auto partial = [&](int w, int unit, int s) -> float4& {
      return ((float4*)(memory + w * REGION))[(unit * N + s) * 32 + lane];
    };
    auto summed = [&](int unit, int s) {
      float4 total = partial(0, unit, s);
#pragma unroll
      for (int w = 1; w < WARPS; w++) {
        float4 v = partial(w, unit, s);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      return total;
    };
    u32 before[2] = {};  // the residual where this thread adds to it
    if (warp >= N && warp < 2 * N && pair < PAIRS)
      for (int half = 0; half < 2; half++)
        if (lane / 4 + 8 * half < LENGTH)
          before[half] = *(const u32*)(tokens + (warp % N * LENGTH + lane / 4 + 8 * half) * HIDDEN + 16 * pair + 8 * rank + 2 * (lane % 4));
    enum { PROJECT, ATTEND, GATE, DOWN, DOWN_TOO, STEPS };
    for (int at = 0; at < num_layers * STEPS; at++) {
      const int step = at % STEPS, l = at / STEPS;
      const bool paired = step == ATTEND || step >= DOWN, working = !paired || pair < PAIRS;
      if (at && step != DOWN_TOO) wait();
      const int first_unit = step >= DOWN ? SPARE : 0;
      int units = 2;
      if (working) {
        if (step == PROJECT || step == GATE) {
          units = step == GATE ? 2 * ((INNER / 8 + GRID - 1 - block) / GRID) : (QKV / 8 + GRID - 1 - block) / GRID;
          copy_rows(region, at ? weighted : normed, HIDDEN, warp * SLICE, lane);
          if (at) {
            constexpr int MOST = (ROWS + WARPS - 1) / WARPS;
            float sum[MOST];
#pragma unroll
            for (int i = 0; i < MOST; i++) {
              float4 v = make_float4(0, 0, 0, 0);
              if (warp + WARPS * i < ROWS) v = ((const float4*)(squares + (warp + WARPS * i) * PARTS))[lane];
              sum[i] = v.x + v.y + v.z + v.w;
            }
#pragma unroll
            for (int k = 16; k; k /= 2)
#pragma unroll
              for (int i = 0; i < MOST; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], k);
#pragma unroll
            for (int i = 0; i < MOST; i++)
              if (lane == 0 && warp + WARPS * i < ROWS) scales[warp + WARPS * i] = rsqrtf(sum[i] / HIDDEN + eps);
          }
        } else if (step == ATTEND) {
          copy_rows(region, qkv, QKV, (8 * rank + warp) * HEAD, lane);
          for (int i = threadIdx.x; i < 2 * ROWS * 16; i += CONSUMERS) {
            int row = i / 16 % ROWS, of = i / 16 / ROWS;
            copy_async(kv + i / 16 * ROW_PITCH + i % 16 * 16, qkv + row * QKV + QUERIES + (2 * of + rank) * HEAD + i % 16 * 8);
          }
        } else if (step == DOWN) {
          for (int i = 0; i < 2; i++) copy_rows(region + i * ROWS * ROW_PITCH, gated, INNER, (2 * rank + i) * HIDDEN + warp * SLICE, lane);
        }
        wait_copies();
        __syncwarp();
        if (step == ATTEND) {
          consumers_sync();
          attend(region, kv, lane);
          __syncwarp();
        }
        Rows a;
#pragma unroll
        for (int s = 0; s < N; s++)
#pragma unroll
          for (int b = 0; b < 4; b++) {
            const u32 at = region + ((step == DOWN_TOO ? ROWS : 0) + s * LENGTH + lane / 4) * ROW_PITCH + 64 * b + lane % 4 * 16;
            uint4 near = make_uint4(0, 0, 0, 0), far = near;
            if (lane / 4 < LENGTH) near = load_shared(at);
            if (lane / 4 + 8 < LENGTH) far = load_shared(at + 8 * ROW_PITCH);
            a[s][b][0] = make_uint4(near.x, far.x, near.y, far.y);
            a[s][b][1] = make_uint4(near.z, far.z, near.w, far.w);
          }
        __syncwarp();
        auto take = [&](Eight(&w)[4]) {
          wait_mbarrier(ring.full + 8 * ring.at, ring.parity);
          u32 from = ring.base + ring.at * STAGE + lane / 4 * PITCH + warp * 2 * SLICE + lane % 4 * 16;
#pragma unroll
          for (int b = 0; b < 4; b++) w[b].v = load_shared(from + 64 * b);
          __syncwarp();
          if (lane == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.empty + 8 * ring.at) : "memory");
          ring.next();
        };
        Eight now[4], ahead[4];
        take(now);
#pragma unroll 2
        for (int u = 0; u < units; u++) {
          if (u + 1 < units) take(ahead);
          float acc[2][N][4];
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int s = 0; s < N; s++) acc[i][s][0] = acc[i][s][1] = acc[i][s][2] = acc[i][s][3] = 0;
#pragma unroll
          for (int b = 0; b < 4; b++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
              for (int s = 0; s < N; s++)
                mma(acc[m][s], a[s][b][m].x, a[s][b][m].y, a[s][b][m].z, a[s][b][m].w, now[b].r[2 * m], now[b].r[2 * m + 1]);
#pragma unroll
          for (int b = 0; b < 4; b++) now[b] = ahead[b];
#pragma unroll
          for (int s = 0; s < N; s++)
            if (step == DOWN_TOO) {
              float4& v = partial(warp, first_unit + u, s);
              v = make_float4(v.x + (acc[0][s][0] + acc[1][s][0]), v.y + (acc[0][s][1] + acc[1][s][1]),
                              v.z + (acc[0][s][2] + acc[1][s][2]), v.w + (acc[0][s][3] + acc[1][s][3]));
            } else {
              partial(warp, first_unit + u, s) = make_float4(acc[0][s][0] + acc[1][s][0], acc[0][s][1] + acc[1][s][1],
                                                acc[0][s][2] + acc[1][s][2], acc[0][s][3] + acc[1][s][3]);
            }
        }
        if (step == DOWN) continue;
        consumers_sync();
        const int row = lane / 4, quad = lane % 4;
        if (step == PROJECT) {
#pragma unroll 1
          for (int task = warp; task < units * N; task += WARPS) {
            int unit = block + GRID * (task / N), s = task % N, d = unit % 16 * 4 + lane % 2 * 2;
            float near = scales[s * LENGTH + (row < LENGTH ? row : 0)], far = scales[s * LENGTH + (row + 8 < LENGTH ? row + 8 : 0)];
            float4 v = summed(task / N, s);
            v = make_float4(rounded(v.x * near), rounded(v.y * near), rounded(v.z * far), rounded(v.w * far));
            if (unit < (HEADS + 2) * 16) {
              float4 other = make_float4(__shfl_xor_sync(~0u, v.x, 2), __shfl_xor_sync(~0u, v.y, 2),
                                         __shfl_xor_sync(~0u, v.z, 2), __shfl_xor_sync(~0u, v.w, 2));
              float sign = quad < 2 ? -1.f : 1.f;
              const float *c = table + (row < LENGTH ? row : 0) * HEAD + d, *n = c + HEAD / 2;
              v.x = v.x * c[0] + sign * other.x * n[0], v.y = v.y * c[1] + sign * other.y * n[1];
              if (row + 8 < LENGTH) c += 8 * HEAD, n += 8 * HEAD;
              v.z = v.z * c[0] + sign * other.z * n[0], v.w = v.w * c[1] + sign * other.w * n[1];
            }
            bf16* to = qkv + (s * LENGTH + row) * QKV + unit / 16 * HEAD + d + quad / 2 * (HEAD / 2);
            if (row < LENGTH) *(u32*)to = pack(v.x, v.y);
            if (row + 8 < LENGTH) *(u32*)(to + 8 * QKV) = pack(v.z, v.w);
          }
        } else if (step == GATE) {
#pragma unroll 1
          for (int task = warp; task < units / 2 * N; task += WARPS) {
            int unit = block + GRID * (task / N), s = task % N;
            float near = scales[s * LENGTH + (row < LENGTH ? row : 0)], far = scales[s * LENGTH + (row + 8 < LENGTH ? row + 8 : 0)];
            float4 g = summed(task / N * 2, s), u = summed(task / N * 2 + 1, s);
            float y[4] = {g.x * near, g.y * near, g.z * far, g.w * far}, up[4] = {u.x * near, u.y * near, u.z * far, u.w * far};
#pragma unroll
            for (int k = 0; k < 4; k++) {
              float gate = rounded(y[k]);
              y[k] = rounded(__fdividef(gate, 1.f + __expf(-gate))) * rounded(up[k]);
            }
            bf16* to = gated + (s * LENGTH + row) * INNER + unit * 8 + 2 * quad;
            if (row < LENGTH) *(u32*)to = pack(y[0], y[1]);
            if (row + 8 < LENGTH) *(u32*)(to + 8 * INNER) = pack(y[2], y[3]);
          }
        } else if (warp < 2 * N) {
          // The products of both blocks' inputs: each sums one of the two units, eight columns, and sends the other.
          const int s = warp % N, own = warp < N ? 1 - rank : rank;
          if (threadIdx.x == 32 * N)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(peer_bar), "r"(N * 512) : "memory");
          float4 total = summed(first_unit + own, s);
          if (warp < N) {
            u32 there, bar;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(from_peer + s * 32 + lane)), "r"(1 - rank));
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(peer_bar), "r"(1 - rank));
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there), "f"(total.x), "f"(total.y), "f"(total.z), "f"(total.w), "r"(bar) : "memory");
          } else {
            const int column = 16 * pair + 8 * rank + 2 * quad;
            const bf16* norm = step == ATTEND ? layers[l].mlp_norm : l + 1 < num_layers ? layers[l + 1].attention_norm : final_norm;
            const u32 w = *(const u32*)(norm + column);
            wait_peer(peer_bar, peer_parity);
            float4 v = from_peer[s * 32 + lane];
            float t[4] = {total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int token = s * LENGTH + row + 8 * half;
              const u32 sum = before[half] = pack(rounded(t[2 * half]) + low(before[half]), rounded(t[2 * half + 1]) + high(before[half]));
              float square = low(sum) * low(sum) + high(sum) * high(sum);
              square += __shfl_xor_sync(~0u, square, 1);
              square += __shfl_xor_sync(~0u, square, 2);
              if (row + 8 * half < LENGTH) {
                *(u32*)(x + token * HIDDEN + column) = sum;
                *(u32*)(weighted + token * HIDDEN + column) = pack(low(sum) * low(w), high(sum) * high(w));
                if (quad == 0) squares[token * PARTS + block] = square;
              }
            }
          }
        }
        if (paired) peer_parity ^= 1;
      }
      if (step == DOWN) continue;
      consumers_sync();
      if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
    }
    wait();
    for (int i = block; i < N * kept; i += GRID) {
      const int token = i / kept * LENGTH + first_kept + i % kept;
      float sum = 0;
      for (int part = lane; part < PARTS; part += 32) sum += squares[token * PARTS + part];
      for (int k = 16; k; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
      const float scale = rsqrtf(sum / HIDDEN + eps);
      uint2 v = ((const uint2*)(x + token * HIDDEN))[threadIdx.x], w = ((const uint2*)final_norm)[threadIdx.x];
      u32 first = pack(low(v.x) * scale, high(v.x) * scale), second = pack(low(v.y) * scale, high(v.y) * scale);
      ((uint2*)(out + i * HIDDEN))[threadIdx.x] =
          make_uint2(pack(low(first) * low(w.x), high(first) * high(w.x)), pack(low(second) * low(w.y), high(second) * high(w.y)));
    }
  }
  // No block may leave while its peer may still write to it.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
