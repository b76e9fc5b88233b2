// Products of a few rows with weights [outputs, inputs] on a CPU, as a handler of XLA's foreign function interface.
//
//     out[row, output] = round(sum of x[row, input] * weights[output, input])
//
// Weights are read once, in place: bfloat16 and float16 become float32 in registers. Each sum has LANES partial sums;
// partial sum i adds the products of inputs i, i + LANES, ... in this order, and the partial sums are added pairwise. So
// the bits of a row depend neither on the number of rows nor on the number of threads.

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define INLINE static inline __attribute__((always_inline))

// Lanes fill one register; the sums of a tile, its weights and a vector of inputs fill all. ROWS and TILE are the most
// rows and outputs of a tile, CHUNK the outputs that a thread takes at a time. Compilers choose for each loop whether they
// contract a product and a sum, by its number of rows, on which no bit may depend: the macros do not leave it to them.
#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, ROWS = 4, TILE = 6, CHUNK = 48 };
#define MULTIPLY_ADD(one, other, sum) (Lanes) _mm512_fmadd_ps((__m512)(one), (__m512)(other), (__m512)(sum))
#define WIDEN(at) (Words) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void*)(at)))
#define IN_REGISTER(lanes) __asm__("" : "+v"(lanes))
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { LANES = 8, ROWS = 4, TILE = 3, CHUNK = 48 };
#define MULTIPLY_ADD(one, other, sum) (Lanes) _mm256_fmadd_ps((__m256)(one), (__m256)(other), (__m256)(sum))
#define WIDEN(at) (Words) _mm256_cvtepu16_epi32(_mm_loadu_si128((const void*)(at)))
#define IN_REGISTER(lanes) __asm__("" : "+x"(lanes))
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { LANES = 4, ROWS = 4, TILE = 6, CHUNK = 48 };
#define MULTIPLY_ADD(one, other, sum) (Lanes) vfmaq_f32((float32x4_t)(sum), (float32x4_t)(one), (float32x4_t)(other))
#define WIDEN(at) (Words) vmovl_u16(vld1_u16((const void*)(at)))
#define IN_REGISTER(lanes) __asm__("" : "+w"(lanes))
#else
enum { LANES = 4, ROWS = 4, TILE = 3, CHUNK = 48 };
#define MULTIPLY_ADD(one, other, sum) ((sum) + (one) * (other))
#define WIDEN(at) __builtin_convertvector(*(const Shorts*)(at), Words)
#define IN_REGISTER(lanes)
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2)));
#ifdef __FLT16_MAX__
typedef _Float16 Floats16 __attribute__((vector_size(2 * LANES), aligned(2)));
const int supports_float16 = 1;
#else
const int supports_float16 = 0;
#endif

typedef struct {
  const float* x;
  const char* weights;
  char* out;
  int64_t rows, inputs, outputs, chunks;
  XLA_FFI_DataType dtype, result;
  atomic_llong next, done;  // chunks
  atomic_int users;         // threads that may still read this
} Product;

INLINE int64_t bytes_of(XLA_FFI_DataType dtype) { return dtype == XLA_FFI_DataType_F32 ? 4 : 2; }

INLINE Lanes load(const char* at, XLA_FFI_DataType dtype) {
  if (dtype == XLA_FFI_DataType_BF16) return (Lanes)(WIDEN(at) << 16);
#ifdef __FLT16_MAX__
  if (dtype == XLA_FFI_DataType_F16) return __builtin_convertvector(*(const Floats16*)at, Lanes);
#endif
  return *(const Lanes*)at;
}

