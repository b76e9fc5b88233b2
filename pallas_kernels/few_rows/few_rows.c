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

enum { LANES = 16, TILE = 4, ROWS = 8, CHUNK = 32 };  // outputs of a tile, most rows of one, outputs of a chunk

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef float Quarter __attribute__((vector_size(LANES)));
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
  if (dtype == XLA_FFI_DataType_BF16) return (Lanes)(__builtin_convertvector(*(const Shorts*)at, Words) << 16);
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
  union { Lanes whole; Half parts[2]; } halves = {sums};
  union { Half whole; Quarter parts[2]; } quarters = {halves.parts[0] + halves.parts[1]};
  Quarter four = quarters.parts[0] + quarters.parts[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
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
      __builtin_prefetch(address + TILE * line);  // the next tile
    }
    for (int r = 0; r < rows; r++) {
      Lanes numbers = *(const Lanes*)(x + r * of->inputs + input);
      for (int at = 0; at < outputs; at++) sums[r][at] += own[at] * numbers;
    }
  }
  const int64_t size = bytes_of(of->result);
  for (int r = 0; r < rows; r++)
    for (int at = 0; at < outputs; at++)
      store(of->out + ((row + r) * of->outputs + output + at) * size, added(sums[r][at]), of->result);
}

INLINE void rows_of(const Product* of, int64_t output, int outputs, XLA_FFI_DataType dtype) {
  int64_t row = 0;
  for (; of->rows - row >= 8; row += 8) tile(of, row, output, 8, outputs, dtype);
  if (of->rows - row >= 4) tile(of, row, output, 4, outputs, dtype), row += 4;
  if (of->rows - row >= 2) tile(of, row, output, 2, outputs, dtype), row += 2;
  if (of->rows - row >= 1) tile(of, row, output, 1, outputs, dtype);
}

INLINE void outputs_of(const Product* of, int64_t output, int64_t end, XLA_FFI_DataType dtype) {
  for (; end - output >= TILE; output += TILE) rows_of(of, output, TILE, dtype);
  for (; output < end; output++) rows_of(of, output, 1, dtype);
}

static void chunk(const Product* of, int64_t index) {
  const int64_t first = index * CHUNK, end = first + CHUNK < of->outputs ? first + CHUNK : of->outputs;
  if (of->dtype == XLA_FFI_DataType_BF16) outputs_of(of, first, end, XLA_FFI_DataType_BF16);
  else if (of->dtype == XLA_FFI_DataType_F16) outputs_of(of, first, end, XLA_FFI_DataType_F16);
  else outputs_of(of, first, end, XLA_FFI_DataType_F32);
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
