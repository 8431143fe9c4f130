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
    .store_kv = store_kv,
    .query_bytes = query_bytes,
    .prepare_query = prepare_query,
    .attend = attend,
    .merge = merge,
};

}  // namespace toque::TOQUE_ISA