INLINE void store(char* at, float sum, XLA_FFI_DataType dtype) {
  if (dtype == XLA_FFI_DataType_BF16) {
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    *(uint16_t*)at = (sum != sum ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return;
  }
#ifdef __FLT16_MAX__
  if (dtype == XLA_FFI_DataType_F16) {
    *(_Float16*)at = (_Float16)sum;
    return;
  }
#endif
  *(float*)at = sum;
}

INLINE float added(Lanes sums) {
  float parts[LANES];
  memcpy(parts, &sums, sizeof parts);
  for (int half = LANES / 2; half; half /= 2)
    for (int at = 0; at < half; at++) parts[at] += parts[at + half];
  return parts[0];
}

// rows, outputs and dtype are constants where this is inlined: the sums are in registers.
INLINE void tile(const Product* of, int64_t row, int64_t output, int rows, int outputs, XLA_FFI_DataType dtype) {
  const int64_t bytes = bytes_of(dtype), line = of->inputs * bytes;
  const char* weights = of->weights + output * line;
  const float* x = of->x + row * of->inputs;
  Lanes sums[ROWS][TILE] = {0};
  for (int64_t input = 0; input < of->inputs; input += LANES) {
    Lanes own[TILE];
    for (int at = 0; at < outputs; at++) {
      const char* address = weights + at * line + input * bytes;
      own[at] = load(address, dtype);
      IN_REGISTER(own[at]);
      if (row == 0) __builtin_prefetch(address + outputs * line);  // the next tile
    }
    for (int r = 0; r < rows; r++) {
      Lanes numbers = *(const Lanes*)(x + r * of->inputs + input);
      IN_REGISTER(numbers);
      for (int at = 0; at < outputs; at++) sums[r][at] = MULTIPLY_ADD(own[at], numbers, sums[r][at]);
    }
  }
  const int64_t size = bytes_of(of->result);
  for (int r = 0; r < rows; r++)
    for (int at = 0; at < outputs; at++)
      store(of->out + ((row + r) * of->outputs + output + at) * size, added(sums[r][at]), of->result);
}

INLINE void rows_of(const Product* of, int64_t output, int outputs, XLA_FFI_DataType dtype) {
  int64_t row = 0;
  for (; of->rows - row >= 4; row += 4) tile(of, row, output, 4, outputs, dtype);
  if (of->rows - row >= 2) tile(of, row, output, 2, outputs, dtype), row += 2;
  if (of->rows - row >= 1) tile(of, row, output, 1, outputs, dtype);
}

INLINE void outputs_of(const Product* of, int64_t output, int64_t last, XLA_FFI_DataType dtype) {
  for (; last - output >= TILE; output += TILE) rows_of(of, output, TILE, dtype);
  for (; output < last; output++) rows_of(of, output, 1, dtype);
}

static void chunk(const Product* of, int64_t index) {
  const int64_t first = index * CHUNK, last = first + CHUNK < of->outputs ? first + CHUNK : of->outputs;
  if (of->dtype == XLA_FFI_DataType_BF16) outputs_of(of, first, last, XLA_FFI_DataType_BF16);
  else if (of->dtype == XLA_FFI_DataType_F16) outputs_of(of, first, last, XLA_FFI_DataType_F16);
  else outputs_of(of, first, last, XLA_FFI_DataType_F32);
}

static void chunks(Product* of) {
  for (int64_t index; (index = atomic_fetch_add(&of->next, 1)) < of->chunks; atomic_fetch_add(&of->done, 1))
    chunk(of, index);
}

static void leave(Product* of) {
  if (atomic_fetch_sub(&of->users, 1) == 1) free(of);
}

static void help(void* product) {  // may begin after the product is finished: then there is no chunk left
  chunks(product);
  leave(product);
}

static void pause_thread(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t threads_of(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, .ctx = frame->ctx, .num_threads = &threads};
  return frame->api->XLA_FFI_ThreadPool_NumThreads(&args) ? 1 : threads;
}

XLA_FFI_Error* few_rows(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_InternalExtension* asked = frame->extension_start;
  if (asked != NULL && asked->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((const XLA_FFI_Metadata_Extension*)asked)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  const XLA_FFI_Buffer *x = frame->args.args[0], *weights = frame->args.args[1], *out = frame->rets.rets[0];
  Product* product = malloc(sizeof *product);
  if (product == NULL) abort();
  *product = (Product){.x = x->data, .weights = weights->data, .out = out->data, .rows = x->dims[0],
                       .inputs = x->dims[1], .outputs = weights->dims[0],
                       .chunks = (weights->dims[0] + CHUNK - 1) / CHUNK,
                       .dtype = weights->dtype, .result = out->dtype};
  const int64_t threads = threads_of(frame);
  const int helpers = (int)(threads < product->chunks ? threads : product->chunks) - 1;
  atomic_store(&product->users, 1 + helpers);
  for (int index = 0; index < helpers; index++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, .ctx = frame->ctx, .task = help, .data = product};
    if (frame->api->XLA_FFI_ThreadPool_Schedule(&args) != NULL) leave(product);
  }
  chunks(product);
  while (atomic_load(&product->done) < product->chunks) pause_thread();
  leave(product);
  return NULL;
}
