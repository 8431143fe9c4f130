// The kernel table of the instruction set this file is compiled for.
#include "isa.h"
#include "sampler_kernels.h"
#include "simd.h"
#include "step_kernels_isa.h"

namespace toque::TOQUE_ISA {

#define TOQUE_STRING_OF(x) #x
#define TOQUE_STRING(x) TOQUE_STRING_OF(x)

extern const SamplerKernels sampler_kernels;
extern const KernelTable kTable;
const KernelTable kTable = {
    .name = TOQUE_STRING(TOQUE_ISA),
    .tile_max = kTileMax,
    .act_kind = act_kind,
    .pack_rows = pack_rows,
    .linear_units = linear_units,
    .linear = linear,
    .embed_rows = embed_rows,
    .step = &step_kernels,
    .sampler = &sampler_kernels,
};

}  // namespace toque::TOQUE_ISA
