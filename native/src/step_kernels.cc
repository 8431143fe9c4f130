#include "step_kernels_isa.h"

namespace toque::TOQUE_ISA {

const StepKernels step_kernels = {
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .add = add_rows,
    .scale = scale_row,
    .softcap = softcap_row,
    .activate = activate,
    .activate_mul = activate_mul,
    .argmax = argmax,
    .pack_columns = pack_columns,
    .rotate = rotate,
    .kv = {{tile_bytes16, store_kv16, query_bytes16, prepare_query16, attend16},
           {tile_bytes8, store_kv8, query_bytes8, prepare_query8, attend8}},
    .merge = merge,
};

}  // namespace toque::TOQUE_ISA
