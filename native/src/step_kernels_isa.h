// Declares, in the namespace of the instruction set being compiled, what step_kernels.cc collects into its
// table.
#pragma once

#include "step_kernels.h"

namespace toque::TOQUE_ISA {

void rms_norm(const float* x, const float* gain, int width, int group, float eps, float* y);
void layer_norm(const float* x, const float* gain, const float* bias, int width, float eps, float* y);
void add_rows(const float* a, const float* b, int n, float* y);
void scale_row(const float* x, float by, int n, float* y);
void softcap_row(const float* x, float cap, int n, float* y);
void activate(Activation act, const float* x, int n, float* y);
void activate_mul(Activation act, const float* gate, const float* up, int n, float* y);
int argmax(const float* x, int n);
void pack_columns(const Act& act, int token, int column, const float* x, int n);
void rotate(const float* x, const float* cos, const float* sin, int half, int head_dim, float* y);

void store_kv16(uint8_t* tile, int slot, const float* k, const float* v, int head_dim);
size_t tile_bytes16(int head_dim);
size_t query_bytes16(int head_dim);
void prepare_query16(const float* q, int head_dim, float scale, void* prepared);
void attend16(const AttendChunk& chunk);
void store_kv8(uint8_t* tile, int slot, const float* k, const float* v, int head_dim);
size_t tile_bytes8(int head_dim);
size_t query_bytes8(int head_dim);
void prepare_query8(const float* q, int head_dim, float scale, void* prepared);
void attend8(const AttendChunk& chunk);
void merge(float* maximum, float* sum, float* out, float chunk_maximum, float chunk_sum,
           const float* chunk_out, int head_dim);

extern const StepKernels step_kernels;

}  // namespace toque::TOQUE_ISA
