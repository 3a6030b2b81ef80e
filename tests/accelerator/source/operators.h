// Operations on tensors of the device: queued on the current stream, and run there by the CPU's kernels.
#pragma once

#include <map>
#include <string>

namespace accelerator {

// Operations by name since they were last asked for: those that ran at once, for what they return depends on data.
std::map<std::string, int> take_eager_operations();

// Sees what operations of the host do with pinned memory. The number takes it away again.
unsigned long observe_host();
void unobserve_host(unsigned long number);

}  // namespace accelerator
