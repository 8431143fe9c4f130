// The extension module toque._native.
#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of the CPU backend.";
  toque::bind_linear(m);
  toque::bind_plan(m);
  toque::bind_sampler(m);
}
