// torch's allocators of the device and of pinned memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <functional>

namespace accelerator {

c10::DeviceAllocator& device_allocator();
at::HostAllocator& host_allocator();

// Calls before an allocation fails, with the device, the bytes asked for, and the bytes there are and that are free. What it throws is thrown.
using Observer = std::function<void(int64_t, int64_t, int64_t, int64_t)>;
void observe_out_of_memory(Observer observer);

// The stream of this thread.
int current_stream();
int exchange_stream(int stream);

}  // namespace accelerator
