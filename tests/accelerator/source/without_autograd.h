// Operations of tasks go straight to the CPU's kernels.
#pragma once

#include <functional>

namespace accelerator {

void without_autograd(const std::function<void()>& run);

}  // namespace accelerator
