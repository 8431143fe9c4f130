// One function per file of bindings; module.cc calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace toque {

void bind_linear(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);

}  // namespace toque
