// What one instruction set's object library provides; table.cc puts it into a KernelTable.
#pragma once

#include "kernels.h"

namespace toque::TOQUE_ISA {

ActKind act_kind(Format format);
void pack_rows(const Act& act, const float* x, int64_t stride, int first, int last);
int linear_units(const LinearArgs& args);
void linear(const LinearArgs& args, int first_unit, int last_unit);
void embed_rows(const PackedMatrix& weight, const int32_t* ids, float scale, float* out, int64_t out_stride,
                int first, int last);

}  // namespace toque::TOQUE_ISA
